from __future__ import annotations

import pytest
import torch

from cpu_kv import KVLayout


def test_byte_counts() -> None:
    layout = KVLayout(layers=3, kv_heads=4, head_dim=64, dtype=torch.bfloat16, page_size=16)
    assert layout.layer_token_bytes == 2 * 4 * 64 * 2
    assert layout.token_bytes == 3 * layout.layer_token_bytes
    assert layout.page_bytes == 16 * layout.layer_token_bytes
    assert [layout.pages(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert layout.kv_bytes(17) == 17 * layout.token_bytes
    assert layout.reserved_bytes(17) == 32 * layout.token_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("kv_heads", -1),
        ("head_dim", 1.5),
        ("page_size", 0),
        ("dtype", torch.int8),
        ("dtype", "bf16"),
    ],
)
def test_errors_name_field_and_value(field: str, value: object) -> None:
    fields = {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": torch.float32, "page_size": 1}
    with pytest.raises(ValueError, match=rf"KVLayout\.{field} .*{value!r}"):
        KVLayout(**(fields | {field: value}))
