"""`LLM` and `SamplingParams`: checks, streams and their ends, seeds, results, and what is left behind."""

from __future__ import annotations

import gc
import json
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from small_engine import CONFIGS, SIZES, again
from small_engine import draft as draft  # a fixture
from tiny_models import byte_ids, byte_tokenizer, real_text, tiny_target
from transformers import PreTrainedModel

import offload_rt
from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams, clock, native
from offload_rt.context import TokenStream
from offload_rt.engine import controller
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError
from offload_rt.machine import memory
from offload_rt.planning.prediction import Predictor, RoundTime

ASCII = 128
PROMPT = byte_ids(100, vocabulary=ASCII)
PARAMS = SamplingParams(max_tokens=60)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    # A token is an ASCII character, so that every text is text.
    return tiny_target("llama-gqa", vocabulary=ASCII)


@pytest.fixture
def make(target: PreTrainedModel, draft: PreTrainedModel) -> Iterator[Any]:
    """Makes LLMs of the pair, and closes them."""
    with ExitStack() as closing:

        def llm(config: str = "triforce", step_down: bool = False, **options: Any) -> LLM:
            options = {"tokenizer": byte_tokenizer(), **options}
            overrides = SIZES | {"speculation.step_down": step_down}
            made = LLM.from_models(target, draft, config=config, overrides=overrides, **options)
            return closing.enter_context(made)

        yield llm


def test_the_package_offers_what_it_names() -> None:
    assert all(getattr(offload_rt, name).__name__ == name for name in offload_rt.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Chat'"):
        _ = offload_rt.Chat


def test_auto_takes_what_is_predicted_to_be_fastest(
    target: PreTrainedModel, draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = Predictor.round

    def favouring(predictor: Predictor, *arguments: Any) -> RoundTime:
        found = predict(predictor, *arguments)
        quick = predictor.config.name == ("naive" if predictor.request.context > 50 else "plain")
        return replace(found, ms=1e-3 * found.ms) if quick else found

    monkeypatch.setattr(Predictor, "round", favouring)
    params = SamplingParams(max_tokens=12)
    with LLM.from_models(target, draft, overrides=SIZES) as llm:
        long, short = llm.generate([PROMPT, PROMPT[:20]], params)
        assert (long.config, short.config) == ("naive", "plain") and long.levels[0].name == "draft:streaming"
        alone = llm.generate(PROMPT, params)
        assert long.tokens == alone.tokens
        told = [notice for notice in alone.notices if notice.startswith("config auto: ")]
        chosen = [re.match("config auto: ([a-z]+) [0-9.]+ ms a token", notice)[1] for notice in told]
        assert chosen == ["plain", "naive"], "the shortest text is read first, and a choice is told once"
    # Without a small model there is nothing to draft with it.
    with LLM.from_models(target, overrides=SIZES) as llm:
        result = llm.generate(PROMPT, params)
        assert result.config in ("retrieval", "trees", "lookup", "plain") and result.tokens == long.tokens
        assert "naive" not in "".join(result.notices)
    with LLM.from_models(target, draft, config="triforce", overrides=SIZES) as llm:
        assert llm.generate(PROMPT, params).config == "triforce", "what is named is kept"


@pytest.fixture(scope="module")
def plain_tokens(target: PreTrainedModel) -> list[int]:
    """60 greedy tokens after `PROMPT`."""
    with LLM.from_models(target, config="plain") as llm:
        return llm.generate(PROMPT, PARAMS).tokens


# --- what is checked before anything is done


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"top_p": 0.0}, "top-p 0.0"),
        ({"top_p": 1.01}, "top-p 1.01"),
        ({"top_p": float("nan")}, "top-p nan"),
        ({"top_k": -1}, "top-k -1"),
        ({"max_tokens": 0}, "max-tokens 0"),
        ({"stop": b"end"}, "stop must be a string or a sequence of strings, got b'end'"),
        ({"stop": None}, "stop must be a string or a sequence of strings, got None"),
        ({"stop": ["a", b"b"]}, "a stop string must be a str, got b'b'"),
        ({"temperature": "0.5"}, "temperature must be a number, got '0.5'"),
        ({"temperature": None}, "temperature must be a number, got None"),
        ({"top_p": True}, "top-p must be a number, got True"),
        ({"top_k": 2.5}, "top-k must be an integer, got 2.5"),
        ({"max_tokens": 3.5}, "max-tokens must be an integer, got 3.5"),
        ({"max_tokens": "3"}, "max-tokens must be an integer, got '3'"),
        ({"max_tokens": None}, "max-tokens must be an integer, got None"),
        ({"max_tokens": True}, "max-tokens must be an integer, got True"),
        ({"seed": 1.0}, "seed must be an integer, got 1.0"),
        ({"seed": torch.tensor([1, 2])}, "seed must be an integer, got tensor([1, 2])"),
        ({"ignore_eos": 1}, "ignore-eos 1 must be True or False"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "seed 9223372036854775808"),
    ],
)
def test_sampling_params_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        SamplingParams(**values)


