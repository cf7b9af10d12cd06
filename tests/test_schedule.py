"""Drafting ahead: exact laws whatever the clock says, and what is guessed, kept and thrown away."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from enumeration import Composition, Parts, ScriptedDraws, distance, output_law, own_law

from offload_rt.drafting.base import NoDrafter
from offload_rt.drafting.outcomes import likely_outcomes
from offload_rt.drafting.verifier import Pass, Verifier
from offload_rt.sampling import SamplingLaw
from offload_rt.schedule import Schedule
from offload_rt.verification import Draft

PROMPT = [3, 1, 4, 1, 2]
TOLERANCE = 1e-9
LAWS = {
    "greedy": SamplingLaw(0.0),
    "T=0.6": SamplingLaw(0.6),
    "T=1": SamplingLaw(1.0),
    "top-p": SamplingLaw(1.0, 0.8),
}

# Whether a pass is over, by the choices that were drawn since it began: a clock that knows the tokens.
CLOCKS: dict[str, Callable[[list[int]], bool]] = {
    "never": lambda drawn: False,
    "at once": lambda drawn: True,
    "after an odd choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 1,
    "after an even choice": lambda drawn: bool(drawn) and drawn[-1] % 2 == 0,
    "when they add up": lambda drawn: sum(drawn) >= 2,
}


class FakeLane:
    """Runs a pass at once, and says that it is over when a clock says so."""

    def __init__(self, draws: ScriptedDraws, clock: Callable[[list[int]], bool]) -> None:
        self._draws = draws
        self._clock = clock

    def start(self, begin: Callable[[], Pass], *, drafting: bool) -> Future[Pass]:
        begun, clock, draws = begin(), self._clock, self._draws
        first = len(draws.taken)

        class Begun(Future[Pass]):
            def done(self) -> bool:
                return clock(draws.taken[first:])

        future = Begun()
        future.set_result(begun)
        return future


def scheduled(
    ahead: int, clock: Callable[[list[int]], bool] | None, kind: type[Schedule] = Schedule
) -> Callable[[Verifier], Schedule]:
    def build(verifier: Verifier) -> Schedule:
        draws: Any = verifier.sampling.draws
        lane: Any = FakeLane(draws, clock or (lambda drawn: False))
        return kind(verifier, lane, ahead, clock=clock is not None)

    return build


def retrieval(parts: Parts) -> Composition:
    return parts.full(lambda full, sampling: parts.derived("retrieved", full, sampling, NoDrafter(), 0))


def triforce(parts: Parts) -> Composition:
    return parts.full(
        lambda full, sampling: parts.derived("retrieved", full, sampling, parts.draft_model(sampling), 1)
    )


def naive(parts: Parts) -> Composition:
    return parts.full(lambda full, sampling: parts.draft_model(sampling))


COMPOSITIONS = {"retrieval": retrieval, "triforce": triforce, "naive": naive}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("clock", [*CLOCKS.values(), None], ids=[*CLOCKS, "not asked"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_output_law_depends_on_no_clock(
    name: str, clock: Callable[[list[int]], bool] | None, law: SamplingLaw
) -> None:
    parts = Parts(seed=7, support=2)
    found = output_law(COMPOSITIONS[name](parts), law, PROMPT, 4, 1, schedule=scheduled(2, clock))
    assert sum(found.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert distance(found, own_law(parts.target, law, PROMPT, 4)) < TOLERANCE


@pytest.mark.parametrize(("ahead", "gamma"), [(1, 2), (3, 2)])
@pytest.mark.parametrize("clock", ["never", "after an odd choice"])
@pytest.mark.parametrize("name", ["retrieval", "naive"])
def test_longer_drafts_and_more_outcomes(name: str, clock: str, ahead: int, gamma: int) -> None:
    parts, law = Parts(seed=11, support=2), SamplingLaw(1.0)
    schedule = scheduled(ahead, CLOCKS[clock])
    found = output_law(COMPOSITIONS[name](parts), law, PROMPT, 4, gamma, schedule=schedule)
    assert distance(found, own_law(parts.target, law, PROMPT, 4)) < TOLERANCE


def test_a_cut_at_the_end_of_the_text_bends_no_law() -> None:
    parts, law = Parts(seed=9, support=2), SamplingLaw(1.0)
    schedule = scheduled(2, CLOCKS["never"])
    found = output_law(retrieval(parts), law, PROMPT, 6, 2, max_tokens=5, schedule=schedule)
    assert distance(found, own_law(parts.target, law, PROMPT, 5)) < TOLERANCE


class ThrowsAwayWhatTookLong(Schedule):
    """The trap: whether a draft is drawn again depends on its tokens."""

    def _draft(self, text: Any, count: int) -> Draft:
        ready = self._ready
        if ready is not None and ready[1].draft().tokens[0] % 2:
            self._ready = None
        return super()._draft(text, count)


def test_throwing_away_what_took_long_would_bend_the_law() -> None:
    parts, law = Parts(seed=7, support=3), SamplingLaw(1.0)
    schedule = scheduled(2, CLOCKS["never"], ThrowsAwayWhatTookLong)
    found = output_law(retrieval(parts), law, PROMPT, 4, 1, schedule=schedule)
    assert distance(found, own_law(parts.target, law, PROMPT, 4)) > 1e-4


def test_likely_outcomes_by_hand() -> None:
    laws = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    # The second token is doubted most; the third row says what would follow both.
    assert likely_outcomes([0, 1], laws, 9, acceptance=0.9) == [(0, 1, 2), (0, 0), (1,)]
    assert likely_outcomes([0, 1], laws, 1, acceptance=0.9) == [(0, 1, 2)]
    # Where nearly all is rejected, the likelier rejection comes first.
    assert likely_outcomes([0, 1], laws, 2, acceptance=0.3)[0] == (0, 0)
    assert likely_outcomes([], laws[:1], 3, acceptance=0.5) == [(0,)]
    # Unsure of everything: tokens that are drawn seldom agree, those that are taken as the likeliest do.
    even = torch.full((3, 8), 0.125)
    assert likely_outcomes([5, 5], even, 1, acceptance=0.9, greedy=True)[0][:2] == (5, 5)
    assert len(likely_outcomes([5, 5], even, 1, acceptance=0.3, greedy=False)[0]) == 1
