"""What queries attend to, beside what they get of it: weights summed over a few tokens at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from offload_rt.attention import AttentionBackend


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


class WeighedByProduct:
    """`AttentionBackend.weighed` by one more product, over keys that are there anyway."""

    TOKENS = 4096
    """Whose scores are in memory at a time."""

    def weighed(
        self: AttentionBackend,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scale: float,
        unit: int,
        weighed: Weighed,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse = self(queries, keys, values, scale, None)
        # Scaled before the product, whose sums may be more than float16 holds.
        asking, asked = scale * weighed.rows(queries), weighed.rows(lse)[..., None]
        tokens = max(unit, WeighedByProduct.TOKENS // unit * unit)
        columns = []
        for part in keys.split(tokens, dim=2):
            rows = [
                ((asking @ pages.mT).to(lse.dtype) - asked).exp_().unflatten(-1, (-1, unit)).sum(-1)
                for pages in part.split(max(1, tokens // part.shape[2]))
            ]
            columns.append(torch.cat(rows))
        units = torch.cat(columns, dim=-1).permute(1, 2, 0, 3).flatten(2)
        return out, lse, units.float()
