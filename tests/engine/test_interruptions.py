"""What ends a sequence in its middle, over a link: interrupts, copies that fail or stall, and a close.

What was written by then stands, the next sequence is whole, and no thread is left.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.small_engine import PARAMS, PROMPT, engine_overrides, pass_running
from support.uneven_link import UnevenLink
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import CopyFailed, Link, PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.caches.full import FullCache, PassCancelled
from offload_rt.caches.selection import choose_chunks
from offload_rt.engine import decode
from offload_rt.engine.batching import PassThread
from offload_rt.model.work import Work

SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


# --------------------------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("place", ["drafting", "start", "join"])
def test_an_interrupt_between_a_pass_and_who_waits_for_it(
    target: PreTrainedModel, plain_tokens: list[int], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            if place != "drafting":
                time.sleep(2e-3)  # the pass has begun
            raise KeyboardInterrupt

    start, ahead, join = PassThread.start, decode.draft_ahead, PassThread.join

    def started(thread: PassThread, *arguments: Any) -> Any:
        begun = start(thread, *arguments)
        interrupt()
        return begun

    def drafting(*arguments: Any) -> Work[Any]:
        interrupt()
        return (yield from ahead(*arguments))

    joins = 0

    def joined(thread: PassThread) -> None:
        nonlocal joins
        joins += calls >= 3
        if joins == 1:
            raise KeyboardInterrupt
        join(thread)

    if place == "start":
        monkeypatch.setattr(PassThread, "start", started)
    else:
        monkeypatch.setattr(decode, "draft_ahead", drafting)
    if place == "join":
        monkeypatch.setattr(PassThread, "join", joined)
    running, abandon, under_a_pass = pass_running(monkeypatch), FullCache.abandon, list[FullCache]()

    def abandoned(full: FullCache) -> None:
        if running.is_set() and not threading.current_thread().name.startswith("offload_rt-pass"):
            under_a_pass.append(full)
        abandon(full)

    monkeypatch.setattr(FullCache, "abandon", abandoned)
    overrides, link = engine_overrides(ahead=2), PacedLink(1e9, latency_s=3e-3)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        with pytest.raises(KeyboardInterrupt):
            list(stream := llm.stream(PROMPT, PARAMS))
        stands = stream.result
        assert stands is not None and stands.finish_reason == "interrupted"
        assert 0 < len(stands.tokens) < PARAMS.max_tokens
        assert stands.tokens == plain_tokens[: len(stands.tokens)]
        assert llm.generate(PROMPT, SHORT).tokens == plain_tokens[: SHORT.max_tokens]
        assert not under_a_pass


@pytest.mark.parametrize("link", [lambda: None, lambda: PacedLink(1e9, 1e-3)], ids=["in place", "link"])
def test_closing_in_the_middle_of_a_sequence(
    target: PreTrainedModel, draft: PreTrainedModel, plain_tokens: list[int], link: Callable[[], Link | None]
) -> None:
    llm = LLM.from_models(target, draft, None, "retrieval", engine_overrides(ahead=2), link=link())
    stream = llm.stream(PROMPT, PARAMS)
    tokens = [next(stream).token for _ in range(3)]
    llm.close()
    stream.close()
    assert tokens == plain_tokens[:3] and stream.result is not None
    assert stream.result.tokens == tokens and stream.result.finish_reason == "interrupted"


# ------------------------------------------------------------------------------------- failed copies


def breaking(fails_at: int) -> UnevenLink:
    """Fails at its copy number `fails_at`, and at none after it."""
    link, numbers = UnevenLink(), itertools.count(1)
    link.failing = lambda pairs: next(numbers) == fails_at
    return link


@pytest.mark.parametrize("fails_at", [1, 2, 5, 9, 20, 33])
@pytest.mark.parametrize(
    ("config", "offload"),
    [
        ("plain", {"ahead": 0}),
        ("triforce", {"ahead": 0, "refresh_from": "store"}),
        ("retrieval", {"ahead": 2, "cpu_tokens": 32}),
    ],
    ids=["plain", "triforce", "drafting ahead"],
)
def test_a_copy_that_fails_is_named_and_can_be_lived_with(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    plain_tokens: list[int],
    config: str,
    offload: dict[str, object],
    fails_at: int,
) -> None:
    overrides, link = engine_overrides(**offload), breaking(fails_at)
    with LLM.from_models(target, draft, config=config, overrides=overrides, link=link) as llm:
        with pytest.raises(CopyFailed, match=r"copy to the (host|device) of [\d,]+ bytes .*cable was pulled"):
            llm.generate(PROMPT, SHORT)
        assert llm.generate(PROMPT, SHORT).tokens == plain_tokens[: SHORT.max_tokens]


def test_a_write_that_failed_after_the_last_token_is_told_once(
    target: PreTrainedModel, plain_tokens: list[int]
) -> None:
    link = UnevenLink()
    with LLM.from_models(target, config="plain", overrides=engine_overrides(), link=link) as llm:
        context = llm.read(PROMPT)
        stream = context.stream(params=PARAMS)
        for _ in range(PARAMS.max_tokens - 1):
            next(stream)
        (sequence,) = llm.engine.sequences
        sequence.transfer.flush()
        working, link.failing = link.failing, lambda pairs: True
        stream.close()
        layout = llm.engine.store.layout
        shape = (layout.layers, 2, layout.kv_heads, 1, layout.head_dim)
        sequence.transfer.write_back(torch.zeros(shape, dtype=layout.dtype))
        with pytest.raises(CopyFailed, match="cable was pulled"):
            context.rewind(len(PROMPT))
        link.failing = working
        context.rewind(len(PROMPT))
        assert context.generate(params=PARAMS).tokens == plain_tokens


def test_a_sequence_given_up_while_chunks_are_chosen(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that chooses for the next layer is waited for; `no_thread_is_left` looks for it."""
    choosing, layers = threading.Event(), itertools.count()

    def slow(*given: Any) -> Tensor:
        if threading.current_thread().name.startswith("offload_rt-choosing") and next(layers) % 2:
            choosing.set()
            time.sleep(0.3)
        return choose_chunks(*given)

    monkeypatch.setattr("offload_rt.caches.retrieved.choose_chunks", slow)
    overrides = engine_overrides(ahead=2)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        stream = llm.stream(PROMPT, PARAMS)
        next(stream)
        (sequence,) = llm.engine.sequences

        def cancel() -> None:
            if choosing.wait(10):
                sequence.full.cancel()

        cancelled = threading.Thread(target=cancel)
        cancelled.start()
        with pytest.raises(PassCancelled):
            list(stream)
        cancelled.join()
    assert choosing.is_set()
