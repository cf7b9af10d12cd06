"""What queries attend to, beside what they get of it: weights summed over a few tokens at a time, units."""

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


def attended_mass(units: Tensor, part_lse: Tensor, lse: Tensor) -> Tensor:
    """How much all queries of a pass together attend to each unit of a part, `[kv_heads, units]`.

    Args:
        units: `[kv_heads, weighed_query, units]`, of each query one in all; or the sum over them,
            `[kv_heads, 1, units]`.
        part_lse, lse: `[heads, query]`, of the part and of all that the queries attended to.
    """
    folded = (part_lse - lse).exp().reshape(len(units), -1)
    weights = Weighed.of(lse.shape[1]).rows(folded)[:, None].float()
    if units.shape[1] == 1:
        weights = weights.mean(-1, keepdim=True)  # whose share was whose is not known any more
    return (weights @ units)[:, 0]
