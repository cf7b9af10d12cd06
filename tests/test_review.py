"""What goes wrong between two rounds, two threads or two texts, and must not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import byte_ids, tiny_target
from transformers import PreTrainedModel

from cpu_kv import CopyFailed, CpuLink, PacedLink, Ticket
from cpu_kv.link import Pairs, PassedTicket
from offload_rt import LLM, SamplingParams
from offload_rt.caches.base import Verified
from offload_rt.caches.full import FullCache
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.draft_length import CHOICES, DraftLength
from offload_rt.drafting.lookup import LookupDrafter
from offload_rt.errors import UsageError
from offload_rt.governor import Governor
from offload_rt.schedule import PassLane, Schedule

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
    acceptance = 0.3

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


def test_every_refill_is_complete_where_the_resident_share_ends_within_a_page(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete: list[bool] = []
    adopt = RetrievedCache.adopt

    def adopted(cache: RetrievedCache, verified: Verified) -> None:
        if cache._refill is not None:
            complete.append(cache._refill.complete)
        adopt(cache, verified)

    monkeypatch.setattr(RetrievedCache, "adopt", adopted)
    # More than the prompt: 149 of its tokens are kept, and the text grows beyond them.
    overrides = SIZES | {"offload.resident_tokens": 160, "retrieval.refresh": "every"}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        llm.generate(PROMPT, PARAMS)
    assert len(complete) > 2 and all(complete)


class Plain:
    """A link that copies at once, in the mode of whoever asks."""

    device = torch.device("cpu")
    in_place = False

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        return CpuLink().copy(pairs, after, to_host=to_host)

    def mark(self) -> Ticket:
        return PassedTicket()

    def close(self) -> None:
        pass


def test_again_after_a_tail_that_has_grown(target: PreTrainedModel, plain_tokens: list[int]) -> None:
    overrides = SIZES | {"speculation.gamma2": 70, "retrieval.budget": 512, "offload.ahead": 0}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=Plain()) as llm:
        long = SamplingParams(max_tokens=100)
        tokens = llm.generate(PROMPT, long).tokens
        assert llm._session is not None and llm._session.full._tail.keys.is_inference()
        assert llm.again(long).tokens == tokens
        assert tokens[: len(plain_tokens)] == plain_tokens


@contextmanager
def watched_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes what is abandoned while a pass runs."""
    running, seen = threading.Event(), list[str]()
    run, abandon = PassLane._run, FullCache.abandon

    def watched(lane: PassLane, *arguments: Any) -> Any:
        running.set()
        try:
            return run(lane, *arguments)
        finally:
            running.clear()

    def noted(full: FullCache) -> None:
        if running.is_set() and not threading.current_thread().name.startswith("offload_rt-pass"):
            seen.append("abandoned under a pass")
        abandon(full)

    monkeypatch.setattr(PassLane, "_run", watched)
    monkeypatch.setattr(FullCache, "abandon", noted)
    yield seen


@pytest.mark.parametrize("place", ["start", "callback", "give up"])
def test_an_interrupt_between_a_pass_and_who_waits_for_it(
    target: PreTrainedModel, plain_tokens: list[int], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            time.sleep(2e-3)  # the pass has begun
            raise KeyboardInterrupt

    start, callback = PassLane.start, Future.add_done_callback
    give_up = PassLane.give_up

    def started(lane: PassLane, begin: Any) -> Any:
        begun = start(lane, begin)
        interrupt()
        return begun

    def called(future: Any, function: Any) -> None:
        callback(future, function)
        interrupt()

    def drafting(*arguments: Any) -> None:
        interrupt()

    interrupts = 0

    def given_up(lane: PassLane) -> None:
        nonlocal interrupts
        interrupts += 1
        if interrupts == 1:
            raise KeyboardInterrupt
        give_up(lane)

    if place == "start":
        monkeypatch.setattr(PassLane, "start", started)
    elif place == "callback":
        monkeypatch.setattr(Future, "add_done_callback", called)
    else:
        monkeypatch.setattr(Schedule, "_draft_ahead", drafting)
        monkeypatch.setattr(PassLane, "give_up", given_up)
    link = PacedLink(1e9, latency_s=3e-3)
    with (
        watched_passes(monkeypatch) as seen,
        LLM.from_models(target, config="retrieval", overrides=SIZES, link=link) as llm,
    ):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, PARAMS)
        stands = llm.last_result.tokens
        assert stands == plain_tokens[: len(stands)]
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens
        assert seen == []
    assert set(threading.enumerate()) <= before


def test_buffers_are_made_by_the_thread_that_drafts(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each thread has its stream, and memory is reused in the order of the stream it came from."""
    makers: set[str] = set()
    zeros_like = torch.zeros_like

    def made(like: torch.Tensor, **arguments: Any) -> torch.Tensor:
        if like.dim() == 4:
            makers.add(threading.current_thread().name)
        return zeros_like(like, **arguments)

    monkeypatch.setattr("offload_rt.caches.retrieved.torch.zeros_like", made)
    overrides = SIZES | {"retrieval.refresh": "every"}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        llm.generate(PROMPT, PARAMS)
    assert makers == {threading.current_thread().name}


class LastWriteFails(PacedLink):
    """Fails at everything it is to bring to the host after it was told so."""

    fails = False

    def move(self, pairs: Pairs) -> None:
        if self.fails:
            raise RuntimeError("the cable was pulled")
        super().move(pairs)


def test_a_write_that_failed_after_the_last_token_is_told_once(
    target: PreTrainedModel, plain_tokens: list[int]
) -> None:
    link = LastWriteFails(1e9)
    with LLM.from_models(target, config="plain", overrides=SIZES, link=link) as llm:
        stream = llm.stream(PROMPT, PARAMS)
        for at, _ in enumerate(stream):
            if at == PARAMS.max_tokens - 2:
                assert llm._session is not None
                llm._session.engine.flush()
                link.fails = True
                break
        stream.close()
        assert llm._session is not None
        layout = llm._store.layout
        some = torch.zeros(layout.kv_heads, 1, layout.head_dim, dtype=layout.dtype)
        llm._session.engine.write_back(0, some, some)
        with pytest.raises(CopyFailed, match="cable was pulled"):
            llm.generate(PROMPT, PARAMS)
        link.fails = False
        with pytest.raises(UsageError, match="generate first"):
            llm.again(PARAMS)
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens


def test_again_is_of_the_planned_sizes(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LLM._plan

    def smaller(llm: LLM, *arguments: Any) -> Any:
        config, shares = plan(llm, *arguments)
        return replace(config, retrieval=replace(config.retrieval, budget=48)), shares

    monkeypatch.setattr(LLM, "_plan", smaller)
    with LLM.from_models(target, config="retrieval", overrides=SIZES, link=PacedLink(1e9)) as llm:
        llm.generate(PROMPT, PARAMS)
        llm.plain(PARAMS)
        llm.again(PARAMS)
        assert llm._session is not None
        (derived,) = llm._session.full.derived
        assert isinstance(derived, RetrievedCache) and derived.budget == 48
