"""Losslessness, proved by enumeration: every composition has the output distribution of its target, to 1e-6.

See `enumeration.py` for how. Target, middle levels and small model have different distributions, and rows
differ in which tokens are possible at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import pytest
import torch
from enumeration import (
    VOCABULARY,
    Level,
    Parts,
    ScriptedDraws,
    TableModel,
    Text,
    distance,
    head,
    joint_probs,
    next_probs,
    nothing,
    outcome_probs,
    output_probs,
    own_probs,
    small_model,
    step,
    target_over,
)

from offload_rt.drafting.base import Drafter, Proposal, TokenView
from offload_rt.drafting.merged import MergedDrafter
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.sources import NGrams, Source, SuffixAutomaton
from offload_rt.drafting.verifier import Sampling
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.scheduler import run_alone
from offload_rt.rejection_sampling import Draft
from offload_rt.sampling import Draws, Sampler
from offload_rt.tokens import Tokens
from offload_rt.trees import ROOT, Tree, forest

TOLERANCE = 1e-6
PROMPT = [1, 3, 0, 2, 4, 1, 3]
COUNT = 3
STOP = 2

SAMPLERS = {
    "greedy": Sampler(0.0),
    "T=1": Sampler(1.0),
    "top-k and top-p": Sampler(2.0, top_k=3, top_p=0.8),
}
GROUPS = LayerPlan(((0,), (1, 2), (3,)))
WHOLE = LayerPlan.whole(4)


# --------------------------------------------------------------------------- drafters without models


class TableDrafter(Drafter):
    """A drafter whose proposals are functions of a small model's probabilities; keeps no state."""

    def __init__(self, model: TableModel, sampling: Sampling) -> None:
        self.model = model
        self.sampling = sampling

    def probs_after(self, tokens: Sequence[int]) -> list[float]:
        return next_probs(self.sampling.sampler, self.model.logits("draft", list(enumerate(tokens))))

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        return Proposal(self.propose(view, shape.depth))

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
        drawn_from = torch.tensor(probs, dtype=torch.float64) if sampled else None
        return Draft(Tokens(tokens), forest([len(tokens)]), drawn_from)

    def goes_on(self, tokens: list[int]) -> bool:
        chance = (0.3, 0.5, 0.9)[sum(tokens) % 3]
        return bool(self.sampling.draws.categorical(torch.tensor([1.0 - chance, chance])))


# ------------------------------------------------------------------------------------- compositions

Build = tuple[Level, DraftShape]
"""What drafts for the full cache, and in which shape."""

ONE, TWO, THREE = (CHAIN.deep(depth) for depth in (1, 2, 3))


def tree(text: str, depth: int) -> DraftShape:
    return DraftShape.parse(text).deep(depth)


def retrieved(below: Level = nothing, shape: DraftShape = CHAIN, *plans: LayerPlan | None) -> Level:
    return target_over("retrieved", below, shape, *plans)


class Stored(NGrams):
    """Finds several continuations, as a datastore does: some that are drawn often, some that never are."""

    FOUND = ((0, 1, 2), (3, 1), (3, 3, 3), (4, 0, 2), (2, 0))

    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        return [one[:depth] for one in self.FOUND[len(view) % 2 :]]


def source(kind: type[Source], *sizes: int) -> Callable[..., Source]:
    return lambda parts, full, sampling: kind(*sizes)


def merged(level: Level, beside: Callable[..., Source]) -> Level:
    """A source beside what a level drafts."""
    return lambda *given: MergedDrafter(level(*given), beside(*given))


def made_by(kind: type[TableDrafter]) -> Level:
    return lambda parts, full, sampling: kind(parts.small, sampling)


lookup = source(NGrams, 2, 1)
suffixes = source(SuffixAutomaton, 1)
stored = source(Stored, 2, 1)

COMPOSITIONS: dict[str, Build] = {
    "plain": (nothing, CHAIN),
    "naive": (small_model(), THREE),
    "retrieval": (retrieved(), THREE),
    "triforce 1 1": (retrieved(small_model(), ONE), ONE),
    "triforce 1 3": (retrieved(small_model(), ONE), THREE),
    "triforce 2 3": (retrieved(small_model(), TWO), THREE),
    "lookup": (lookup, THREE),
    "suffix automaton": (suffixes, THREE),
    "datastore, chain": (stored, THREE),
    "datastore, tree": (stored, tree("grown:5", 3)),
    "lookup, retrieval": (retrieved(lookup, TWO), THREE),
    "head": (head, THREE),
    "head, retrieval": (retrieved(head, TWO), TWO),
    "three levels": (retrieved(target_over("streaming", small_model(), ONE), ONE), TWO),
    "tree with replacement": (made_by(WithReplacement), THREE),
    "tree of the most likely": (made_by(MostLikely), THREE),
    "chain of any length": (made_by(ChainOfAnyLength), THREE),
    "tree with replacement, retrieval": (retrieved(made_by(WithReplacement), TWO), TWO),
    "deterministic tree, retrieval": (retrieved(made_by(MostLikely), TWO), TWO),
}

