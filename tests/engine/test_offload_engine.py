"""The whole engine over a slow and uneven link: tokens, selections and bytes."""

from __future__ import annotations

import gc
import threading
import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.small_engine import CONFIGS, PAGE, PARAMS, PROMPT, SIZES, again, engine_overrides, pass_running
from support.uneven_link import LateLink, UnevenLink
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import CpuLink, KVLayout, LayerStream, PacedLink, TransferEngine
from offload_rt import LLM, SamplingParams
from offload_rt.attention.backends import AttentionBackend, folded_mask
from offload_rt.caches.base import VerifiedTokens
from offload_rt.caches.bounded import BufferAttention
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.full import FullCache
from offload_rt.caches.refresh import RetrievalRefresh
from offload_rt.caches.retrieved import RetrievedCache
from offload_rt.config.draft_shape import CHAIN
from offload_rt.engine.controller import SpeculationController
from offload_rt.errors import UsageError
from offload_rt.kernels.sizes import GROUP
from offload_rt.planning.sequence_planner import SequencePlan, SequencePlanner

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
        context = llm.read(PROMPT)
        assert again(context, SHORT).tokens == plain_tokens[: SHORT.max_tokens]
        assert again(context, SHORT, "plain").tokens == plain_tokens[: SHORT.max_tokens]


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
        queries, before = (
            cache._next_pass_queries,
            deepcopy(cache._spare),
        )  # what it holds already is not taken again
        begun = begin(cache)
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
                bits=bits,
            )
            assert before is not None
            separate.buffer = before
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
        assert separate.quantized == refill.layout.quantized > 0 or bits == 16
        for layer in range(cache._layout.layers if separate.quantized else 0):
            filled, wanted = refill.buffer.quantized, separate.buffer.quantized
            assert filled is not None and wanted is not None
            pair = (one.layer(layer).first(separate.quantized) for one in (filled, wanted))
            assert all(map(torch.equal, *pair))
        rest = slice(refill.buffer.mean_slots - refill.layout.means, refill.buffer.mean_slots)
        assert torch.equal(refill.buffer.memory[:, :, :, rest], separate.buffer.memory[:, :, :, rest])
        use(cache, refill)

    monkeypatch.setattr(RetrievedCache, "begin_pass", begun)
    monkeypatch.setattr(RetrievedCache, "_use", checked)
    overrides = engine_overrides(resident_tokens=shares[0], cpu_tokens=shares[1], ahead=2)
    overrides["retrieval.bits"] = bits = {(0, 0): 16, (32, 48): 4}.get(shares, 8)
    with LLM.from_models(target, draft, config=config, overrides=overrides, link=LateLink(1e9)) as llm:
        llm.generate(PROMPT, SHORT)
    assert compared >= 2


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("refresh_from", ["store", "stream"])
def test_drafts_go_on_where_memory_for_a_refresh_is_short(
    target: PreTrainedModel,
    plain_tokens: list[int],
    refresh_from: str,
    bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refreshes fail at any of their transfers, the one after the prompt, too, and drafts are still read."""
    move, calls, refused = RetrievalRefresh._move, [0], list[int]()

    def short(refill: RetrievalRefresh, *given: Any) -> None:
        calls[0] += 1
        if calls[0] % 7 == 1:
            refused.append(refill.layout.length)
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")
        move(refill, *given)

    monkeypatch.setattr(RetrievalRefresh, "_move", short)
    overrides = engine_overrides(ahead=2, refresh_from=refresh_from)
    overrides |= {"retrieval.refresh": "stride:4", "retrieval.bits": bits}
    with (
        LLM.from_models(target, config="retrieval", overrides=overrides, link=LateLink(1e9)) as llm,
        pytest.warns(UserWarning, match=r"too little memory to refresh.*: CUDA out of memory\.$"),
    ):
        result = llm.generate(PROMPT, PARAMS)
    assert result.tokens == plain_tokens and result.levels[0].accepted
    assert len(set(refused)) > 2 and min(refused) < len(PROMPT) + 1


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
    streams, stream = list[LayerStream](), TransferEngine.stream

    def recorded(engine: TransferEngine, end: int, **arguments: Any) -> LayerStream:
        streams.append(stream(engine, end, **arguments))
        return streams[-1]

    monkeypatch.setattr(TransferEngine, "stream", recorded)
    overrides = engine_overrides(resident_tokens=resident, cpu_tokens=cpu, ahead=2)
    link = PacedLink(1e9)
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
        result = llm.generate(PROMPT, PARAMS)
        layout = llm.engine.store.layout
    assert [stream.start for stream in streams] == [resident + cpu] * (result.rounds + 1)
    streamed = sum(stream.end - stream.start for stream in streams[:-1])
    read = result.transfer.bytes_to_device - result.transfer.bytes_abandoned
    # Beside the streams, in tokens: the first choice and the means of its pages; means of new pages, for two
    # buffers; and of the CPU's share what a refresh keeps, once a round at most.
    beside = read / layout.token_bytes - streamed
    pages = PARAMS.max_tokens // layout.page_size + 1
    assert 0 < beside <= 64 + GROUP + len(PROMPT) // layout.page_size + 2 * pages + cpu * result.rounds
    committed = result.rounds + result.timings.accepted_tokens
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
    """A proposal is longer than the page and the 64 tokens that the tail has room for."""
    overrides = engine_overrides(ahead=0) | {"speculation.gamma2": 70, "retrieval.budget": 512}
    with LLM.from_models(target, config="retrieval", overrides=overrides, link=CopiesAtOnce()) as llm:
        long = SamplingParams(max_tokens=100)
        context = llm.read(PROMPT)
        tokens = again(context, long).tokens
        assert again(context, long).tokens == tokens
        assert tokens[: len(plain_tokens)] == plain_tokens


def test_what_is_generated_in_inference_mode_is_decoded_again_outside(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="retrieval", overrides=engine_overrides()) as llm:
        with torch.inference_mode():
            context = llm.read(PROMPT)
            tokens = again(context, SHORT).tokens
        assert again(context, SHORT).tokens == tokens


def test_chunks_of_another_config_divide_the_pages_of_the_context(target: PreTrainedModel) -> None:
    with LLM.from_models(target, config="retrieval", overrides=engine_overrides()) as llm:
        context = llm.read(PROMPT)
        tokens = again(context, SHORT).tokens
        sizes = {"retrieval.chunk": 32, "retrieval.budget": 64, "retrieval.recent": 16}
        with pytest.raises(
            UsageError, match="config retrieval .* retrieval.chunk = 32: must divide store.page = 16"
        ):
            context.generate((), SHORT, "retrieval", sizes)
        assert again(context, SHORT).tokens == tokens


def test_a_sequence_is_planned_for_what_one_that_is_closed_held(
    target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device; closing lets it go, and not the garbage collector. Buffers are kept for the next one."""
    held = list[FullCache]()
    planned, plan = [], SequencePlanner.plan

    def watched(planner: SequencePlanner, *arguments: Any) -> SequencePlan:
        planned.append(sum(full.resident_bytes for full in held))
        return plan(planner, *arguments)

    monkeypatch.setattr(SequencePlanner, "plan", watched)
    gc.disable()
    try:
        link, overrides = PacedLink(1e9), engine_overrides(resident_tokens=64)
        with LLM.from_models(target, config="retrieval", overrides=overrides, link=link) as llm:
            for _ in range(2):
                with llm.read(PROMPT) as context:
                    context.generate((), SHORT)
                    (sequence,) = llm.engine.sequences
                    (retrieved,) = sequence.full.derived
                    assert isinstance(retrieved, RetrievedCache)
                    held.append(sequence.full)
                    assert sequence.full.resident_bytes > 0
                    buffers = [weakref.ref(buffer) for buffer in retrieved.buffers]
                    del retrieved
                assert len(buffers) == 2 and all(one() is not None for one in buffers)
        assert planned == [0, 0] and not any(one() for one in buffers), "nothing outlives the engine"
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
    """Their sequences grow in turns, and in two threads."""
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
