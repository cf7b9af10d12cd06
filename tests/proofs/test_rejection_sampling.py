"""The acceptance rules alone: whatever is drafted, the output has the verifier's distribution."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.enumeration import ScriptedDraws, outcome_probs
from torch import Tensor

from offload_rt.drafting.merged import joined
from offload_rt.sampling.rejection import Draft, Verdict, residual, verify, verify_greedy
from offload_rt.sampling.sampler import Draws
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, Tree

VOCABULARY = 4


def normalized(weights: Sequence[float]) -> Tensor:
    probs = torch.tensor(weights, dtype=torch.float64)
    return probs / probs.sum()


def random_probs(source: random.Random) -> Tensor:
    """A distribution that is often 0 somewhere."""
    possible = source.sample(range(VOCABULARY), source.randint(1, VOCABULARY))
    return normalized([source.random() if token in possible else 0.0 for token in range(VOCABULARY)])


class Distributions:
    """Random distributions of the next token: one per text, for the verifier and for the drafter."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, who: str, text: tuple[int, ...]) -> Tensor:
        return random_probs(random.Random(f"{self._seed} {who} {text}"))


def draft_of(tokens: Sequence[int], parents: Sequence[int], probs: Tensor | None = None) -> Draft:
    return Draft(Tokens(tokens), Tree(tuple(parents)), probs)


def output(draft: Draft, verdict: Verdict) -> tuple[int, ...]:
    path = draft.tree.path(int(verdict.row))
    return (*(draft.tokens.known[node] for node in path), int(verdict.token))


def drafted(given_by: Distributions, draws: Draws, parents: Sequence[int], *, replacement: bool) -> Draft:
    """Samples a tree; a sibling for which no token is left has a row of zeros."""
    tokens: list[int] = []
    rows: list[Tensor] = []
    texts: list[tuple[int, ...]] = []
    for node, parent in enumerate(parents):
        above = texts[parent] if parent != ROOT else ()
        probs = given_by("draft", above).clone()
        if not replacement:
            for elder in (e for e in range(node) if parents[e] == parent):
                probs[tokens[elder]] = 0
        rows.append(probs / probs.sum() if probs.sum() > 0 else probs)
        tokens.append(int(draws.categorical(rows[-1])))
        texts.append((*above, tokens[-1]))
    return draft_of(tokens, parents, torch.stack(rows))


def verified(given_by: Distributions, draft: Draft, draws: Draws) -> tuple[int, ...]:
    """Output of a verifier with its own distribution after each node."""
    paths = [draft.tree.path(row) for row in range(1 + len(draft))]
    texts = [tuple(draft.tokens.known[node] for node in path) for path in paths]
    rows = torch.stack([given_by("verifier", text) for text in texts])
    return output(draft, verify(draft, rows, draws))


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda numbers: [min(number, node) - 1 for node, number in enumerate(numbers)]
)


