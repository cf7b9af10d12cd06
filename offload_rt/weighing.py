"""What queries attend to, beside what they get of it: weights summed over a few tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Weighed:
    """Which queries' weights are told: of every `period` folded ones each `step`th, the last among them."""

    period: int
    step: int

    MOST: ClassVar[int] = 4

    @classmethod
    def of(cls, queries: int) -> Weighed:
        """A few of so many tokens, from all over them: more tell hardly more, and each costs its sums."""
        return cls(queries, -(-queries // cls.MOST))

    @property
    def count(self) -> int:
        """How many of `period` queries."""
        return -(-self.period // self.step)

    def rows(self, queries: Tensor) -> Tensor:
        """Of folded queries `[kv_heads, folded_query, …]`, or of anything alike, the weighed ones."""
        apart: Tensor = queries.unflatten(1, (-1, self.period))
        return apart[:, :, (self.period - 1) % self.step :: self.step].flatten(1, 2)
