"""Attention mass: the share of attention that each chunk of a sequence gets, sampled from a few queries.

The retrieved cache chooses chunks by it. Mass is summed over the tokens of a chunk and over the sampled
queries of all heads that share a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from offload_rt.kernels import operators
from offload_rt.kernels.sizes import SAMPLED_QUERIES


@dataclass(frozen=True)
class Sample:
    """The sampled queries: of every `period` folded ones each `step`th, counted back from the last."""

    period: int
    step: int

    @classmethod
    @cache
    def of(cls, queries: int) -> Sample:
        """Samples at most `SAMPLED_QUERIES` of `queries` tokens, evenly spaced."""
        return cls(queries, -(-queries // SAMPLED_QUERIES))

    @property
    def count(self) -> int:
        """Number of sampled queries in each `period`."""
        return -(-self.period // self.step)

    def rows(self, queries: Tensor) -> Tensor:
        """Returns the sampled rows of folded queries `[kv_heads, folded_query, …]`."""
        return operators.sampled_rows(queries, self.period, self.step)


class MassRange:
    """Attention mass of consecutive chunks of one layer in one pass, filled segment by segment.

    Attributes:
        first: number of the first chunk.
        chunk: tokens per chunk.
        mass: `[kv_heads, sampled_query, chunks]` float32, for each chunk the sum of exp(score - reference)
            over its tokens; or `[kv_heads, 1, chunks]`, also summed over the sampled queries (`summed_mass`).
        reference: log-sum-exp that the mass is relative to, `[kv_heads, folded_query]`; None until the first
            segment is attended.
    """

    def __init__(self, first: int, chunk: int, mass: Tensor, reference: Tensor | None) -> None:
        self.first = first
        self.chunk = chunk
        self.mass = mass
        self.reference = reference
        self._filled = 0

    def next_segment(self, tokens: int) -> Tensor:
        """Returns the view for the next segment, of so many tokens."""
        start = self._filled
        self._filled += tokens // self.chunk
        return self.mass[:, :, start : self._filled]


def summed_mass(ranges: Sequence[MassRange], lse: Tensor, sample: Sample) -> Tensor:
    """Sums the mass of consecutive ranges over the sampled queries, which makes it small enough to send.

    Args:
        lse: what the result is relative to, `[kv_heads, folded_query]`.

    Returns:
        `[kv_heads, 1, chunks]` float32.
    """
    summed = []
    for one in ranges:
        assert one.reference is not None
        weights = sample.rows(operators.clamped_exp(one.reference - lse)).float()
        summed.append(weights[:, None] @ one.mass)
    return torch.cat(summed, dim=2)
