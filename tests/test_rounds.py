"""Drafting ahead: exact distributions whatever the clock says, and what is guessed, kept and thrown away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enumeration import Clock, Composition, Parts, ScriptedDraws, Text, distance, output_probs, own_probs

from offload_rt import rounds
from offload_rt.drafting.outcomes import likely_outcomes, ranked
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.verifier import Sampling
from offload_rt.passes import Together
from offload_rt.sampling import Sampler

PROMPT = [3, 1, 4, 1, 2]
TOLERANCE = 1e-9
SAMPLERS = {
    "greedy": Sampler(0.0),
    "T=0.6": Sampler(0.6),
    "T=1": Sampler(1.0),
    "top-p": Sampler(1.0, 0.8),
}

# Whether a pass is over, by the choices that were drawn since it began: a clock that knows the tokens.
CLOCKS: dict[str, Clock] = {
    "never": lambda drawn: False,
    "at once": lambda drawn: True,
    "after an odd choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 1,
    "after an even choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 0,
    "when they add up": lambda drawn: sum(drawn) >= 2,
}


def retrieval(parts: Parts) -> Composition:
    return parts.full(lambda full, sampling: parts.derived("retrieved", full, sampling))


def triforce(parts: Parts) -> Composition:
    return parts.full(
        lambda full, sampling: parts.derived(
            "retrieved", full, sampling, parts.draft_model(sampling), CHAIN.deep(1)
        )
    )


def naive(parts: Parts) -> Composition:
    return parts.full(lambda full, sampling: parts.draft_model(sampling))


def head(parts: Parts) -> Composition:
    return parts.full(lambda full, sampling: parts.head_drafter(sampling))


def head_below_retrieval(parts: Parts) -> Composition:
    return parts.full(
        lambda full, sampling: parts.derived(
            "retrieved", full, sampling, parts.head_drafter(sampling), CHAIN.deep(1)
        )
    )


COMPOSITIONS = {
    "retrieval": retrieval,
    "triforce": triforce,
    "naive": naive,
    "head": head,
    "head, retrieval": head_below_retrieval,
}


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("clock", [*CLOCKS.values(), None], ids=[*CLOCKS, "not asked"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_output_distribution_depends_on_no_clock(
    name: str, clock: Clock | None, sampler: Sampler
) -> None:
    parts = Parts(seed=7, support=2)
    found = output_probs(COMPOSITIONS[name](parts), sampler, PROMPT, 4, CHAIN.deep(1), ahead=2, clock=clock)
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(found, own_probs(parts.target, sampler, PROMPT, 4)) < TOLERANCE


@pytest.mark.parametrize(("ahead", "depth"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("clock", ["never", "after an odd choice"])
@pytest.mark.parametrize("name", ["retrieval", "naive", "head"])
def test_longer_drafts_and_more_outcomes(name: str, clock: str, ahead: int, depth: int) -> None:
    parts, sampler = Parts(seed=11, support=2), Sampler(1.0)
    found = output_probs(
        COMPOSITIONS[name](parts), sampler, PROMPT, 3, CHAIN.deep(depth), ahead=ahead, clock=CLOCKS[clock]
    )
    assert distance(found, own_probs(parts.target, sampler, PROMPT, 3)) < TOLERANCE


def test_a_cut_at_the_end_of_the_text_biases_nothing() -> None:
    parts, sampler = Parts(seed=9, support=2), Sampler(1.0)
    found = output_probs(
        retrieval(parts), sampler, PROMPT, 6, CHAIN.deep(2), max_tokens=5, ahead=2, clock=CLOCKS["never"]
    )
    assert distance(found, own_probs(parts.target, sampler, PROMPT, 5)) < TOLERANCE


def test_throwing_away_what_took_long_would_bias_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap: whether a draft is drawn again depends on its tokens."""
    extend = Text.extend

    def forgetful(text: Text, *arguments: Any) -> None:
        extend(text, *arguments)
        if text.ready is not None and text.ready.draft().tokens.known[0] % 2:
            text.ready = None

    monkeypatch.setattr(Text, "extend", forgetful)
    parts, sampler = Parts(seed=7, support=3), Sampler(1.0)
    found = output_probs(retrieval(parts), sampler, PROMPT, 4, CHAIN.deep(1), ahead=2, clock=CLOCKS["never"])
    assert distance(found, own_probs(parts.target, sampler, PROMPT, 4)) > 1e-4


