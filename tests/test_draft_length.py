"""The length of a draft follows what passes and drafts take, and how many tokens are accepted."""

from __future__ import annotations

import pytest
from small_engine import PARAMS, SIZES
from small_engine import target as target  # a fixture
from tiny_models import byte_ids
from transformers import PreTrainedModel

from offload_rt import LLM
from offload_rt.draft_length import CHOICES, DraftLength
from offload_rt.drafting.acceptance import RunningAcceptance


class Shapes:
    """Fixed costs: a pass of `pass_ms` and `query_ms` for each drafted token, drafts of `step_ms` a token."""

    def __init__(self, pass_ms: float, query_ms: float, step_ms: float, acceptance: float = 0.9) -> None:
        self.pass_ms = pass_ms
        self.query_ms = query_ms
        self.step_ms = step_ms
        self.acceptance = acceptance

    def expected_pass_ms(self, length: int, count: int) -> float:
        return self.pass_ms + self.query_ms * count

    def expected_draft_ms(self, length: int, count: int) -> float:
        return self.step_ms * count


def best(shapes: Shapes, acceptance: float) -> int:
    """The choice with the most tokens a ms, by the definition."""

    def rate(count: int) -> float:
        tokens = sum(acceptance**i for i in range(count + 1))
        return tokens / (shapes.expected_pass_ms(0, count) + shapes.expected_draft_ms(0, count))

    return max(CHOICES, key=rate)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("step_ms", [0.1, 1.0, 10.0])
def test_before_anything_is_seen_shapes_decide(step_ms: float, acceptance: float) -> None:
    shapes = Shapes(100.0, 1.0, step_ms, acceptance)
    assert DraftLength(shapes, clock=True).choose(0) == best(shapes, acceptance)
    assert DraftLength(shapes, clock=False).choose(0) == best(shapes, acceptance)


def test_it_learns_what_the_machine_takes() -> None:
    expected, true = Shapes(100.0, 1.0, 1.0), Shapes(40.0, 3.0, 0.5)
    length = DraftLength(expected, clock=True)
    for count in (4, 8, 12, 4, 16, 6, 12, 8) * 4:
        length.observe_pass(0, count, true.expected_pass_ms(0, count))
        length.observe_draft(0, count, true.expected_draft_ms(0, count))
    chosen = CHOICES.index(length.choose(0))
    assert abs(chosen - CHOICES.index(best(true, 0.9))) <= 1
    assert best(true, 0.9) != best(expected, 0.9)


def test_where_no_clock_may_decide_measured_times_count_for_nothing() -> None:
    shapes = Shapes(100.0, 1.0, 1.0)
    length = DraftLength(shapes, clock=False)
    for count in (4, 8, 12):
        length.observe_pass(0, count, float("nan"))
        length.observe_draft(0, count, float("nan"))
    assert length.choose(0) == best(shapes, 0.9)


def test_it_learns_how_many_are_accepted() -> None:
    shapes, seen = Shapes(100.0, 1.0, 1.0), RunningAcceptance(0.9)
    assert seen.rate == pytest.approx(0.9)
    for _ in range(60):
        seen.observe(8, 2)
    assert seen.rate == pytest.approx(2 / 3, abs=0.03)
    length = DraftLength(shapes, clock=False)
    shapes.acceptance = seen.rate
    assert length.choose(0) == best(shapes, seen.rate) < best(shapes, 0.9)
    before = seen.rate
    seen.observe(0, 0)  # a plain round says nothing
    assert seen.rate == before


def test_what_is_accepted_as_a_whole_rejects_nothing() -> None:
    seen = RunningAcceptance(0.5)
    for _ in range(200):
        seen.observe(8, 8)
    assert seen.rate > 0.999


def test_a_draft_that_is_hidden_is_as_long_as_the_pass() -> None:
    shapes = Shapes(100.0, 0.0, 10.0, acceptance=0.97)
    alone, ahead = DraftLength(shapes, clock=True), DraftLength(shapes, clock=True, ahead=True)
    assert alone.choose(0) * 10.0 > 100.0 >= ahead.choose(0) * 10.0


def test_a_draft_that_costs_nothing_by_its_shapes() -> None:
    shapes = Shapes(1.0, 0.01, 0.0, acceptance=0.3)
    length = DraftLength(shapes, clock=True)
    for _ in range(3):
        length.observe_pass(0, 4, shapes.expected_pass_ms(0, 4))
        length.observe_draft(0, 4, 0.1)
    assert length.choose(0) == best(shapes, 0.3)


def test_lookup_chooses_its_length_by_the_clock(target: PreTrainedModel) -> None:
    prompt = byte_ids(20) * 6
    overrides = SIZES | {"speculation.gamma2": 0}
    with LLM.from_models(target, config="lookup", overrides=overrides) as llm:
        assert llm.generate(prompt, PARAMS).timings.draft_n > 0
        assert llm.last_result.tokens == llm.plain(PARAMS).tokens
