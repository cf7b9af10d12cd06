"""Drafting ahead: exact distributions whatever the clock says, and which outcomes are drafted for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.enumeration import (
    BackgroundAtOnce,
    Clock,
    ScriptedDraws,
    SomePaths,
    Text,
    distance,
    output_probs,
    own_probs,
)
from support.table_models import Parts, head, small_model, target_over

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import Round
from offload_rt.drafting.growth import Growth
from offload_rt.drafting.outcomes import likely_outcomes
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine import decode
from offload_rt.engine.batching import BatchRunner, run_alone
from offload_rt.model.work import CopyToHost, LevelStats
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.trees import ROOT, Tree, forest

PROMPT = [3, 1, 4, 1, 2]
TOLERANCE = 1e-9
SAMPLERS = {"greedy": Sampler(0.0), "T=1": Sampler(1.0), "top-p": Sampler(1.0, 0.8)}
PENALTIES = [
    Sampler(temperature, repetition_penalty=1.5, presence_penalty=0.8, frequency_penalty=0.4)
    for temperature in (0.0, 1.0)
]

# Whether a pass is over may depend on the choices drawn since it began: the worst clock knows the tokens.
CLOCKS: dict[str, Clock] = {
    "never": lambda drawn: False,
    "at once": lambda drawn: True,
    "after an odd choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 1,
    "after an even choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 0,
    "when they add up": lambda drawn: sum(drawn) >= 2,
}


COMPOSITIONS = {
    "retrieval": target_over("retrieved"),
    "triforce": target_over("retrieved", small_model(), CHAIN.deep(1)),
    "naive": small_model(),
    "head": head,
    "head, retrieval": target_over("retrieved", head, CHAIN.deep(1)),
}


def error(
    name: str,
    parts: Parts,
    sampler: Sampler,
    count: int,
    depth: int,
    max_tokens: int | None = None,
    shape: DraftShape = CHAIN,
    **how: Any,
) -> float:
    """Largest error of the distribution of `count` tokens, against the target alone."""
    composition, shape = parts.full(COMPOSITIONS[name]), shape.deep(depth)
    found = output_probs(composition, sampler, PROMPT, count, shape, max_tokens=max_tokens, **how)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    grammar = how.get("grammar")
    expected = own_probs(parts.target, sampler, PROMPT, max_tokens or count, grammar=grammar)
    return distance(found, expected)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("clock", [*CLOCKS.values(), None], ids=[*CLOCKS, "not asked"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_output_distribution_depends_on_no_clock(
    name: str, clock: Clock | None, sampler: Sampler
) -> None:
    assert error(name, Parts(seed=7, support=2), sampler, 3, 1, ahead=2, clock=clock) < TOLERANCE


TREES = ["tree:2,1", "grown:3", "sequences:2"]


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("clock", ["never", "after an odd choice"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [*(("retrieval", shape) for shape in TREES), ("naive", "tree:2,1"), ("head", "grown:3")],
)
def test_trees_are_drafted_ahead_in_the_same_distribution(
    name: str, shape: str, clock: str, sampler: Sampler
) -> None:
    how: dict[str, Any] = {"ahead": 2, "clock": CLOCKS[clock], "shape": DraftShape.parse(shape)}
    assert error(name, Parts(seed=7, support=2), sampler, 2, 2, **how) < TOLERANCE


@pytest.mark.parametrize("sampler", PENALTIES, ids=["greedy", "T=1"])
@pytest.mark.parametrize("clock", ["never", "after an odd choice"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_penalties_count_the_outcome_that_is_drafted_for(name: str, clock: str, sampler: Sampler) -> None:
    how: dict[str, Any] = {"ahead": 2, "clock": CLOCKS[clock]}
    assert error(name, Parts(seed=7, support=2), sampler, 3, 1, **how) < 1e-6


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.0)], ids=["greedy", "T=1"])
@pytest.mark.parametrize("clock", ["never", "after an odd choice"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_grammar_follows_the_outcome_that_is_drafted_for(name: str, clock: str, sampler: Sampler) -> None:
    how: dict[str, Any] = {"ahead": 2, "clock": CLOCKS[clock], "grammar": SomePaths(seed=4)}
    assert error(name, Parts(seed=5), sampler, 3, 1, **how) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "clock", "most"), [("retrieval", "never", 4), ("naive", "after an odd choice", None)]
)
def test_longer_drafts_that_may_be_cut_at_the_end(name: str, clock: str, most: int | None) -> None:
    parts, count = Parts(seed=9, support=2), 3 if most is None else 5
    found = error(name, parts, Sampler(1.0), count, 2, max_tokens=most, ahead=2, clock=CLOCKS[clock])
    assert found < TOLERANCE


def test_dropping_slow_drafts_would_bias_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a draft is drawn again would depend on its tokens."""
    extend = Text.extend

    def forgetful(text: Text, *arguments: Any) -> None:
        extend(text, *arguments)
        if text.next_proposal is not None and text.next_proposal.draft().tokens.known[0] % 2:
            text.next_proposal = None

    monkeypatch.setattr(Text, "extend", forgetful)
    parts, clock = Parts(seed=7, support=3), CLOCKS["never"]
    assert error("retrieval", parts, Sampler(1.0), 4, 1, ahead=2, clock=clock) > 1e-4


