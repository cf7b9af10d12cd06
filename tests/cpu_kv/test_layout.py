from __future__ import annotations

import torch

from cpu_kv import KVLayout


def test_byte_counts() -> None:
    layout = KVLayout(layers=3, kv_heads=4, head_dim=64, dtype=torch.bfloat16, page_size=16)
    assert layout.layer_token_bytes == 2 * 4 * 64 * 2
    assert layout.token_bytes == 3 * layout.layer_token_bytes
    assert layout.page_bytes == 16 * layout.layer_token_bytes
    assert [layout.pages(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert layout.reserved_bytes(17) == 32 * layout.token_bytes
    assert layout.means_bytes(17, None, False) == 0
    assert layout.means_bytes(17, 8, False) == 2 * layout.token_bytes // 2, "mean keys of chunks"
    assert layout.means_bytes(33, 8, True) == (4 + 2 * 2) * layout.token_bytes // 2, "of pages, values too"
