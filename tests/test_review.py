"""What goes wrong between two rounds, two threads or two texts, and must not."""

from __future__ import annotations

import pytest
from tiny_models import byte_ids, tiny_target
from transformers import PreTrainedModel

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.draft_length import CHOICES, DraftLength
from offload_rt.drafting.lookup import LookupDrafter
from offload_rt.governor import Governor

PROMPT = byte_ids(150)
PARAMS = SamplingParams(max_tokens=40)
SIZES: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "store.page": 16,
    "store.slab_tokens": 64,
    "store.segment_tokens": 64,
    "offload.ahead": 2,
    "speculation.gamma2": 5,
    "speculation.step_down": False,
}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa")


@pytest.fixture(scope="module")
def plain_tokens(target: PreTrainedModel) -> list[int]:
    with LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        return llm.generate(PROMPT, PARAMS).tokens


class Free:
    """A forecast in which speculation pays."""

    def expected_ms(self, length: int, count: int) -> float:
        return 1.0 + count / 100

    def expected_tokens(self, count: int) -> float:
        return 1.0 + count


def test_a_plain_round_is_measured_though_the_second_one_was_drafted_ahead_of() -> None:
    governor = Governor(4, step_down=True, forecast=Free(), clock=True)
    governor.begin(100)
    governor.observe(governor.draft_count(), 5, 100, 20.0, 0.0)
    governor.observe(4, 5, 105, 20.0, 0.0)  # its draft was ready, whatever the governor wanted
    assert governor.draft_count() == 0
    governor.observe(0, 1, 110, 10.0, 0.0)
    for round_ in range(6):
        assert governor.draft_count() == 4
        governor.observe(4, 5, 111 + 5 * round_, 20.0, 0.0)
    assert governor.steps_down == 0


def test_drafting_ahead_that_always_guesses_right_is_governed_too(
    target: PreTrainedModel, plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Governor, "begin", lambda self, length: None)  # as where it is expected to pay
    # The retrieved cache holds the whole text, so that it drafts what the target says.
    overrides = SIZES | {"speculation.step_down": True, "retrieval.budget": 512, "speculation.gamma2": 1}
    link = PacedLink(1e9, latency_s=1e-3)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens


class LookedUp(LookupDrafter):
    def expected_pass_ms(self, length: int, count: int) -> float:
        return 1.0 + 0.01 * count

    def expected_draft_ms(self, length: int, count: int) -> float:
        return self.expected_ms(length, count)


def test_the_length_of_a_draft_that_costs_nothing_by_its_shapes() -> None:
    length = DraftLength(LookedUp(4, 1), clock=True)
    for _ in range(3):
        length.observe_pass(100, 4, 1.04)
        length.observe_draft(100, 4, 0.1)
    assert length.choose(100) in CHOICES


def test_lookup_chooses_its_length_by_the_clock(target: PreTrainedModel) -> None:
    prompt = byte_ids(20) * 6
    overrides = SIZES | {"speculation.gamma2": 0}
    with LLM.from_models(target, config="lookup", overrides=overrides) as llm:
        assert llm.generate(prompt, PARAMS).timings.draft_n > 0
        assert llm.last_result.tokens == llm.plain(PARAMS).tokens