def first_round(
    parts: Parts, max_tokens: int, depth: int, ahead: int, shape: DraftShape = CHAIN
) -> tuple[Text, Round]:
    """The first step of a greedy sequence over retrieval, whose pass lasts until it is waited for."""
    draws, never = ScriptedDraws(), CLOCKS["never"]
    verifier = parts.full(COMPOSITIONS["retrieval"])(Sampling(Sampler(0.0), draws))
    text = Text(verifier, PROMPT, max_tokens, shape.deep(depth), ahead=ahead)
    thread: Any = BackgroundAtOnce(draws, never)
    (round,) = BatchRunner([decode.decode_step(text)], thread).run()
    assert not isinstance(round, Exception), round
    return text, round


@pytest.mark.parametrize(("guessed", "kept"), [("right", True), ("wrong", False)])
def test_a_draft_of_the_right_outcome_is_used(
    guessed: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(seed=7, support=2)
    truth = own_probs(parts.target, Sampler(0.0), PROMPT, 3)
    ((tokens, _),) = truth.items()

    def outcomes(growth: Any, most: int, acceptance: float) -> Any:
        yield from ()
        drafted = growth.draft().tokens.on(torch.device("cpu")).tolist()
        right = next(
            tokens[: place + 1] for place in range(3) if tuple(drafted[: place + 1]) != tokens[: place + 1]
        )
        return [right if guessed == "right" else (*right[:-1], (right[-1] + 1) % 5)]

    monkeypatch.setattr(Growth, "outcomes", outcomes)
    text, round = first_round(parts, 20, depth=2, ahead=1)
    assert tuple(round.tokens) == tokens[: len(round.tokens)]
    assert (text.next_proposal is not None) is kept
    if text.next_proposal is not None:
        assert len(text.next_proposal.draft()) == 2, "complete: the pass was never over"


@pytest.mark.parametrize("depth", [1, 3])
def test_chains_for_several_outcomes_are_drawn_together(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass takes a token of each; they are the chains that would be drawn one by one."""
    given, made = decode.draft_ahead, []

    def drafting(sequence: Any, *arguments: Any) -> Any:
        drafter, view = sequence.verifier.drafter, sequence.view
        before = drafter.stats.passes
        ahead, drawn = yield from given(sequence, *arguments)
        together = drafter.stats.passes - before
        for outcome, proposal in ahead.items():
            found = proposal.draft().tokens.known
            alone = yield from drafter.proposal(view.extended(outcome), CHAIN.deep(depth)).complete()
            alone.tokens.arrive((yield CopyToHost(alone.tokens.pending(), drafter.stats)))
            made.append((found, alone.tokens.known))
        assert drawn == ((depth, len(ahead)),)
        assert together == depth + 1, "one more, to know the outcomes"
        return ahead, drawn

    monkeypatch.setattr(decode, "draft_ahead", drafting)
    first_round(Parts(seed=7, support=4), 20, depth=depth, ahead=3)
    assert len(made) == min(3, depth + 1) and all(found == alone for found, alone in made)
    assert all(len(found) == depth for found, _ in made)


@pytest.mark.parametrize("shape", TREES)
def test_a_tree_is_ready_when_its_outcome_comes_true(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the tree that would be drawn after the verdict."""
    kind, parts = DraftShape.parse(shape), Parts(seed=7, support=4)
    _, verified = first_round(parts, 20, depth=2, ahead=0, shape=kind)

    def outcomes(growth: Any, most: int, acceptance: float) -> Any:
        yield from ()
        return [tuple(verified.tokens)]

    monkeypatch.setattr(Growth, "outcomes", outcomes)
    text, _ = first_round(parts, 20, depth=2, ahead=1, shape=kind)
    assert text.next_proposal is not None
    drafter, view, found = text.verifier.drafter, text.view, text.next_proposal.draft()

    def alone() -> Any:
        draft = yield from drafter.proposal(view, kind.deep(2)).complete()
        draft.tokens.arrive((yield CopyToHost(draft.tokens.pending(), drafter.levels[-1])))
        return draft

    wanted = run_alone(alone())
    assert len(found) > 2 and (found.tokens.known, found.tree) == (wanted.tokens.known, wanted.tree)


def test_likely_outcomes_of_a_tree_by_hand() -> None:
    """Two children of the sequence, and one below the elder."""
    drafter: Any = SimpleNamespace(sampling=Sampling(Sampler(1.0), ScriptedDraws()))
    drafter.stats = LevelStats("draft")
    rows = [[0.6, 0.3, 0.1, 0.0], [0.0, 0.0, 0.8, 0.2], [0.9, 0.1, 0.0, 0.0], [0.4, 0.3, 0.2, 0.1]]
    given = drafter, [0, 1, 2], Tree((ROOT, ROOT, 0)), torch.tensor(rows).log()
    # 0 is rejected with a chance of 0.4, and 2 behind it with 0.2: as they are doubted, and 0.7 are accepted.
    chances = {(1, 0): 0.3 * 0.9, (0, 2, 0): 0.6 * 0.8 * 0.4, (0, 3): 0.6 * 0.2, (2,): 0.1}
    assert run_alone(likely_outcomes(*given, 9, 0.7)) == list(chances)
    assert run_alone(likely_outcomes(*given, 1, 0.7)) == [(1, 0)]
    # Where hardly any is accepted, the second child and what is neither come first.
    assert run_alone(likely_outcomes(*given, 2, 0.1)) == [(1, 0), (2,)]


def test_a_plain_round_drafts_nothing_ahead() -> None:
    text, round = first_round(Parts(seed=7, support=2), 9, depth=0, ahead=2)
    assert (
        len(round.tokens) == 1 and text.next_proposal is None and text.verifier.drafter.levels[0].passes == 0
    )


def test_likely_outcomes_by_hand() -> None:
    def outcomes(
        tokens: list[int], probs: torch.Tensor, most: int, acceptance: float, temperature: float = 0.0
    ) -> list[tuple[int, ...]]:
        drafter: Any = SimpleNamespace(sampling=Sampling(Sampler(temperature), ScriptedDraws()))
        drafter.stats = LevelStats("draft")
        tree = forest([len(tokens)])
        return run_alone(likely_outcomes(drafter, tokens, tree, probs.log(), most, acceptance))

    probs = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    # The second token is doubted most; the third row says what would follow both.
    assert outcomes([0, 1], probs, 9, acceptance=0.9) == [(0, 1, 2), (0, 0), (1,)]
    assert outcomes([0, 1], probs, 1, acceptance=0.9) == [(0, 1, 2)]
    # Where nearly all is rejected, the likelier rejection comes first.
    assert outcomes([0, 1], probs, 2, acceptance=0.3)[0] == (0, 0)
    assert outcomes([], probs[:1], 3, acceptance=0.5) == [(0,)]
    # Unsure of everything: tokens that are drawn seldom agree, those that are taken as the likeliest do.
    even = torch.full((3, 8), 0.125)
    assert outcomes([5, 5], even, 1, acceptance=0.6)[0][:2] == (5, 5)
    assert len(outcomes([5, 5], even, 1, acceptance=0.6, temperature=1.0)[0]) == 1
