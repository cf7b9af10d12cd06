"""Losslessness, proved by enumeration: every composition has the output distribution of its target.

`enumeration.py` computes the distributions. Target, middle levels and small model have different ones, and
differ in which tokens are possible at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.enumeration import (
    ScriptedDraws,
    SomePaths,
    Text,
    distance,
    joint_probs,
    next_probs,
    outcome_probs,
    output_probs,
    own_probs,
    step,
)
from support.table_models import Level, Parts, head, nothing, small_model, target_over

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.merged import MergedDrafter, PreferredDrafter
from offload_rt.drafting.sources import NGrams, Source, SuffixAutomaton
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.batching import run_alone
from offload_rt.model.layer_order import LayerOrder
from offload_rt.sampling.sampler import Draws, Sampler

TOLERANCE = 1e-6
PROMPT = [1, 3, 0, 2, 4, 1, 3]
COUNT = 3
STOP = 2

SAMPLERS = {
    "greedy": Sampler(0.0),
    "T=1": Sampler(1.0),
    "T=0.6, top-p": Sampler(0.6, top_p=0.9),
}
PENALTIES = {
    "greedy, repetition": Sampler(repetition_penalty=1.8),
    "greedy, presence and frequency": Sampler(presence_penalty=1.1, frequency_penalty=0.7),
    "repetition": Sampler(1.0, repetition_penalty=1.8),
    "presence and frequency": Sampler(1.0, presence_penalty=1.1, frequency_penalty=-0.7),
    "all, and min-p": Sampler(
        0.8, min_p=0.2, repetition_penalty=1.3, presence_penalty=-0.6, frequency_penalty=0.9
    ),
}
BRIEF = {name: SAMPLERS[name] for name in ("greedy", "T=1")}
GROUPS = LayerOrder(((0,), (1, 2), (3,)))
WHOLE = LayerOrder.whole(4)
PAIRS = LayerOrder(((0,), (1, 2), (3,), (4,))).on_two_devices()
TRIPLES = LayerOrder(((0,), (1, 2, 3), (4,))).on_two_devices()


# ------------------------------------------------------------------------------------- compositions

Build = tuple[Level, DraftShape]
"""The level below the full cache, and the shape of its drafts."""

ONE, TWO, THREE = (CHAIN.deep(depth) for depth in (1, 2, 3))


def tree(text: str, depth: int) -> DraftShape:
    return DraftShape.parse(text).deep(depth)


def retrieved(
    below: Level = nothing,
    shape: DraftShape = CHAIN,
    order: LayerOrder | None = None,
    first_order: LayerOrder | None = None,
) -> Level:
    return target_over("retrieved", below, shape, order, first_order)


class Stored(NGrams):
    """Finds several continuations, as a datastore does; some are likely, some impossible."""

    FOUND = ((0, 1, 2), (3, 1), (3, 3, 3), (4, 0, 2), (2, 0))

    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        return [one[:depth] for one in self.FOUND[len(view) % 2 :]]


def source(kind: type[Source], *sizes: int) -> Callable[..., Source]:
    return lambda parts, full, sampling: kind(*sizes)


def merged(level: Level, beside: Callable[..., Source]) -> Level:
    """A level whose drafts a token source joins."""
    return lambda *given: MergedDrafter(level(*given), beside(*given))


def preferred(level: Level, beside: Callable[..., Source], depth: int) -> Level:
    """A level whose drafts, of `depth` tokens, the finds of a token source replace."""
    return lambda *given: PreferredDrafter(level(*given), beside(*given), depth)


lookup = source(NGrams, 1, 2)
suffixes = source(SuffixAutomaton, 1)
stored = source(Stored, 1, 2)

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
    "triforce, finds first": (retrieved(preferred(small_model(), suffixes, 1), THREE), THREE),
    "head, finds first": (retrieved(preferred(head, lookup, 2), TWO), TWO),
    "three levels": (retrieved(target_over("streaming", small_model(), ONE), ONE), TWO),
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
    "small model in pairs on two devices, calibrated": (small_model(PAIRS, PAIRS.in_turn()), THREE),
    "small model in triples on two devices, tree": (
        small_model(TRIPLES, TRIPLES.in_turn()),
        tree("tree:2,2", 2),
    ),
    "retrieval in pairs on two devices, tree": (retrieved(nothing, CHAIN, PAIRS), tree("tree:2,2", 2)),
    "retrieval in triples on two devices, calibrated": (
        retrieved(nothing, CHAIN, TRIPLES, TRIPLES.in_turn()),
        THREE,
    ),
    "retrieval without layers": (retrieved(nothing, CHAIN, LayerOrder.parse("skip:1,2a", 4)), THREE),
}


ALL = COMPOSITIONS | TREES | PLANS

MANY_CHOICES = {
    "triforce 2 3",
    "triforce, trees at both levels",
    "head, fixed tree",
    "head, sequences of retrieval",
    "retrieval in pairs on two devices, tree",
}
"""Too many to enumerate where three tokens are possible per row."""


def check(
    name: str,
    sampler: Sampler,
    parts: Parts,
    count: int = COUNT,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int | None = None,
    stop_tokens: Collection[int] = (),
    grammar: SomePaths | None = None,
) -> None:
    level, shape = ALL[name]
    ends: dict[str, Any] = {"max_tokens": max_tokens, "stop_tokens": stop_tokens, "grammar": grammar}
    found = output_probs(parts.full(level), sampler, prompt, count, shape, **ends)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    expected = own_probs(parts.target, sampler, prompt, min(count, max_tokens or count), stop_tokens, grammar)
    assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("name", ALL)
def test_the_output_has_the_distribution_of_the_target(name: str, sampler: Sampler) -> None:
    check(name, sampler, Parts(seed=5, support=2))


@pytest.mark.parametrize("sampler", [Sampler(1.0), Sampler(0.6, top_k=3, top_p=0.9)], ids=["T=1", "top-k"])
@pytest.mark.parametrize("name", [name for name in ALL if name not in MANY_CHOICES])
def test_where_more_tokens_are_possible(name: str, sampler: Sampler) -> None:
    """Of two tokens, a rejection leaves only one: that says little of the residual distribution."""
    check(name, sampler, Parts(seed=11, support=3 if sampler.top_k == 0 else 4), count=2)


@pytest.mark.parametrize("sampler", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "naive",
        "triforce 1 1",
        "datastore, tree",
        "head, retrieval",
        "three levels",
        "small model, fixed tree",
        "small model, sequences",
        "retrieval, grown",
        "retrieval, grown, merged",
        "head, grown",
    ],
)
def test_penalties_are_part_of_the_distribution(name: str, sampler: Sampler) -> None:
    """The prompt lacks tokens that are possible, so that it matters what it has."""
    check(name, sampler, Parts(seed=5, support=2), count=4 if sampler.greedy else 3, prompt=[1, 3, 1])


@pytest.mark.parametrize("name", ["naive", "retrieval", "triforce 1 1"])
def test_penalties_where_more_tokens_are_possible(name: str) -> None:
    sampler = PENALTIES["all, and min-p"]
    check(name, sampler, Parts(seed=11, support=3), count=2, prompt=[1, 3, 1])


# ------------------------------------------------------------------------------------------ grammars

CONSTRAINED = [
    "plain",
    "naive",
    "triforce 2 3",
    "suffix automaton",
    "datastore, tree",
    "head, retrieval",
    "three levels",
    "small model, fixed tree",
    "small model, sequences",
    "small model, more than can be drawn",
    "retrieval, grown",
    "retrieval, grown, merged",
    "retrieval, sequences, merged",
    "head, grown",
    "triforce, trees at both levels",
    "small model in groups, tree",
]


@pytest.mark.parametrize("sampler", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize("name", CONSTRAINED)
def test_a_grammar_is_part_of_the_distribution(name: str, sampler: Sampler) -> None:
    """Its choices are seldom those of the models."""
    check(name, sampler, Parts(seed=5, support=4), grammar=SomePaths(seed=4))


@pytest.mark.parametrize("name", ["naive", "three levels", "retrieval, grown, merged"])
def test_penalties_come_before_a_grammar_and_all_else_after_it(name: str) -> None:
    sampler = replace(PENALTIES["all, and min-p"], top_k=2)
    check(name, sampler, Parts(seed=5), prompt=[1, 3, 1], grammar=SomePaths(seed=4))


@pytest.mark.parametrize("sampler", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize("ends", [(), (STOP,)], ids=["nothing", "an end token"])
@pytest.mark.parametrize("name", ["naive", "triforce 1 1", "datastore, tree", "retrieval, grown", "head"])
def test_what_follows_a_complete_text(name: str, ends: tuple[int, ...], sampler: Sampler) -> None:
    grammar = SomePaths(seed=3, ends=ends, longest=2)
    check(name, sampler, Parts(seed=5, support=2), count=4, stop_tokens=ends, grammar=grammar)


def test_drafts_are_accepted_and_rejected_alike() -> None:
    """Otherwise the proofs above would prove little."""
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
        # These find nothing right in so short a text.
        finds_nothing = name in ("lookup", "suffix automaton")
        assert any(kept > 0 for kept, _ in counts) or finds_nothing, "nothing was ever accepted"


# --------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("sampler", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize(
    "names",
    [("retrieval", "naive"), ("triforce 1 1", "small model, fixed tree"), ("head", "head, retrieval")],
)
def test_a_batch_of_two_sequences_of_which_one_ends_early(names: tuple[str, str], sampler: Sampler) -> None:
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
    expected: dict[tuple[tuple[int, ...], ...], float] = {
        (a, b): p * q for a, p in first.items() for b, q in second.items()
    }
    assert max(abs(joint.get(key, 0.0) - expected.get(key, 0.0)) for key in joint | expected) < TOLERANCE


# ---------------------------------------------------------------------------- ends of a text


@pytest.mark.parametrize("name", ["naive", "retrieval", "triforce 2 3", "lookup", "three levels"])
@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(name: str, length: int) -> None:
    check(name, Sampler(1.0), Parts(seed=3, support=2), count=2, prompt=PROMPT[:length])


@pytest.mark.parametrize("sampler", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "retrieval, grown"])
def test_an_end_token_ends_the_output_and_biases_nothing(name: str, sampler: Sampler) -> None:
    check(name, sampler, Parts(seed=5, support=2), stop_tokens={STOP})


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("name", [*COMPOSITIONS, "small model, fixed tree", "triforce, trees at both levels"])
def test_the_last_round_is_cut_to_max_tokens(name: str, max_tokens: int) -> None:
    check(name, Sampler(1.0), Parts(seed=9, support=2), count=COUNT + 1, max_tokens=max_tokens)


# ---------------------------------------------------------------------------- what a level drafts


@pytest.mark.parametrize(
    ("sampler", "grammar"),
    [(Sampler(0.6), None), (PENALTIES["presence and frequency"], None), (Sampler(0.6), SomePaths(seed=4))],
    ids=["T=0.6", "presence", "grammar"],
)
@pytest.mark.parametrize(
    "name", ["triforce 2 3", "retrieval", "head, retrieval", "naive", "triforce, trees at both levels"]
)
def test_a_level_drafts_with_the_distribution_of_its_model_over_its_cache(
    name: str, sampler: Sampler, grammar: SomePaths | None
) -> None:
    """For TriForce's middle level: of the target over the retrieved KV. (Any other would be lossless too.)"""
    level, shape = ALL[name]
    parts = Parts(seed=7, support=3 if shape.kind == "chain" else 2)
    model, view = (parts.small, "small") if name == "naive" else (parts.target, "retrieved")

    def propose(draws: Draws) -> None:
        text = Text(parts.full(level)(Sampling(sampler, draws, grammar=grammar)), PROMPT, 9, shape)
        draft = run_alone(text.verifier.drafter.proposal(text.view, shape).complete())
        assert draft.probs is not None
        tokens = draft.tokens.on(torch.device("cpu")).tolist()
        for node, row in enumerate(draft.probs.tolist()):
            above = draft.tree.path(1 + node)[:-1]
            drafted = [tokens[at] for at in above]
            logits = model.logits(view, list(enumerate([*PROMPT, *drafted])))
            assert row == pytest.approx(next_probs(sampler, logits, PROMPT, drafted, grammar), abs=1e-12)

    outcome_probs(propose)
