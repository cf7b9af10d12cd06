"""Attention over sliding windows page by page, beside float64, and a query beside itself alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.caches.window_attention import PAGE, PAGED_WINDOW, attend_window

BACKEND = choose_backend(torch.device("cpu"))
HEADS, KV_HEADS, DIM = 4, 2, 32


def attended(
    queries: Tensor, kv: Tensor, end: int, window: int, new: NewTokens, forgotten: int = 0
) -> Tensor:
    """Of the tokens of a pass behind position `end`, of whose window the cache has what the first one sees.

    Args:
        kv: of all tokens of the sequence, then of those of the pass.
        forgotten: tokens of the window that are kept beyond it.
    """
    start = max(0, end + 1 - window - forgotten)
    oldest = [end + depth - window for depth in new.depths]
    view = new.view(PAGE, end % PAGE, torch.device("cpu"))
    past, own = kv[:, :, start:end], kv[:, :, end:]
    return attend_window(BACKEND, queries, past, own, end, oldest, view, Softmax(DIM**-0.5))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    end=st.integers(0, 3000),
    window=st.integers(PAGED_WINDOW, 1500),
    parents=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    kept=st.sampled_from([0, 1, 300]),
)
def test_windows_of_a_tree(
    dtype: torch.dtype, end: int, window: int, parents: Sequence[int], kept: int
) -> None:
    parents = [number % (at + 1) - 1 for at, number in enumerate(parents)]
    new = NewTokens.below(SpeculativeTokens(), parents, [0] * len(parents))
    generator = torch.Generator().manual_seed(end + window)
    kv = torch.randn(2, KV_HEADS, end + new.count, DIM, generator=generator).to(dtype)
    queries = torch.randn(HEADS, new.count, DIM, generator=generator).to(dtype)
    found = attended(queries, kv, end, window, new, kept)
    for row, (bits, depth) in enumerate(zip(new.sees, new.depths, strict=True)):
        path = [at for at in range(bits.bit_length()) if bits >> at & 1]
        seen = [*range(max(0, end + depth - window), end), *(end + at for at in path)]
        keys, values = kv[:, :, seen].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
        weights = (keys @ queries[:, row, :, None].double() * DIM**-0.5).softmax(1)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[:, row].double(), (weights * values).sum(1), rtol=0, atol=tolerance)
        if BACKEND.by_query(dtype, DIM) is None:
            continue
        # The query by itself, once those before it are verified.
        last, own = end + depth - 1, kv[:, :, [*range(end), *(end + at for at in path)]]
        alone = attended(queries[:, row, None], own, last, window, NewTokens.chain(1))
        assert torch.equal(alone[:, 0], found[:, row])