TREES: dict[str, Build] = {
    "small model, fixed tree": (small_model(), tree("tree:2,2", 2)),
    "small model, wide root": (small_model(), tree("tree:3", 2)),
    "small model, more than can be drawn": (small_model(), tree("tree:4", 1)),
    "small model, sequences": (small_model(), tree("sequences:2", 2)),
    "small model, grown": (small_model(), tree("grown:4", 2)),
    "retrieval, fixed tree": (retrieved(), tree("tree:2,2", 2)),
    "retrieval, sequoia": (retrieved(), tree("sequoia:4", 2)),
    "small model, sequoia": (small_model(), tree("sequoia:5", 3)),
    "retrieval, sequences": (retrieved(), tree("sequences:2", 2)),
    "retrieval, grown": (retrieved(), tree("grown:4", 2)),
    "retrieval, merged": (merged(retrieved(), stored), TWO),
    "retrieval, grown, merged": (merged(retrieved(), stored), tree("grown:3", 2)),
    "retrieval, sequences, merged": (merged(retrieved(), lookup), tree("sequences:2", 2)),
    "small model, merged": (merged(small_model(), suffixes), TWO),
    "head, fixed tree": (head, tree("tree:2,2", 2)),
    "head, grown": (head, tree("grown:4", 2)),
    "head, sequences": (head, tree("sequences:2", 2)),
    "head, tree below retrieval": (retrieved(head, tree("tree:2", 2)), TWO),
    "head, sequences of retrieval": (retrieved(head, ONE), tree("sequences:2", 2)),
    "triforce, tree below": (retrieved(small_model(), tree("tree:2", 2)), TWO),
    "triforce, grown below": (retrieved(small_model(), tree("grown:3", 2)), TWO),
    "triforce, trees at both levels": (retrieved(small_model(), tree("tree:2", 1)), tree("sequences:2", 2)),
}

PLANS: dict[str, Build] = {
    "small model in groups, calibrated": (small_model(GROUPS, WHOLE), THREE),
    "small model in groups": (small_model(GROUPS), THREE),
    "small model in groups, tree": (small_model(GROUPS, WHOLE), tree("tree:2,2", 2)),
    "retrieval without layers": (retrieved(nothing, CHAIN, LayerPlan.parse("skip:1,2a", 4)), THREE),
}


ALL = COMPOSITIONS | TREES | PLANS

MANY_CHOICES = {
    "triforce 2 3",
    "triforce, trees at both levels",
    "head, fixed tree",
    "head, sequences of retrieval",
}
"""Proved where two tokens are possible in a row, not three."""


def check(
    name: str,
    sampler: Sampler,
    parts: Parts,
    count: int = COUNT,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int | None = None,
    stop_tokens: Collection[int] = (),
) -> None:
    level, shape = ALL[name]
    found = output_probs(
        parts.full(level), sampler, prompt, count, shape, max_tokens=max_tokens, stop_tokens=stop_tokens
    )
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    expected = own_probs(parts.target, sampler, prompt, min(count, max_tokens or count), stop_tokens)
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", ALL)
def test_the_output_has_the_distribution_of_the_target(name: str, sampler: Sampler) -> None:
    check(name, sampler, Parts(seed=5, support=2))


@pytest.mark.parametrize("name", [name for name in ALL if name not in MANY_CHOICES])
def test_where_more_tokens_are_possible(name: str) -> None:
    """Of two, all that is left of a distribution after a rejection is the other one."""
    check(name, Sampler(1.0), Parts(seed=11, support=3), count=2)


def test_drafts_are_accepted_and_rejected_alike() -> None:
    """Else the proofs above would prove little."""
    parts = Parts(seed=5, support=2)
    for name, (level, shape) in (COMPOSITIONS | TREES).items():
        if name == "plain":
            continue
        counts: dict[tuple[int, int], float] = defaultdict(float)

        def accepted(draws: Draws, level: Level = level, shape: DraftShape = shape) -> tuple[int, int]:
            text = Text(parts.full(level)(Sampling(Sampler(1.0), draws)), PROMPT, 9, shape)
            stats = text.verifier.stats
            step([text])
            if not stats.proposed:  # a head knows no hidden state before
                step([text])
            return stats.accepted, stats.proposed

        for (kept, offered), weight in outcome_probs(accepted).items():
            counts[kept, offered] += weight
        assert any(kept < offered for kept, offered in counts), "nothing was ever rejected"
        # What these find in so short a text is not what follows.
        finds_nothing = name in ("lookup", "suffix automaton")
        assert any(kept > 0 for kept, _ in counts) or finds_nothing, "nothing was ever accepted"


