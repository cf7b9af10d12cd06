"""What the chunks of a text have been attended to by verifications: a by-product of their passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention import AttentionBackend, attend_weighed


@dataclass(frozen=True)
class WeighedPart:
    """How queries attended to the chunks of one segment.

    Attributes:
        lse: `[heads, query]`, of the segment.
        units: `[kv_heads, folded_query, chunks]`, of each query one in all; or the sum over all queries,
            `[kv_heads, 1, chunks]`.
    """

    lse: Tensor
    units: Tensor

    def mass(self, lse: Tensor) -> Tensor:
        """By all queries together `[kv_heads, chunks]`, where `lse` is of all that they attended to."""
        weights = (self.lse - lse).exp().reshape(len(self.units), 1, -1).float()
        if self.units.shape[1] == 1:
            weights = weights.mean(-1, keepdim=True)  # whose share was whose is not known any more
        return (weights @ self.units)[:, 0]


class AttendedChunks:
    """Attention to each chunk, summed over the queries of each pass; what passes saw before counts less.

    Accumulated as in H2O (arXiv 2306.14048), from verifications as in SpecAttn (arXiv 2602.07223). The newest
    tokens, which no stream covers yet, are left out.

    Args:
        chunk: tokens of a chunk.
        decay: what is left of a pass's share after another one; 1: all of it.

    Attributes:
        scores: `[layers, kv_heads, chunks]` float32 on the device; there may be more than the text has.
    """

    def __init__(self, layout: KVLayout, device: torch.device, chunk: int, decay: float) -> None:
        self.chunk = chunk
        self.decay = decay
        self._shape = (layout.layers, layout.kv_heads)
        self.scores = torch.zeros(*self._shape, 0, device=device)
        self._parts: list[tuple[int, WeighedPart]] = []

    def reset(self) -> None:
        """Forgets everything."""
        self.scores.zero_()
        self._parts.clear()

    def reserve(self, tokens: int) -> None:
        """Makes room for the chunks of so many tokens."""
        missing = tokens // self.chunk - self.scores.shape[2]
        if missing > 0:
            self.scores = torch.nn.functional.pad(self.scores, (0, max(missing, self.scores.shape[2] // 4)))

    def attend(
        self,
        backend: AttentionBackend,
        start: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """`attention.attend` over whole pages of the text from token `start` on, which it remembers."""
        out, lse, units = attend_weighed(backend, queries, keys, values, scale, self.chunk)
        self.add(start, WeighedPart(lse, units))
        return out, lse

    def add(self, start: int, part: WeighedPart) -> None:
        """A segment of the layer under way, from token `start` on."""
        self._parts.append((start, part))

    def end_layer(self, layer: int, lse: Tensor) -> None:
        """Counts what was attended to of a layer.

        Args:
            lse: `[heads, query]`, of all that its queries attended to.
        """
        scores = self.scores[layer].mul_(self.decay)
        for start, part in self._parts:
            first = start // self.chunk
            scores[:, first : first + part.units.shape[2]] += part.mass(lse)
        self._parts.clear()
