"""The tree that yields most for its size, by dynamic programming (Sequoia, arXiv 2402.12374, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

GRID = 50  # rates are told apart in so many steps: a plan holds for a while


def reached(rates: Sequence[float]) -> list[float]:
    """Chances that the eldest, the second, … child of a node is the accepted one.

    Args:
        rates: chances that a child is accepted once its elder siblings were rejected.
    """
    rejected = accumulate((1.0 - rate for rate in rates), mul, initial=1.0)
    return [before * rate for before, rate in zip(rejected, rates, strict=False)]


class Plan:
    """The best tree of `nodes`, `depth` deep.

    Attributes:
        tokens: expected from a verification: the accepted nodes, and one of the verifier's own.
        levels: by depth, how many children each node has; of each level the eldest children of all first.
    """

    def __init__(self, rates: Sequence[float], nodes: int, depth: int) -> None:
        self._chances = reached(rates)
        self._takes: list[list[Tensor]] = []  # by depth and rank: how many of n nodes a child's tree takes
        value = torch.zeros(nodes + 1, dtype=torch.float64)  # of n nodes below one; here of no depth
        for _ in range(depth):
            value = self._deeper(value)
        self.tokens = 1.0 + float(value[nodes])
        self.levels: list[list[int]] = []
        level = [nodes]  # how many nodes lie below each
        for left in range(depth, 0, -1):
            shares = [self._shares(count, left) for count in level]
            self.levels.append([len(one) for one in shares])
            widest = max(self.levels[-1], default=0)
            level = [one[rank] for rank in range(widest) for one in shares if len(one) > rank]

    def _deeper(self, below: Tensor) -> Tensor:
        """The best values of n nodes below one, one level deeper than `below`."""
        size = len(below)
        child = 1.0 + below[:-1]  # of a child's tree of 1, 2, … nodes
        rest = torch.zeros(size, dtype=torch.float64)  # of what is left for younger siblings
        takes: list[Tensor] = []
        left = torch.arange(size)[:, None] - torch.arange(1, size)  # [n, taken - 1]
        for chance in reversed(self._chances):
            total = chance * child + rest[left.clamp(min=0)]
            best = total.masked_fill(left < 0, -torch.inf).max(1)
            takes.append(torch.where(best.values > 0, best.indices + 1, 0))
            rest = best.values.clamp(min=0.0)
        self._takes.append(takes[::-1])
        return rest

    def _shares(self, nodes: int, depth: int) -> list[int]:
        """How many nodes lie below each child of one that has `nodes` below it."""
        shares = []
        for take in self._takes[depth - 1]:
            taken = int(take[nodes])
            if not taken:
                break
            shares.append(taken - 1)
            nodes -= taken
        return shares


@lru_cache(maxsize=256)
def _plan(rates: tuple[int, ...], nodes: int, depth: int) -> Plan:
    return Plan([rate / GRID for rate in rates], nodes, depth)


def plan(rates: Sequence[float], nodes: int, depth: int) -> Plan:
    """As `Plan`, for rates near these."""
    return _plan(tuple(round(GRID * rate) for rate in rates), nodes, depth)
