"""The rules of acceptance on their own: whatever is drafted, the output has the verifier's distribution."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from enumeration import ScriptedDraws, outcome_probs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload_rt.drafting.merged import joined
from offload_rt.rejection_sampling import Draft, Verdict, residual, verify, verify_greedy
from offload_rt.sampling import Draws, pick
from offload_rt.tokens import Tokens
from offload_rt.trees import ROOT, Tree, forest

VOCABULARY = 4


def normalized(weights: Sequence[float]) -> Tensor:
    probs = torch.tensor(weights, dtype=torch.float64)
    return probs / probs.sum()


def random_probs(source: random.Random) -> Tensor:
    """With zeros in it, mostly."""
    possible = source.sample(range(VOCABULARY), source.randint(1, VOCABULARY))
    return normalized([source.random() if token in possible else 0.0 for token in range(VOCABULARY)])


class Distributions:
    """A random one after every text, for a verifier and for a drafter."""

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
    """A tree of this shape, sampled. Where no token is left, a row of zeros."""
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
    """What a verifier that has its own distribution after the text at each node puts out."""
    paths = [draft.tree.path(row) for row in range(1 + len(draft))]
    texts = [tuple(draft.tokens.known[node] for node in path) for path in paths]
    rows = torch.stack([given_by("verifier", text) for text in texts])
    return output(draft, verify(draft, rows, draws))


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda numbers: [min(number, node) - 1 for node, number in enumerate(numbers)]
)


@given(seed=st.integers(0, 10**6), parents=SHAPES, replacement=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_sampled_trees_of_any_shape(seed: int, parents: list[int], replacement: bool) -> None:
    """Each token has the verifier's distribution, given those before it and that it is put out."""
    given_by = Distributions(seed)

    def run(draws: Draws) -> tuple[int, ...]:
        return verified(given_by, drafted(given_by, draws, parents, replacement=replacement), draws)

    assert_follows(given_by, outcome_probs(run))


@given(seed=st.integers(0, 10**6), parents=SHAPES)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_deterministic_trees_of_any_shape(seed: int, parents: list[int]) -> None:
    """Even with siblings that bear the same token."""
    given_by, source = Distributions(seed), random.Random(seed)
    draft = draft_of([source.randrange(VOCABULARY) for _ in parents], parents)
    assert_follows(given_by, outcome_probs(lambda draws: verified(given_by, draft, draws)))


