"""Losslessness, proved by enumeration: every composition emits the law of its target, to 1e-6.

See `enumeration.py` for how. Target, middle levels and small model have different laws, and rows differ
in which tokens are possible at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from enumeration import (
    VOCABULARY,
    Composition,
    Parts,
    Run,
    TableModel,
    distance,
    next_law,
    outcome_law,
    output_law,
    own_law,
)

from offload_rt.drafting.base import LevelStats, NoDrafter, Text
from offload_rt.drafting.lookup import LookupDrafter
from offload_rt.drafting.verifier import Sampling
from offload_rt.sampling import Draws, SamplingLaw
from offload_rt.verification import ROOT, Draft

TOLERANCE = 1e-6
PROMPT = [1, 3, 0, 2, 4, 1, 3]
COUNT = 3
STOP = 2

LAWS = {
    "greedy": SamplingLaw(0.0),
    "T=0.6": SamplingLaw(0.6),
    "T=1": SamplingLaw(1.0),
    "top-k": SamplingLaw(1.0, top_k=3),
    "top-p": SamplingLaw(1.3, top_p=0.8),
    "top-k and top-p": SamplingLaw(2.0, top_k=3, top_p=0.8),
}


# --------------------------------------------------------------------------------- drafters of trees


class TableDrafter:
    """A drafter whose proposals are functions of a small model's laws; keeps no state."""

    def __init__(self, model: TableModel, sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling
        self.levels: list[LevelStats] = []

    def prefill(self, text: Text) -> None:
        pass

    def settle(self, text: Text) -> None:
        pass

    expected_acceptance = 0.0

    def expected_ms(self, length: int, count: int) -> float:
        return 0.0

    def law_after(self, tokens: Sequence[int]) -> list[float]:
        return next_law(self.sampling.law, self.model.logits("draft", list(enumerate(tokens))))

    def propose(self, text: Text, count: int) -> Draft:
        raise NotImplementedError


class TreeDrafter(TableDrafter):
    """`widths[d]` children of every node at depth d; subclasses say which."""

    widths = (2, 2)
    sampled = True

    def propose(self, text: Text, count: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[list[float]] = []
        level: list[tuple[int, list[int]]] = [(ROOT, text.part(0))]
        for width in self.widths[:count]:
            below: list[tuple[int, list[int]]] = []
            for node, path in level:
                for token, law in self.children(self.law_after(path), width):
                    below.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(node)
                    laws.append(law)
            level = below
        reports = self.sampled and not self.sampling.law.greedy and tokens
        return Draft(tokens, parents, torch.tensor(laws, dtype=torch.float64) if reports else None)

    def children(self, law: list[float], width: int) -> list[tuple[int, list[float]]]:
        """Tokens, each with the law it was drawn from given its elder siblings."""
        raise NotImplementedError

    def draw(self, law: list[float]) -> int:
        return int(self.sampling.draws.categorical(torch.tensor(law, dtype=torch.float64)))


class WithReplacement(TreeDrafter):
    def children(self, law: list[float], width: int) -> list[tuple[int, list[float]]]:
        return [(self.draw(law), law) for _ in range(width)]


class WithoutReplacement(TreeDrafter):
    def children(self, law: list[float], width: int) -> list[tuple[int, list[float]]]:
        drawn: list[tuple[int, list[float]]] = []
        while len(drawn) < width and sum(law) > 0:
            law = [weight / sum(law) for weight in law]
            drawn.append((self.draw(law), law))
            law = [0.0 if token == drawn[-1][0] else weight for token, weight in enumerate(law)]
        return drawn


class WideRoot(WithoutReplacement):
    """The usual shape: many candidates for the first token, one for each later one."""

    widths = (3, 1)


class MostLikely(TreeDrafter):
    """A deterministic tree."""

    sampled = False
    widths = (3, 2)

    def children(self, law: list[float], width: int) -> list[tuple[int, list[float]]]:
        order = sorted(range(VOCABULARY), key=lambda token: -law[token])
        return [(token, law) for token in order[:width]]


class ChainOfAnyLength(TableDrafter):
    """A chain whose length is drawn too, from the tokens it has so far; sometimes it is empty."""

    def propose(self, text: Text, count: int) -> Draft:
        tokens: list[int] = []
        laws: list[list[float]] = []
        while len(tokens) < count and self.sampling.draws.accept((0.3, 0.5, 0.9)[sum(tokens) % 3]):
            laws.append(self.law_after([*text.part(0), *tokens]))
            tokens.append(int(self.sampling.draws.categorical(torch.tensor(laws[-1], dtype=torch.float64))))
        sampled = tokens and not self.sampling.law.greedy
        return Draft.chain(tokens, torch.tensor(laws, dtype=torch.float64) if sampled else None)


# ------------------------------------------------------------------------------------- compositions

Built = tuple[Composition, int]  # and the tokens drafted for the full cache


def plain(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: NoDrafter()), 0


def naive(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: parts.draft_model(sampling)), 3


def retrieval(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: parts.derived("retrieved", full, sampling, NoDrafter(), 0)), 3


def streaming(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: parts.derived("streaming", full, sampling, NoDrafter(), 0)), 2


def triforce(gamma1: int, gamma2: int) -> Callable[[Parts], Built]:
    def build(parts: Parts) -> Built:
        return parts.full(
            lambda full, sampling: parts.derived(
                "retrieved", full, sampling, parts.draft_model(sampling), gamma1
            )
        ), gamma2

    return build


def lookup(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: LookupDrafter(2, 1)), 3


def lookup_below_retrieval(parts: Parts) -> Built:
    return parts.full(
        lambda full, sampling: parts.derived("retrieved", full, sampling, LookupDrafter(2, 1), 2)
    ), 3


def three_levels(parts: Parts) -> Built:
    def drafter(full, sampling):  # type: ignore[no-untyped-def]
        cheap = parts.derived("streaming", full, sampling, parts.draft_model(sampling), 1)
        return parts.derived("retrieved", full, sampling, cheap, 1)

    return parts.full(drafter), 2


def tree(kind: type[TableDrafter]) -> Callable[[Parts], Built]:
    return lambda parts: (parts.full(lambda full, sampling: kind(parts.small, sampling)), 3)


def tree_below_retrieval(kind: type[TableDrafter]) -> Callable[[Parts], Built]:
    return lambda parts: (
        parts.full(
            lambda full, sampling: parts.derived("retrieved", full, sampling, kind(parts.small, sampling), 2)
        ),
        2,
    )


COMPOSITIONS: dict[str, Callable[[Parts], Built]] = {
    "plain": plain,
    "naive": naive,
    "retrieval": retrieval,
    "streaming": streaming,
    "triforce 1 1": triforce(1, 1),
    "triforce 1 2": triforce(1, 2),
    "triforce 1 3": triforce(1, 3),
    "triforce 2 2": triforce(2, 2),
    "triforce 2 3": triforce(2, 3),
    "lookup": lookup,
    "lookup, retrieval": lookup_below_retrieval,
    "three levels": three_levels,
    "tree with replacement": tree(WithReplacement),
    "tree without replacement": tree(WithoutReplacement),
    "tree with a wide root": tree(WideRoot),
    "tree of the most likely": tree(MostLikely),
    "chain of any length": tree(ChainOfAnyLength),
    "tree, retrieval": tree_below_retrieval(WithReplacement),
    "deterministic tree, retrieval": tree_below_retrieval(MostLikely),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("build", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_every_composition_emits_the_law_of_its_target(
    build: Callable[[Parts], Built], law: SamplingLaw
) -> None:
    parts = Parts(seed=7, support=3)
    composition, gamma = build(parts)
    found = output_law(composition, law, PROMPT, COUNT, gamma)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(found, own_law(parts.target, law, PROMPT, COUNT)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "gamma", "count"),
    [("naive", 1, 5), ("naive", 2, 5), ("retrieval", 2, 5), ("triforce 1 2", 2, 5), ("three levels", 2, 4)],
)
def test_the_rounds_after_a_draft_that_was_all_accepted(name: str, gamma: int, count: int) -> None:
    """So many tokens that another round follows whatever came of the first one."""
    parts, law = Parts(seed=13, support=3), SamplingLaw(1.0)
    composition, _ = COMPOSITIONS[name](parts)
    found = output_law(composition, law, PROMPT, count, gamma)
    assert distance(found, own_law(parts.target, law, PROMPT, count)) < TOLERANCE


def test_the_laws_differ() -> None:
    """Where all levels agreed, a wrong rule would go unseen."""
    parts, law = Parts(seed=7, support=3), SamplingLaw(1.0)
    target = own_law(parts.target, law, PROMPT, COUNT)
    others = [own_law(parts.target, law, PROMPT, COUNT, view=view) for view in ("retrieved", "streaming")]
    others.append(own_law(parts.small, law, PROMPT, COUNT, view="small"))
    for i, other in enumerate(others):
        assert all(distance(other, another) > 0.05 for another in [target, *others[:i]])


@pytest.mark.parametrize(
    ("name", "gamma"),
    [
        ("naive", 2),
        ("retrieval", 2),
        ("triforce 1 2", 2),
        ("lookup, retrieval", 2),
        ("tree with replacement", 1),
        ("tree with a wide root", 1),
    ],
)
def test_where_every_token_is_possible(name: str, gamma: int) -> None:
    parts, law = Parts(seed=11), SamplingLaw(1.0)
    composition, _ = COMPOSITIONS[name](parts)
    found = output_law(composition, law, PROMPT, 2, gamma)
    assert distance(found, own_law(parts.target, law, PROMPT, 2)) < TOLERANCE


@pytest.mark.parametrize("name", ["naive", "retrieval", "triforce 2 3", "lookup", "three levels"])
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(name: str, length: int) -> None:
    parts, law = Parts(seed=3, support=3), SamplingLaw(1.0)
    composition, gamma = COMPOSITIONS[name](parts)
    found = output_law(composition, law, PROMPT[:length], 2, gamma)
    assert distance(found, own_law(parts.target, law, PROMPT[:length], 2)) < TOLERANCE


@pytest.mark.parametrize("law", [LAWS["greedy"], LAWS["T=0.6"], LAWS["T=1"]], ids=["greedy", "T=0.6", "T=1"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_an_end_token_ends_the_output_and_bends_no_law(name: str, law: SamplingLaw) -> None:
    parts = Parts(seed=5, support=3, stop_tokens={STOP})
    composition, gamma = COMPOSITIONS[name](parts)
    found = output_law(composition, law, PROMPT, COUNT, gamma, stop_tokens={STOP})
    expected = own_law(parts.target, law, PROMPT, COUNT, {STOP})
    assert distance(found, expected) < TOLERANCE
    if not law.greedy:
        assert {len(output) for output in expected} == {1, 2, 3}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_last_round_is_cut_to_max_tokens(name: str, max_tokens: int) -> None:
    parts, law = Parts(seed=9, support=3), SamplingLaw(1.0)
    composition, gamma = COMPOSITIONS[name](parts)
    found = output_law(composition, law, PROMPT, COUNT + 1, gamma, max_tokens=max_tokens)
    assert distance(found, own_law(parts.target, law, PROMPT, max_tokens)) < TOLERANCE


# ------------------------------------------------------------------- what a middle level reports


@pytest.mark.parametrize("law", [LAWS["T=1"], LAWS["top-p"]], ids=["T=1", "top-p"])
@pytest.mark.parametrize("stop_tokens", [(), (STOP,)], ids=["", "with an end token"])
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("retrieval", 3),
        ("triforce 1 2", 3),
        ("triforce 2 3", 3),
        ("lookup, retrieval", 3),
        ("three levels", 3),
        ("tree, retrieval", 2),
        ("naive", 3),
    ],
)
def test_drafted_tokens_follow_the_laws_reported_for_them(
    name: str, count: int, law: SamplingLaw, stop_tokens: tuple[int, ...]
) -> None:
    """Given the tokens before it, and that one stands there at all."""
    parts = Parts(seed=5, support=3, stop_tokens=stop_tokens)
    composition, gamma = COMPOSITIONS[name](parts)
    reported: dict[tuple[int, ...], list[float]] = {}

    def propose(draws: Draws) -> tuple[int, ...]:
        path = Run(composition, Sampling(law, draws), PROMPT, 1, gamma, stop_tokens)
        draft = path.verifier.drafter.propose(Text(path.text), count)
        assert draft.is_chain and draft.laws is not None
        for i, row in enumerate(draft.laws.tolist()):
            assert reported.setdefault(tuple(draft.tokens[:i]), row) == pytest.approx(row, abs=1e-12)
        return tuple(draft.tokens)

    stands: dict[tuple[int, ...], float] = defaultdict(float)  # mass of the drafts that begin so
    for draft, weight in outcome_law(propose).items():
        for end in range(len(draft) + 1):
            stands[draft[:end]] += weight
    assert max(map(len, stands)) == count
    for before, row in reported.items():
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        assert [weight / sum(followed) for weight in followed] == pytest.approx(row, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("triforce 2 3", "retrieved"),
        ("retrieval", "retrieved"),
        ("streaming", "streaming"),
        ("naive", "small"),
    ],
)
def test_a_level_reports_its_own_law(name: str, view: str) -> None:
    """Over the cache it has: for TriForce's middle, the target's law over the retrieved KV."""
    parts, law = Parts(seed=7, support=3), SamplingLaw(0.6)
    composition, gamma = COMPOSITIONS[name](parts)
    model = parts.small if view == "small" else parts.target

    def propose(draws: Draws) -> None:
        path = Run(composition, Sampling(law, draws), PROMPT, 1, gamma)
        draft = path.verifier.drafter.propose(Text(path.text), 3)
        assert draft.laws is not None
        for i, row in enumerate(draft.laws.tolist()):
            seen = list(enumerate([*PROMPT, *draft.tokens[:i]]))
            assert row == pytest.approx(next_law(law, model.logits(view, seen)), abs=1e-12)

    outcome_law(propose)
