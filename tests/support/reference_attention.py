"""Attention in the plainest terms, to hold every backend against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv import PlainPages, head_major
from offload_rt.attention.backends import AttentionBackend, fold, unfold
from offload_rt.attention.sums import AttentionSum


class ReferenceBackend(AttentionBackend):
    """Plain matrix products and a softmax; the backends are tested against it, in float64."""

    name = "reference"

    def parts(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(queries.dtype, torch.float32)
        keys, values = head_major(keys), head_major(values)
        scores = queries.to(wide) @ keys.to(wide).transpose(-1, -2) * scale
        if mask is not None:
            scores = scores + mask
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]) @ values.to(wide)
        return out.to(queries.dtype)[None], lse[None]

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        folded = fold(queries, len(keys))
        mask = causal_mask(queries.shape[1], queries).repeat(len(queries) // len(keys), 1)
        out, lse = self.parts(folded, keys[None], values[None], scale, mask)
        return unfold(out[0], len(queries)), unfold(lse[0], len(queries))


def causal_mask(n: int, like: Tensor) -> Tensor:
    """Additive `[n, n]` mask in which token i sees tokens 0..i."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((n, n), -torch.inf, dtype=wide, device=like.device).triu(1)


def attend(
    backend: AttentionBackend,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over one segment and its log-sum-exp `[heads, n]`."""
    total = AttentionSum(backend, queries, keys.shape[-3], scale)
    total.attend(PlainPages(keys, values) if keys.dim() == 4 else PlainPages.one(keys, values), mask)
    assert total.lse is not None
    return total.result(), unfold(total.lse, len(queries))


def merge(
    parts: Sequence[tuple[Tensor, Tensor]], backend: AttentionBackend | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint segments, from that over each."""
    out, _ = parts[0]
    total = AttentionSum(backend or ReferenceBackend(), out, len(out), 1.0)
    for part in parts:
        total.add(*part)
    assert total.lse is not None
    return total.result(), total.lse
