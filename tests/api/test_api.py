"""`LLM` and `SamplingParams`: input checks, notices, seeds and results. Streams: test_token_streams.py."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.contexts import ASCII, PARAMS, PROMPT
from support.small_engine import SIZES, again
from support.tiny_models import byte_ids, real_text, tiny_target
from transformers import PreTrainedModel

import offload_rt
from offload_rt import LLM, SamplingParams, UsageError
from offload_rt.engine import controller
from offload_rt.kernels import native
from offload_rt.planning.cost_model import CostModel, RoundTime
from offload_rt.system import clock


def test_the_package_exports_what_it_names() -> None:
    assert all(getattr(offload_rt, name).__name__ == name for name in offload_rt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Chat'"):
        _ = offload_rt.Chat


def test_auto_chooses_the_config_that_is_predicted_to_be_fastest(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = CostModel.round

    def favouring(predictor: CostModel, *arguments: Any) -> RoundTime:
        found = predict(predictor, *arguments)
        quick = predictor.config.name == ("naive" if predictor.request.context > 50 else "plain")
        return replace(found, ms=1e-3 * found.ms) if quick else found

    monkeypatch.setattr(CostModel, "round", favouring)
    params = SamplingParams(max_tokens=12)
    with LLM.from_models(target, draft, overrides=SIZES) as llm:
        long, short = llm.generate([PROMPT, PROMPT[:20]], params)
        assert (long.config, short.config) == ("naive", "plain") and long.levels[0].name == "draft:streaming"
        alone = llm.generate(PROMPT, params)
        assert long.tokens == alone.tokens
        chosen = re.findall(r"^config auto: ([a-z]+) [0-9.]+ ms per token", "\n".join(alone.notices), re.M)
        assert chosen == ["plain", "naive"], "the shortest prompt is read first, and a choice is told once"
    with LLM.from_models(target, overrides=SIZES) as llm:  # without a small model
        result = llm.generate(PROMPT, params)
        assert result.config in ("retrieval", "trees", "lookup", "plain") and result.tokens == long.tokens
    with LLM.from_models(target, draft, config="triforce", overrides=SIZES) as llm:
        assert llm.generate(PROMPT, params).config == "triforce", "a named config is kept"


# ------------------------------------------------------------------------------------- input checks


@pytest.mark.parametrize(
    ("name", "value"),
    [  # what the command line can be given is in test_bad_input.py
        ("temperature", float("inf")),
        ("temperature", "0.5"),
        ("top_p", 1.01),
        ("top_p", True),
        ("top_k", 2.5),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("repetition_penalty", None),
        ("presence_penalty", -2.5),
        ("frequency_penalty", float("nan")),
        ("frequency_penalty", "1"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("max_tokens", True),
        ("max_tokens", None),
        ("seed", torch.tensor([1, 2])),
        ("seed", 2**63),
        ("stop", b"end"),
        ("stop", None),
        ("ignore_eos", 1),
    ],
    ids=str,
)
def test_bad_sampling_params(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        SamplingParams(**{name: value})
    assert name.replace("_", "-") in str(refused.value) and repr(value) in str(refused.value)


def test_bad_stop_strings() -> None:
    for stop, message in (
        (["a", b"b"], r"a stop string must be a str, got b'b'"),
        (["a" * 4097], r"a stop string has 4097 characters: use at most 4096"),
        (["a"] * 65, r"65 stop strings are given: use at most 64"),
        (("a", ""), "a stop string is empty"),
    ):
        with pytest.raises(UsageError, match=message):
            SamplingParams(stop=stop)  # type: ignore[arg-type]


def test_good_sampling_params() -> None:
    SamplingParams(temperature=0, top_p=1.0, top_k=0, max_tokens=1, stop=[], seed=2**63 - 1)
    SamplingParams(min_p=1, repetition_penalty=5, presence_penalty=-2, frequency_penalty=2, logprobs=20)
    half, few, many, seed = np.float32(0.5), np.int64(3), torch.tensor(7), np.uint8(9)
    given = SamplingParams(half, top_k=few, max_tokens=many, seed=seed)  # type: ignore[arg-type]
    assert given == SamplingParams(0.5, top_k=3, max_tokens=7, seed=9)
    assert {type(value) for value in (given.top_k, given.max_tokens, given.seed)} == {int}
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "prompt b'abc' is of type bytes"),
        (None, "prompt None is of type NoneType"),
        ([1, "a"], "prompt token 1 must be an integer, got 'a'"),
        (["a", [1, "b"]], "prompt token 1 must be an integer, got 'b'"),
        ([1, True], "prompt token 1 must be an integer, got True"),
        (torch.tensor([1.5, 2.0]), "prompt token 0 must be an integer, got 1.5"),
        (torch.tensor([[[1]]]), "prompt token 0 must be an integer, got [[1]]"),
        ("a\ud800b", r"prompt 'a\ud800b': character 1 is half of a surrogate pair"),
        ("", "the prompt is empty"),
        ((), "the prompt is empty"),
        ([1, -1, 2], f"token -1 is outside the vocabulary of {ASCII}"),
        ([1, ASCII, 2], f"token {ASCII} is outside the vocabulary of {ASCII}"),
        ([1] * 9000, "8132 prompt tokens"),
        ([1] * 8190, "8132 prompt tokens or 2 new"),
    ],
    ids=lambda given: str(given)[:20],
)
def test_bad_prompts(make: Any, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make("plain").generate(prompt, PARAMS)


def test_the_longest_prompt(make: Any) -> None:
    assert len(make("plain").generate([1] * 8190, SamplingParams(max_tokens=2)).tokens) == 2


def test_bad_models_and_parameters(target: PreTrainedModel, make: Any) -> None:
    llm = make("plain")
    for use, message in (
        (lambda: llm.generate("a", {"max_tokens": 3}), "params {'max_tokens': 3}: give SamplingParams"),
        (lambda: llm.generate(["a", "b"], None), "params None: give SamplingParams"),
        (lambda: LLM.from_models("./m"), "model './m' is no transformers model"),  # type: ignore[arg-type]
        (lambda: LLM(target), "LLM.from_models takes loaded models"),  # type: ignore[arg-type]
        (lambda: LLM.from_models(target, config=3), "unknown config '3'"),  # type: ignore[arg-type]
        (lambda: LLM.from_models(target, overrides=["a=b"]), "give values by full key"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            use()


def test_kv_that_does_not_fit_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_target("llama", max_position_embeddings=10**7)
    with LLM.from_models(wide, config="plain", overrides={"store.slab_tokens": 256}) as llm:
        short = SamplingParams(max_tokens=5)
        kept = llm.read(byte_ids(20), 5)
        before = again(kept, short).tokens
        reserved = llm.engine.store.reserved_bytes
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**30))
        # 1.25 KiB per token: 2 layers, 4 heads of 16, keys and values in float32, and 64 hidden states. What
        # the store has reserved and never written is part of what is available.
        free = 2**30 // 1280
        message = rf"KV of 4000020 tokens needs 4\.8 GiB .* 1\.0 GiB are .* longest .* {free} tokens"
        with pytest.raises(UsageError, match=message):
            llm.stream(byte_ids(20), SamplingParams(max_tokens=4_000_000))
        assert llm.engine.store.reserved_bytes == reserved
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=0))
        assert again(kept, short).tokens == before
        kept.close()  # its memory is reused
        assert len(llm.generate(byte_ids(170), short).tokens) == 5


def test_a_prompt_is_text_or_tokens(make: Any, plain_tokens: list[int]) -> None:
    llm, text, tensor = make("plain"), real_text()[:100], torch.tensor(PROMPT)
    for prompt in (text, tuple(PROMPT), tensor, np.array(PROMPT), [*tensor]):
        result = llm.generate(prompt, PARAMS)
        assert result.tokens == plain_tokens and result.prompt_tokens == 100
    batch = llm.generate(torch.stack([tensor, tensor]), PARAMS)
    assert [result.tokens for result in batch] == [plain_tokens] * 2
    assert llm.encode(text) == PROMPT and llm.encode(text, last=7) == PROMPT[-7:]


def test_a_shortened_prompt_keeps_its_beginning_of_text_token(target: PreTrainedModel) -> None:
    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            assert not options["verbose"]  # transformers would warn about its length
            return {"input_ids": [1, *text.encode()]}

    tokenizer = Tokenizer(bos_token_id=1, eos_token_id=None)
    with LLM.from_models(target, config="plain", tokenizer=tokenizer) as llm:  # type: ignore[arg-type]
        assert llm.encode("abcdef", last=3) == [1, *b"ef"]
        assert llm.encode("abcdef", last=1) == [*b"f"]
        assert llm.encode("ab", last=3) == [1, *b"ab"]


# ------------------------------------------------------------------------------ progress and notices


def test_progress_counts_tokens_of_layers(make: Any) -> None:
    told: list[tuple[str, int, int]] = []
    make(on_progress=lambda *report: told.append(report)).generate(PROMPT, SamplingParams(max_tokens=1))
    assert told[-1] == ("prefill", 198, 198)  # two layers of all tokens but the last


def test_a_notice_counts_the_tokens_that_were_decoded_plainly(make: Any) -> None:
    result = make(step_down=True).generate(PROMPT, PARAMS)  # plain decoding of so small a model is faster
    assert result.plain_tokens and any(f"{result.plain_tokens} of 60 tokens" in n for n in result.notices)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"CXX": "/bin/false"}, ["slower without the native kernel; its build failed"]),
        ({"PATH": ""}, ["slower without the native kernel; install g++"]),
        ({native.SWITCH: "0"}, []),
    ],
    ids=["build failed", "no compiler", "switched off"],
)
def test_a_missing_kernel_is_reported(
    make: Any, environment: dict[str, str], told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in {"OFFLOAD_RT_CACHE": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    native.load_kernel.cache_clear()
    found: list[str] = []
    make("plain", on_notice=found.append)
    native.load_kernel.cache_clear()
    assert all(part in notice for notice, part in zip(found, told, strict=True))


def test_a_missing_draft_model_is_reported(target: PreTrainedModel, plain_tokens: list[int]) -> None:
    told: list[str] = []
    with LLM.from_models(target, config="triforce", overrides=SIZES, on_notice=told.append) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert "no draft model: only target:retrieved drafts" in told and told == result.notices
    assert [level.name for level in result.levels] == ["target:retrieved", "target:full"]
    assert result.draft is None and result.tokens == plain_tokens


# -------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("config", ["plain", "triforce", "lookup", "trees"])
def test_a_seed_repeats_its_tokens_whatever_the_clock_says(
    make: Any, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a model would decode plainly from the start: here the controller never ceases to reconsider.
    monkeypatch.setattr(controller, "FORESEEN_BREAK", 4)
    monkeypatch.setattr(controller, "FIRST_BREAK", 4)
    monkeypatch.setattr(controller, "LONGEST_BREAK", 4)
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=60, seed=11)
    expected = make(config, step_down=True).generate(PROMPT, params)
    if config != "plain":
        assert expected.timings.drafted_tokens > 0
    for load in (1, 2):
        source = random.Random(load)
        now = 0.0

        def wild() -> float:
            nonlocal now
            now += source.choice([1e-6, 1e-3, 10.0])  # noqa: B023
            return now

        with monkeypatch.context() as patch:
            patch.setattr(clock, "now", wild)
            assert make(config, step_down=True).generate(PROMPT, params).tokens == expected.tokens


def test_a_missing_seed_is_drawn_and_reported(make: Any) -> None:
    llm, params = make(), SamplingParams(temperature=1.5, max_tokens=30)
    first, second = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert first.seed != second.seed and first.tokens != second.tokens
    (member,) = llm.generate([PROMPT], params)
    for result in (first, member):
        assert llm.generate(PROMPT, replace(params, seed=result.seed)).tokens == result.tokens


# ------------------------------------------------------------------------------------------ results

FIELDS = {
    "": {
        "model", "draft", "config", "device", "dtype", "seed", "prompt_tokens", "tokens", "text",
        "finish_reason", "timings", "rounds", "levels", "transfer", "memory", "exactness",
    },
    "timings": {
        "prefill_tokens", "prefill_ms", "new_tokens", "decode_ms", "tokens_per_second", "drafted_tokens",
        "accepted_tokens",
    },
    "transfer": {"bytes_to_device", "bytes_to_host", "wait_ms"},
    "memory": {"kv_bytes", "kv_reserved_bytes", "host_peak_bytes", "device_peak_bytes"},
}  # fmt: skip


def test_a_result_and_its_json(make: Any) -> None:
    result = make().generate(PROMPT, PARAMS)
    values = json.loads(json.dumps(result.to_json()))
    assert {name: set(values[name] if name else values) for name in FIELDS} == FIELDS
    assert [set(level) for level in values["levels"]] == [{"name", "proposed", "accepted", "ms"}] * 3
    assert [level.name for level in result.levels] == ["draft:streaming", "target:retrieved", "target:full"]
    assert result.prompt_tokens == result.timings.prefill_tokens == 100
    assert result.timings.new_tokens == len(result.tokens) == 60
    assert (result.config, result.device, result.dtype) == ("triforce", "cpu", "float32")
    assert result.draft is not None
    draft, middle, top = result.levels
    measured = result.timings
    assert (middle.proposed, middle.accepted) == (measured.drafted_tokens, measured.accepted_tokens)
    assert (top.proposed, top.accepted, top.rounds) == (0, 0, result.rounds)
    assert 0 < draft.accepted < draft.proposed and 0 < middle.accepted < middle.proposed
    # KV of everything but what was emitted last; it is reserved in whole pages.
    token_bytes = 2 * 2 * 2 * 16 * 4
    assert result.memory.kv_bytes == (100 + 60 - 1) * token_bytes
    assert result.memory.kv_reserved_bytes == 160 * token_bytes
