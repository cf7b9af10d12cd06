"""SpeculationController as a state machine: rounds of known cost go in, and what to draft comes out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from random import Random

import pytest
import torch
from support.small_engine import SIZES, again
from support.tiny_models import byte_ids
from transformers import PreTrainedModel

from cpu_kv import PacedLink
from offload_rt import LLM
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.priors import DRAFT_LENGTHS, expected_tokens
from offload_rt.drafting.base import Round
from offload_rt.engine.controller import (
    CHECKS,
    FIRST_BREAK,
    FORESEEN_BREAK,
    LONGEST_BREAK,
    MARGIN,
    WINDOW,
    RoundTimes,
    RunningAcceptance,
    SpeculationController,
)
from offload_rt.planning.sequence_costs import SequenceCosts

DRAFT = 8
PLAIN_MS = 10.0
NAN = float("nan")


@dataclass(frozen=True)
class Costs(SequenceCosts):
    """A composition: passes of `fixed_ms`, and more by the drafted token; drafts of `step_ms` a level."""

    fixed_ms: float = PLAIN_MS
    query_ms: float = 0.0
    step_ms: float = PLAIN_MS / DRAFT

    def pass_ms(self, length: int, shape: DraftShape) -> float:
        return self.fixed_ms + self.query_ms * shape.size

    def draft_ms(self, length: int, shape: DraftShape) -> float:
        return self.step_ms * shape.depth

    def ahead_ms(self, length: int, shape: DraftShape, outcomes: int) -> list[float]:
        return [count * self.draft_ms(length, shape) for count in range(1, outcomes + 1)]


def controller(
    costs: Costs = Costs(),
    shapes: tuple[DraftShape, ...] = (CHAIN.deep(DRAFT),),
    *,
    acceptance: float = 0.9,
    step_down: bool = True,
    clock: bool = True,
    ahead: int = 0,
) -> SpeculationController:
    made = SpeculationController(costs, shapes, acceptance, ahead=ahead, step_down=step_down, clock=clock)
    made.begin(100)
    return made


def observe(
    subject: SpeculationController,
    asked: int,
    tokens: int,
    ms: float,
    *,
    proposed: int | None = None,
    draft_ms: float = 0.0,
    ahead_ms: float = 0.0,
    drawn_ahead: tuple[tuple[int, int], ...] = (),
) -> None:
    accepted = tokens - 1
    round = Round([0] * tokens, accepted, accepted, [(accepted, 0)], None, *torch.empty(2, 0))
    took = RoundTimes(
        started=0.0,
        ms=ms,
        draft_ms=draft_ms,
        pass_ms=ms - draft_ms,
        ahead_ms=ahead_ms,
        verdict_ms=0.0,
        guessed=None,
        depth=asked,
        proposed=asked if proposed is None else proposed,
        accepted=accepted,
        drawn_levels=asked,
        drawn_ahead=drawn_ahead,
    )
    subject.observe(100, round, took)


def drive(subject: SpeculationController, rounds: int, *, tokens: int, ms: float, clock: bool) -> list[int]:
    """Runs rounds in which a draft yields `tokens` in `ms`; returns the depth that was asked for in each."""
    depths = []
    for _ in range(rounds):
        depth = subject.shape(1000).depth
        # What must not be looked at is not a number: any comparison with it would come out false.
        observe(subject, depth, tokens if depth else 1, (ms if depth else PLAIN_MS) if clock else NAN)
        depths.append(depth)
    return depths


def runs(depths: list[int]) -> list[tuple[int, int]]:
    return [(depth, len(list(group))) for depth, group in groupby(depths)]


# --- falling back to plain decoding: the default costs predict that a drafted round takes 2 × PLAIN_MS


@pytest.mark.parametrize("clock", [True, False])
def test_it_keeps_drafting_while_that_pays(clock: bool) -> None:
    subject = controller(clock=clock)
    depths = drive(subject, 300, tokens=4, ms=2 * PLAIN_MS, clock=clock)
    # The clock needs to see one plain round, the second one; predictions are known.
    assert depths.count(0) == int(clock) and (not clock or depths[1] == 0)
    assert (subject.fallbacks, subject.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_falls_back_while_it_loses_for_longer_and_longer(clock: bool) -> None:
    subject = controller(clock=clock)
    depths = drive(subject, 4000, tokens=1, ms=2 * PLAIN_MS, clock=clock)
    breaks = [length for depth, length in runs(depths) if depth == 0 and length > 1]
    expected = [min(FIRST_BREAK * 2**i, LONGEST_BREAK) for i in range(len(breaks))]
    assert len(breaks) > 5 and LONGEST_BREAK in expected
    assert breaks[:-1] == expected[:-1]  # the last one is cut by the end of the script
    assert {length for depth, length in runs(depths)[3:-1] if depth} == {WINDOW}
    assert (subject.fallbacks, subject.plain_tokens) == (len(breaks), sum(breaks))


@pytest.mark.parametrize("clock", [True, False])
def test_it_comes_back_when_speculation_pays_again(clock: bool) -> None:
    subject = controller(clock=clock)
    drive(subject, 200, tokens=1, ms=2 * PLAIN_MS, clock=clock)
    assert subject.fallbacks > 1
    drive(subject, 1000, tokens=5, ms=2 * PLAIN_MS, clock=clock)
    assert set(drive(subject, 8 * WINDOW, tokens=5, ms=2 * PLAIN_MS, clock=clock)) == {DRAFT}
    # A window that paid makes the next break short again.
    depths = drive(subject, 8 * WINDOW + FIRST_BREAK, tokens=1, ms=3 * PLAIN_MS, clock=clock)
    assert runs(depths)[1] == (0, FIRST_BREAK)


@pytest.mark.parametrize(("excess", "falls"), [(0.0, False), (MARGIN - 1.001, False), (MARGIN - 0.999, True)])
def test_a_loss_within_the_margin_is_noise(excess: float, falls: bool) -> None:
    subject = controller()
    drive(subject, 60, tokens=3, ms=3 * PLAIN_MS * (1 + excess), clock=True)
    assert (subject.fallbacks > 0) == falls


def test_a_plain_round_is_measured_though_the_second_one_was_drafted_ahead() -> None:
    subject = controller()
    observe(subject, subject.shape(1000).depth, 5, 2 * PLAIN_MS)
    observe(subject, 0, 5, 2 * PLAIN_MS, proposed=DRAFT)  # its draft was ready, whatever was wanted
    assert drive(subject, 7, tokens=5, ms=2 * PLAIN_MS, clock=True) == [0, *[DRAFT] * 6]
    assert subject.fallbacks == 0


def test_a_loss_is_checked_against_plain_rounds_of_the_same_moment() -> None:
    subject, depths = controller(), list[int]()
    drive(subject, 2, tokens=2, ms=PLAIN_MS, clock=True)
    for _ in range(WINDOW + CHECKS + 1):
        # The machine has become four times as slow: against the plain round before, drafting loses.
        depths.append(subject.shape(1000).depth)
        observe(subject, depths[-1], 2 if depths[-1] else 1, 4 * PLAIN_MS)
    assert runs(depths) == [(DRAFT, WINDOW), (0, CHECKS), (DRAFT, 1)]
    assert subject.fallbacks == 0


def test_one_slow_plain_round_is_not_the_cost_of_a_token() -> None:
    subject = controller()
    drive(subject, 2 + WINDOW, tokens=1, ms=2 * PLAIN_MS, clock=True)
    for check in range(CHECKS):
        assert subject.shape(1000).depth == 0
        observe(subject, 0, 1, 1e6 if check == 1 else PLAIN_MS)
    assert subject.fallbacks == 1


def noisy_sequence(gain: float, seed: int) -> SpeculationController:
    """300 tokens on a busy machine, where drafting is `gain` times as fast as plain decoding.

    A round takes 12% more or less, one of 25 several times as long, and now and then all do for a while;
    what one yields is anything from 1 to 9 tokens.
    """
    random, subject, busy, made = Random(seed), controller(), 1.0, 0
    while made < 300:
        if random.random() < 0.03:
            busy = 2.5 if busy == 1.0 else 1.0
        asked = subject.shape(1000).depth
        spike = random.uniform(2, 8) if random.random() < 0.04 else 1.0
        noise = random.lognormvariate(0, 0.12) * spike * busy
        tokens = random.randint(1, 9) if asked else 1
        observe(subject, asked, tokens, noise * PLAIN_MS * (5 / gain if asked else 1))
        made += tokens
    return subject


@pytest.mark.parametrize(
    ("gain", "least", "most"), [(2.0, 0, 10), (1.5, 0, 24), (0.7, 170, 200), (0.4, 185, 200)]
)
def test_how_often_it_errs_on_a_noisy_machine(gain: float, least: int, most: int) -> None:
    """Counts fallbacks in 200 sequences."""
    fell_back = sum(noisy_sequence(gain, seed).fallbacks > 0 for seed in range(200))
    assert least <= fell_back <= most


@pytest.mark.parametrize("clock", [True, False])
def test_without_stepping_down_it_drafts_however_slow_that_is(clock: bool) -> None:
    subject = controller(clock=clock, step_down=False)
    assert drive(subject, 100, tokens=1, ms=1e6, clock=clock) == [DRAFT] * 100
    assert subject.fallbacks == 0


def test_a_plain_composition_has_nothing_to_watch() -> None:
    subject = controller(shapes=(CHAIN,))
    assert drive(subject, 50, tokens=1, ms=1e6, clock=True) == [0] * 50
    assert (subject.fallbacks, subject.plain_tokens) == (0, 0)


@pytest.mark.parametrize("clock", [True, False])
def test_it_begins_plainly_where_speculation_is_not_expected_to_pay(clock: bool) -> None:
    tokens = expected_tokens(0.9, DRAFT)
    hopeless = Costs(step_ms=1.01 * (tokens - 1) * PLAIN_MS / DRAFT)
    subject = controller(hopeless, clock=clock)
    depths = drive(subject, FORESEEN_BREAK + 1, tokens=9, ms=2 * PLAIN_MS, clock=clock)
    assert runs(depths) == [(0, FORESEEN_BREAK), (DRAFT, 1)]
    assert (subject.fallbacks, subject.plain_tokens) == (1, FORESEEN_BREAK)
    hopeful = Costs(step_ms=0.99 * (tokens - 1) * PLAIN_MS / DRAFT)
    assert controller(hopeful, clock=clock).fallbacks == 0


# --- the choice of a shape


DEPTHS = tuple(map(CHAIN.deep, DRAFT_LENGTHS))


def best(costs: Costs, acceptance: float) -> int:
    """The depth with the most tokens a ms, by trying all."""

    def rate(shape: DraftShape) -> float:
        ms = costs.pass_ms(0, shape) + costs.draft_ms(0, shape)
        return expected_tokens(acceptance, shape.depth) / ms

    return max(DEPTHS, key=rate).depth


@pytest.mark.parametrize("acceptance", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("costs", [Costs(100.0, 1.0, 1.0), Costs(10.0, 0.1, 4.0), Costs(50.0, 0.0, 0.1)])
def test_the_depth_is_the_best_by_predicted_costs(costs: Costs, acceptance: float) -> None:
    subject = controller(costs, DEPTHS, acceptance=acceptance, step_down=False)
    assert subject.shape(1000).depth == best(costs, acceptance)
    assert subject.shape(2).depth == min(2, best(costs, acceptance)), "no deeper than there is room"


def test_measured_ratios_correct_what_was_predicted() -> None:
    """A pass takes a third of what was predicted, and a draft three times as long."""
    predicted, true = Costs(90.0, 0.0, 1.0), Costs(30.0, 0.0, 3.0)
    subject = controller(predicted, DEPTHS, step_down=False)
    assert subject.shape(1000).depth == best(predicted, 0.9) != best(true, 0.9)
    for _ in range(20):
        shape = subject.shape(1000)
        draft_ms = true.draft_ms(0, shape)
        # Nine of ten siblings are accepted, as was expected.
        subject.acceptance = RunningAcceptance(0.9)
        observe(subject, shape.depth, 10, true.pass_ms(0, shape) + draft_ms, draft_ms=draft_ms)
    subject.acceptance = RunningAcceptance(0.9)
    assert subject.shape(1000).depth == best(true, 0.9)


def test_a_pass_is_compared_with_the_price_of_what_it_verified() -> None:
    """A look-up finds nothing, so that its passes are plain: predictions were right."""
    costs = Costs(10.0, 2.0, 1.0)
    subject = controller(costs, DEPTHS, step_down=False)
    for _ in range(20):
        shape = subject.shape(1000)
        draft_ms = costs.draft_ms(0, shape)
        observe(subject, shape.depth, 1, costs.pass_ms(0, CHAIN) + draft_ms, proposed=0, draft_ms=draft_ms)
    assert subject.shape(1000).depth == best(costs, 0.9)


def test_a_clock_that_stands_still_decides_nothing() -> None:
    costs = Costs(90.0, 1.0, 1.0)
    subject = controller(costs, DEPTHS, step_down=False)
    for _ in range(3):
        observe(subject, subject.shape(1000).depth, 1, 0.0)
    assert subject.shape(1000).depth == best(costs, 0.9)


def test_without_a_clock_only_acceptance_moves_the_depth() -> None:
    subject = controller(Costs(90.0, 0.0, 1.0), DEPTHS, step_down=False, clock=False)
    before = subject.shape(1000).depth
    for _ in range(5):
        observe(subject, before, 10, NAN, draft_ms=NAN)  # times are not looked at
    deeper = subject.shape(1000).depth
    for _ in range(60):
        subject.acceptance.observe([(0, 1)])
    observe(subject, deeper, 1, NAN)
    assert subject.shape(1000).depth < before <= deeper


def test_drafts_that_a_pass_hides_are_nearly_free() -> None:
    """Where all is accepted, every draft is ready in time: levels beyond 100 ms gain little."""
    costs = Costs(100.0, 0.0, 8.0)
    alone, ahead = (controller(costs, DEPTHS, acceptance=1.0, ahead=most) for most in (0, 1))
    assert alone.shape(1000).depth == max(DRAFT_LENGTHS)
    assert ahead.shape(1000).depth == 15


def test_how_many_outcomes_are_drafted_for() -> None:
    costs = Costs(100.0, 0.0, 5.0)  # a draft of 8 takes 40 ms: two of them fit beside a pass
    assert controller(costs, ahead=4).outcomes == 4, "the clock ends drafting in time"
    assert controller(costs, ahead=4, clock=False).outcomes == 2
    assert controller(Costs(100.0, 0.0, 0.0), ahead=4, clock=False).outcomes == 4


@dataclass(frozen=True)
class Together(Costs):
    """Drafts for several outcomes are drawn together; each further one makes a level longer by `more`.

    They take `beside` times as long as it was predicted for a processor that no pass shares.
    """

    more: float = 1.0
    beside: float = 1.0

    def ahead_ms(self, length: int, shape: DraftShape, outcomes: int) -> list[float]:
        return outcomes * [self.beside * self.draft_ms(length, shape) * (1 + self.more * (outcomes - 1))]


def test_further_outcomes_are_drafted_for_while_they_delay_the_likeliest_too_little() -> None:
    assert controller(Together(100.0, 0.0, 10.0, more=0.05), ahead=4).outcomes == 4
    assert controller(Together(100.0, 0.0, 10.0, more=1.0), ahead=4).outcomes == 1
    assert controller(Together(100.0, 0.0, 10.0, more=0.5), ahead=4, clock=False).outcomes == 1
    assert controller(Costs(), (CHAIN.deep(0),), ahead=4).outcomes == 0


def test_drafts_for_several_outcomes_do_not_make_one_draft_look_slow() -> None:
    """Each kind of draft is compared with its own prediction."""
    predicted = Together(100.0, 0.0, 12.0)
    measured = replace(predicted, beside=3.0)
    subject = controller(predicted, DEPTHS, ahead=2, step_down=False)
    for _ in range(12):
        asked = subject.shape(1000)
        draft_ms, ahead_ms = measured.draft_ms(100, asked), measured.ahead_ms(100, asked, 2)[-1]
        ms, drawn = 100.0 + draft_ms, ((asked.depth, 2),)
        observe(subject, asked.depth, 5, ms, draft_ms=draft_ms, ahead_ms=ahead_ms, drawn_ahead=drawn)
    foreseen = controller(measured, DEPTHS, acceptance=subject.acceptance.rate, ahead=2, step_down=False)
    assert subject.shape(1000) == foreseen.shape(1000)


def test_acceptance_follows_what_is_seen_by_rank() -> None:
    subject = RunningAcceptance(0.9)
    assert subject.rate == pytest.approx(0.9)
    for _ in range(100):
        subject.observe([(1, 3), (3, 1)])
    assert subject.rates[0] == pytest.approx(0.25, abs=0.03)
    assert subject.rates[1] == pytest.approx(0.75, abs=0.03)
    untouched = subject.rates[2]
    subject.observe([])
    assert subject.rates[2] == untouched


def test_a_sequence_decodes_plainly_where_that_is_faster(target: PreTrainedModel) -> None:
    """A model this small drafts no faster than it verifies; tokens stay those of plain decoding."""
    sizes = SIZES | {"speculation.step_down": True}
    with LLM.from_models(target, config="retrieval", overrides=sizes) as llm:
        context = llm.read(byte_ids(90))
        plain, found = again(context, config="plain"), again(context)
        assert found.tokens == plain.tokens and found.plain_tokens > 0
        assert any("used plain decoding" in notice for notice in found.notices)


@pytest.mark.parametrize(("config", "ahead"), [("lookup", 0), ("retrieval", 4)])
def test_only_drafters_that_guess_outcomes_draft_ahead(
    target: PreTrainedModel, config: str, ahead: int
) -> None:
    with LLM.from_models(target, config=config, overrides=SIZES, link=PacedLink(1e9)) as llm:
        stream = llm.stream(byte_ids(40))
        (sequence,) = llm.engine.sequences
        assert sequence.controller.ahead == ahead
        stream.close()