# --------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("sampler", [SAMPLERS["greedy"], SAMPLERS["T=1"]], ids=["greedy", "T=1"])
@pytest.mark.parametrize(
    "names",
    [("retrieval", "naive"), ("triforce 1 1", "small model, fixed tree"), ("head", "head, retrieval")],
)
def test_a_batch_of_two_texts_of_which_one_ends_early(names: tuple[str, str], sampler: Sampler) -> None:
    parts = Parts(seed=5, support=2)
    prompts, lengths = (PROMPT, PROMPT[2:5]), (3, 1)

    def start(draws: ScriptedDraws) -> tuple[list[Text], None]:
        texts = []
        for name, prompt, length in zip(names, prompts, lengths, strict=True):
            level, shape = ALL[name]
            texts.append(Text(parts.full(level)(Sampling(sampler, draws)), prompt, length, shape))
        return texts, None

    joint = joint_probs(start, lambda texts: all(text.ended for text in texts))
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
    check(name, Sampler(1.0), Parts(seed=3, support=2), count=2, prompt=PROMPT[:length])


@pytest.mark.parametrize("sampler", [SAMPLERS["greedy"], SAMPLERS["T=1"]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "retrieval, grown"])
def test_an_end_token_ends_the_output_and_biases_nothing(name: str, sampler: Sampler) -> None:
    check(name, sampler, Parts(seed=5, support=2), stop_tokens={STOP})


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "triforce, trees at both levels"])
def test_the_last_round_is_cut_to_max_tokens(name: str, max_tokens: int) -> None:
    check(name, Sampler(1.0), Parts(seed=9, support=2), count=COUNT + 1, max_tokens=max_tokens)


# ------------------------------------------------------------------- what a middle level reports


def proposed(
    parts: Parts, name: str, sampling: Sampling, shape: DraftShape = THREE
) -> tuple[Draft, list[int], list[list[float]]]:
    """A draft of what stands below the full cache; its tokens, and what each was drawn from."""
    text = Text(parts.full(ALL[name][0])(sampling), PROMPT, 9, shape)
    draft = run_alone(text.verifier.drafter.proposal(text.view, shape).complete())
    assert draft.probs is not None
    return draft, draft.tokens.on(torch.device("cpu")).tolist(), draft.probs.tolist()


class Reports:
    """What was said of each token, given those before it, against how often it was drawn there."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, ...], list[float]] = {}

    def note(self, before: Sequence[int], row: list[float]) -> None:
        assert self._told.setdefault(tuple(before), row) == pytest.approx(row, abs=1e-12)

    def check(self, drawn: dict[tuple[int, ...], float]) -> None:
        stands: dict[tuple[int, ...], float] = defaultdict(float)  # mass of what begins so
        for tokens, weight in drawn.items():
            for end in range(len(tokens) + 1):
                stands[tokens[:end]] += weight
        assert max(map(len, stands)) >= 2
        for before, row in self._told.items():
            followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
            if sum(row) > 0:  # else nothing was left to draw
                assert [weight / sum(followed) for weight in followed] == pytest.approx(row, abs=TOLERANCE)


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(1.3, top_p=0.8)], ids=["T=1", "top-p"])
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
    parts, reports = Parts(seed=5, support=3), Reports()

    def propose(draws: Draws) -> tuple[int, ...]:
        draft, tokens, rows = proposed(parts, name, Sampling(sampler, draws, stop_tokens))
        assert draft.tree.is_chain
        for i, row in enumerate(rows):
            reports.note(tokens[:i], row)
        return tuple(tokens)

    drawn = outcome_probs(propose)
    assert max(map(len, drawn)) == 3
    reports.check(drawn)


@pytest.mark.parametrize("name", ["small model, fixed tree", "retrieval, fixed tree", "retrieval, grown"])
def test_siblings_have_the_probabilities_reported_for_them(name: str) -> None:
    """The children of the root, given the elder ones."""
    parts, reports = Parts(seed=5, support=3), Reports()

    def propose(draws: Draws) -> tuple[int, ...]:
        draft, tokens, rows = proposed(parts, name, Sampling(Sampler(1.0), draws), TREES[name][1])
        children = [node for node, parent in enumerate(draft.tree.parents) if parent == ROOT]
        drawn = [tokens[node] for node in children]
        for rank, node in enumerate(children):
            reports.note(drawn[:rank], rows[node])
        return tuple(drawn)

    reports.check(outcome_probs(propose))


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
    model = parts.small if view == "small" else parts.target

    def propose(draws: Draws) -> None:
        _, tokens, rows = proposed(parts, name, Sampling(sampler, draws))
        for i, row in enumerate(rows):
            seen = list(enumerate([*PROMPT, *tokens[:i]]))
            assert row == pytest.approx(next_probs(sampler, model.logits(view, seen)), abs=1e-12)

    outcome_probs(propose)
