"""The governor as a state machine: rounds of known cost go in, and what it says to draft comes out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import pytest

from offload_rt.governor import (
    CLEAR_MARGIN,
    CLEAR_WINDOW,
    FIRST_BREAK,
    FORESEEN_BREAK,
    LONGEST_BREAK,
    MARGIN,
    WINDOW,
    Governor,
)

DRAFT = 8
PLAIN_MS = 10.0
NAN = float("nan")


class Table:
    """A forecast: a plain token costs `PLAIN_MS`, a drafted round `round_ms` at a text length."""

    def __init__(self, round_ms: Callable[[int], float], tokens: float = 5.0) -> None:
        self._round_ms = round_ms
        self._tokens = tokens

    def expected_ms(self, length: int, count: int) -> float:
        return PLAIN_MS if count == 0 else self._round_ms(length)

    def expected_tokens(self, count: int) -> float:
        return 1.0 if count == 0 else self._tokens


HOPEFUL = Table(lambda length: 2 * PLAIN_MS)


def governor(
    *, clock: bool, step_down: bool = True, forecast: Table = HOPEFUL, draft: int = DRAFT
) -> Governor:
    made = Governor(draft, step_down=step_down, forecast=forecast, clock=clock)
    made.begin(100)
    return made


def drive(subject: Governor, rounds: int, *, tokens: int, cost: float, clock: bool) -> list[int]:
    """Runs rounds in which a draft yields `tokens` at `cost` ms; returns what was drafted in each."""
    counts = []
    for _ in range(rounds):
        count = subject.draft_count()
        ms = cost if count else PLAIN_MS
        # What must not be looked at is not a number: any comparison with it would come out false.
        subject.observe(count, tokens if count else 1, 100, ms if clock else NAN, NAN if clock else ms)
        counts.append(count)
    return counts


def runs(counts: list[int]) -> list[tuple[int, int]]:
    return [(count, len(list(group))) for count, group in groupby(counts)]


@pytest.mark.parametrize("clock", [True, False])
def test_it_keeps_drafting_while_that_pays(clock: bool) -> None:
    subject = governor(clock=clock)
    counts = drive(subject, 300, tokens=4, cost=2 * PLAIN_MS, clock=clock)
    # The clock needs to see one plain round, the second one; fixed costs are known.
    assert counts.count(0) == int(clock) and (not clock or counts[1] == 0)
    assert (subject.steps_down, subject.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_steps_down_when_it_loses_and_takes_longer_breaks(clock: bool) -> None:
    subject = governor(clock=clock)
    counts = drive(subject, 4000, tokens=1, cost=2 * PLAIN_MS, clock=clock)
    breaks = [length for count, length in runs(counts) if count == 0 and length > 1]
    expected = [min(FIRST_BREAK * 2**i, LONGEST_BREAK) for i in range(len(breaks))]
    assert len(breaks) > 6 and LONGEST_BREAK in expected
    assert breaks[:-1] == expected[:-1]  # the last one is cut by the end of the script
    trials = [length for count, length in runs(counts) if count > 0]
    assert set(trials[2:-1]) == {CLEAR_WINDOW}  # a loss as clear as this needs no whole window
    assert subject.steps_down == len(breaks)
    assert subject.plain_tokens == sum(breaks)


@pytest.mark.parametrize("clock", [True, False])
def test_it_comes_back_when_speculation_pays_again(clock: bool) -> None:
    subject = governor(clock=clock)
    drive(subject, 200, tokens=1, cost=2 * PLAIN_MS, clock=clock)
    assert subject.steps_down > 1
    drive(subject, 1000, tokens=5, cost=2 * PLAIN_MS, clock=clock)
    counts = drive(subject, 100, tokens=5, cost=2 * PLAIN_MS, clock=clock)
    assert set(counts) == {DRAFT}
    # A window that paid makes the next break short again.
    counts = drive(subject, 2 * WINDOW + FIRST_BREAK, tokens=1, cost=3 * PLAIN_MS, clock=clock)
    assert runs(counts)[1] == (0, FIRST_BREAK)


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize(("excess", "steps"), [(0.0, False), (MARGIN - 1.001, False), (MARGIN - 0.999, True)])
def test_what_hardly_loses_is_noise(clock: bool, excess: float, steps: bool) -> None:
    subject = governor(clock=clock)
    drive(subject, 60, tokens=3, cost=3 * PLAIN_MS * (1 + excess), clock=clock)
    assert (subject.steps_down > 0) == steps


@pytest.mark.parametrize(
    ("cost", "rounds"), [(CLEAR_MARGIN * 1.01, CLEAR_WINDOW), (CLEAR_MARGIN * 0.99, WINDOW)]
)
def test_a_clear_loss_is_seen_sooner(cost: float, rounds: int) -> None:
    subject = governor(clock=False)
    counts = drive(subject, WINDOW + 2, tokens=3, cost=3 * PLAIN_MS * cost, clock=False)
    assert runs(counts)[0] == (DRAFT, 1 + rounds)  # the first round is not judged


def test_the_first_round_is_not_judged() -> None:
    subject = governor(clock=True)
    subject.observe(subject.draft_count(), 1, 100, 1e9, NAN)
    drive(subject, 50, tokens=4, cost=2 * PLAIN_MS, clock=True)
    assert subject.steps_down == 0


def test_a_plain_round_is_measured_though_the_second_one_was_drafted_ahead_of() -> None:
    subject = governor(clock=True)
    subject.observe(subject.draft_count(), 5, 100, 2 * PLAIN_MS, NAN)
    subject.observe(DRAFT, 5, 105, 2 * PLAIN_MS, NAN)  # its draft was ready, whatever the governor wanted
    assert drive(subject, 7, tokens=5, cost=2 * PLAIN_MS, clock=True) == [0, *[DRAFT] * 6]
    assert subject.steps_down == 0


def test_the_clock_is_measured_against_the_median_plain_round() -> None:
    subject = governor(clock=True)
    drive(subject, 2 + CLEAR_WINDOW, tokens=1, cost=2 * PLAIN_MS, clock=True)
    assert subject.steps_down == 1
    for i in range(FIRST_BREAK):  # one slow round, as when the machine hesitates, is not the cost of a token
        assert subject.draft_count() == 0
        subject.observe(0, 1, 100, 1e6 if i == FIRST_BREAK - 1 else PLAIN_MS, NAN)
    drive(subject, CLEAR_WINDOW, tokens=1, cost=2 * PLAIN_MS, clock=True)
    assert subject.steps_down == 2


@pytest.mark.parametrize("clock", [True, False])
def test_without_stepping_down_it_drafts_whatever_it_costs(clock: bool) -> None:
    subject = governor(clock=clock, step_down=False)
    assert drive(subject, 100, tokens=1, cost=1e6, clock=clock) == [DRAFT] * 100
    assert subject.steps_down == 0


def test_a_plain_composition_has_nothing_to_watch() -> None:
    subject = governor(clock=True, draft=0)
    assert drive(subject, 50, tokens=1, cost=1e6, clock=True) == [0] * 50
    assert (subject.steps_down, subject.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_begins_plainly_where_speculation_is_not_expected_to_pay(clock: bool) -> None:
    subject = governor(clock=clock, forecast=Table(lambda length: 5 * PLAIN_MS * 1.01))
    counts = drive(subject, FORESEEN_BREAK + 1, tokens=9, cost=2 * PLAIN_MS, clock=clock)
    assert counts == [0] * FORESEEN_BREAK + [DRAFT]
    assert (subject.steps_down, subject.plain_tokens) == (1, FORESEEN_BREAK)
    hopeful = governor(clock=False, forecast=Table(lambda length: 5 * PLAIN_MS * 0.99))
    assert drive(hopeful, 3, tokens=9, cost=PLAIN_MS, clock=False) == [DRAFT] * 3


def test_it_foresees_by_the_length_of_the_text() -> None:
    for length, drafts in ((100, 0), (100_000, DRAFT)):
        forecast = Table(lambda length: 1e5 * PLAIN_MS / length)
        subject = Governor(DRAFT, step_down=True, forecast=forecast, clock=False)
        subject.begin(length)
        assert subject.draft_count() == drafts