def test_sampling_params_at_the_ends_of_their_ranges() -> None:
    SamplingParams(temperature=0, top_p=1.0, top_k=0, max_tokens=1, stop=[], seed=2**63 - 1)
    SamplingParams(temperature=100.0, top_p=1e-9, seed=None)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    given = SamplingParams(np.float32(0.5), top_k=np.int64(3), max_tokens=torch.tensor(7), seed=np.uint8(9))
    assert given == SamplingParams(0.5, top_k=3, max_tokens=7, seed=9)
    assert {type(value) for value in (given.top_k, given.max_tokens, given.seed)} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (b"abc", "prompt b'abc' is of type bytes: give a text (str) or token IDs"),
        (None, "prompt None is of type NoneType"),
        (3, "prompt 3 is of type int"),
        ({1: 2}, "prompt {1: 2} is of type dict"),
        ([1, "a"], "prompt token 1 must be an integer, got 'a'"),
        (["a", 1], "prompt token 0 must be an integer, got 'a'"),
        ([3.5], "prompt token 0 must be an integer, got 3.5"),
        ([1, True], "prompt token 1 must be an integer, got True"),
        (torch.tensor([1.5, 2.0]), "prompt token 0 must be an integer, got 1.5"),
        (torch.tensor([True]), "prompt token 0 must be an integer, got True"),
        (torch.tensor([[[1]]]), "prompt token 0 must be an integer, got [[1]]"),
        ([[1, 2], b"ab"], "prompt b'ab' is of type bytes"),
        (["a", [1, "b"]], "prompt token 1 must be an integer, got 'b'"),
    ],
    ids=str,
)
def test_what_is_no_prompt(make: Any, prompt: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make("plain").generate(prompt, PARAMS)


def test_a_prompt_that_is_no_unicode(make: Any) -> None:
    with pytest.raises(UsageError, match=r"prompt 'a\\ud800b': character 1 is half of a surrogate pair"):
        make("plain").generate("a\ud800b", PARAMS)


def test_what_are_no_params(make: Any) -> None:
    llm = make("plain")
    for prompt in ("a", ["a", "b"]):
        for params in (None, {"max_tokens": 3}, 5):
            with pytest.raises(UsageError, match=re.escape(f"params {params!r}: give SamplingParams")):
                llm.generate(prompt, params)
    with pytest.raises(UsageError, match="params None: give SamplingParams"):
        llm.read("a").generate((), None)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


def test_a_model_that_is_none_where_one_is_wanted(target: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match=re.escape("model './m' is no transformers model; LLM(…) takes")):
        LLM.from_models("./m")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no folder and no hub ID; LLM.from_models takes loaded models"):
        LLM(target)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown config '3'"):
        LLM.from_models(target, config=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="overrides .* give values by full key"):
        LLM.from_models(target, overrides=["a=b"])  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt(make: Any, prompt: Any) -> None:
    with pytest.raises(UsageError, match="the prompt is empty"):
        make().generate(prompt)


@pytest.mark.parametrize("token", [-1, ASCII, 10**9])
def test_a_token_outside_the_vocabulary(make: Any, token: int) -> None:
    with pytest.raises(UsageError, match=f"token {token} is outside the vocabulary of {ASCII}"):
        make().generate([1, token, 2])


def test_more_tokens_than_positions(make: Any) -> None:
    llm = make("plain")
    with pytest.raises(
        UsageError, match="8190 prompt tokens and 3 new ones .* 8192 positions .* 8189 prompt tokens or 2 new"
    ):
        llm.generate([1] * 8190, SamplingParams(max_tokens=3))
    assert len(llm.generate([1] * 8190, SamplingParams(max_tokens=2)).tokens) == 2
    for prompt, new, remedy in (
        (1, 8192, "8191 new tokens"),
        (9000, 10, "8182 prompt tokens"),
        (9000, 9000, "8192 together"),
    ):
        with pytest.raises(UsageError, match=f"positions of LlamaForCausalLM: use at most {remedy}$"):
            llm.generate([1] * prompt, SamplingParams(max_tokens=new))


def test_kv_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = tiny_target("llama", max_position_embeddings=10**7)
    with LLM.from_models(wide, config="plain", overrides={"store.slab_tokens": 256}) as llm:
        short = SamplingParams(max_tokens=5)
        kept = llm.read(byte_ids(20), 5)
        before = again(kept, short).tokens
        reserved = llm.engine.store.reserved_bytes
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
        # 1.25 KiB a token: 2 layers, 4 heads of 16, keys and values in float32, and 64 hidden states.
        with pytest.raises(
            UsageError, match=r"KV of 4000020 tokens needs 4\.8 GiB .* 1\.0 GiB are"
        ) as caught:
            llm.stream(byte_ids(20), SamplingParams(max_tokens=4_000_000))
        found = re.search(r"longest context that fits is (\d+) tokens", str(caught.value))
        used = llm.engine.store.used_bytes
        assert found is not None and int(found[1]) == (2**30 + reserved - used) // 1280
        # Nothing was taken, and what was there is still there.
        assert llm.engine.store.reserved_bytes == reserved
        monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
        assert again(kept, short).tokens == before
        # What a closed text had is the next one's.
        kept.close()
        assert len(llm.generate(byte_ids(170), short).tokens) == 5


# --- prompts


def test_a_prompt_is_text_or_tokens(make: Any, plain_tokens: list[int]) -> None:
    llm = make("plain")
    text = real_text()[:100]
    for prompt in (
        text,
        PROMPT,
        tuple(PROMPT),
        torch.tensor(PROMPT),
        np.array(PROMPT),
        [*torch.tensor(PROMPT)],
    ):
        result = llm.generate(prompt, PARAMS)
        assert result.tokens == plain_tokens and result.prompt_tokens == 100
    (both,) = {tuple(result.tokens) for result in llm.generate(torch.tensor([PROMPT, PROMPT]), PARAMS)}
    assert list(both) == plain_tokens
    assert llm.encode(text) == PROMPT
    assert llm.encode(text, last=7) == PROMPT[-7:]


def test_long_prompts_keep_their_beginning_of_text(target: PreTrainedModel) -> None:
    class Tokenizer(SimpleNamespace):
        def __call__(self, text: str, **options: bool) -> dict[str, list[int]]:
            assert not options["verbose"]  # transformers would warn about its length
            return {"input_ids": [1, *text.encode()]}

    tokenizer = Tokenizer(bos_token_id=1)
    with LLM.from_models(target, config="plain", tokenizer=tokenizer) as llm:  # type: ignore[arg-type]
        assert llm.encode("abcdef", last=3) == [1, *b"ef"]
        assert llm.encode("abcdef", last=1) == [*b"f"]
        assert llm.encode("ab", last=3) == [1, *b"ab"]


# --- streams and their ends


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stream_is_the_text(make: Any, plain_tokens: list[int], config: str) -> None:
    llm = make(config)
    events = list(stream := llm.stream(PROMPT, PARAMS))
    result = stream.result
    assert [event.token for event in events] == result.tokens == plain_tokens
    assert "".join(event.text for event in events) == result.text == bytes(plain_tokens).decode()
    assert result.finish_reason == "length"
    assert sum(event.from_draft for event in events) == result.timings.draft_n_accepted
    # Each round ends with a token of the target's own.
    assert result.rounds + result.timings.draft_n_accepted == len(result.tokens) == 60


@pytest.fixture(scope="module")
def drafted_token(target: PreTrainedModel) -> tuple[int, int]:
    """(index, token) of an accepted draft that another accepted one follows, and that is new in the text."""
    with LLM.from_models(target, config="retrieval", overrides=SIZES) as llm:
        events = list(llm.stream(PROMPT, PARAMS))
    tokens = [event.token for event in events]
    for index, (event, following) in enumerate(pairwise(events)):
        if event.from_draft and following.from_draft and tokens.index(event.token) == index:
            return index, event.token
    raise AssertionError("no draft of two tokens was accepted")


@pytest.mark.parametrize("config", CONFIGS)
def test_an_end_token_inside_a_draft_ends_the_text(
    make: Any,
    target: PreTrainedModel,
    plain_tokens: list[int],
    drafted_token: tuple[int, int],
    config: str,
) -> None:
    index, end = drafted_token
    target.generation_config.eos_token_id = [end, ASCII - 1]
    try:
        llm = make(config)
        assert llm.end_tokens == {end, ASCII - 1}
        events = list(stream := llm.stream(PROMPT, PARAMS))
        result = stream.result
        assert result.tokens == plain_tokens[: index + 1] and result.finish_reason == "eos"
        # The end token has no text of its own.
        assert result.text == bytes(plain_tokens[:index]).decode() == "".join(e.text for e in events)
        ignored = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))
        assert ignored.tokens == plain_tokens and ignored.finish_reason == "length"
        assert llm.generate(PROMPT, PARAMS).tokens == result.tokens
    finally:
        target.generation_config.eos_token_id = None


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_stop_string_inside_a_draft_ends_the_text(
    make: Any, plain_tokens: list[int], drafted_token: tuple[int, int], config: str, length: int
) -> None:
    text = bytes(plain_tokens).decode()
    index, _ = drafted_token
    stop = text[index : index + length]
    llm = make(config)
    events = list(made := llm.stream(PROMPT, SamplingParams(max_tokens=60, stop=("never this", stop))))
    result = made.result
    end = text.index(stop)
    assert result.text == text[:end] == "".join(event.text for event in events)
    assert result.finish_reason == "stop"
    assert result.tokens == plain_tokens[: end + length]


