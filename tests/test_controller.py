"""SpeculationController as a state machine: rounds of known cost go in, and what to draft comes out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from random import Random
from typing import Any

import pytest
import torch
from small_engine import SIZES, again
from small_engine import target as target  # a fixture
from tiny_models import byte_ids
from transformers import PreTrainedModel

from offload_rt import LLM
from offload_rt.drafting.base import Round
from offload_rt.drafting.expectations import DRAFT_LENGTHS, expected_tokens
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.engine.controller import (
    CHECKS,
    CLEAR_MARGIN,
    CLEAR_WINDOW,
    FIRST_BREAK,
    FORESEEN_BREAK,
    LONGEST_BREAK,
    MARGIN,
    WINDOW,
    RoundTimes,
    RunningAcceptance,
    ShapeChoice,
    SpeculationController,
)
from offload_rt.errors import UsageError

DRAFT = 8
PLAIN_MS = 10.0
NAN = float("nan")


def decode_step(tokens: int) -> Round:
    accepted = tokens - 1
    return Round([0] * tokens, accepted, accepted, [(accepted, 0)], None, torch.empty(0))


def times(
    asked: int, ms: float, nominal_ms: float, *, proposed: int | None = None, draft_ms: float = 0.0
) -> RoundTimes:
    return RoundTimes(
        started=0.0,
        ms=ms,
        draft_ms=draft_ms,
        pass_ms=ms,
        ahead_ms=0.0,
        verdict_ms=0.0,
        nominal_ms=nominal_ms,
        guessed=None,
        asked=asked,
        proposed=asked if proposed is None else proposed,
        accepted=0,
        drawn=asked,
    )


# ------------------------------------------------------------------------------- stepping down


class Table:
    """A composition: a pass costs `PLAIN_MS`, and a drafted round `round_ms` at a text length."""

    drafter: Any = property(lambda self: self)
    expected_acceptance = 0.9

    def __init__(self, round_ms: Callable[[int], float]) -> None:
        self._round_ms = round_ms

    def nominal_draft_ms(self, length: int, shape: DraftShape) -> float:
        return self.nominal_round_ms(length, shape) - PLAIN_MS

    def nominal_round_ms(self, length: int, shape: DraftShape) -> float:
        return self._round_ms(length) if shape.depth else PLAIN_MS

    def nominal_pass_ms(self, length: int, nodes: int) -> float:
        return PLAIN_MS

    def expected_tokens(self, count: int) -> float:
        return 5.0 if count else 1.0


HOPEFUL = Table(lambda length: 2 * PLAIN_MS)


def pace(
    *, clock: bool, step_down: bool = True, forecast: Table = HOPEFUL, draft: int = DRAFT
) -> SpeculationController:
    made = SpeculationController(
        forecast, CHAIN.deep(draft) if draft else None, step_down=step_down, clock=clock
    )
    made.begin(100)
    return made


def observe(subject: SpeculationController, asked: int, tokens: int, ms: float, nominal_ms: float) -> None:
    subject.observe(100, decode_step(tokens), times(asked, ms, nominal_ms))


def drive(subject: SpeculationController, rounds: int, *, tokens: int, cost: float, clock: bool) -> list[int]:
    """Runs rounds in which a draft yields `tokens` at `cost` ms; returns what was drafted in each."""
    counts = []
    for _ in range(rounds):
        count = subject.shape(1000).depth
        ms = cost if count else PLAIN_MS
        # What must not be looked at is not a number: any comparison with it would come out false.
        observe(subject, count, tokens if count else 1, ms if clock else NAN, NAN if clock else ms)
        counts.append(count)
    return counts


def runs(counts: list[int]) -> list[tuple[int, int]]:
    return [(count, len(list(group))) for count, group in groupby(counts)]


@pytest.mark.parametrize("clock", [True, False])
def test_it_keeps_drafting_while_that_pays(clock: bool) -> None:
    subject = pace(clock=clock)
    counts = drive(subject, 300, tokens=4, cost=2 * PLAIN_MS, clock=clock)
    # The clock needs to see one plain round, the second one; nominal costs are known.
    assert counts.count(0) == int(clock) and (not clock or counts[1] == 0)
    assert (subject.breaks.steps_down, subject.breaks.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_steps_down_when_it_loses_and_takes_longer_breaks(clock: bool) -> None:
    subject = pace(clock=clock)
    counts = drive(subject, 4000, tokens=1, cost=2 * PLAIN_MS, clock=clock)
    breaks = [length for count, length in runs(counts) if count == 0 and length > 1]
    expected = [min(FIRST_BREAK * 2**i, LONGEST_BREAK) for i in range(len(breaks))]
    assert len(breaks) > 6 and LONGEST_BREAK in expected
    assert breaks[:-1] == expected[:-1]  # the last one is cut by the end of the script
    trials = [length for count, length in runs(counts) if count > 0]
    assert set(trials[2:-1]) == {CLEAR_WINDOW}  # a loss as clear as this needs no whole window
    assert subject.breaks.steps_down == len(breaks)
    assert subject.breaks.plain_tokens == sum(breaks)


@pytest.mark.parametrize("clock", [True, False])
def test_it_comes_back_when_speculation_pays_again(clock: bool) -> None:
    subject = pace(clock=clock)
    drive(subject, 200, tokens=1, cost=2 * PLAIN_MS, clock=clock)
    assert subject.breaks.steps_down > 1
    drive(subject, 1000, tokens=5, cost=2 * PLAIN_MS, clock=clock)
    counts = drive(subject, 100, tokens=5, cost=2 * PLAIN_MS, clock=clock)
    assert set(counts) == {DRAFT}
    # A window that paid makes the next break short again.
    counts = drive(subject, 2 * WINDOW + FIRST_BREAK, tokens=1, cost=3 * PLAIN_MS, clock=clock)
    assert runs(counts)[1] == (0, FIRST_BREAK)


@pytest.mark.parametrize("clock", [True, False])
@pytest.mark.parametrize(("excess", "steps"), [(0.0, False), (MARGIN - 1.001, False), (MARGIN - 0.999, True)])
def test_what_hardly_loses_is_noise(clock: bool, excess: float, steps: bool) -> None:
    subject = pace(clock=clock)
    drive(subject, 60, tokens=3, cost=3 * PLAIN_MS * (1 + excess), clock=clock)
    assert (subject.breaks.steps_down > 0) == steps


@pytest.mark.parametrize(
    ("cost", "rounds"), [(CLEAR_MARGIN * 1.01, CLEAR_WINDOW), (CLEAR_MARGIN * 0.99, WINDOW)]
)
def test_a_clear_loss_is_seen_sooner(cost: float, rounds: int) -> None:
    subject = pace(clock=False)
    counts = drive(subject, WINDOW + 2, tokens=3, cost=3 * PLAIN_MS * cost, clock=False)
    assert runs(counts)[0] == (DRAFT, 1 + rounds)  # the first round is not judged


def test_a_plain_round_is_measured_though_the_second_one_was_drafted_ahead_of() -> None:
    subject = pace(clock=True)
    observe(subject, subject.shape(1000).depth, 5, 2 * PLAIN_MS, NAN)
    observe(subject, DRAFT, 5, 2 * PLAIN_MS, NAN)  # its draft was ready, whatever was wanted
    assert drive(subject, 7, tokens=5, cost=2 * PLAIN_MS, clock=True) == [0, *[DRAFT] * 6]
    assert subject.breaks.steps_down == 0


def test_a_loss_is_checked_against_plain_rounds_of_the_same_moment() -> None:
    subject = pace(clock=True)
    drive(subject, 2, tokens=2, cost=PLAIN_MS, clock=True)
    drafted = []
    for _ in range(CLEAR_WINDOW + CHECKS + 1):
        # The machine has become four times as slow: against the plain round before, drafting loses.
        drafted.append(subject.shape(1000).depth)
        observe(subject, drafted[-1], 2 if drafted[-1] else 1, 4 * PLAIN_MS, NAN)
    assert runs(drafted) == [(DRAFT, CLEAR_WINDOW), (0, CHECKS), (DRAFT, 1)]
    assert subject.breaks.steps_down == 0


def test_one_slow_plain_round_is_not_the_cost_of_a_token() -> None:
    subject = pace(clock=True)
    drive(subject, 2 + CLEAR_WINDOW, tokens=1, cost=2 * PLAIN_MS, clock=True)
    for check in range(CHECKS):
        assert subject.shape(1000).depth == 0
        observe(subject, 0, 1, 1e6 if check == 1 else PLAIN_MS, NAN)
    assert subject.breaks.steps_down == 1


def noisy_text(gain: float, seed: int) -> SpeculationController:
    """300 tokens on a busy machine, where drafting is `gain` times as fast as plain decoding.

    A round takes 12% more or less, one of 25 several times as long, and now and then all do for a while;
    what one yields is anything from 1 to 9 tokens.
    """
    random, subject, busy, made = Random(seed), pace(clock=True), 1.0, 0
    while made < 300:
        if random.random() < 0.03:
            busy = 2.5 if busy == 1.0 else 1.0
        asked = subject.shape(1000).depth
        spike = random.uniform(2, 8) if random.random() < 0.04 else 1.0
        noise = random.lognormvariate(0, 0.12) * spike * busy
        tokens = random.randint(1, 9) if asked else 1
        observe(subject, asked, tokens, noise * PLAIN_MS * (5 / gain if asked else 1), NAN)
        made += tokens
    return subject


@pytest.mark.parametrize(
    ("gain", "least", "most"), [(2.0, 0, 12), (1.5, 0, 24), (0.7, 180, 200), (0.4, 185, 200)]
)
def test_how_often_it_errs_on_a_noisy_machine(gain: float, least: int, most: int) -> None:
    """Of 200 texts. Three rounds against one plain round of before gave up 176 of those twice as fast."""
    gave_up = sum(noisy_text(gain, seed).breaks.steps_down > 0 for seed in range(200))
    assert least <= gave_up <= most


@pytest.mark.parametrize("clock", [True, False])
def test_without_stepping_down_it_drafts_whatever_it_costs(clock: bool) -> None:
    subject = pace(clock=clock, step_down=False)
    assert drive(subject, 100, tokens=1, cost=1e6, clock=clock) == [DRAFT] * 100
    assert subject.breaks.steps_down == 0


def test_a_plain_composition_has_nothing_to_watch() -> None:
    subject = pace(clock=True, draft=0)
    assert drive(subject, 50, tokens=1, cost=1e6, clock=True) == [0] * 50
    assert (subject.breaks.steps_down, subject.breaks.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_begins_plainly_where_speculation_is_not_expected_to_pay(clock: bool) -> None:
    subject = pace(clock=clock, forecast=Table(lambda length: 5 * PLAIN_MS * 1.01))
    counts = drive(subject, FORESEEN_BREAK + 1, tokens=9, cost=2 * PLAIN_MS, clock=clock)
    assert counts == [0] * FORESEEN_BREAK + [DRAFT]
    assert (subject.breaks.steps_down, subject.breaks.plain_tokens) == (1, FORESEEN_BREAK)
    hopeful = pace(clock=False, forecast=Table(lambda length: 5 * PLAIN_MS * 0.99))
    assert drive(hopeful, 3, tokens=9, cost=PLAIN_MS, clock=False) == [DRAFT] * 3


def test_it_foresees_by_the_length_of_the_text() -> None:
    for length, drafts in ((100, 0), (100_000, DRAFT)):
        forecast = Table(lambda length: 1e5 * PLAIN_MS / length)
        subject = SpeculationController(forecast, CHAIN.deep(DRAFT), clock=False)
        subject.begin(length)
        assert subject.shape(1000).depth == drafts


@pytest.mark.parametrize(("round_ms", "outcomes"), [(1.2, 4), (1.4, 2), (2.0, 1), (2.1, 0)])
def test_without_a_clock_no_more_is_drafted_ahead_than_a_pass_takes(round_ms: float, outcomes: int) -> None:
    forecast = Table(lambda length: round_ms * PLAIN_MS)
    for clock in (False, True):
        subject = SpeculationController(forecast, CHAIN.deep(DRAFT), ahead=4, clock=clock)
        subject.begin(100)
        assert subject.outcomes(100) == (4 if clock else outcomes)
    assert SpeculationController(forecast, CHAIN.deep(DRAFT), clock=False).outcomes(100) == 0


def test_a_draft_is_no_deeper_than_there_is_room() -> None:
    subject = pace(clock=False)
    assert [subject.shape(room).depth for room in (1000, 3, 0, -1)] == [DRAFT, 3, 0, 0]


def test_what_was_asked_for_and_not_found_is_no_plain_round() -> None:
    """A look-up without a match: speculation is judged by it."""
    subject = pace(clock=False)
    for _ in range(1 + CLEAR_WINDOW):  # the first round is not judged
        subject.observe(100, decode_step(1), times(DRAFT, NAN, 2 * PLAIN_MS, proposed=0))
    assert subject.breaks.steps_down == 1


# ------------------------------------------------------------------------------ depth of drafts


class Shapes:
    """Nominal costs: a pass of `pass_ms` and `query_ms` for each node, drafts of `step_ms` a level."""

    drafter: Any = property(lambda self: self)
    expected_acceptance = 0.9

    def __init__(self, pass_ms: float, query_ms: float, step_ms: float) -> None:
        self.pass_ms = pass_ms
        self.query_ms = query_ms
        self.step_ms = step_ms

    def nominal_pass_ms(self, length: int, nodes: int) -> float:
        return self.pass_ms + self.query_ms * nodes

    def nominal_draft_ms(self, length: int, shape: DraftShape) -> float:
        return self.step_ms * shape.depth


def best(shapes: Shapes, acceptance: float) -> int:
    """The depth with the most tokens a ms, by the definition."""

    def rate(count: int) -> float:
        ms = shapes.nominal_pass_ms(0, count) + shapes.nominal_draft_ms(0, CHAIN.deep(count))
        return expected_tokens(acceptance, count) / ms

    return max(DRAFT_LENGTHS, key=rate)


def depth(shapes: Shapes, acceptance: float, *, ahead: bool = False) -> ShapeChoice:
    return ShapeChoice(shapes, CHAIN.candidates(), RunningAcceptance(acceptance), ahead=ahead)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("step_ms", [0.1, 1.0, 10.0])
def test_before_anything_is_seen_shapes_decide(step_ms: float, acceptance: float) -> None:
    shapes = Shapes(100.0, 1.0, step_ms)
    assert depth(shapes, acceptance).best(0).depth == best(shapes, acceptance)


def test_it_learns_what_the_machine_takes() -> None:
    nominal, true = Shapes(100.0, 1.0, 1.0), Shapes(40.0, 3.0, 0.5)
    subject = depth(nominal, 0.9)
    for count in (4, 8, 12, 4, 16, 6, 12, 8) * 4:
        draft_ms = true.nominal_draft_ms(0, CHAIN.deep(count))
        subject.observe(0, times(count, true.nominal_pass_ms(0, count), NAN, draft_ms=draft_ms))
    chosen = DRAFT_LENGTHS.index(subject.best(0).depth)
    assert abs(chosen - DRAFT_LENGTHS.index(best(true, 0.9))) <= 1
    assert best(true, 0.9) != best(nominal, 0.9)


@pytest.mark.parametrize("clock", [True, False])
def test_measured_times_count_where_a_clock_may_decide(clock: bool) -> None:
    shapes = Shapes(100.0, 1.0, 1.0)
    subject = SpeculationController(shapes, CHAIN, step_down=False, clock=clock)
    subject.begin(100)
    for count in (8, 4, 8, 12):  # in 1 ms: a pass costs as little as a drafted token
        subject.observe(
            100, Round([0], 0, 0, [], None, torch.empty(0)), times(count, 1.0 if clock else NAN, NAN)
        )
    assert (subject.shape(1000).depth == best(shapes, 0.9)) != clock


def test_it_learns_how_many_are_accepted() -> None:
    seen = RunningAcceptance(0.9)
    assert seen.rate == pytest.approx(0.9)
    for _ in range(60):
        seen.observe([(2, 1)])
    assert seen.rate == pytest.approx(2 / 3, abs=0.03)
    before = seen.rate
    seen.observe([(0, 0)])  # a plain round says nothing
    assert seen.rate == before
    for _ in range(200):
        seen.observe([(8, 0)])
    assert seen.rate > 0.999


def test_a_draft_that_is_hidden_is_as_deep_as_the_pass() -> None:
    shapes = Shapes(110.0, 0.0, 10.0)
    alone, ahead = depth(shapes, 0.97), depth(shapes, 0.97, ahead=True)
    assert alone.best(0).depth * 10.0 > 110.0 == ahead.best(0).depth * 10.0


@pytest.mark.parametrize(("query_ms", "kind"), [(0.0, "grown"), (20.0, "chain")])
def test_a_tree_is_drafted_where_wide_passes_cost_little(query_ms: float, kind: str) -> None:
    """As over a link, where a pass takes as long for 64 tokens as for 4."""
    shapes = Shapes(100.0, query_ms, 4.0)
    subject = ShapeChoice(shapes, DraftShape.parse("auto").candidates(), RunningAcceptance(0.85))
    chosen = subject.best(0)
    assert chosen.kind == kind
    if kind == "grown":
        assert chosen.size >= 32
        assert chosen.expected_tokens([0.85]) > CHAIN.deep(chosen.depth).expected_tokens([0.85])


def test_shapes() -> None:
    sizes = {"chain": 3, "sequences:4": 12, "tree:3,2": 15, "grown:10": 10, "sequoia:10": 10}
    for text, size in sizes.items():
        shape = DraftShape.parse(text)
        assert (str(shape), shape.size, shape.deep(3).size) == (text, 0, size)
    assert [DraftShape.parse(text).deep(3).per_pass for text in sizes][:4] == [1, 4, 6, 4]
    for text in ("", "tree", "tree:", "tree:0", "tree:2,x", "grown:-1", "grown:2,3", "sequences", "forest:2"):
        with pytest.raises(UsageError, match="must be auto, chain"):
            DraftShape.parse(text)


def test_a_draft_that_costs_nothing_by_its_shapes() -> None:
    shapes = Shapes(1.0, 0.01, 0.0)
    subject = depth(shapes, 0.3)
    for _ in range(3):
        subject.observe(0, times(4, shapes.nominal_pass_ms(0, 4), NAN, draft_ms=0.1))
    assert subject.best(0).depth == best(shapes, 0.3)


def test_lookup_chooses_its_depth_by_the_clock(target: PreTrainedModel) -> None:
    prompt = byte_ids(20) * 6
    overrides = SIZES | {"speculation.gamma2": 0}
    with LLM.from_models(target, config="lookup", overrides=overrides) as llm:
        text = llm.read(prompt)
        result = again(text)
        assert result.timings.draft_n > 0 and result.tokens == again(text, config="plain").tokens
