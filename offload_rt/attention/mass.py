"""Attention mass: how much a pass attends to each chunk of a text, sampled from a few of its queries.

It is what the retrieved cache chooses chunks by. Mass is summed over the tokens of a chunk and over the
sampled queries of all heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.attention import fused

SAMPLED_QUERIES = 4
"""More queries choose no better, and each costs its sums."""


@dataclass(frozen=True)
class Sample:
    """Which queries are sampled: of every `period` folded ones each `step`th, the last one among them."""

    period: int
    step: int

    @classmethod
    def of(cls, queries: int) -> Sample:
        """Samples a few of so many tokens, from all over them."""
        return cls(queries, -(-queries // SAMPLED_QUERIES))

    @property
    def count(self) -> int:
        """Sampled queries among `period`."""
        return -(-self.period // self.step)

    @property
    def offset(self) -> int:
        """The first of them."""
        return (self.period - 1) % self.step

    def rows(self, queries: Tensor) -> Tensor:
        """Returns the sampled ones of folded queries `[kv_heads, folded_query, …]`, or of anything alike."""
        apart: Tensor = queries.unflatten(1, (-1, self.period))
        return apart[:, :, self.offset :: self.step].flatten(1, 2)


class MassRange:
    """Attention mass of consecutive chunks of one layer in one pass, filled segment by segment.

    Attributes:
        first: number of the first chunk.
        chunk: tokens of a chunk.
        units: `[kv_heads, sampled_query, chunks]` float32, of each chunk the sum of exp(score - reference)
            over its tokens; or `[kv_heads, 1, chunks]`, summed over the sampled queries (`summed_mass`).
        reference: `[kv_heads, folded_query]`, the log-sum-exp that the units are relative to; None: not known
        yet.
    """

    def __init__(self, first: int, chunk: int, units: Tensor, reference: Tensor | None) -> None:
        self.first = first
        self.chunk = chunk
        self.units = units
        self.reference = reference
        self._filled = 0

    def next(self, keys: Tensor) -> Tensor:
        """Returns the units of the next segment, whose keys are `[pages, kv_heads, tokens, head_dim]`."""
        start = self._filled
        self._filled += len(keys) * keys.shape[2] // self.chunk
        return self.units[:, :, start : self._filled]

    def put(self, keys: Tensor, units: Tensor, lse: Tensor, sample: Sample) -> None:
        """Takes units of the next segment that are relative to `lse` `[kv_heads, folded_query]`."""
        if self.reference is None and units.shape == self.units.shape:
            self.units, self.reference = units, lse
            return
        if self.reference is None:
            self.reference = lse
        else:
            shift = sample.rows(lse) - sample.rows(self.reference)
            units = units * fused.shifted_exp(shift)[..., None].float()
        self.next(keys).copy_(units)


def summed_mass(ranges: Sequence[MassRange], lse: Tensor, sample: Sample) -> Tensor:
    """Sums the mass of consecutive ranges over the sampled queries, `[kv_heads, 1, chunks]`.

    Relative to `lse` `[kv_heads, folded_query]`. Whose mass was whose is not known afterwards, but the result
    is small enough to be sent from one device to another.
    """
    summed = []
    for one in ranges:
        assert one.reference is not None
        weights = sample.rows(fused.shifted_exp(one.reference - lse)).float()
        summed.append(weights[:, None] @ one.units)
    return torch.cat(summed, dim=2)
