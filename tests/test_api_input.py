"""What `LLM` and `Context` accept as prompts and parameters, and how they name what they refuse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import byte_ids, byte_tokenizer, tiny_target
from transformers import BatchEncoding, GenerationConfig

from offload_rt import LLM, SamplingParams
from offload_rt.errors import UsageError

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM.from_models(tiny_target("llama-gqa"), None, byte_tokenizer(), "plain") as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            [{"role": "user", "content": "hi"}],
            "has no chat template and so cannot chat: take an instruct model",
        ),
        (
            BatchEncoding({"input_ids": [1]}),
            'is a BatchEncoding: give the token IDs in it, prompt["input_ids"]',
        ),
    ],
    ids=["messages", "encoding"],
)
def test_what_a_tokenizer_takes_or_gives_is_no_prompt(llm: LLM, prompt: Any, message: str) -> None:
    for use in (llm.generate, llm.stream, llm.read):
        with pytest.raises(UsageError, match=re.escape(message)):
            use(prompt)


def test_sampling_parameters_may_be_given_by_name(llm: LLM) -> None:
    prompt = byte_ids(20)
    whole = llm.generate(prompt, max_tokens=8)
    assert whole.tokens == llm.generate(prompt, SamplingParams(max_tokens=8)).tokens
    assert [one.tokens for one in llm.generate([prompt, prompt], max_tokens=3)] == 2 * [whole.tokens[:3]]
    stream = llm.stream(prompt, SamplingParams(max_tokens=5, seed=3), max_tokens=2)
    assert [event.token for event in stream] == whole.tokens[:2]
    assert stream.result is not None and stream.result.seed == 3
    with llm.read(prompt) as context:
        assert context.generate(max_tokens=4).tokens == whole.tokens[:4]
        context.rewind(len(prompt))
        assert [event.token for event in context.stream(max_tokens=2)] == whole.tokens[:2]
        for use in (llm.generate, llm.stream, context.generate):
            with pytest.raises(
                UsageError, match="unknown sampling parameter max_token; did you mean max_tokens"
            ):
                use(prompt, max_token=3)
            with pytest.raises(UsageError, match="max-tokens 0 is out of range"):
                use(prompt, max_tokens=0)


def test_one_stop_string_may_stand_alone() -> None:
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"])
    with pytest.raises(UsageError, match="a stop string is empty"):
        SamplingParams(stop="")


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [300], [2]], PARAMS, "prompt 1 of the batch: prompt token 300 is outside the vocabulary"),
        (["a", "", "b"], PARAMS, "prompt 1 of the batch: the prompt is empty"),
        (["a", [1, "b"]], PARAMS, "prompt 1 of the batch: prompt token 1 must be an integer, got 'b'"),
        (["a", "b\ud800"], PARAMS, "prompt 1 of the batch: prompt 'b"),
        ([[1], [1] * 9000], PARAMS, "prompt 1 of the batch: 9000 prompt tokens"),
        (["a", "b"], [PARAMS, 3], "prompt 1 of the batch: params 3: give SamplingParams"),
        ([[{"role": "user"}], "b"], PARAMS, "prompt 0 of the batch: model LlamaForCausalLM has no chat"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_batch_names_its_bad_prompt(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        llm.generate(prompts, params)


def test_the_models_own_sampling(llm: LLM) -> None:
    assert llm.model_sampling is None
    own = llm.engine.target.module.generation_config
    try:
        llm.engine.target.module.generation_config = GenerationConfig(
            do_sample=True, temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1
        )
        assert llm.model_sampling == SamplingParams(0.6, 0.9, 20, min_p=0.05, repetition_penalty=1.1)
        llm.engine.target.module.generation_config.temperature = "hot"
        assert llm.model_sampling is None, "a bad suggestion is no reason to refuse a run"
        llm.engine.target.module.generation_config = GenerationConfig(temperature=0.6)
        assert llm.model_sampling is None
        llm.engine.target.module.generation_config = GenerationConfig(repetition_penalty=1.1)
        assert llm.model_sampling == SamplingParams(repetition_penalty=1.1), "greedy decoding has one too"
        llm.engine.target.module.generation_config = GenerationConfig(eos_token_id=[3, 5])
        assert llm.end_tokens == {3, 5} and llm.model_sampling is None
        llm.engine.target.module.generation_config = GenerationConfig(eos_token_id=3)
        assert llm.end_tokens == {3}
    finally:
        llm.engine.target.module.generation_config = own
