"""What the chunks of a text have been attended to by verifications: a by-product of their passes."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.weighing import attended_mass


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
        self._parts: list[tuple[int, Tensor, Tensor]] = []  # first token, lse, units

    def reset(self) -> None:
        """Forgets everything."""
        self.scores.zero_()
        self.drop_layer()

    def drop_layer(self) -> None:
        """Forgets the layer under way."""
        self._parts.clear()

    def add(self, start: int, lse: Tensor, units: Tensor) -> None:
        """A segment of the layer under way, from token `start` on; see `attended_mass`."""
        self._parts.append((start, lse, units))

    def end_layer(self, layer: int, lse: Tensor) -> None:
        """Counts what was attended to of a layer.

        Args:
            lse: `[heads, query]`, of all that its queries attended to.
        """
        scores = self.scores[layer].mul_(self.decay)
        for start, part_lse, units in self._parts:
            first = start // self.chunk
            scores[:, first : first + units.shape[2]] += attended_mass(units, part_lse, lse)
        self._parts.clear()