def test_a_stop_string_that_is_not_completed_stays_in_the_text(make: Any, plain_tokens: list[int]) -> None:
    text = bytes(plain_tokens).decode()
    result = make().generate(PROMPT, SamplingParams(max_tokens=60, stop=(text[-2:] + "and no more",)))
    assert result.text == text and result.finish_reason == "length"


def test_a_text_that_fails_says_why(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("plain")
    monkeypatch.setattr(llm.engine, "step", lambda sequences: [RuntimeError("the link broke")])
    with pytest.raises(RuntimeError, match="the link broke"):
        list(stream := llm.stream(PROMPT, PARAMS))
    assert (stream.result.finish_reason, stream.result.error) == ("error", "the link broke")
    assert llm.engine.store.used_bytes == 0


def test_times_are_those_of_rounds(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the caller does between two tokens."""
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
    assert stream.result.timings.predicted_ms == 1e3 * stream.result.rounds


@pytest.mark.parametrize("config", CONFIGS)
def test_a_closed_stream_is_an_interrupted_text(make: Any, plain_tokens: list[int], config: str) -> None:
    llm = make(config)
    stream = llm.stream(PROMPT, PARAMS)
    begun = [next(stream) for _ in range(4)]
    stream.close()
    result = stream.result
    assert result.finish_reason == "interrupted"
    assert result.tokens == plain_tokens[:4] == [event.token for event in begun]
    assert result.text == bytes(plain_tokens[:4]).decode()
    assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens


@pytest.mark.parametrize("config", ["plain", "lookup", "trees", "triforce"])
def test_streams_in_turns_are_texts_of_their_own(make: Any, plain_tokens: list[int], config: str) -> None:
    llm, other_prompt = make(config), byte_ids(70, start=500, vocabulary=ASCII)
    alone = llm.generate(other_prompt, PARAMS)
    first, second = llm.stream(PROMPT, PARAMS), llm.stream(other_prompt, PARAMS)
    turns = [(a.token, b.token) for a, b in zip(first, second, strict=True)]
    assert turns == list(zip(plain_tokens, alone.tokens, strict=True))
    assert second.result.tokens == alone.tokens and llm.engine.store.used_bytes == 0


def test_a_stream_is_opened_in_the_middle_of_another(make: Any, plain_tokens: list[int]) -> None:
    llm, others = make(), byte_ids(70, start=500, vocabulary=ASCII)
    expected = make("plain").generate(others, PARAMS).tokens
    first = llm.stream(PROMPT, PARAMS)
    begun = [next(first).token for _ in range(5)]
    second = llm.stream(others, PARAMS)
    assert [*begun, *(event.token for event in first)] == plain_tokens == first.result.tokens
    assert [event.token for event in second] == second.result.tokens == expected
    assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("uses", [("generate", "generate", "read"), ("generate", "stream", "stream")])
def test_threads_take_turns(make: Any, plain_tokens: list[int], uses: tuple[str, ...]) -> None:
    llm = make()
    found: list[object] = []

    def work(use: str) -> None:
        try:
            for _ in range(2):
                if use == "stream":
                    found.append([event.token for event in llm.stream(PROMPT, PARAMS)])
                elif use == "read":
                    with llm.read(PROMPT) as text:
                        found.append(text.generate((), PARAMS, "plain").tokens)
                else:
                    found.append(llm.generate(PROMPT, PARAMS).tokens)
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [plain_tokens] * 6
    assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("link", [None, PacedLink(1e9)], ids=["in place", "link"])
def test_a_stream_that_is_let_go_is_closed_by_the_next_call(
    target: PreTrainedModel, plain_tokens: list[int], link: PacedLink | None
) -> None:
    """Nothing is done while it is collected: that may be in any thread, which may wait for nothing."""

    class Tab:  # a cycle, as objects of user interfaces have
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
    """As user interfaces do that handle what happens meanwhile; other threads take their turns."""
    inner: list[list[int]] = []
    streams: list[TokenStream] = []

    def busy(phase: str, done: int, total: int) -> None:
        if streams:
            streams.pop().close()
            time.sleep(0.1)  # another thread wants its turn
            inner.append(llm.generate(PROMPT[:20], SamplingParams(max_tokens=3)).tokens)

    with LLM.from_models(target, config="plain", overrides=SIZES, on_progress=busy) as llm:
        streams.append(llm.stream(PROMPT, PARAMS))
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens, "its own, not the inner one's"
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


@pytest.mark.parametrize(
    ("step", "error"), [("_read", KeyboardInterrupt), ("_compose", RuntimeError("no composition"))]
)
def test_a_text_that_cannot_begin_keeps_nothing(
    make: Any, step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make("plain")
    with monkeypatch.context() as patch:
        patch.setattr(TokenSequence, step, Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                llm.generate(PROMPT, PARAMS)
            assert llm.engine.store.used_bytes == 0
            reserved = llm.engine.store.reserved_bytes
    llm.generate(PROMPT, PARAMS)
    assert llm.engine.store.reserved_bytes == reserved, "its pages were free"


def test_a_second_interrupt_leaves_the_text(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    stream = llm.stream(PROMPT, PARAMS)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "stop", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    assert stream.result is not None and len(stream.result.tokens) == 1
    assert llm.engine.store.used_bytes == 0, "its context is closed"
    stream.close()


def test_a_stream_that_never_began_ends_as_any_other(make: Any, plain_tokens: list[int]) -> None:
    llm = make()
    stream = llm.stream(byte_ids(70, start=500, vocabulary=ASCII), PARAMS)
    stream.close()
    assert stream.result.tokens == [] and stream.result.finish_reason == "interrupted"
    assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens
    assert llm.engine.store.used_bytes == 0


def test_one_prompt_after_another_owes_nothing_to_the_first(make: Any) -> None:
    prompts = [byte_ids(length, start=length, vocabulary=ASCII) for length in (1, 300, 2, 64, 65)]
    llm, params = make(), SamplingParams(max_tokens=15)
    in_turn = [llm.generate(prompt, params).tokens for prompt in prompts]
    assert in_turn == [make().generate(prompt, params).tokens for prompt in prompts]


def test_progress_is_told(make: Any) -> None:
    told: list[tuple[str, int, int]] = []
    make(on_progress=lambda *report: told.append(report)).generate(PROMPT, SamplingParams(max_tokens=1))
    assert told[-1] == ("prefill", 198, 198)  # two layers of all tokens but the last


def test_tokens_without_drafts_are_told_as_what_happened(make: Any) -> None:
    result = make(step_down=True).generate(PROMPT, PARAMS)  # so small a model is faster without
    told = "of 60 tokens were decoded plainly, as drafting them would have taken longer"
    assert f"{result.plain_tokens} {told}" in result.notices


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"CXX": "/bin/false"},
            ["attention on the processor is slower without the native kernel; its build"],
        ),
        (
            {"PATH": ""},
            ["attention on the processor is slower without the native kernel; there is no C++ comp"],
        ),
        ({native.SWITCH: "0"}, []),
    ],
    ids=["build failed", "no compiler", "switched off"],
)
def test_a_missing_kernel_is_told(
    make: Any, environment: dict[str, str], told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    for name, value in {"OFFLOAD_RT_CACHE": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    native.load_kernel.cache_clear()
    found: list[str] = []
    make("plain", on_notice=found.append)
    native.load_kernel.cache_clear()
    assert [text[: len(start)] for text, start in zip(found, told, strict=True)] == told


def test_a_missing_draft_is_told(target: PreTrainedModel, plain_tokens: list[int]) -> None:
    told: list[str] = []
    with LLM.from_models(target, config="triforce", overrides=SIZES, on_notice=told.append) as llm:
        result = llm.generate(PROMPT, PARAMS)
    assert "no draft model: target:retrieved drafts alone" in told and told == result.notices
    assert [level.name for level in result.levels] == ["target:retrieved", "target:full"]
    assert result.draft is None and result.tokens == plain_tokens


# --- seeds


@pytest.mark.parametrize("config", CONFIGS)
def test_a_seed_repeats_its_tokens_whatever_the_clock_says(
    make: Any, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Left alone, so small a model does without drafts from the start: here it never ceases to reconsider.
    monkeypatch.setattr(controller, "FORESEEN_BREAK", 4)
    monkeypatch.setattr(controller, "FIRST_BREAK", 4)
    monkeypatch.setattr(controller, "LONGEST_BREAK", 4)
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=60, seed=11)
    expected = make(config, step_down=True).generate(PROMPT, params)
    if config != "plain":
        assert expected.timings.draft_n > 0
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


def test_another_seed_is_another_text(make: Any) -> None:
    llm = make()
    texts = {
        tuple(llm.generate(PROMPT, SamplingParams(temperature=1.0, max_tokens=30, seed=seed)).tokens)
        for seed in (0, 1, 2)
    }
    assert len(texts) == 3


def test_without_a_seed_one_is_drawn_and_told(make: Any) -> None:
    llm, params = make(), SamplingParams(temperature=1.5, max_tokens=30)
    first, second = llm.generate(PROMPT, params), llm.generate(PROMPT, params)
    assert first.seed != second.seed and first.tokens != second.tokens
    assert llm.generate(PROMPT, replace(params, seed=first.seed)).tokens == first.tokens
    (member,) = llm.generate([PROMPT], params)
    assert llm.generate(PROMPT, replace(params, seed=member.seed)).tokens == member.tokens


# --- results


FIELDS = {
    "model", "draft", "config", "device", "dtype", "seed", "prompt_tokens", "tokens", "text",
    "finish_reason", "timings", "rounds", "levels", "transfer", "memory",
}  # fmt: skip
TIMINGS = {
    "prompt_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second", "draft_n",
    "draft_n_accepted",
}  # fmt: skip
MEMORY = {"kv_bytes", "kv_reserved_bytes", "host_peak_bytes", "device_peak_bytes"}


def test_json_has_exactly_the_fields_of_the_contract(make: Any) -> None:
    result = make().generate(PROMPT, PARAMS)
    values = json.loads(json.dumps(result.to_json()))
    assert set(values) == FIELDS
    assert set(values["timings"]) == TIMINGS
    assert set(values["transfer"]) == {"bytes_to_device", "bytes_to_host", "wait_ms"}
    assert set(values["memory"]) == MEMORY
    assert [set(level) for level in values["levels"]] == [{"name", "proposed", "accepted", "ms"}] * 3
    names = [level["name"] for level in values["levels"]]
    assert names == ["draft:streaming", "target:retrieved", "target:full"]
    assert values["prompt_tokens"] == values["timings"]["prompt_n"] == 100
    assert values["timings"]["predicted_n"] == len(values["tokens"]) == 60
    assert (values["config"], values["device"], values["dtype"]) == ("triforce", "cpu", "float32")
    assert values["seed"] == result.seed and values["draft"] is not None
    assert values["memory"]["kv_reserved_bytes"] >= values["memory"]["kv_bytes"] > 0


def test_counts_of_a_result_agree(make: Any) -> None:
    result = make().generate(PROMPT, PARAMS)
    draft, middle, top = result.levels
    assert middle.proposed == result.timings.draft_n
    assert middle.accepted == result.timings.draft_n_accepted
    assert (top.proposed, top.accepted, top.rounds) == (0, 0, result.rounds)
    assert 0 < draft.accepted < draft.proposed
    assert 0 < middle.accepted < middle.proposed
    # KV of everything but what was emitted last, in whole pages where it is reserved.
    token_bytes = 2 * 2 * 2 * 16 * 4
    assert result.memory.kv_bytes == (100 + 60 - 1) * token_bytes
    assert result.memory.kv_reserved_bytes == 160 * token_bytes


# --- the end


def test_close_gives_everything_back(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    before = set(threading.enumerate())
    llm = LLM.from_models(target, draft, config="triforce", overrides=SIZES)
    llm.generate(PROMPT, PARAMS)
    assert llm.engine.store.reserved_bytes > 0
    llm.close()
    llm.close()
    assert llm.engine.store.reserved_bytes == llm.engine.store.used_bytes == 0
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stream_that_outlives_its_llm_says_so(make: Any, plain_tokens: list[int], config: str) -> None:
    llm, tokens = make(config), list[int]()
    stream = llm.stream(PROMPT, PARAMS)
    tokens.append(next(stream).token)
    llm.close()
    with pytest.raises(UsageError, match="this LLM is closed: make a new one"):
        tokens += (event.token for event in stream)
    assert list(stream) == [] and stream.result.finish_reason == "interrupted"
    assert tokens == plain_tokens[: len(tokens)] == stream.result.tokens


def test_use_after_close(target: PreTrainedModel) -> None:
    with pytest.raises(ZeroDivisionError), LLM.from_models(target, config="plain", overrides=SIZES) as llm:
        llm.generate(PROMPT, PARAMS)
        raise ZeroDivisionError
    for use in (llm.generate, llm.stream, llm.read):
        with pytest.raises(UsageError, match="closed: make a new one"):
            use(PROMPT)
