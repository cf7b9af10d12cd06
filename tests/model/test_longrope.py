"""LongRoPE: a sequence has the frequencies of its own length from its beginning to its end."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import LONGROPE_BORDER, byte_ids, noisy_copy, tiny_target, transformers_greedy

from offload_rt import LLM, SamplingParams
from offload_rt.errors import UsageError
from offload_rt.model.runner import CausalModel

NEW = 12
PARAMS = SamplingParams(max_tokens=NEW)
SMALL = {"retrieval.budget": 64, "retrieval.recent": 16, "streaming.sinks": 4, "streaming.window": 28}


@pytest.mark.parametrize("length", [LONGROPE_BORDER - NEW, LONGROPE_BORDER + 1])
def test_up_to_the_border_and_from_there_on(length: int) -> None:
    target = tiny_target("phi3")
    prompt = byte_ids(length)
    expected = transformers_greedy(target, prompt, NEW)
    with LLM.from_models(target, noisy_copy(target), overrides=SMALL | {"prefill.chunk": 500}) as llm:
        assert llm.generate(prompt, PARAMS).tokens == expected


@pytest.mark.parametrize("length", [LONGROPE_BORDER - NEW + 1, LONGROPE_BORDER])
def test_a_sequence_that_would_cross_the_border_is_refused(length: int) -> None:
    refused = pytest.raises(UsageError, match=f"{length} prompt tokens and {NEW} new ones cross 2048 tokens")
    with LLM.from_models(tiny_target("phi3"), config="plain") as llm, refused:
        llm.generate(byte_ids(length), PARAMS)


def test_a_batch_has_sequences_of_both_sides() -> None:
    target = tiny_target("phi3")
    prompts = [byte_ids(length) for length in (50, LONGROPE_BORDER + 40, 90, LONGROPE_BORDER + 7)]
    expected = [transformers_greedy(target, prompt, NEW) for prompt in prompts]
    with LLM.from_models(target, noisy_copy(target), overrides=SMALL) as llm:
        assert [result.tokens for result in llm.generate(prompts, PARAMS)] == expected


def test_the_model_is_left_as_found() -> None:
    target = tiny_target("phi3")
    rotary = target.model.rotary_emb
    before = {name: value.clone() for name, value in rotary.named_buffers()}
    with LLM.from_models(target, config="plain") as llm:
        llm.generate(byte_ids(LONGROPE_BORDER + 40), PARAMS)
    assert rotary.rope_type == "longrope"
    assert all(torch.equal(value, before[name]) for name, value in rotary.named_buffers())


def test_frequencies_are_those_of_the_sequences_length() -> None:
    model = CausalModel(tiny_target("phi3"), "phi")
    long = model.for_length(LONGROPE_BORDER + 1, 0)
    factors = model.module.config.rope_parameters
    base = factors["rope_theta"] ** (-torch.arange(0, 12, 2) / 12)
    for runner, name in ((model, "short_factor"), (long, "long_factor")):
        torch.testing.assert_close(runner.rotary_frequencies, base / torch.tensor(factors[name]))
    assert model.for_length(LONGROPE_BORDER, 0) is model
    assert model.for_length(4000, 50) is long  # sequences of one side go through together


def test_a_drafts_frequencies_are_those_of_its_window() -> None:
    target = tiny_target("phi3")
    prompt = byte_ids(LONGROPE_BORDER + 40)
    accepted = []
    for window in (200, LONGROPE_BORDER + 100):
        sizes = SMALL | {"streaming.window": window, "speculation.step_down": False}
        with LLM.from_models(target, target, config="naive", overrides=sizes) as llm:
            accepted.append(llm.generate(prompt, PARAMS).timings)
    # A window that holds the whole sequence makes the model its own perfect draft.
    assert accepted[0].accepted_tokens < accepted[0].drafted_tokens
    assert accepted[1].accepted_tokens == accepted[1].drafted_tokens > 0
