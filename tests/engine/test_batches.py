"""Batches: every member is generated as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_engine import CONFIGS, LINKS, PAGE, PROMPT, SIZES, engine_overrides
from support.tiny_models import byte_ids, byte_tokenizer
from transformers import PreTrainedModel

from offload_rt import LLM, SamplingParams
from offload_rt.drafting.base import Round
from offload_rt.engine import decode
from offload_rt.engine.engine import Engine
from offload_rt.engine.results import GenerationResult
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError

PROMPTS = [PROMPT, byte_ids(70, start=500), byte_ids(1), byte_ids(37, start=900)]
LENGTHS = (14, 6, 9, 12)
PLACES: dict[str, dict[str, object]] = {
    "in place": {},
    "link": {"resident_tokens": 2 * PAGE, "cpu_tokens": PAGE},
}


@pytest.fixture(params=PLACES)
def make(target: PreTrainedModel, draft: PreTrainedModel, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes LLMs whose KV is attended in place or streamed, and closes them."""
    with ExitStack() as closing:

        def llm(config: str, **overrides: object) -> LLM:
            sizes = engine_overrides(**({"ahead": 2} | PLACES[request.param])) | overrides
            options: dict[str, Any] = {"overrides": sizes, "link": LINKS[request.param]()}
            made = LLM.from_models(target, draft, byte_tokenizer(), config, **options)
            return closing.enter_context(made)

        yield llm


def told(result: GenerationResult) -> tuple[object, ...]:
    """What a member shares with its single run."""
    return result.tokens, result.text, result.finish_reason, result.seed, result.prompt_tokens


def letter_inside(tokens: list[int]) -> str:
    """A printable character that is new in the middle of the text."""
    new = (token for at, token in enumerate(tokens) if at > 4 and token not in tokens[:at])
    return chr(next(token for token in new if 33 <= token < 127))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", CONFIGS)
