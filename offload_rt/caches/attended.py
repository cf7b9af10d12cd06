"""What the chunks of a text have been attended to by verifications: a by-product of their passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.weighing import Weighed


@dataclass(frozen=True)
class WeighedPart:
    """How some queries of a pass attended to the chunks of one segment (`weighing.Weighed`).

    Attributes:
        lse: `[heads, query]`, of the segment.
        units: `[kv_heads, weighed_query, chunks]`, of each query one in all; or the sum over them,
            `[kv_heads, 1, chunks]`.
    """

    lse: Tensor
    units: Tensor

    def mass(self, lse: Tensor) -> Tensor:
        """By those queries together `[kv_heads, chunks]`, where `lse` is of all that they attended to."""
        queries = lse.shape[1]
        folded = (self.lse - lse).exp().reshape(len(self.units), -1)
        weights = Weighed.of(queries).rows(folded)[:, None].float()
        if self.units.shape[1] == 1:
            weights = weights.mean(-1, keepdim=True)  # whose share was whose is not known any more
        return (weights @ self.units)[:, 0]


class AttendedChunks:
    """Attention to each chunk, summed over some queries of each pass; what passes saw before counts less.

    Accumulated as in H2O (arXiv 2306.14048), from verifications as in SpecAttn (arXiv 2602.07223). The newest
    tokens, which no stream covers yet, are left out.

    Args:
        chunk: tokens of a chunk.
        decay: what is left of a pass's share after another one; 1: all of it.
        pages: what the text may come to.

    Attributes:
        scores: `[layers, kv_heads, chunks]` float32 on the device, of all those pages.
    """

    def __init__(self, layout: KVLayout, device: torch.device, chunk: int, decay: float, pages: int) -> None:
        self.chunk = chunk
        self.decay = decay
        # Once: it is read and written in several threads, on a GPU in streams of their own.
        chunks = pages * layout.page_size // chunk
        self.scores = torch.zeros(layout.layers, layout.kv_heads, chunks, device=device)
        self._parts: list[tuple[int, WeighedPart]] = []

    def reset(self) -> None:
        """Forgets everything."""
        self.scores.zero_()
        self.drop_layer()

    def drop_layer(self) -> None:
        """Forgets the layer under way."""
        self._parts.clear()

    def add(self, start: int, lse: Tensor, units: Tensor) -> None:
        """A segment of the layer under way, from token `start` on; see `WeighedPart`."""
        self._parts.append((start, WeighedPart(lse, units)))

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
