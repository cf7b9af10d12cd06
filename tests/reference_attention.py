"""Attention in the plainest terms, to hold every backend against."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_kv import head_major
from offload_rt.attention import AttentionBackend, fold, unfold


class ReferenceBackend(AttentionBackend):
    """Plain matrix products and a softmax; the backends are tested against it, in float64."""

    name = "reference"

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(queries.dtype, torch.float32)
        keys, values = head_major(keys), head_major(values)
        scores = queries.to(wide) @ keys.to(wide).transpose(-1, -2) * scale
        if mask is not None:
            scores = scores + mask
        lse = scores.logsumexp(-1)
        out = torch.exp(scores - lse[..., None]) @ values.to(wide)
        return out.to(queries.dtype), lse

    def causal(self, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        folded = fold(queries, len(keys))
        mask = causal_mask(queries.shape[1], queries).repeat(len(queries) // len(keys), 1)
        return unfold(*self(folded, keys[None], values[None], scale, mask), len(queries))


def causal_mask(n: int, like: Tensor) -> Tensor:
    """Additive `[n, n]` mask in which token i sees tokens 0..i."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.full((n, n), -torch.inf, dtype=wide, device=like.device).triu(1)
