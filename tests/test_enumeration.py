"""Losslessness, proved by enumeration: every composition has the output distribution of its target, to 1e-6.

See `enumeration.py` for how. Target, middle levels and small model have different distributions, and rows
differ in which tokens are possible at all.
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
    Probs,
    ScriptedDraws,
    TableModel,
    Text,
    distance,
    joint_probs,
    next_probs,
    outcome_probs,
    output_probs,
    own_probs,
)

from offload_rt.drafting.base import Complete, NoDrafter, Proposal, Round, TokenView
from offload_rt.drafting.merged import MergedDrafter
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.sources import NGrams, Source, SourceDrafter, SuffixAutomaton
from offload_rt.drafting.verifier import Sampling
from offload_rt.layers import LayerPlan
from offload_rt.passes import LevelStats, Together, Work, run_alone
from offload_rt.sampling import Draws, Sampler
from offload_rt.trees import ROOT, Tree
from offload_rt.verification import Draft, Tokens

TOLERANCE = 1e-6
PROMPT = [1, 3, 0, 2, 4, 1, 3]
COUNT = 3
STOP = 2

SAMPLERS = {
    "greedy": Sampler(0.0),
    "T=0.6": Sampler(0.6),
    "T=1": Sampler(1.0),
    "top-k": Sampler(1.0, top_k=3),
    "top-p": Sampler(1.3, top_p=0.8),
    "top-k and top-p": Sampler(2.0, top_k=3, top_p=0.8),
}
FEW = ("greedy", "T=1")
GROUPS = LayerPlan(((0,), (1, 2), (3,)))
WHOLE = LayerPlan.whole(4)


# --------------------------------------------------------------------------- drafters without models


class TableDrafter:
    """A drafter whose proposals are functions of a small model's probabilities; keeps no state."""

    wants_hidden = False
    expected_acceptance = 0.0

    def __init__(self, model: TableModel, sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling
        self.levels: list[LevelStats] = []

    def prefill(self, view: TokenView) -> Work[None]:
        yield from ()

    def observe(self, view: TokenView, round: Round) -> None:
        pass

    def nominal_ms(self, length: int, shape: DraftShape) -> float:
        return 0.0

    def probs_after(self, tokens: Sequence[int]) -> list[float]:
        return next_probs(self.sampling.sampler, self.model.logits("draft", list(enumerate(tokens))))

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        return Complete(self.propose(view, shape.depth))

    def propose(self, view: TokenView, count: int) -> Draft:
        raise NotImplementedError


class WithReplacement(TableDrafter):
    """Two children of every node, drawn alike: candidates are repeated."""

    widths = (2, 2)
    sampled = True

    def propose(self, view: TokenView, count: int) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[list[float]] = []
        level: list[tuple[int, list[int]]] = [(ROOT, view.part(0))]
        for width in self.widths[:count]:
            below: list[tuple[int, list[int]]] = []
            for node, path in level:
                for token, drawn_from in self.children(self.probs_after(path), width):
                    below.append((len(tokens), [*path, token]))
                    tokens.append(token)
                    parents.append(node)
                    probs.append(drawn_from)
            level = below
        reports = self.sampled and not self.sampling.sampler.greedy and tokens
        told = torch.tensor(probs, dtype=torch.float64) if reports else None
        return Draft(Tokens(tokens), Tree(tuple(parents)), told)

    def children(self, probs: list[float], width: int) -> list[tuple[int, list[float]]]:
        """Tokens, each with what it was drawn from given its elder siblings."""
        drawn = torch.tensor(probs, dtype=torch.float64).expand(width, -1)
        return [(token, probs) for token in self.sampling.draws.categorical(drawn).tolist()]


class MostLikely(WithReplacement):
    """A deterministic tree, in which one candidate comes twice."""

    sampled = False
    widths = (3, 2)

    def children(self, probs: list[float], width: int) -> list[tuple[int, list[float]]]:
        order = sorted(range(VOCABULARY), key=lambda token: -probs[token])
        return [(token, probs) for token in [*order[: width - 1], order[0]]]


class ChainOfAnyLength(TableDrafter):
    """A chain whose length is drawn too, from the tokens it has so far; sometimes it is empty."""

    def propose(self, view: TokenView, count: int) -> Draft:
        tokens: list[int] = []
        probs: list[list[float]] = []
        while len(tokens) < count and self.goes_on(tokens):
            probs.append(self.probs_after([*view.part(0), *tokens]))
            drawn = self.sampling.draws.categorical(torch.tensor(probs[-1], dtype=torch.float64))
            tokens.append(int(drawn))
        sampled = tokens and not self.sampling.sampler.greedy
        return Draft.chain(tokens, torch.tensor(probs, dtype=torch.float64) if sampled else None)

    def goes_on(self, tokens: list[int]) -> bool:
        chance = (0.3, 0.5, 0.9)[sum(tokens) % 3]
        return bool(self.sampling.draws.categorical(torch.tensor([1.0 - chance, chance])))


# ------------------------------------------------------------------------------------- compositions

Built = tuple[Composition, DraftShape]  # and what is drafted for the full cache
Build = Callable[[Parts], Built]


def plain(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: NoDrafter()), CHAIN


def naive(shape: DraftShape, plan: LayerPlan | None = None, first: LayerPlan | None = None) -> Build:
    return lambda parts: (parts.full(lambda full, sampling: parts.draft_model(sampling, plan, first)), shape)


def retrieval(shape: DraftShape, plan: LayerPlan | None = None, first: LayerPlan | None = None) -> Build:
    return lambda parts: (
        parts.full(
            lambda full, sampling: parts.derived("retrieved", full, sampling, plan=plan, first_plan=first)
        ),
        shape,
    )


def triforce(gamma1: DraftShape, gamma2: DraftShape) -> Build:
    return lambda parts: (
        parts.full(
            lambda full, sampling: parts.derived(
                "retrieved", full, sampling, parts.draft_model(sampling), gamma1
            )
        ),
        gamma2,
    )


def lookup(parts: Parts) -> Built:
    return parts.full(lambda full, sampling: SourceDrafter("lookup", NGrams(2, 1))), CHAIN.deep(3)


def lookup_below_retrieval(parts: Parts) -> Built:
    return parts.full(
        lambda full, sampling: parts.derived(
            "retrieved", full, sampling, SourceDrafter("lookup", NGrams(2, 1)), CHAIN.deep(2)
        )
    ), CHAIN.deep(3)


class Stored(NGrams):
    """Finds several continuations, as a datastore does: some that are drawn often, some that never are."""

    FOUND = ((0, 1, 2), (3, 1), (3, 3, 3), (4, 0, 2), (2, 0))

    def continuations(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        return [one[:depth] for one in self.FOUND[len(view) % 2 :]]


def source(made: Callable[[], Source], shape: DraftShape) -> Build:
    return lambda parts: (parts.full(lambda full, sampling: SourceDrafter("source", made())), shape)


def merged(made: Callable[[], Source], shape: DraftShape, *, retrieved: bool = True) -> Build:
    """A source beside what the target over a retrieved cache, or the small model, drafts."""

    def build(parts: Parts) -> Built:
        def drafter(full, sampling):  # type: ignore[no-untyped-def]
            model = parts.derived("retrieved", full, sampling) if retrieved else parts.draft_model(sampling)
            return MergedDrafter(model, SourceDrafter("source", made()))

        return parts.full(drafter), shape

    return build


def head(shape: DraftShape) -> Build:
    return lambda parts: (parts.full(lambda full, sampling: parts.head_drafter(sampling)), shape)


def head_below_retrieval(gamma1: DraftShape, gamma2: DraftShape) -> Build:
    return lambda parts: (
        parts.full(
            lambda full, sampling: parts.derived(
                "retrieved", full, sampling, parts.head_drafter(sampling), gamma1
            )
        ),
        gamma2,
    )


def three_levels(parts: Parts) -> Built:
    def drafter(full, sampling):  # type: ignore[no-untyped-def]
        cheap = parts.derived("streaming", full, sampling, parts.draft_model(sampling), CHAIN.deep(1))
        return parts.derived("retrieved", full, sampling, cheap, CHAIN.deep(1))

    return parts.full(drafter), CHAIN.deep(2)


def made_by(kind: type[TableDrafter], depth: int = 3) -> Build:
    return lambda parts: (parts.full(lambda full, sampling: kind(parts.small, sampling)), CHAIN.deep(depth))


def below_retrieval(kind: type[TableDrafter]) -> Build:
    return lambda parts: (
        parts.full(
            lambda full, sampling: parts.derived(
                "retrieved", full, sampling, kind(parts.small, sampling), CHAIN.deep(2)
            )
        ),
        CHAIN.deep(2),
    )


def tree(text: str, depth: int) -> DraftShape:
    return DraftShape.parse(text).deep(depth)


COMPOSITIONS: dict[str, Build] = {
    "plain": plain,
    "naive": naive(CHAIN.deep(3)),
    "retrieval": retrieval(CHAIN.deep(3)),
    "triforce 1 1": triforce(CHAIN.deep(1), CHAIN.deep(1)),
    "triforce 1 3": triforce(CHAIN.deep(1), CHAIN.deep(3)),
    "triforce 2 3": triforce(CHAIN.deep(2), CHAIN.deep(3)),
    "lookup": lookup,
    "suffix automaton": source(lambda: SuffixAutomaton(1), CHAIN.deep(3)),
    "datastore, chain": source(lambda: Stored(2, 1), CHAIN.deep(3)),
    "datastore, tree": source(lambda: Stored(2, 1), DraftShape("grown", nodes=5).deep(3)),
    "lookup, retrieval": lookup_below_retrieval,
    "head": head(CHAIN.deep(3)),
    "head, retrieval": head_below_retrieval(CHAIN.deep(2), CHAIN.deep(3)),
    "three levels": three_levels,
    "tree with replacement": made_by(WithReplacement),
    "tree of the most likely": made_by(MostLikely),
    "chain of any length": made_by(ChainOfAnyLength),
    "tree with replacement, retrieval": below_retrieval(WithReplacement),
    "deterministic tree, retrieval": below_retrieval(MostLikely),
}

TREES: dict[str, Build] = {
    "small model, fixed tree": naive(tree("tree:2,2", 2)),
    "small model, wide root": naive(tree("tree:3", 2)),
    "small model, more than can be drawn": naive(tree("tree:4", 1)),
    "small model, sequences": naive(tree("sequences:2", 2)),
    "small model, grown": naive(tree("grown:4", 2)),
    "retrieval, fixed tree": retrieval(tree("tree:2,2", 2)),
    "retrieval, sequoia": retrieval(tree("sequoia:4", 2)),
    "small model, sequoia": naive(tree("sequoia:5", 3)),
    "retrieval, sequences": retrieval(tree("sequences:2", 2)),
    "retrieval, grown": retrieval(tree("grown:4", 2)),
    "retrieval, merged": merged(lambda: Stored(2, 1), CHAIN.deep(2)),
    "retrieval, grown, merged": merged(lambda: Stored(2, 1), tree("grown:3", 2)),
    "retrieval, sequences, merged": merged(lambda: NGrams(2, 1), tree("sequences:2", 2)),
    "small model, merged": merged(lambda: SuffixAutomaton(1), CHAIN.deep(2), retrieved=False),
    "head, fixed tree": head(tree("tree:2,2", 2)),
    "head, grown": head(tree("grown:4", 2)),
    "head, sequences": head(tree("sequences:2", 2)),
    "head, tree below retrieval": head_below_retrieval(tree("tree:2", 2), CHAIN.deep(3)),
    "head, sequences of retrieval": head_below_retrieval(CHAIN.deep(1), tree("sequences:2", 2)),
    "triforce, tree below": triforce(tree("tree:2", 2), CHAIN.deep(2)),
    "triforce, grown below": triforce(tree("grown:3", 2), CHAIN.deep(2)),
    "triforce, trees at both levels": triforce(tree("tree:2", 1), tree("sequences:2", 2)),
}

PLANS: dict[str, Build] = {
    "small model in groups, calibrated": naive(CHAIN.deep(3), GROUPS, WHOLE),
    "small model in groups": naive(CHAIN.deep(3), GROUPS),
    "small model in groups, tree": naive(tree("tree:2,2", 2), GROUPS, WHOLE),
    "retrieval without layers": retrieval(CHAIN.deep(3), LayerPlan.parse("skip:1,2a", 4)),
}


MANY_CHOICES = {
    "triforce 1 3",
    "triforce 2 3",
    "lookup, retrieval",
    "head",
    "head, retrieval",
    "three levels",
    "tree with replacement",
    "tree with replacement, retrieval",
    "chain of any length",
}
"""Proved where two tokens are possible in a row, not three."""


def check(name: str, sampler: Sampler, parts: Parts, count: int = COUNT) -> Probs:
    composition, shape = (COMPOSITIONS | TREES | PLANS)[name](parts)
    found = output_probs(composition, sampler, PROMPT, count, shape)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(found, own_probs(parts.target, sampler, PROMPT, count)) < TOLERANCE
    return found


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_output_has_the_distribution_of_the_target(name: str, sampler: Sampler) -> None:
    check(name, sampler, Parts(seed=5, support=2 if name in MANY_CHOICES else 3))


@pytest.mark.parametrize("sampler", ["greedy", "T=0.6", "top-p"])
@pytest.mark.parametrize("name", [*TREES, *PLANS])
def test_trees_and_layer_plans(name: str, sampler: str) -> None:
    check(name, SAMPLERS[sampler], Parts(seed=5, support=3 if name in PLANS else 2))


@pytest.mark.parametrize("name", ["small model, fixed tree", "retrieval, grown", "small model, sequences"])
def test_trees_where_more_tokens_are_possible(name: str) -> None:
    check(name, Sampler(1.0), Parts(seed=11, support=3), count=2)


def test_drafts_are_accepted_and_rejected_alike() -> None:
    """Else the proofs above would prove little."""
    parts = Parts(seed=5, support=3)
    for build in (*COMPOSITIONS.values(), *TREES.values()):
        composition, shape = build(parts)
        if build is plain:
            continue
        counts: dict[tuple[int, int], float] = defaultdict(float)

        def accepted(draws: Draws, composition=composition, shape=shape) -> tuple[int, int]:  # type: ignore[no-untyped-def]
            text = Text(composition(Sampling(Sampler(1.0), draws)), PROMPT, 9, shape)
            stats = text.verifier.stats
            step([text])
            if not stats.proposed:  # a head knows no hidden state before
                step([text])
            return stats.accepted, stats.proposed

        for (kept, offered), weight in outcome_probs(accepted).items():
            counts[kept, offered] += weight
        assert any(kept < offered for kept, offered in counts), "nothing was ever rejected"
        # What these find in so short a text is not what follows.
        finds_nothing = build in (lookup, COMPOSITIONS["suffix automaton"])
        assert any(kept > 0 for kept, _ in counts) or finds_nothing, "nothing was ever accepted"


def step(texts: list[Text]) -> None:
    from offload_rt.rounds import round_of

    for result in Together().run([round_of(text) for text in texts]):
        if isinstance(result, Exception):
            raise result


# --------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("sampler", [SAMPLERS["greedy"], SAMPLERS["T=0.6"]], ids=["greedy", "T=0.6"])
@pytest.mark.parametrize(
    "names",
    [("retrieval", "naive"), ("triforce 1 1", "small model, fixed tree"), ("head", "head, retrieval")],
)
def test_a_batch_of_two_texts_of_which_one_ends_early(names: tuple[str, str], sampler: Sampler) -> None:
    parts = Parts(seed=5, support=2)
    prompts, lengths = (PROMPT, PROMPT[2:5]), (3, 1)

    def start(draws: ScriptedDraws) -> tuple[list[Text], Together]:
        texts = []
        for name, prompt, length in zip(names, prompts, lengths, strict=True):
            composition, shape = (COMPOSITIONS | TREES)[name](parts)
            texts.append(Text(composition(Sampling(sampler, draws)), prompt, length, shape))
        return texts, Together()

    joint = joint_probs(start, lambda texts: all(text.over for text in texts))
    first, second = (
        own_probs(parts.target, sampler, prompt, length)
        for prompt, length in zip(prompts, lengths, strict=True)
    )
    # Each has its target's distribution, and they are independent.
    expected = {(a, b): p * q for a, p in first.items() for b, q in second.items()}
    assert max(abs(joint.get(key, 0.0) - expected.get(key, 0.0)) for key in joint | expected) < TOLERANCE


# ---------------------------------------------------------------------------- ends of a text


@pytest.mark.parametrize("name", ["naive", "retrieval", "triforce 2 3", "lookup", "three levels"])
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(name: str, length: int) -> None:
    parts, sampler = Parts(seed=3, support=3), Sampler(1.0)
    composition, shape = COMPOSITIONS[name](parts)
    found = output_probs(composition, sampler, PROMPT[:length], 2, shape)
    assert distance(found, own_probs(parts.target, sampler, PROMPT[:length], 2)) < TOLERANCE


@pytest.mark.parametrize("sampler", [SAMPLERS[name] for name in FEW], ids=FEW)
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "retrieval, grown"])
def test_an_end_token_ends_the_output_and_biases_nothing(name: str, sampler: Sampler) -> None:
    parts = Parts(seed=5, support=2 if name in MANY_CHOICES or name in TREES else 3, stop_tokens={STOP})
    composition, shape = (COMPOSITIONS | TREES)[name](parts)
    found = output_probs(composition, sampler, PROMPT, COUNT, shape, stop_tokens={STOP})
    expected = own_probs(parts.target, sampler, PROMPT, COUNT, {STOP})
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "triforce, trees at both levels"])
def test_the_last_round_is_cut_to_max_tokens(name: str, max_tokens: int) -> None:
    parts, sampler = Parts(seed=9, support=2), Sampler(1.0)
    composition, shape = (COMPOSITIONS | TREES)[name](parts)
    found = output_probs(composition, sampler, PROMPT, COUNT + 1, shape, max_tokens=max_tokens)
    assert distance(found, own_probs(parts.target, sampler, PROMPT, max_tokens)) < TOLERANCE


