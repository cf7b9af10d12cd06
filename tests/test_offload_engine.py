"""The whole engine over a slow and uneven link: tokens, selections and bytes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_engine import CONFIGS, PAGE, PARAMS, PROMPT, SIZES, again, engine_overrides, pass_running
from small_engine import draft as draft  # a fixture
from small_engine import plain_tokens as plain_tokens
from small_engine import target as target
from torch import Tensor
from transformers import PreTrainedModel
from uneven_link import LateLink, UnevenLink

import offload_rt.engine.engine
from cpu_kv import CpuLink, KVLayout, LayerStream, PacedLink, TransferEngine
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import AttentionBackend, folded_mask
from offload_rt.caches.base import VerifiedTokens
from offload_rt.caches.bounded import BufferAttention
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.refresh import RetrievalRefresh
from offload_rt.caches.remote import CpuAttention
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.drafting.base import Round
from offload_rt.drafting.expectations import SAME_MODEL_ACCEPTANCE
from offload_rt.drafting.shapes import CHAIN
from offload_rt.engine.controller import RunningAcceptance, SpeculationController
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError

SHORT = SamplingParams(max_tokens=24)


@given(
    config=st.sampled_from(CONFIGS),
    resident=st.integers(0, 10),
    cpu=st.integers(0, 10),
    ahead=st.integers(0, 4),
    refresh_from=st.sampled_from(["stream", "store"]),
    refresh=st.sampled_from(["every", "stride:7", "acceptance:0.9"]),
    ring=st.integers(2, 5),
    segment=st.sampled_from([16, 32, 64, 256]),
    delay=st.sampled_from([0.0, 2e-4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=16, derandomize=True, deadline=None)
def test_every_schedule_yields_the_tokens_of_plain_decoding(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    plain_tokens: list[int],
    config: str,
    resident: int,
    cpu: int,
    ahead: int,
    refresh_from: str,
    refresh: str,
    ring: int,
    segment: int,
    delay: float,
    seed: int,
) -> None:
    overrides = SIZES | {
        "offload.resident_tokens": PAGE * resident,
        "offload.cpu_tokens": PAGE * cpu,
        "offload.ahead": ahead,
        "offload.refresh_from": refresh_from,
        "retrieval.refresh": refresh,
        "store.ring_buffers": ring,
        "store.segment_bytes": 256 * segment,
    }
    link = UnevenLink(seed, delay)
    with LLM.from_models(target, draft, config=config, overrides=overrides, link=link) as llm:
        text = llm.read(PROMPT)
        assert again(text, SHORT).tokens == plain_tokens[: SHORT.max_tokens]
        assert again(text, SHORT, "plain").tokens == plain_tokens[: SHORT.max_tokens]


@pytest.mark.parametrize("shares", [(0, 0), (32, 0), (0, 48), (32, 48)])
@pytest.mark.parametrize("config", ["retrieval", "triforce"])
def test_a_refresh_from_the_stream_selects_what_a_separate_pass_would(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    config: str,
    shares: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = 0
    begin, use = RetrievedCache.begin_pass, RetrievedCache._use
    expected: dict[RetrievalRefresh, RetrievedCache] = {}

    def begun(cache: RetrievedCache) -> bool:
        queries, begun = cache._wanted, begin(cache)
        if begun:
            refill = cache._running
            assert queries is not None and refill is not None
            separate = expected[refill] = RetrievedCache(
                cache._source,
                budget=cache.budget,
                chunk=cache.chunk,
                recent=cache.recent,
                refresh=cache.refresh.policy,
                selection=cache.selection,
                mean_slots=cache.buffer.mean_slots,
            )
            own = separate._start_refresh(refill.layout.length, queries, separate.buffer)
            own.take_from_store()
            separate._apply(own.layout)
        return begun

    def checked(cache: RetrievedCache, refill: RetrievalRefresh) -> None:
        nonlocal compared
        compared += 1
        separate, entries = expected[refill], refill.layout.entries
        assert separate.entries == entries
        assert torch.equal(refill.buffer.kv[:, :, :, :entries], separate.kv[:, :, :, :entries])
        rest = slice(refill.buffer.mean_slots - refill.layout.means, refill.buffer.mean_slots)
        assert torch.equal(refill.buffer.memory[:, :, :, rest], separate.buffer.memory[:, :, :, rest])
        use(cache, refill)

    monkeypatch.setattr(RetrievedCache, "begin_pass", begun)
    monkeypatch.setattr(RetrievedCache, "_use", checked)
    overrides = engine_overrides(resident_tokens=shares[0], cpu_tokens=shares[1], ahead=2)
    with LLM.from_models(target, draft, config=config, overrides=overrides, link=LateLink(1e9)) as llm:
        llm.generate(PROMPT, SHORT)
    assert compared >= 2


def test_plain_decoding_never_pays_for_a_refresh(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[RetrievedCache] = []
    build = RetrievedCache.fill

    def counted(cache: RetrievedCache, queries: torch.Tensor) -> None:
        built.append(cache)
        build(cache, queries)

    monkeypatch.setattr(RetrievedCache, "fill", counted)
    monkeypatch.setattr(SpeculationController, "shape", lambda pace, room: CHAIN)
    for ahead in (0, 2):
        built.clear()
        overrides = engine_overrides(ahead=ahead)
        with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
            assert llm.generate(PROMPT, PARAMS).rounds == PARAMS.max_tokens
        assert len(built) == 1, "for the prompt alone"


def test_no_cache_is_built_while_a_pass_runs(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass and a gather would use one engine from two threads."""
    running, build = pass_running(monkeypatch), RetrievedCache.fill
    built: list[bool] = []

    def noted(cache: RetrievedCache, queries: torch.Tensor) -> None:
        built.append(running.is_set())
        build(cache, queries)

    monkeypatch.setattr(RetrievedCache, "fill", noted)
    overrides = engine_overrides(ahead=2, refresh_from="store")
    link = PacedLink(1e9, latency_s=2e-3)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        llm.generate(PROMPT, PARAMS)
    assert len(built) > 3 and not any(built)


