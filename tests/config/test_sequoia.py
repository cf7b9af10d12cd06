"""Sequoia's trees against an enumeration of all trees."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import LATER_CHOICES
from offload_rt.config.sequoia import TreePlan, acceptance_vector, plan

Node = tuple["Node", ...]
"""A node as the tuple of its children."""


@cache
def trees(nodes: int, depth: int) -> tuple[Node, ...]:
    """Returns all ordered trees of `nodes` nodes below a root, of at most `depth` levels."""
    return tuple(_trees(nodes, depth))


def _trees(nodes: int, depth: int) -> Iterator[Node]:
    if not nodes:
        yield ()
    elif depth:
        for first in range(nodes):  # below the eldest child
            for eldest, rest in product(trees(first, depth - 1), trees(nodes - 1 - first, depth)):
                yield (eldest, *rest)


def value(tree: Node, chances: list[float]) -> float:
    """Expected number of accepted nodes; children beyond the known ranks are never accepted."""
    return sum(chance * (1.0 + value(child, chances)) for chance, child in zip(chances, tree, strict=False))


def of_plan(found: TreePlan, depth: int) -> Node:
    """Builds the tree that the levels of a plan describe."""
    children: dict[int, list[int]] = {0: []}
    level, count = [0], 1
    for widths in found.levels(depth):
        assert len(widths) == len(level)
        below = []
        for rank in range(max(widths, default=0)):
            for node, width in zip(level, widths, strict=True):
                if width > rank:
                    children[node].append(count)
                    children[count] = []
                    below.append(count)
                    count += 1
        level = below

    def built(node: int) -> Node:
        return tuple(built(child) for child in children[node])

    return built(0)


@given(
    rates=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4),
    nodes=st.integers(1, 6),
    depth=st.integers(1, 4),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_no_tree_is_better(rates: list[float], nodes: int, depth: int) -> None:
    chances, found = acceptance_vector(rates), TreePlan(rates, nodes)
    best = max(value(tree, chances) for count in range(nodes + 1) for tree in trees(count, depth))
    assert found.tokens(depth) == pytest.approx(1.0 + best)
    assert value(of_plan(found, depth), chances) == pytest.approx(best)


def test_the_shape_follows_the_acceptance_rates() -> None:
    sure, unsure = (plan((rate, *LATER_CHOICES), 16) for rate in (0.98, 0.3))
    assert sum(map(any, sure.levels(16))) > 12 > sum(map(any, unsure.levels(16)))
    assert unsure.levels(16)[0][0] > sure.levels(16)[0][0]
    shape = DraftShape.parse("sequoia:16").deep(16, (0.3, *LATER_CHOICES))
    levels = unsure.levels(16)
    assert shape.levels == levels
    assert shape.per_pass == max(map(sum, levels)) and shape.expected_tokens(shape.rates) == unsure.tokens(16)
    assert unsure.tokens(16) > DraftShape.parse("chain").deep(16).expected_tokens([0.3])


def test_a_rank_that_was_never_accepted_is_still_tried() -> None:
    assert plan([0.0] * 8, 16).levels(8)[0][0] > 0


def test_acceptance_vector() -> None:
    assert acceptance_vector([0.5, 0.5, 1.0]) == pytest.approx([0.5, 0.25, 0.25])
    assert sum(acceptance_vector(LATER_CHOICES)) < 1