# ------------------------------------------------------------------- what a middle level reports


def proposed(composition: Composition, sampler: Sampler, shape: DraftShape, draws: Draws) -> Draft:
    text = Text(composition(Sampling(sampler, draws)), PROMPT, 9, shape)
    return run_alone(text.verifier.drafter.proposal(text.view, shape).complete())


@pytest.mark.parametrize("sampler", [SAMPLERS["T=1"], SAMPLERS["top-p"]], ids=["T=1", "top-p"])
@pytest.mark.parametrize("stop_tokens", [(), (STOP,)], ids=["", "with an end token"])
@pytest.mark.parametrize(
    "name",
    [
        "retrieval",
        "triforce 1 3",
        "triforce 2 3",
        "lookup, retrieval",
        "head, retrieval",
        "three levels",
        "naive",
    ],
)
def test_drafted_tokens_have_the_probabilities_reported_for_them(
    name: str, sampler: Sampler, stop_tokens: tuple[int, ...]
) -> None:
    """Given the tokens before it, and that one stands there at all."""
    parts = Parts(seed=5, support=3, stop_tokens=stop_tokens)
    composition, _ = COMPOSITIONS[name](parts)
    reported: dict[tuple[int, ...], list[float]] = {}

    def propose(draws: Draws) -> tuple[int, ...]:
        draft = proposed(composition, sampler, CHAIN.deep(3), draws)
        assert draft.tree.is_chain and draft.probs is not None
        tokens = draft.tokens.on(torch.device("cpu")).tolist()
        for i, row in enumerate(draft.probs.tolist()):
            assert reported.setdefault(tuple(tokens[:i]), row) == pytest.approx(row, abs=1e-12)
        return tuple(tokens)

    stands: dict[tuple[int, ...], float] = defaultdict(float)  # mass of the drafts that begin so
    for draft, weight in outcome_probs(propose).items():
        for end in range(len(draft) + 1):
            stands[draft[:end]] += weight
    assert max(map(len, stands)) == 3
    for before, row in reported.items():
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        assert [weight / sum(followed) for weight in followed] == pytest.approx(row, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["small model, fixed tree", "retrieval, fixed tree", "retrieval, grown"])
def test_siblings_have_the_probabilities_reported_for_them(name: str) -> None:
    """The children of the root, given the elder ones."""
    parts, sampler = Parts(seed=5, support=3), Sampler(1.0)
    composition, shape = TREES[name](parts)
    reported: dict[tuple[int, ...], list[float]] = {}

    def propose(draws: Draws) -> tuple[int, ...]:
        draft = proposed(composition, sampler, shape, draws)
        assert draft.probs is not None
        tokens, told = draft.tokens.on(torch.device("cpu")).tolist(), draft.probs.tolist()
        children = [node for node, parent in enumerate(draft.tree.parents) if parent == ROOT]
        for rank, node in enumerate(children):
            before = tuple(tokens[elder] for elder in children[:rank])
            assert reported.setdefault(before, told[node]) == pytest.approx(told[node], abs=1e-12)
        return tuple(tokens[node] for node in children)

    stands: dict[tuple[int, ...], float] = defaultdict(float)
    for drawn, weight in outcome_probs(propose).items():
        for end in range(len(drawn) + 1):
            stands[drawn[:end]] += weight
    assert max(map(len, stands)) >= 2
    for before, row in reported.items():
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        if sum(row) > 0:
            assert [weight / sum(followed) for weight in followed] == pytest.approx(row, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "view"),
    [
        ("triforce 2 3", "retrieved"),
        ("retrieval", "retrieved"),
        ("head, retrieval", "retrieved"),
        ("naive", "small"),
    ],
)
def test_a_level_reports_its_own_distribution(name: str, view: str) -> None:
    """Over the cache it has: for TriForce's middle, the target's over the retrieved KV."""
    parts, sampler = Parts(seed=7, support=3), Sampler(0.6)
    composition, _ = COMPOSITIONS[name](parts)
    model = parts.small if view == "small" else parts.target

    def propose(draws: Draws) -> None:
        draft = proposed(composition, sampler, CHAIN.deep(3), draws)
        assert draft.probs is not None
        tokens = draft.tokens.on(torch.device("cpu")).tolist()
        for i, row in enumerate(draft.probs.tolist()):
            seen = list(enumerate([*PROMPT, *tokens[:i]]))
            assert row == pytest.approx(next_probs(sampler, model.logits(view, seen)), abs=1e-12)

    outcome_probs(propose)