def test_acceptance_is_what_the_rounds_said(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = RunningAcceptance(SAME_MODEL_ACCEPTANCE)
    extend = TokenSequence.extend

    def noted(sequence: TokenSequence, round: Round, *arguments: Any) -> None:
        seen.observe([(round.accepted, int(round.accepted < round.proposed))])
        extend(sequence, round, *arguments)

    monkeypatch.setattr(TokenSequence, "extend", noted)
    overrides = engine_overrides(ahead=2)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        llm.read(PROMPT).generate((), PARAMS)
        (sequence,) = llm.engine._sequences
        assert sequence.controller.acceptance.rate == seen.rate != SAME_MODEL_ACCEPTANCE


def test_every_refill_is_complete_where_the_resident_share_ends_within_a_page(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete: list[bool] = []
    adopt = RetrievedCache.adopt

    def adopted(cache: RetrievedCache, verified: VerifiedTokens) -> None:
        if cache._running is not None:
            complete.append(cache._running.complete)
        adopt(cache, verified)

    monkeypatch.setattr(RetrievedCache, "adopt", adopted)
    # More than the prompt: 149 of its tokens are kept, and the text grows beyond them.
    overrides = engine_overrides(ahead=2, resident_tokens=160)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        llm.generate(PROMPT, PARAMS)
    assert len(complete) > 2 and all(complete)


def test_buffers_are_made_by_the_thread_that_drafts(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each thread has its stream, and memory is reused in the order of the stream it came from."""
    makers: list[str] = []
    take = BufferPool.take

    def taken(*arguments: Any) -> KVBuffer:
        makers.append(threading.current_thread().name)
        return take(*arguments)

    monkeypatch.setattr(BufferPool, "take", taken)
    overrides = engine_overrides(ahead=2) | {"retrieval.refresh": "stride:12"}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
        stream = llm.stream(PROMPT, PARAMS)
        next(stream)
        before_any_refresh = len(makers)
        for _ in stream:
            pass
    assert set(makers) == {threading.current_thread().name}
    assert before_any_refresh == len(makers) == 2, "a round would wait for memory to be touched"


@pytest.mark.parametrize("resident", [0, 32])
@pytest.mark.parametrize("cpu", [0, 48])
def test_a_round_moves_the_streamed_share_once_and_a_refresh_nothing(
    target: PreTrainedModel, resident: int, cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[LayerStream] = []
    stream = TransferEngine.stream
    under_way: list[Callable[..., Any]] = []
    beside = {RetrievedCache.fill: 0, RetrievedCache.begin_pass: 0, RetrievalRefresh._transfer: 0}

    def recorded(engine: TransferEngine, end: int, **arguments: Any) -> LayerStream:
        streams.append(stream(engine, end, **arguments))
        return streams[-1]

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(of: RetrievedCache | RetrievalRefresh, *arguments: Any) -> Any:
            engine = of._engine if isinstance(of, RetrievalRefresh) else of._source.engine
            counters = engine.counters
            before = counters.bytes_to_device
            under_way.append(method)
            found = method(of, *arguments)
            under_way.pop()
            if not under_way:  # what the first choice sends is its own
                beside[method] += counters.bytes_to_device - before
            return found

        return call

    monkeypatch.setattr(TransferEngine, "stream", recorded)
    for method, owner in zip(beside, (RetrievedCache, RetrievedCache, RetrievalRefresh), strict=True):
        monkeypatch.setattr(owner, method.__name__, counted(method))
    overrides = engine_overrides(resident_tokens=resident, cpu_tokens=cpu, ahead=2)
    link = PacedLink(1e9)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        result = llm.generate(PROMPT, PARAMS)
        layout = llm.engine.store.layout
    assert [stream.start for stream in streams] == [resident + cpu] * (result.rounds + 1)
    tokens = sum(stream.end - stream.start for stream in streams[:-1])
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    # Beside the streams: the first choice, and what a refresh takes of the CPU's share and of new pages'
    # means. What the prefill moved was counted before.
    page = layout.page_size
    assert read == tokens * layout.token_bytes + sum(beside.values())
    _, means, sent = beside.values()
    assert (sent > 0) == (cpu > 0)
    assert 0 < means <= 2 * (PARAMS.max_tokens // page + 1) * layout.token_bytes, "to two buffers"
    committed = result.rounds + result.timings.draft_n_accepted
    assert result.transfer.bytes_to_host == committed * layout.token_bytes


def test_drafting_ahead_that_always_guesses_right_is_paced_too(
    target: PreTrainedModel, plain_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SpeculationController, "begin", lambda *_: None)  # as where it is expected to pay
    # The retrieved cache holds the whole text, so that it drafts what the target says.
    sizes = {"speculation.step_down": True, "retrieval.budget": 512, "speculation.gamma2": 1}
    overrides = engine_overrides(ahead=2) | sizes
    link = PacedLink(1e9, latency_s=1e-3)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        assert llm.generate(PROMPT, PARAMS).tokens == plain_tokens


class CopiesAtOnce(CpuLink):
    """Leads elsewhere, and copies at once, in the mode of whoever asks."""

    in_place = False


def test_a_rewind_after_a_tail_that_has_grown(target: PreTrainedModel, plain_tokens: list[int]) -> None:
    overrides = engine_overrides(ahead=0) | {"speculation.gamma2": 70, "retrieval.budget": 512}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=CopiesAtOnce()) as llm:
        long = SamplingParams(max_tokens=100)
        text = llm.read(PROMPT)
        tokens = again(text, long).tokens
        (sequence,) = llm.engine._sequences
        assert sequence.full._tail.buffer.capacity > PAGE + 64
        assert again(text, long).tokens == tokens
        assert tokens[: len(plain_tokens)] == plain_tokens


def test_what_is_generated_in_inference_mode_is_decoded_again_outside(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="retrieval", overrides=engine_overrides()) as llm:
        with torch.inference_mode():
            text = llm.read(PROMPT)
            tokens = again(text, SHORT).tokens
        assert again(text, SHORT).tokens == tokens


def test_chunks_of_another_config_divide_the_pages_of_the_context(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="retrieval", overrides=engine_overrides()) as llm:
        text = llm.read(PROMPT)
        tokens = again(text, SHORT).tokens
        sizes = {"retrieval.chunk": 32, "retrieval.budget": 64, "retrieval.recent": 16}
        with pytest.raises(UsageError, match="retrieval.chunk = 32 must divide the store's page of 16"):
            text.generate((), SHORT, "retrieval", sizes)
        assert again(text, SHORT).tokens == tokens


def test_a_text_is_planned_for_what_one_that_is_closed_held(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device; closing lets it go, and not the garbage collector."""
    held: list[weakref.ref[Tensor]] = []
    planned, plan = [], Engine.plan

    def watched(engine: Engine, *arguments: Any) -> Any:
        planned.append([tensor for one in held if (tensor := one()) is not None])
        return plan(engine, *arguments)

    monkeypatch.setattr(Engine, "plan", watched)
    overrides = engine_overrides(resident_tokens=64)
    gc.disable()
    try:
        with LLM.from_models(target, config="retrieval", overrides=overrides, link=PacedLink(1e9)) as llm:
            text = llm.read(PROMPT)
            text.generate((), SHORT)
            full = llm.engine._sequences[0].full
            held += map(weakref.ref, (*full._resident._blocks, full._tail.buffer.memory))
            (retrieved,) = full.derived
            assert isinstance(retrieved, RetrievedCache)
            buffers = [weakref.ref(buffer) for buffer in retrieved.buffers]
            taken = sum(buffer.memory.nbytes for buffer in retrieved.buffers)
            del full, retrieved
            text.close()
            text = llm.read(PROMPT)
            text.generate((), SHORT)
            assert planned == [[], []]
            assert len(buffers) == 2 and all(one() is not None for one in buffers), "kept for the next text"
            pool, told = llm.engine._shared.pool, []
            usable = offload_rt.engine.engine.usable_hardware
            monkeypatch.setattr(
                offload_rt.engine.engine,
                "usable_hardware",
                lambda device, loaded, *others: told.append(loaded) or usable(device, loaded, *others),
            )
            for free in (0, taken):
                assert pool.free_bytes == free
                llm.engine._fastest(*map(len, (PROMPT, PROMPT)))
                text.close()
            assert told == [llm.engine.target.weight_bytes + free for free in (0, taken)]
        assert not any(one() for one in buffers), "nothing outlives the engine"
    finally:
        gc.enable()


def test_buffers_of_other_sizes_go_before_new_ones_come() -> None:
    pool, layout = BufferPool(), KVLayout(1, 1, 2, torch.float32)
    first = pool.take(layout, 8, torch.device("cpu"))
    pool.give_back(first)
    assert pool.free_bytes == first.memory.nbytes
    assert pool.take(layout, 8, torch.device("cpu")) is first
    pool.give_back(first)
    assert pool.take(layout, 9, torch.device("cpu")) is not first
    assert pool.free_bytes == 0


def test_two_engines_share_a_model(
    target: PreTrainedModel, draft: PreTrainedModel, plain_tokens: list[int]
) -> None:
    """Their texts grow in turns, and in two threads."""
    overrides = engine_overrides(ahead=2, resident_tokens=16)
    expected = plain_tokens[: SHORT.max_tokens]
    links = PacedLink(1e9, latency_s=1e-3), PacedLink(1e9, latency_s=3e-4)
    with (
        LLM.from_models(target, draft, config="triforce", overrides=overrides, link=links[0]) as one,
        LLM.from_models(target, draft, config="retrieval", overrides=overrides, link=links[1]) as other,
    ):
        turns = zip(one.stream(PROMPT, SHORT), other.stream(PROMPT, SHORT), strict=True)
        assert [[a.token, b.token] for a, b in turns] == [[token, token] for token in expected]
        results: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda llm=llm: results.append(llm.generate(PROMPT, SHORT).tokens))
            for llm in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected, expected]


def test_masks_are_folded_once_a_pass(target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every layer: each time is several kernels on a GPU."""
    masked, folded, behind = list[BufferAttention](), list[Tensor](), BufferAttention.behind

    def made(*arguments: Any) -> BufferAttention:
        frame = behind(*arguments)
        masked.extend([frame] if frame.mask is not None else [])
        return frame

    def fold(backend: AttentionBackend, mask: Tensor, *arguments: Any) -> Tensor:
        folded.append(mask)
        return folded_mask(backend, mask, *arguments)

    monkeypatch.setattr(BufferAttention, "behind", made)
    monkeypatch.setattr("offload_rt.caches.bounded.folded_mask", fold)
    link = PacedLink(1e9)
    with LLM.from_models(target, config="trees", overrides=engine_overrides(), link=link) as llm:
        llm.generate(PROMPT, PARAMS)
    assert 0 < len(folded) <= len(masked)


# -------------------------------------------------------------------------------- remote attention


def test_the_cpu_share_attends_several_runs_as_one() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(4, 3, 8, dtype=torch.float64, generator=generator)
    keys = torch.randn(2, 50, 8, dtype=torch.float64, generator=generator)
    values = torch.randn(2, 50, 8, dtype=torch.float64, generator=generator)
    runs = [(keys[None, :, a:b], values[None, :, a:b]) for a, b in ((0, 7), (7, 33), (33, 50))]
    share = CpuAttention(50, torch.device("cpu"))
    try:
        out, lse = share.finish(share.start(0, queries, runs, 0.3))
    finally:
        share.close()
    logits = torch.einsum("hqd,htd->hqt", queries, keys.repeat_interleave(2, 0)) * 0.3
    assert torch.allclose(lse, logits.logsumexp(-1))
    assert torch.allclose(out, logits.softmax(-1) @ values.repeat_interleave(2, 0))