@given(seed=st.integers(0, 10**6), parents=SHAPES, replacement=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_sampled_trees_are_lossless(seed: int, parents: list[int], replacement: bool) -> None:
    given_by = Distributions(seed)

    def run(draws: Draws) -> tuple[int, ...]:
        return verified(given_by, drafted(given_by, draws, parents, replacement=replacement), draws)

    assert_follows(given_by, outcome_probs(run))


@given(seed=st.integers(0, 10**6), parents=SHAPES)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_deterministic_trees_are_lossless(seed: int, parents: list[int]) -> None:
    """Siblings may have the same token."""
    given_by, source = Distributions(seed), random.Random(seed)
    draft = draft_of([source.randrange(VOCABULARY) for _ in parents], parents)
    assert_follows(given_by, outcome_probs(lambda draws: verified(given_by, draft, draws)))


@given(
    seed=st.integers(0, 10**6),
    parents=SHAPES,
    chain=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_joining_a_found_chain_never_shortens_the_output(
    seed: int, parents: list[int], chain: list[int]
) -> None:
    """No number of tokens becomes less likely."""
    given_by = Distributions(seed)

    def run(found: list[int], draws: Draws) -> int:
        draft = joined(drafted(given_by, draws, parents, replacement=False), found)
        return len(verified(given_by, draft, draws))

    alone, merged = (outcome_probs(partial(run, found)) for found in ([], chain))
    for least in range(2, 8):
        wanted, got = (sum(p for n, p in one.items() if n >= least) for one in (alone, merged))
        assert got >= wanted - 1e-9


def assert_follows(given_by: Distributions, found: dict[tuple[int, ...], float]) -> None:
    """Each emitted token has the verifier's distribution, given the tokens before it."""
    stands: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in found.items():
        for end in range(len(tokens) + 1):
            stands[tokens[:end]] += weight
    assert stands[()] == pytest.approx(1.0)
    for before in {tokens[:-1] for tokens in stands if tokens}:
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        probs = [weight / sum(followed) for weight in followed]
        assert probs == pytest.approx(given_by("verifier", before).tolist(), abs=1e-9)


@given(seed=st.integers(0, 10**6), nodes=st.lists(st.integers(0, 12), max_size=12))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_descend_walks_through_first_accepted_children(seed: int, nodes: list[int]) -> None:
    tree = Tree(tuple(min(number, node) - 1 for node, number in enumerate(nodes)))
    accepted = [random.Random(seed + node).random() < 0.7 for node in range(len(nodes))]
    node = ROOT
    while True:
        children = (c for c, parent in enumerate(tree.parents) if parent == node and accepted[c])
        child = next(children, None)
        if child is None:
            break
        node = child
    assert int(tree.descend(torch.tensor(accepted, dtype=torch.bool))) == node + 1


@given(seed=st.integers(0, 10**6), parents=SHAPES)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_a_greedy_verdict_is_that_of_one_hot_distributions(seed: int, parents: list[int]) -> None:
    source = random.Random(seed)
    draft = draft_of([source.randrange(2) for _ in parents], parents)
    chosen = torch.tensor([source.randrange(2) for _ in range(1 + len(parents))])
    sampled = verify(draft, torch.eye(VOCABULARY, dtype=torch.float64)[chosen], ScriptedDraws())
    assert output(draft, verify_greedy(draft, chosen)) == output(draft, sampled)
    assert int(verify_greedy(Draft(), chosen).token) == chosen[0]


def test_the_acceptance_rate_is_the_overlap_of_the_distributions() -> None:
    """A rule may be lossless and accept less: one minus the total variation distance is optimal."""
    proposal, probs = normalized([1, 2, 3, 4]), normalized([4, 1, 0, 5])

    def run(draws: Draws) -> bool:
        draft = draft_of([int(draws.categorical(proposal))], [ROOT], proposal[None])
        return bool(verify(draft, probs.expand(2, -1), draws).row)

    assert outcome_probs(run)[True] == pytest.approx(0.1 + 0.1 + 0.4)


def test_the_residual_of_equal_distributions_is_the_distribution() -> None:
    """Only rounding leads there."""
    probs = normalized([1, 2, 3])[None]
    assert torch.equal(residual(probs, probs), probs)


def test_accepted_and_rejected_children_are_counted_by_rank() -> None:
    tree = Tree((ROOT, 0, ROOT, 0))
    # On the way to node 3 its elder sibling 1 was rejected; node 2 was not tried.
    assert tree.tries([0, 3]) == [(1, 1), (1, 0)]
    assert tree.tries([0, 3], 2) == [(1, 1)]  # of the first two nodes
    assert tree.tries([2]) == [(0, 1), (1, 0)] and tree.tries([]) == [(0, 1), (0, 1)]
    assert Tree().tries([]) == []


def test_a_malformed_draft_is_refused() -> None:
    for tokens, parents, probs, message in (
        ([1, 2], [ROOT], None, "2 tokens but 1 parents"),
        ([1], [0], None, "must be -1 or an earlier node"),
        ([1], [-2], None, "must be -1 or an earlier node"),
        ([1], [ROOT], torch.ones(2, 4), r"1 tokens but probs of shape \[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            draft_of(tokens, parents, probs)