@given(
    seed=st.integers(0, 10**6),
    parents=SHAPES,
    chain=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_joining_what_a_source_found_is_never_a_loss(seed: int, parents: list[int], chain: list[int]) -> None:
    """Whatever it is: no number of tokens is less likely to be reached by a pass."""
    given_by = Distributions(seed)

    def run(draws: Draws, found: list[int]) -> int:
        draft = joined(drafted(given_by, draws, parents, replacement=False), found)
        return len(verified(given_by, draft, draws))

    alone, merged = (outcome_probs(lambda draws, found=found: run(draws, found)) for found in ([], chain))
    for least in range(2, 8):
        wanted, got = (sum(p for n, p in one.items() if n >= least) for one in (alone, merged))
        assert got >= wanted - 1e-9


def assert_follows(given_by: Distributions, found: dict[tuple[int, ...], float]) -> None:
    stands: dict[tuple[int, ...], float] = defaultdict(float)
    for tokens, weight in found.items():
        for end in range(len(tokens) + 1):
            stands[tokens[:end]] += weight
    assert stands[()] == pytest.approx(1.0)
    for before in {tokens[:-1] for tokens in stands if tokens}:
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        probs = [weight / sum(followed) for weight in followed]
        assert probs == pytest.approx(given_by("verifier", before).tolist(), abs=1e-9)


# ---------------------------------------------------------------- against a walk on the host


def walk(draft: Draft, probs: Tensor, accept: Sequence[float], last: float) -> tuple[int, ...]:
    """The rule as the papers write it: one child after the other, one uniform number a node."""
    tokens: list[int] = []
    node = ROOT
    while True:
        left = probs[node + 1]
        for child in (c for c, parent in enumerate(draft.tree.parents) if parent == node):
            token = draft.tokens.known[child]
            proposal = torch.zeros_like(left)
            proposal[token] = 1.0
            if draft.probs is not None:
                proposal = draft.probs[child]
            if proposal[token] > 0 and accept[child] < float(left[token] / proposal[token]):
                tokens.append(token)
                node = child
                break
            left = residual(left[None], proposal[None])[0]
        else:
            return (*tokens, int(pick(left, torch.tensor(last, dtype=torch.float64))))


class GivenUniforms:
    """The program's own draws, of given uniform numbers: one for each node, one for the last token."""

    def __init__(self, nodes: Sequence[float], last: float) -> None:
        self._nodes = torch.tensor(nodes, dtype=torch.float64)
        self._last = torch.tensor(last, dtype=torch.float64)

    def categorical(self, probs: Tensor) -> Tensor:
        return pick(probs, self._last)

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        return tree.descend(self._nodes < chances)


UNIFORM = st.floats(0, 1, exclude_max=True)
NODES = st.lists(st.tuples(st.integers(0, 8), UNIFORM), min_size=1, max_size=8)


@given(seed=st.integers(0, 10**6), nodes=NODES, last=UNIFORM, sampled=st.booleans(), chain=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_the_rule_on_the_device_is_the_walk(
    seed: int, nodes: list[tuple[int, float]], last: float, sampled: bool, chain: bool
) -> None:
    """Token for token, of the same uniform numbers, for every tree."""
    source = random.Random(seed)
    parents = [node - 1 if chain else min(number, node) - 1 for node, (number, _) in enumerate(nodes)]
    proposals = torch.stack([random_probs(source) for _ in nodes])
    tokens = [source.choices(range(VOCABULARY), probs.tolist())[0] for probs in proposals]
    draft = draft_of(tokens, parents, proposals if sampled else None)
    rows = torch.stack([random_probs(source) for _ in range(len(nodes) + 1)])
    for node, parent in enumerate(parents):  # near the proposals, so that long runs are accepted
        rows[parent + 1] = 0.7 * proposals[node] + 0.3 * rows[parent + 1]
    uniforms = [uniform for _, uniform in nodes]
    verdict = verify(draft, rows, GivenUniforms(uniforms, last))
    assert output(draft, verdict) == walk(draft, rows, uniforms, last)


@given(seed=st.integers(0, 10**6), nodes=st.lists(st.integers(0, 12), max_size=12))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_descending_is_a_walk_through_first_accepted_children(seed: int, nodes: list[int]) -> None:
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


# ------------------------------------------------------------------------------------ by hand


def test_the_residual_is_sampled_after_a_rejection() -> None:
    """Sampling the whole distribution there, as one published program does, would give (.44, .56)."""
    proposal, probs = normalized([0.2, 0.8]), normalized([0.6, 0.4])

    def run(draws: Draws) -> int:
        draft = draft_of([int(draws.categorical(proposal))], [ROOT], proposal[None])
        return output(draft, verify(draft, torch.stack([probs, normalized([1, 1])]), draws))[0]

    found = outcome_probs(run)
    assert [found[0], found[1]] == pytest.approx([0.6, 0.4])


def test_acceptance_is_as_likely_as_the_distributions_overlap() -> None:
    """Lossless is not enough: one minus the total variation is accepted, no less."""
    proposal, probs = normalized([1, 2, 3, 4]), normalized([4, 1, 0, 5])

    def run(draws: Draws) -> bool:
        draft = draft_of([int(draws.categorical(proposal))], [ROOT], proposal[None])
        return bool(verify(draft, probs.expand(2, -1), draws).row)

    assert outcome_probs(run)[True] == pytest.approx(float(torch.minimum(proposal, probs).sum()))


def test_an_equal_distribution_accepts_every_draft() -> None:
    probs = normalized([1, 2, 3, 4])
    draft = draft_of([3, 0, 2], [ROOT, 0, 1], probs.expand(3, -1))
    draws = ScriptedDraws()
    assert int(verify(draft, probs.expand(4, -1), draws).row) == 3
    assert draws.probability == pytest.approx(0.1)  # of the last token alone


def test_a_greedy_verifier_walks_to_the_child_that_bears_its_token() -> None:
    #        0:a ── 2:c
    # root <     └─ 3:d ── 5:a
    #        1:b ── 4:c
    draft = draft_of([10, 11, 12, 13, 12, 10], [ROOT, ROOT, 0, 0, 1, 3])

    def greedy(*chosen: int) -> tuple[int, ...]:
        return output(draft, verify_greedy(draft, torch.tensor(chosen)))

    assert greedy(10, 13, 0, 0, 10, 0, 7) == (10, 13, 10, 7)
    assert greedy(11, 0, 13, 0, 0, 0, 0) == (11, 13)
    assert greedy(12, 0, 0, 0, 0, 0, 0) == (12,)
    assert int(verify_greedy(Draft(), torch.tensor([5])).token) == 5


def test_a_candidate_that_could_not_be_drawn_is_never_accepted() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.float64)
    draft = draft_of([3], [ROOT], nothing)
    found = outcome_probs(lambda draws: int(verify(draft, normalized([1, 1, 1, 7]).expand(2, -1), draws).row))
    assert found == {0: pytest.approx(1.0)}


def test_residual() -> None:
    assert residual(normalized([6, 4])[None], normalized([2, 8])[None])[0].tolist() == [1.0, 0.0]
    rest = residual(normalized([5, 3, 2])[None], normalized([1, 1, 8])[None])[0]
    assert rest.tolist() == pytest.approx([2 / 3, 1 / 3, 0], abs=0.1)
    probs = normalized([1, 2, 3])[None]
    assert torch.equal(residual(probs, probs), probs)  # nothing is left: only rounding leads here


def test_trees() -> None:
    assert forest([3]).parents == (ROOT, 0, 1) and forest([3]).is_chain and Tree().is_chain
    tree = Tree((ROOT, 0, ROOT, 0))
    assert not tree.is_chain
    assert tree.depths == [1, 2, 1, 2]
    assert tree.ranks == [[0, 1], [2, 3]]
    assert [tree.path(row) for row in range(5)] == [[], [0], [0, 1], [2], [0, 3]]
    assert forest([2, 0, 1]).parents == (ROOT, 0, ROOT)
    # On the way to the second child the eldest was tried and rejected, and below it nothing was tried.
    assert tree.tries([0, 3]) == [(1, 1), (1, 0)]
    assert tree.tries([]) == [(0, 1), (0, 1)] and Tree().tries([]) == []
    assert tree.tries([0, 3], 2) == [(1, 1)]  # of the first two nodes
    assert tree.tries([2]) == [(0, 1), (1, 0)]  # node 2 has no children


@pytest.mark.parametrize(
    ("tokens", "parents", "probs", "message"),
    [
        ([1, 2], [ROOT], None, "2 tokens but 1 parents"),
        ([1], [0], None, "must be -1 or an earlier node"),
        ([1], [-2], None, "must be -1 or an earlier node"),
        ([1], [ROOT], torch.ones(2, 4), r"1 tokens but probs of shape \[2, 4\]"),
    ],
)
def test_a_malformed_draft_is_refused(
    tokens: list[int], parents: list[int], probs: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        draft_of(tokens, parents, probs)