def test_members_are_their_single_runs(make: Any, config: str, temperature: float) -> None:
    llm = make(config)
    params = [SamplingParams(temperature, max_tokens=count, seed=at) for at, count in enumerate(LENGTHS)]
    whole = llm.generate(PROMPTS[3], replace(params[3], max_tokens=20))
    params[3] = replace(params[3], max_tokens=20, stop=(letter_inside(whole.tokens),))
    alone = [llm.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert alone[3].finish_reason == "stop"
    together = llm.generate(PROMPTS, params)
    assert [told(member) for member in together] == [told(one) for one in alone]
    if config not in ("plain", "lookup"):
        assert all(member.timings.drafted_tokens for member in together)


@pytest.mark.parametrize("shape", ["tree:3,2", "sequences:3", "grown:12"])
def test_members_draft_trees(make: Any, shape: str) -> None:
    small = {"model": "draft", "cache": "streaming", "draft": shape}
    middle = {"model": "target", "cache": "retrieved", "draft": "sequences:2", "layers": "skip:1a"}
    llm = make("triforce", **{"speculation.levels": [small, middle]})
    params = [SamplingParams(max_tokens=count, seed=0) for count in LENGTHS]
    alone = [llm.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    assert [told(member) for member in llm.generate(PROMPTS, params)] == [told(one) for one in alone]


@pytest.mark.parametrize("config", ["plain", "triforce", "lookup"])
def test_streams_and_a_batch_in_turns(make: Any, config: str) -> None:
    llm, params = make(config), SamplingParams(max_tokens=14, seed=0)
    alone = [llm.generate(prompt, params).tokens for prompt in PROMPTS]
    streams = [llm.stream(prompt, params) for prompt in PROMPTS[:2]]
    turns = [[next(stream).token for stream in streams] for _ in range(6)]
    assert [member.tokens for member in llm.generate(PROMPTS, params)] == alone
    turns += [[next(stream).token for stream in streams] for _ in range(8)]
    assert [list(tokens) for tokens in zip(*turns, strict=True)] == alone[:2]


def test_members_share_the_time_of_their_passes(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        together = llm.generate(PROMPTS, SamplingParams(max_tokens=12))
        spent = sum(level.ms for member in together for level in member.levels)
        assert spent <= max(member.timings.decode_ms for member in together)


def test_a_member_that_fails_ends_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("retrieval")
    params = [SamplingParams(max_tokens=count, seed=0) for count in LENGTHS]
    alone = [llm.generate(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    step, steps = Engine.step, 0

    def broken(layer: int, *arguments: Any) -> torch.Tensor:
        raise MemoryError("no room for this text")

    def breaking(engine: Engine, sequences: Sequence[TokenSequence]) -> list[Round | Exception]:
        nonlocal steps
        steps += 1
        if steps == 2:
            monkeypatch.setattr(sequences[0].full, "attend", broken)
        return step(engine, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", breaking)
        failed, *others = llm.generate(PROMPTS, params)
    assert llm.engine.store.used_bytes == 0
    assert (failed.finish_reason, failed.error) == ("error", "no room for this text")
    assert 0 < len(failed.tokens) < LENGTHS[0]
    assert failed.tokens == alone[0].tokens[: len(failed.tokens)]
    assert [told(member) for member in others] == [told(one) for one in alone[1:]]
    assert all(member.error is None for member in others)
    assert [told(member) for member in llm.generate(PROMPTS, params)] == [told(one) for one in alone]


def test_an_interrupt_ends_all_members(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("retrieval")
    params = SamplingParams(max_tokens=12, seed=0)
    expected = llm.generate(PROMPTS, params)
    calls, ahead = 0, decode.draft_ahead

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6:  # in the middle of a round, after some members have begun it
            raise KeyboardInterrupt
        return (yield from ahead(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(decode, "draft_ahead", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params)
    assert [told(one) for one in llm.generate(PROMPTS, params)] == [told(one) for one in expected]


def test_room_for_a_batch_is_room_for_the_sum_of_its_texts(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        token_bytes = llm.engine.store.layout.token_bytes + llm.engine.target.hidden_size * 4
        monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 60 * token_bytes)
        texts, params = [byte_ids(40), byte_ids(2)], [SamplingParams(max_tokens=n) for n in (10, 8)]
        assert [len(one.tokens) for one in llm.generate(texts, params)] == [10, 8]
        monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 0)
        with pytest.raises(UsageError, match="KV of 420 tokens .* of all sequences together fit"):
            llm.generate([byte_ids(400), texts[1]], params)
        assert llm.engine.store.used_bytes == 0


def test_prompts_and_parameters_belong_together(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="plain") as llm:
        with pytest.raises(UsageError, match="4 prompts but 2 parameters"):
            llm.generate(PROMPTS, [SamplingParams(), SamplingParams()])
        with pytest.raises(UsageError, match="for a list of prompts a list of them"):
            llm.generate(PROMPT, [SamplingParams()])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the prompt is empty"):
            llm.generate([PROMPT, []])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", ["plain", "triforce", "lookup"])
def test_a_common_beginning_is_read_once(
    make: Any, config: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all prompts, or of some; of one that is the beginning of another; of the same prompt twice."""
    llm, common = make(config), PROMPT[:100]
    prompts = [[*common, *byte_ids(9, start=700 + 50 * at)] for at in range(3)]
    prompts += [common, common, byte_ids(70, start=500), [*byte_ids(70, start=500), 3, 4]]
    params = [SamplingParams(temperature, max_tokens=12, seed=at) for at in range(len(prompts))]
    alone = [llm.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    read, original = list[int](), Engine.prefill

    def counting(engine: Engine, sequence: TokenSequence, tokens: Sequence[int]) -> None:
        read.append(len(tokens))
        original(engine, sequence, tokens)

    monkeypatch.setattr(Engine, "prefill", counting)
    together = llm.generate(prompts, params)
    assert [told(member) for member in together] == [told(one) for one in alone]
    assert sum(read) <= len(common) + 70 + 4 * 10
    assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("config", ["plain", "triforce"])
def test_forks_are_a_batch(make: Any, config: str) -> None:
    llm = make(config)
    params = [SamplingParams(0.8, max_tokens=count, seed=at) for at, count in enumerate((9, 14, 6))]
    prompts = [byte_ids(5, start=100 * at) for at in range(3)]
    with llm.read(PROMPT) as context:
        forks = [context.fork() for _ in range(3)]
        wanted = []
        for prompt, one in zip(prompts, params, strict=True):
            with context.fork() as fork:
                wanted.append((fork.generate(prompt, one).tokens, fork.tokens))
        results = llm.generate_from(forks, prompts, params)
        assert [(r.tokens, f.tokens) for r, f in zip(results, forks, strict=True)] == wanted
        assert all(len(one.tokens) == 4 for one in llm.generate_from(forks, max_tokens=4))
        with pytest.raises(UsageError, match="is in the batch twice: give a fork"):
            llm.generate_from([context, context])
        with pytest.raises(UsageError, match="3 contexts but 1 prompts"):
            llm.generate_from(forks, ["a"])
        forks[1].close()
        with pytest.raises(UsageError, match="prompt 1 of the batch"):
            llm.generate_from(forks, prompts)
        assert forks[0].generate((), max_tokens=2).tokens


def test_decode_is_the_counterpart_of_encode(make: Any) -> None:
    llm = make("plain")
    assert llm.decode(llm.encode("Call me Ishmael.")) == "Call me Ishmael."
    assert llm.decode(torch.tensor(llm.encode("Ahab"))) == "Ahab" and llm.decode([]) == ""
    with pytest.raises(UsageError, match="token 100000 is outside the vocabulary"):
        llm.decode([100000])
