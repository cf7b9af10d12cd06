"""The tree that yields most for its size, by dynamic programming (Sequoia, arXiv 2402.12374, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

GRID = 20  # rates are told apart in so many steps: a plan holds for a while
DEEPEST = 32


def acceptance_vector(rates: Sequence[float]) -> list[float]:
    """Returns the chances that the eldest, the second, … child of a node is the accepted one.

    Args:
        rates: chances that a child is accepted once its elder siblings were rejected.
    """
    rejected = accumulate((1.0 - rate for rate in rates), mul, initial=1.0)
    return [before * rate for before, rate in zip(rejected, rates, strict=False)]


class TreePlan:
    """The best trees of `nodes`, of any depth."""

    def __init__(self, rates: Sequence[float], nodes: int) -> None:
        self._chances = acceptance_vector(rates)
        self._nodes = nodes
        # By depth: the best value of n nodes below one, and by rank how many of them a child's tree takes.
        self._values = [torch.zeros(nodes + 1, dtype=torch.float64)]
        self._takes: list[Tensor] = []
        while len(self._takes) < min(nodes, DEEPEST):
            value, takes = self._deeper(self._values[-1])
            if torch.equal(value, self._values[-1]):
                break  # deeper ones are no better
            self._values.append(value)
            self._takes.append(takes)

    def tokens(self, depth: int) -> float:
        """Returns the expected tokens of a verification: accepted nodes, and one of the verifier's own."""
        return 1.0 + float(self._values[min(depth, len(self._takes))][self._nodes])

    def levels(self, depth: int) -> list[list[int]]:
        """Returns for each depth the number of children of each node, eldest children of a level first."""
        levels: list[list[int]] = []
        below = [self._nodes]  # how many nodes lie below each
        for remaining in range(min(depth, len(self._takes)), 0, -1):
            shares = [self._shares(count, remaining) for count in below]
            levels.append([len(counts) for counts in shares])
            widest = max(levels[-1], default=0)
            below = [counts[rank] for rank in range(widest) for counts in shares if len(counts) > rank]
        return levels

    def _deeper(self, below: Tensor) -> tuple[Tensor, Tensor]:
        """Values and takes, one level deeper than the values `below`."""
        size = len(below)
        child = 1.0 + below[:-1]  # of a child's tree of 1, 2, … nodes
        younger = torch.zeros(size, dtype=torch.float64)  # of what is left for younger siblings
        takes: list[Tensor] = []
        remaining = torch.arange(size)[:, None] - torch.arange(1, size)  # [n, taken - 1]
        for chance in reversed(self._chances):
            total = chance * child + younger[remaining.clamp(min=0)]
            best = total.masked_fill(remaining < 0, -torch.inf).max(1)
            takes.append(torch.where(best.values > 0, best.indices + 1, 0))
            younger = best.values.clamp(min=0.0)
        return younger, torch.stack(takes[::-1])

    def _shares(self, nodes: int, depth: int) -> list[int]:
        """Returns the number of nodes below each child of a node that has `nodes` below it."""
        shares = []
        for take in self._takes[depth - 1]:
            nodes_taken = int(take[nodes])
            if not nodes_taken:
                break
            shares.append(nodes_taken - 1)
            nodes -= nodes_taken
        return shares


@lru_cache(maxsize=64)
def _plan(rates: tuple[int, ...], nodes: int) -> TreePlan:
    return TreePlan([rate / GRID for rate in rates], nodes)


def plan(rates: Sequence[float], nodes: int) -> TreePlan:
    """Returns the plan for rates near these, none of them 0: what is never drafted is never measured."""
    return _plan(tuple(max(1, round(GRID * rate)) for rate in rates), nodes)
