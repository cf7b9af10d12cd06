"""Streams of an `LLM`: how they end, what they share, and what they leave behind."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from support.contexts import ASCII, PARAMS, PROMPT
from support.small_engine import CONFIGS, SIZES
from support.tiny_models import byte_ids
from transformers import PreTrainedModel

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams, TokenEvent, TokenStream, UsageError
from offload_rt.engine.engine import Engine
from offload_rt.system import clock


@pytest.mark.parametrize("config", CONFIGS)
def test_every_end_of_a_stream(
    make: Any, target: PreTrainedModel, plain_tokens: list[int], config: str
) -> None:
    text, llm = bytes(plain_tokens).decode(), make(config)

    def streamed(params: SamplingParams, take: int = 61) -> tuple[list[TokenEvent], Any]:
        stream = llm.stream(PROMPT, params)
        events = [event for _, event in zip(range(take), stream, strict=False)]
        stream.close()
        assert stream.result.tokens == [event.token for event in events]
        assert stream.result.text == "".join(event.text for event in events)
        return events, stream.result

    events, result = streamed(PARAMS)
    assert (result.tokens, result.text, result.finish_reason) == (plain_tokens, text, "length")
    assert sum(event.from_draft for event in events) == result.timings.accepted_tokens
    # Each round ends with a token of the target's own.
    assert result.rounds + result.timings.accepted_tokens == 60
    for taken in (0, 4):
        _, result = streamed(PARAMS, taken)
        assert (result.tokens, result.finish_reason) == (plain_tokens[:taken], "interrupted")
    # A token inside a draft that is new in the text: as the end of a stop string, and as an end token.
    at = next(
        (
            at
            for at, (one, following) in enumerate(pairwise(events))
            if one.from_draft and following.from_draft and plain_tokens.index(one.token) == at
        ),
        plain_tokens.index(plain_tokens[20]),
    )
    for length in (1, 3):
        stop = text[at : at + length]
        end = text.index(stop)
        _, result = streamed(SamplingParams(max_tokens=60, stop=("never this", stop)))
        assert (result.tokens, result.finish_reason) == (plain_tokens[: end + length], "stop")
        assert result.text == text[:end]
    _, result = streamed(replace(PARAMS, stop=(text[-2:] + "and no more",)))
    assert (result.text, result.finish_reason) == (text, "length"), "an incomplete stop string is text"
    target.generation_config.eos_token_id = [plain_tokens[at], ASCII - 1]
    try:
        _, result = streamed(PARAMS)
        assert (result.tokens, result.finish_reason) == (plain_tokens[: at + 1], "eos")
        assert result.text == text[:at], "the end token has no text"
        _, result = streamed(replace(PARAMS, ignore_eos=True))
        assert (result.tokens, result.finish_reason) == (plain_tokens, "length")
    finally:
        target.generation_config.eos_token_id = None
    assert llm.engine.store.used_bytes == 0


def test_a_failed_step_is_raised_and_recorded(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("plain")
    monkeypatch.setattr(llm.engine, "step", lambda sequences: [RuntimeError("the link broke")])
    with pytest.raises(RuntimeError, match="the link broke"):
        list(stream := llm.stream(PROMPT, PARAMS))
    assert (stream.result.finish_reason, stream.result.error) == ("error", "the link broke")
    assert llm.engine.store.used_bytes == 0


def test_the_time_between_steps_does_not_count(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def step(subject: Engine, *sequences: Any) -> Any:
        nonlocal now
        now += 1.0
        return stepped(subject, *sequences)

    stepped = Engine.step
    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(clock, "now", lambda: now)
    for _ in (stream := make("triforce").stream(PROMPT, PARAMS)):
        now += 100.0
    assert stream.result.timings.decode_ms == 1e3 * stream.result.rounds


def test_threads_take_turns(make: Any, plain_tokens: list[int]) -> None:
    llm: LLM = make()
    found: list[object] = []

    def read() -> list[int]:
        with llm.read(PROMPT) as context:
            return context.generate((), PARAMS, "plain").tokens

    def work(use: Any) -> None:
        try:
            found.extend(use() for _ in range(2))
        except Exception as error:
            found.append(error)

    uses = (
        lambda: llm.generate(PROMPT, PARAMS).tokens,
        lambda: [event.token for event in llm.stream(PROMPT, PARAMS)],
        read,
    )
    threads = [threading.Thread(target=work, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [plain_tokens] * 6 and llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("link", [None, PacedLink(1e9)], ids=["in place", "link"])
def test_a_dropped_stream_is_closed_by_the_next_call(
    target: PreTrainedModel, plain_tokens: list[int], link: PacedLink | None
) -> None:
    """Not by the garbage collector, which may run in any thread and must not wait."""

    class Tab:  # a reference cycle, as objects of user interfaces have
        def __init__(self, llm: LLM) -> None:
            self.stream = llm.stream(PROMPT, PARAMS)
            self.shows = self.show

        def show(self) -> int:
            return next(self.stream).token

    with LLM.from_models(target, config="retrieval", overrides=SIZES, link=link) as llm:
        assert next(llm.stream(PROMPT, PARAMS)).token == plain_tokens[0]
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens and llm.engine.store.used_bytes == 0
        assert Tab(llm).show() == plain_tokens[0]
        with llm.engine.lock:
            collecting = threading.Thread(target=gc.collect)
            collecting.start()
            collecting.join(10)
            assert not collecting.is_alive()
        assert llm.engine.store.used_bytes > 0
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens
        assert llm.engine.store.used_bytes == 0


def test_a_callback_may_use_the_llm(target: PreTrainedModel, plain_tokens: list[int]) -> None:
    """Also while other threads wait for their turn."""
    inner: list[list[int]] = []
    streams: list[TokenStream] = []

    def busy(phase: str, done: int, total: int) -> None:
        if streams:
            streams.pop().close()
            time.sleep(0.1)  # another thread wants its turn
            inner.append(llm.generate(PROMPT[:20], SamplingParams(max_tokens=3)).tokens)

    with LLM.from_models(target, config="plain", overrides=SIZES, on_progress=busy) as llm:
        streams.append(llm.stream(PROMPT, PARAMS))
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens
        streams.append(llm.stream(PROMPT, PARAMS))
        found: list[list[int]] = []
        batch = threading.Thread(
            target=lambda: found.extend(one.tokens for one in llm.generate([PROMPT], PARAMS))
        )
        batch.start()
        time.sleep(0.02)  # it reads its prompt
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens
        batch.join(60)
        assert found == [plain_tokens] and [len(tokens) for tokens in inner] == [3, 3]


@pytest.mark.parametrize("step", ["prefill", "compose"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_stream_that_cannot_begin_keeps_no_memory(
    make: Any, step: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make("plain")
    with monkeypatch.context() as patch:
        patch.setattr(f"offload_rt.engine.sequence.{step}", Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises(error):
                llm.generate(PROMPT, PARAMS)
            assert llm.engine.store.used_bytes == 0
            reserved = llm.engine.store.reserved_bytes
    llm.generate(PROMPT, PARAMS)
    assert llm.engine.store.reserved_bytes == reserved, "its pages were free"


def test_a_second_interrupt_while_closing(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "stop", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert stream.result is not None and len(stream.result.tokens) == 1
    assert llm.engine.store.used_bytes == 0
    stream.close()


def test_prompts_of_one_llm_do_not_affect_each_other(make: Any) -> None:
    llm, plain, params = make(), make("plain"), SamplingParams(max_tokens=15)
    for length in (1, 300, 2, 64, 65):
        prompt = byte_ids(length, start=length, vocabulary=ASCII)
        assert llm.generate(prompt, params).tokens == plain.generate(prompt, params).tokens


@pytest.mark.parametrize("config", ["plain", "triforce"])
def test_a_closed_llm(target: PreTrainedModel, draft: PreTrainedModel, config: str) -> None:
    before = set(threading.enumerate())
    llm = LLM.from_models(target, draft, config=config, overrides=SIZES)
    whole = llm.generate(PROMPT, PARAMS).tokens
    stream = llm.stream(PROMPT, PARAMS)
    tokens = [next(stream).token]
    llm.close()
    llm.close()
    with pytest.raises(UsageError, match="this LLM is closed: make a new one"):
        tokens += (event.token for event in stream)
    assert list(stream) == []
    assert stream.result is not None and stream.result.finish_reason == "interrupted"
    assert tokens == whole[: len(tokens)] == stream.result.tokens
    for use in (llm.generate, llm.stream, llm.read):
        with pytest.raises(UsageError, match="closed: make a new one"):
            use(PROMPT)
    assert llm.engine.store.reserved_bytes == llm.engine.store.used_bytes == 0
    assert set(threading.enumerate()) == before
    with pytest.raises(ZeroDivisionError), LLM.from_models(target, config="plain") as llm:
        raise ZeroDivisionError
    with pytest.raises(UsageError, match="closed"):
        llm.generate(PROMPT)