@pytest.mark.parametrize(("guessed", "kept"), [("right", True), ("wrong", False)])
def test_a_draft_of_the_right_outcome_is_used(
    guessed: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, draws = Parts(seed=7, support=2), ScriptedDraws()
    text = Text(retrieval(parts)(Sampling(Sampler(0.0), draws)), PROMPT, 20, CHAIN.deep(2), ahead=1)
    truth = own_probs(parts.target, Sampler(0.0), PROMPT, 3)
    ((tokens, _),) = truth.items()

    def outcomes(growth: Any, most: int, acceptance: float) -> Any:
        yield from ()
        drafted = growth.draft().tokens.on(torch.device("cpu")).tolist()
        right = next(
            tokens[: place + 1] for place in range(3) if tuple(drafted[: place + 1]) != tokens[: place + 1]
        )
        return [right if guessed == "right" else (*right[:-1], (right[-1] + 1) % 5)]

    monkeypatch.setattr("offload_rt.drafting.growth.LevelGrowth.outcomes", outcomes)
    thread: Any = _AtOnce()
    (round,) = Together(thread).run([rounds.round_of(text)])
    assert not isinstance(round, Exception), round
    assert tuple(round.tokens) == tokens[: len(round.tokens)]
    assert (text.ready is not None) is kept
    if text.ready is not None:
        assert len(text.ready.draft()) == 2, "complete: the pass was never over"


class _AtOnce:
    """A background that is over at the end only."""

    def start(self, caches: Any, forward: Any) -> Any:
        outputs = forward()

        class Begun:
            def done(self) -> bool:
                return False

            def result(self) -> Any:
                return outputs, 0.0

        return Begun()


def test_a_plain_round_drafts_nothing_ahead() -> None:
    parts = Parts(seed=7, support=2)
    text = Text(retrieval(parts)(Sampling(Sampler(0.0), ScriptedDraws())), PROMPT, 9, DraftShape(), ahead=2)
    thread: Any = _AtOnce()
    (round,) = Together(thread).run([rounds.round_of(text)])
    assert not isinstance(round, Exception)
    assert len(round.tokens) == 1 and text.ready is None and text.verifier.drafter.levels[0].passes == 0


def test_likely_outcomes_by_hand() -> None:
    def outcomes(tokens: list[int], probs: torch.Tensor, most: int, **how: Any) -> list[tuple[int, ...]]:
        return likely_outcomes(tokens, *ranked(probs, torch.tensor(tokens, dtype=torch.long)), most, **how)

    probs = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    # The second token is doubted most; the third row says what would follow both.
    assert outcomes([0, 1], probs, 9, acceptance=0.9) == [(0, 1, 2), (0, 0), (1,)]
    assert outcomes([0, 1], probs, 1, acceptance=0.9) == [(0, 1, 2)]
    # Where nearly all is rejected, the likelier rejection comes first.
    assert outcomes([0, 1], probs, 2, acceptance=0.3)[0] == (0, 0)
    assert outcomes([], probs[:1], 3, acceptance=0.5) == [(0,)]
    # Unsure of everything: tokens that are drawn seldom agree, those that are taken as the likeliest do.
    even = torch.full((3, 8), 0.125)
    assert outcomes([5, 5], even, 1, acceptance=0.9, greedy=True)[0][:2] == (5, 5)
    assert len(outcomes([5, 5], even, 1, acceptance=0.3, greedy=False)[0]) == 1
