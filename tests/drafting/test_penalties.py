"""Penalties and log probabilities of whole engines, against transformers; test_enumeration.py has proofs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engine import CONFIGS, ON_CUDA, PROMPT, SIZES, again, engine_overrides, link_to
from support.tiny_models import noisy_copy, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams

NEW = 24
REPETITION = SamplingParams(max_tokens=NEW, repetition_penalty=1.3)
OF_GENERATED = SamplingParams(max_tokens=NEW, presence_penalty=0.9, frequency_penalty=0.6)


@pytest.fixture(scope="module")
def repetition_tokens(target: PreTrainedModel, plain_tokens: list[int]) -> list[int]:
    """What transformers itself writes."""
    ids = torch.tensor([PROMPT])
    generate: Any = target.generate
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    with torch.inference_mode():
        tokens: list[int] = generate(ids, **given, repetition_penalty=1.3)[0, len(PROMPT) :].tolist()
    assert tokens != plain_tokens[:NEW]
    return tokens


def logits_after(model: PreTrainedModel, tokens: list[int], count: int) -> Tensor:
    """Logits `[count, vocabulary]` before each of the last `count` tokens."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([tokens])).logits[0, -1 - count : -1]
    return logits.clone()


@pytest.mark.parametrize("config", CONFIGS)
def test_greedy_tokens_are_those_of_transformers(
    target: PreTrainedModel, draft: PreTrainedModel, repetition_tokens: list[int], config: str
) -> None:
    with LLM.from_models(target, draft, config=config, overrides=SIZES) as llm:
        result = llm.generate(PROMPT, REPETITION)
    assert result.tokens == repetition_tokens
    assert config == "plain" or result.timings.drafted_tokens > 0


def test_each_continuation_counts_its_own_tokens(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Those before it are its prompt: they matter to the repetition penalty alone."""
    with LLM.from_models(target, draft, config="triforce", overrides=SIZES) as llm:
        context = llm.read(PROMPT, 4 * NEW)
        first = context.generate((), OF_GENERATED)
        second = context.generate((), OF_GENERATED)
        context.rewind(second.start)
        rewound = context.generate((), REPETITION)
    for result, params in ((first, OF_GENERATED), (second, OF_GENERATED), (rewound, REPETITION)):
        before = [*PROMPT, *first.tokens] if result.start > len(PROMPT) else PROMPT
        assert result.tokens == penalised_greedily(target, before, params)
    assert first.tokens != second.tokens


def penalised_greedily(model: PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """The greedy tokens after `prompt`, by OpenAI's formula for each of them."""
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = logits_after(model, [*tokens, 0], 1)[0]
        for token in set(tokens):
            factor = params.repetition_penalty
            logits[token] *= factor if logits[token] < 0 else 1 / factor
        for token, count in Counter(tokens[len(prompt) :]).items():
            logits[token] -= count * params.frequency_penalty + params.presence_penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_sequences_of_a_batch_have_their_own_penalties(
    target: PreTrainedModel, draft: PreTrainedModel, plain_tokens: list[int], repetition_tokens: list[int]
) -> None:
    params = [SamplingParams(max_tokens=NEW), REPETITION, OF_GENERATED]
    with LLM.from_models(target, draft, config="naive", overrides=SIZES) as llm:
        plain, repeated, generated = llm.generate([PROMPT] * 3, params)
    assert plain.tokens == plain_tokens[:NEW] and repeated.tokens == repetition_tokens
    assert generated.tokens == penalised_greedily(target, PROMPT, OF_GENERATED)


@ON_CUDA
def test_penalties_on_a_gpu(device: torch.device) -> None:
    target = tiny_target("llama-gqa")
    draft, options = to(noisy_copy(target), device), {"config": "trees", "overrides": engine_overrides()}
    params = replace(OF_GENERATED, repetition_penalty=1.3, logprobs=1, max_tokens=8)
    with LLM.from_models(to(target, device), draft, link=link_to(device), **options) as llm:  # type: ignore[arg-type]
        context = llm.read(PROMPT)
        result, plain = again(context, params), again(context, params, "plain")
    assert result.tokens == plain.tokens and result.timings.accepted_tokens > 0
    assert result.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize("config", ["plain", "triforce", "trees"])
@pytest.mark.parametrize(
    "params", [replace(REPETITION, logprobs=5), SamplingParams(0.9, logprobs=20, seed=1)]
)
def test_logprobs_are_those_of_the_models_own_logits(
    target: PreTrainedModel, draft: PreTrainedModel, config: str, params: SamplingParams
) -> None:
    with LLM.from_models(target, draft, config=config, overrides=SIZES) as llm:
        events = llm.stream(PROMPT, params, max_tokens=NEW)
        made = list(events)
    assert events.result is not None
    tokens = events.result.tokens
    expected = logits_after(target, [*PROMPT, *tokens], NEW).log_softmax(-1)
    own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (
        events.result.logprobs == [event.logprob for event in made] == pytest.approx(own.tolist(), abs=1e-4)
    )
    best = expected.topk(params.logprobs or 0)
    for event, indices, values in zip(made, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [token for token, _ in event.alternatives] == indices
        assert [value for _, value in event.alternatives] == pytest.approx(values, abs=1e-4)
    assert events.result.to_json()["logprobs"] == events.result.logprobs


def test_logprobs_without_alternatives_and_none_at_all(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        stream = llm.stream(PROMPT, max_tokens=3, logprobs=0)
        assert [(event.logprob is None, event.alternatives) for event in stream] == 3 * [(False, ())]
        stream = llm.stream(PROMPT, max_tokens=3)
        assert [(event.logprob, event.alternatives) for event in stream] == 3 * [(None, ())]
    assert stream.result is not None and stream.result.logprobs is None
    assert "logprobs" not in stream.result.to_json()
