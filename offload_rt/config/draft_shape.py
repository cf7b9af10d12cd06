"""Shapes of drafts: their depth and width, and the rule that chooses them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import mul
from typing import TYPE_CHECKING, Final, Literal

from offload_rt.config.priors import (
    DRAFT_LENGTHS,
    LATER_CHOICES,
    RUNNER_UP_HITS,
    SAME_MODEL_ACCEPTANCE,
    SECOND_CHOICE,
    expected_tokens,
    outcome_chances,
)
from offload_rt.errors import UsageError

if TYPE_CHECKING:
    from offload_rt.config.sequoia import TreePlan

RULE = (
    "must be auto, chain, sequences:K, tree:W,W,... (children of a node by depth), "
    "sequoia:N or grown:N (nodes)"
)

MOST_NODES = 1024
"""Most nodes of any draft: far more than a pass verifies in the time of one token."""

MOST_CHOSEN = 256
"""Most nodes of a `tree` or `sequences` draft whose depth is chosen while decoding, beyond depth 1."""

AUTO: Final = "auto"
"""A chain or a grown tree, whichever yields more tokens a second."""


@dataclass(frozen=True)
class DraftShape:
    """Shape of the draft tree that is proposed behind a sequence.

    - `chain`: one token after the other.
    - `sequences`: independent chains side by side (TriForce, section 5.4).
    - `tree`: fixed numbers of children at each depth, drawn without replacement.
    - `sequoia`: the tree that yields most of all with so many nodes, by how often children of each rank were
      accepted (see `sequoia.py`).
    - `auto`: a chain or a grown tree, chosen round by round (see `SpeculationController`).
    - `grown`: best first, where the draft's own probabilities promise most, a batch of nodes a pass
      (as EAGLE-2, arXiv 2406.16858, and SpecExec, arXiv 2406.02532).

    Attributes:
        depth: tokens on the longest path; 0: nothing is proposed.
        widths: `tree`: children of a node at each depth, 1 beyond; `sequences`: how many.
        nodes: `grown`, `sequoia`: how many at most.
        rates: chances that the eldest child of a node is accepted, the second one where that was rejected,
            and so on, by what has been seen.
    """

    kind: Literal["auto", "chain", "sequences", "tree", "sequoia", "grown"] = "chain"
    depth: int = 0
    widths: tuple[int, ...] = ()
    nodes: int = 0
    rates: tuple[float, ...] = (SAME_MODEL_ACCEPTANCE, *LATER_CHOICES)

    @classmethod
    def parse(cls, text: str) -> DraftShape:
        """Parses `auto`, `chain`, `sequences:4`, `tree:4,2,2`, `sequoia:64` or `grown:64`, of depth 0.

        Raises:
            UsageError: for anything else.
        """
        if text == "chain":
            return cls()
        if text == AUTO:
            return cls(AUTO)
        kind, _, values = text.partition(":")
        written = values.split(",")
        if all(re.fullmatch("0*[1-9][0-9]{0,18}", number) for number in written):
            numbers = tuple(map(int, written))
            if kind == "tree":
                return cls("tree", widths=numbers)
            if kind == "sequences" and len(numbers) == 1:
                return cls("sequences", widths=numbers)
            if kind in ("sequoia", "grown") and len(numbers) == 1:
                return cls("grown" if kind == "grown" else "sequoia", nodes=numbers[0])
        raise UsageError(f"draft {text!r}: {RULE}")

    def __str__(self) -> str:
        numbers = ",".join(map(str, (self.nodes,) if self.nodes else self.widths))
        return f"{self.kind}:{numbers}" if numbers else self.kind

    def deep(self, depth: int, rates: tuple[float, ...] = ()) -> DraftShape:
        """Returns the same shape of another depth, perhaps with other `rates`."""
        return replace(self, depth=depth, rates=rates or self.rates)

    def width(self, depth: int) -> int:
        """Returns the number of children of each node at `depth`; the root is at 0."""
        return self.widths[depth] if depth < len(self.widths) else 1

    @cached_property
    def levels(self) -> list[list[int]]:
        """For each depth the number of children of each node; eldest children of a level come first."""
        if self.kind == "sequoia":
            return _planned(self.rates, self.nodes).levels(self.depth)
        levels: list[list[int]] = []
        nodes = 1
        for depth in range(self.depth):
            levels.append([self.width(depth)] * nodes)
            nodes *= self.width(depth)
        return levels

    @cached_property
    def size(self) -> int:
        """Nodes, at most."""
        if self.nodes:
            return self.nodes if self.depth else 0
        return sum(accumulate(map(self.width, range(self.depth)), mul))

    @property
    def per_pass(self) -> int:
        """Tokens in the widest pass that drafts it."""
        if self.kind == "grown":
            return -(-self.nodes // max(1, self.depth))
        if self.kind == "sequoia":
            return max(map(sum, self.levels), default=0)
        return prod(map(self.width, range(self.depth))) if self.depth else 0

    def candidates(self) -> list[DraftShape]:
        """Returns the shapes to choose among while decoding: itself, where its depth is given."""
        if self.depth:
            return [self]
        if self.kind == AUTO:
            grown = (DraftShape("grown", nodes=nodes) for nodes in (16, 32, 64))
            return [candidate for kind in (CHAIN, *grown) for candidate in kind.candidates()]
        if self.nodes:
            return [self.deep(depth) for depth in DRAFT_LENGTHS if depth <= self.nodes]
        shallowest, *deeper = map(self.deep, DRAFT_LENGTHS)
        return [shallowest, *(shape for shape in deeper if shape.size <= MOST_CHOSEN)]

    def outcome_chances(self, acceptance: float) -> tuple[float, ...]:
        """Returns the chances of the verdicts that can be guessed, the likeliest first.

        Where an eldest node is rejected, the runner-up may be a sibling: what follows that is not guessed.
        """
        alone = self.kind == "chain"
        return outcome_chances(acceptance, self.depth, RUNNER_UP_HITS * (1.0 if alone else SECOND_CHOICE))

    def expected_tokens(self, rates: Sequence[float]) -> float:
        """Returns the tokens that a verification yields, given the acceptance rate by sibling rank.

        But for `sequoia` a guess: siblings save `SECOND_CHOICE` of the rejections that they stand beside.
        """
        if self.kind == "sequoia" and self.depth:
            return _planned(rates, self.nodes).tokens(self.depth)
        acceptance = rates[0]
        beside = 1.0 - 1.0 / max(1, self.per_pass)
        second_chance = SECOND_CHOICE * beside if self.kind != "chain" else 0.0
        return expected_tokens(acceptance + (1.0 - acceptance) * second_chance, self.depth)


def _planned(rates: Sequence[float], nodes: int) -> TreePlan:
    from offload_rt.config.sequoia import plan  # with torch, which takes seconds to import

    return plan(rates, nodes)


CHAIN = DraftShape()
