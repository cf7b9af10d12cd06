"""What `LLM` and `Context` accept as prompts and parameters, and how they name what they refuse."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import byte_ids, byte_tokenizer, tiny_target
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


@pytest.fixture
def suggest(llm: LLM) -> Iterator[Callable[..., None]]:
    """Replaces the model's generation config until the test's end."""
    module = llm.engine.target.module
    own = module.generation_config

    def replaced(**values: Any) -> None:
        module.generation_config = GenerationConfig()
        for name, value in values.items():  # as files have them, unchecked
            setattr(module.generation_config, name, value)

    yield replaced
    module.generation_config = own


def test_the_models_own_sampling(llm: LLM, suggest: Callable[..., None]) -> None:
    assert llm.model_sampling is None
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    suggest(**drawn, repetition_penalty=1.1)
    assert llm.model_sampling == SamplingParams(0.6, 0.9, 20, min_p=0.05, repetition_penalty=1.1)
    suggest(temperature=0.6)
    assert llm.model_sampling is None
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    suggest(**penalties)
    assert llm.model_sampling == SamplingParams(**penalties), "greedy decoding has penalties too"


def notices(llm: LLM) -> list[str]:
    """The notices of an LLM that is opened with the same model."""
    told: list[str] = []
    module = llm.engine.target.module
    with LLM.from_models(module, None, llm.tokenizer, "plain", on_notice=told.append):
        return told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -1),
        ("top_k", 2.5),
        ("temperature", "hot"),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 7),
        ("min_p", [1]),
        ("repetition_penalty", 0),
        ("presence_penalty", 9.0),
    ],
)
def test_a_bad_value_of_the_generation_config_is_left_out_with_a_notice(
    llm: LLM, suggest: Callable[..., None], name: str, value: object
) -> None:
    good: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    suggest(do_sample=True, **good | {name: value})
    good.pop(name, None)
    assert llm.model_sampling == SamplingParams(**{"temperature": 1.0} | good)
    (told,) = notices(llm)
    assert told.startswith(f"generation_config.json: {name.replace('_', '-')} ") and "ignored" in told


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suppress_tokens", [3]),
        ("bad_words_ids", [[3]]),
        ("encoder_repetition_penalty", 1.2),
        ("exponential_decay_length_penalty", (3, 1.1)),
        ("no_repeat_ngram_size", 3),
        ("typical_p", 0.9),
    ],
)
def test_what_is_not_applied_is_a_notice(
    llm: LLM, suggest: Callable[..., None], name: str, value: object
) -> None:
    suggest(**{name: value})
    (told,) = notices(llm)
    assert told.startswith(f"generation_config.json: {name} ") and told.endswith(
        "is not supported; it is ignored"
    )
    suggest(suppress_tokens=[], bad_words_ids=None, no_repeat_ngram_size=0, typical_p=1.0, num_beams=1)
    assert not notices(llm)


@pytest.mark.parametrize(
    ("value", "ends"),
    [
        (3, {3}),
        ([3, 5], {3, 5}),
        ([[3], [5, None]], {3, 5}),
        (3.0, {3}),
        ("3", {3}),
        ("a", {ord("a")}),
        (["a", 5], {ord("a"), 5}),
        (-1, set()),
        (10**6, set()),
        (None, set()),
    ],
)
def test_end_tokens_however_they_are_written(
    llm: LLM, suggest: Callable[..., None], value: object, ends: set[int]
) -> None:
    suggest(eos_token_id=value)
    assert llm.end_tokens == ends and llm.model_sampling is None and not notices(llm)


@pytest.mark.parametrize("value", [True, 1.5, float("nan"), "<no token>", {"a": 1}, [[3], "<no token>"]])
def test_what_is_no_end_token_is_a_notice(llm: LLM, suggest: Callable[..., None], value: object) -> None:
    suggest(eos_token_id=value)
    assert llm.end_tokens == ({3} if isinstance(value, list) else set())
    (told,) = notices(llm)
    assert told.startswith("generation_config.json: eos_token_id ") and "is not a token" in told


def test_end_tokens_of_all_files_end_a_text() -> None:
    """Each is known to one of the three, and each ends the greedy text at its place."""
    target, tokenizer = tiny_target("llama-gqa"), copy.deepcopy(byte_tokenizer())
    prompt = byte_ids(40)
    with LLM.from_models(target, None, tokenizer, "plain") as llm:
        whole = llm.generate(prompt, max_tokens=40, ignore_eos=True).tokens
        ends = list(dict.fromkeys(whole))[:3]
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[2])
        assert llm.end_tokens == {ends[2]}
        assert llm.generate(prompt, max_tokens=40).tokens == whole[: whole.index(ends[2]) + 1]
        target.config.eos_token_id = ends[1]
        assert llm.generate(prompt, max_tokens=40).tokens == whole[: whole.index(ends[1]) + 1]
        target.generation_config.eos_token_id = ends[0]
        assert llm.end_tokens == set(ends)
        assert llm.generate(prompt, max_tokens=40).tokens == whole[: whole.index(ends[0]) + 1]


def test_the_models_own_stop_strings_end_a_text(llm: LLM, suggest: Callable[..., None]) -> None:
    whole = llm.generate([1, 2], max_tokens=20)
    own, given = whole.text[8:10], whole.text[4:6]
    suggest(stop_strings=[own])
    cut = llm.generate([1, 2], max_tokens=20)
    assert (cut.text, cut.finish_reason) == (whole.text[: whole.text.index(own)], "stop")
    both = llm.generate([1, 2], max_tokens=20, stop=given)
    assert both.text == whole.text[: min(whole.text.index(own), whole.text.index(given))]
    assert llm.generate([1, 2], max_tokens=20, ignore_eos=True).tokens == whole.tokens
    suggest(stop_strings=[""])
    assert llm.generate([1, 2], max_tokens=20).tokens == whole.tokens
    assert notices(llm) == [
        "generation_config.json: stop_strings: a stop string is empty: leave it out; it is ignored"
    ]


def test_a_generation_config_that_transformers_refuses_is_read(tmp_path: Path) -> None:
    tiny_target("llama-gqa").save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    refused = {
        "early_stopping": "x",
        "max_new_tokens": -3,
        "cache_implementation": "no",
        "eos_token_id": [[3]],
    }
    file.write_text(json.dumps(refused | {"do_sample": True, "top_p": 0.3}))
    with LLM(tmp_path, config="plain") as llm:
        assert llm.model_sampling == SamplingParams(1.0, 0.3) and llm.end_tokens == {3}
    for text in ("{", "[]", "null"):
        file.write_text(text)
        with pytest.raises(
            UsageError, match=r"generation_config.json is no JSON object .*; download it again"
        ):
            LLM(tmp_path, config="plain")
    file.unlink()
    with LLM(tmp_path, config="plain") as llm:
        assert llm.model_sampling is None and not llm.end_tokens
