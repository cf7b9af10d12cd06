"""Attention over sliding windows page by page, so that a query has the same bits beside others and alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv import PlainPages
from offload_rt.attention.backends import AttentionBackend, folded_mask
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.kernels.tail import TailView
from offload_rt.system.device_copies import to_device

PAGE = 256
"""Tokens of a page. Pages are counted in the sequence, as those of a store."""
PAGED_WINDOW = 1024
"""Shortest window that is attended page by page: all tokens of a pass see its newest page."""


def attend_window(
    backend: AttentionBackend,
    queries: Tensor,
    past: Tensor,
    own: Tensor,
    end: int,
    oldest: Sequence[int],
    view: TailView,
    softmax: Softmax,
) -> Tensor:
    """Computes attention of some tokens to those of their windows.

    Args:
        queries: `[heads, queries, head_dim]`.
        past: keys and values of the tokens before position `end`, as far back as a query sees,
            `[2, kv_heads, tokens, head_dim]`.
        own: those behind it, in the form of `past`.
        oldest: position of the oldest token that each query sees, 0 or less: all; at least `PAGE` before
            `end`.
        view: how queries see the tokens from the last page before `end` on.

    Returns:
        `[heads, queries, head_dim]`.
    """
    start, tail, kv_heads = end - past.shape[2], end // PAGE * PAGE, past.shape[1]
    first = max(0, min(oldest)) // PAGE * PAGE
    seen = first if max(oldest) <= first else -(-max(oldest) // PAGE) * PAGE  # from here on by all queries
    total = AttentionSum(backend, queries, kv_heads, softmax.scale)
    last = torch.cat([past[:, :, max(0, tail - start) :], own], dim=2)
    total.begin_tail(PlainPages.one(*last), None, view)
    if first < seen:
        begun = past[:, :, max(0, first - start) : seen - start]
        # Of the first page, tokens are missing that no query sees.
        begun = torch.nn.functional.pad(begun, (0, 0, max(0, start - first), 0))
        mask = from_column([at - first for at in oldest], seen - first, queries)
        total.attend(_paged(begun), folded_mask(backend, mask, queries, kv_heads))
    if seen < tail:
        total.attend(_paged(past[:, :, seen - start : tail - start]))
    total.end_tail()
    return total.result(softmax.sinks)


def _paged(kv: Tensor) -> PlainPages:
    """Returns whole pages of keys and values `[2, kv_heads, tokens, head_dim]`."""
    return PlainPages(*kv.unflatten(2, (-1, PAGE)).transpose(1, 2))


def from_column(first: Sequence[int], columns: int, like: Tensor) -> Tensor:
    """Returns an additive mask by which each row sees the columns from its own first one on.

    Returns:
        `[len(first), columns]`, in float32 or wider, on the device of `like`.
    """
    wide = torch.promote_types(like.dtype, torch.float32)
    mask = torch.zeros(len(first), columns, dtype=wide, device=like.device)
    unseen = torch.arange(columns, device=like.device) < to_device(first, like.device)[:, None]
    return mask.masked_fill_(unseen, -torch.inf)
