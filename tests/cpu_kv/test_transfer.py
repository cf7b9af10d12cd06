"""Streams, write-backs and reads over slow and uneven links: contents, byte counts, and a whole ring."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from emulated_gpu import EMULATED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from uneven_link import UnevenLink

from cpu_kv import (
    CopyFailed,
    CpuLink,
    CudaLink,
    Event,
    KeysValues,
    KVLayout,
    LayerStream,
    Link,
    PacedLink,
    PagedKVStore,
    TransferEngine,
    head_major,
)
from cpu_kv.link import FutureEvent, Pairs, pair_bytes
from cpu_kv.streams import device_streams

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=4)


def random_kv(tokens: int, seed: int = 0, layout: KVLayout = LAYOUT) -> Tensor:
    """[layers, 2, kv_heads, tokens, head_dim]"""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.layers, 2, layout.kv_heads, tokens, layout.head_dim)
    return torch.randn(shape, generator=generator).to(layout.dtype)


@contextmanager
def engine_over(
    link: Link, kv: Tensor, segment_tokens: int = 5, ring_buffers: int = 2
) -> Iterator[TransferEngine]:
    """An engine over a sequence that holds ``kv``, in runs of up to 16 tokens."""
    with PagedKVStore(LAYOUT, slab_tokens=16) as store:
        sequence = store.new_sequence()
        for layer in range(LAYOUT.layers):
            for keys, values in zip(kv[layer, 0].split(7, 1), kv[layer, 1].split(7, 1), strict=True):
                sequence.append(layer, keys, values)
        engine = TransferEngine(sequence, link, segment_tokens=segment_tokens, ring_buffers=ring_buffers)
        try:
            yield engine
        finally:
            engine.close()
            link.close()


def test_a_write_back_that_finds_no_room_leaves_every_layer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, memory = random_kv(16), PagedKVStore._memory

    def last_layer_is_too_much(self: PagedKVStore, slab: Any, layer: int) -> Tensor:
        if layer == 2 and slab is not next(iter(self._slabs.values())):
            raise MemoryError("too large")
        return memory(self, slab, layer)

    with engine_over(PacedLink(1e9), kv) as engine:
        monkeypatch.setattr(PagedKVStore, "_memory", last_layer_is_too_much)
        with pytest.raises(MemoryError):
            engine.write_back(kv)
        engine.flush()
        assert {engine.sequence.layer_length(layer) for layer in range(LAYOUT.layers)} == {16}


def test_what_is_sent_overtakes_what_is_carried_ahead() -> None:
    class Held(PacedLink):
        def __init__(self) -> None:
            super().__init__(1e9)
            self.go_on = threading.Event()
            self.moved: list[int] = []

        def move(self, pairs: Pairs) -> None:
            assert self.go_on.wait(30)
            super().move(pairs)
            self.moved.append(pair_bytes(pairs))

    link = Held()
    with engine_over(link, random_kv(30), ring_buffers=3) as engine:
        stream = engine.stream(28)
        sent = engine.send([7], lambda packed: packed.fill_(1.0))
        link.go_on.set()
        assert engine.await_copy(sent).sum() == 7
        assert link.moved.index(28) < 2, "behind what had begun"
        stream.close()


def test_what_is_sent_is_not_overwritten_on_its_way() -> None:
    with engine_over(UnevenLink(1, 5e-3), random_kv(5)) as engine:
        sent = [engine.send([7], partial(torch.fill_, value=number)) for number in range(6)]
        assert [engine.await_copy(one).unique().tolist() for one in sent] == [[number] for number in range(6)]


Segment = tuple[int, int, KeysValues]
"""Layer, first token, and what a stream shows of it."""


def segments_of(stream: LayerStream) -> Iterator[Segment]:
    """All segments, one after the other."""
    for layer in range(LAYOUT.layers):
        at = stream.start
        for pair in stream.segments(layer):
            yield layer, at, pair
            at += len(pair[0]) * LAYOUT.page_size
        assert at == stream.end


def check_segment(kv: Tensor, segment: Segment) -> int:
    """It shows what it should; its bytes."""
    time.sleep(2e-4)  # it must hold still while the link runs ahead
    layer, at, pair = segment
    found = torch.stack([head_major(side) for side in pair])
    assert torch.equal(found, kv[layer, :, :, at : at + found.shape[2]])
    return found.nbytes


def check_pass(engine: TransferEngine, kv: Tensor, length: int) -> None:
    stream = engine.stream(length)
    for segment in segments_of(stream):
        check_segment(kv, segment)
    assert stream not in engine._streams


OPERATIONS = st.one_of(
    st.tuples(st.just("open"), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just("read"), st.integers(1, 12), st.none()),
    st.tuples(st.just("read"), st.just(99), st.none()),
    st.tuples(st.just("close"), st.integers(0, 3), st.none()),
    st.tuples(st.just("write"), st.integers(1, 12), st.none()),
    st.tuples(st.just("flush"), st.none(), st.none()),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(
    prompt=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=6),
    rest=st.integers(0, 11),
    operations=st.lists(OPERATIONS, min_size=4, max_size=16),
    segment_tokens=st.integers(1, 17),
    ring_buffers=st.integers(1, 4),
    delay=st.sampled_from([2e-4, 1e-3]),
    seed=st.integers(0, 99),
)
def test_streams_and_write_backs_under_any_use(
    prompt: list[tuple[int, int]],
    rest: int,
    operations: list[tuple[str, Any, Any]],
    segment_tokens: int,
    ring_buffers: int,
    delay: float,
    seed: int,
) -> None:
    """A prompt, layer by layer; then rounds write to all, while streams are opened, read and given up."""
    layers = [random_kv(0)[0] for _ in range(LAYOUT.layers)]
    longest = 4 * sum(pages for _, pages in prompt) + rest
    with engine_over(UnevenLink(seed, delay), random_kv(0), segment_tokens, ring_buffers) as engine:
        for layer, pages in [*prompt, *((layer, None) for layer in range(LAYOUT.layers))]:
            tokens = longest - layers[layer].shape[2] if pages is None else 4 * pages
            block = random_kv(tokens, 1000 * layer + tokens)[0]
            if tokens:
                engine.write_prompt(layer, block[0].clone(), block[1].clone())
            layers[layer] = torch.cat([layers[layer], block], dim=2)
        kv, read, counters = torch.stack(layers), 0, engine.counters
        streams: list[tuple[LayerStream, Iterator[Segment]]] = []
        for number, (name, first, second) in enumerate(operations):
            if name == "open":
                start, end = sorted(round(share * (kv.shape[3] // 4)) * 4 for share in (first, second))
                stream = engine.stream(end, start=start)
                streams.append((stream, segments_of(stream)))
            elif name == "read" and streams:
                read += sum(check_segment(kv, segment) for segment in itertools.islice(streams[0][1], first))
                if streams[0][0] not in engine._streams:
                    del streams[0]
            elif name == "close" and streams:
                streams.pop(first % len(streams))[0].close()
            elif name == "write":
                block, copies = random_kv(first, number), counters.copies
                engine.write_back(block.clone())
                assert counters.copies == copies + 1, "of all layers and heads"
                kv = torch.cat([kv, block], dim=3)
            elif name == "flush":
                engine.flush()
                assert engine.sequence.length == kv.shape[3]
        for stream, _ in streams:
            stream.close()
        assert counters.bytes_to_device - counters.bytes_abandoned == read
        assert engine._ring is not None and engine._ring.room == ring_buffers
        check_pass(engine, kv, kv.shape[3] // 4 * 4)
        engine.flush()
        for layer, expected in enumerate(kv):
            found = [torch.stack([head_major(s) for s in pair]) for pair in engine.sequence.views(layer)]
            assert torch.equal(torch.cat([expected[:, :, :0], *found], dim=2), expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 32])
def test_copies_are_few_whatever_the_number_of_heads(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One a segment, and one a verdict; a segment in two slabs is two."""
    layout = KVLayout(layers=2, kv_heads=kv_heads, head_dim=4, dtype=torch.float32, page_size=4)
    link = UnevenLink()
    with PagedKVStore(layout, slab_tokens=24) as store:
        sequence = store.new_sequence()
        engine = TransferEngine(sequence, link, segment_tokens=20, ring_buffers=3)
        for layer in range(2):
            engine.write_prompt(layer, *torch.randn(2, kv_heads, 46, 4))
        engine.flush()
        assert engine.counters.copies == 2
        for tokens in (1, 17):
            engine.write_back(torch.randn(2, 2, kv_heads, tokens, 4))
        assert engine.counters.copies == 2 + 2
        engine.flush()
        stream = engine.stream(64)
        for layer in range(2):
            list(stream.segments(layer))
        assert engine.counters.copies == 4 + 2 * (1 + 1 + 2 + 1), "the third one lies in two slabs"
        engine.read(3, 7)
        assert engine.counters.copies == 14 + 1, "of all layers"
        monkeypatch.setattr(TransferEngine, "READ_TOKENS", 16)
        read = engine.read(3, 50)
        assert engine.counters.copies == 15 + 3
        stored = [torch.stack([head_major(side) for side in pair]) for pair in sequence.views(1, 3, 50)]
        assert torch.equal(read[1], torch.cat(stored, dim=2))
        engine.close()
        link.close()


class ComputeLink(PacedLink):
    """Its compute is as far behind what is enqueued as a test lets it be."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.moved = 0
        self.marks: list[Future[None]] = []

    def move(self, pairs: Pairs) -> None:
        self.moved += 1
        super().move(pairs)

    def record_event(self) -> Event:
        self.marks.append(Future())
        return FutureEvent(self.marks[-1])

    def finish(self, count: int) -> None:
        """The first `count` marks are passed."""
        for mark in self.marks[:count]:
            if not mark.done():
                mark.set_result(None)


def test_the_host_runs_ahead_of_the_compute_by_a_ring() -> None:
    """Compute that reads segments is enqueued and not done: the host stops with the ring, and not before."""
    link, seen, moved, enqueued = ComputeLink(), [], [], []
    with engine_over(link, random_kv(40), segment_tokens=4, ring_buffers=3) as engine:
        link.finish(3)  # nothing reads the ring yet
        stream, following = engine.stream(40), engine.stream(40)

        def read() -> None:
            for layer in range(LAYOUT.layers):
                seen.extend(keys[0, 0, 0, 0].item() for keys, _ in stream.segments(layer))

        reader = threading.Thread(target=read)
        reader.start()
        for done in range(30):
            deadline, ring = time.monotonic() + 5, min(30, done + 3)
            while len(link.marks) < 3 + ring and time.monotonic() < deadline:
                time.sleep(1e-4)
            time.sleep(1e-3)
            moved.append(link.moved)
            enqueued.append(len(link.marks) - 3)
            if enqueued[-1] != ring:
                break
            link.finish(4 + done)
        reader.join(5)
        alive = reader.is_alive()
        threading.Timer(0.02, lambda: link.finish(len(link.marks))).start()
        if not alive:
            engine.finish_compute()
        deadline = time.monotonic() + 5
        while link.moved < 33 and time.monotonic() < deadline:
            time.sleep(1e-4)
        filled = link.moved
        link.finish(len(link.marks))  # also where this test fails: closing waits for all compute
        following.close()
        link.finish(len(link.marks))
    assert not alive and len(seen) == 30
    assert all(moved[done] <= 3 + done for done in range(30)), "a buffer was filled that was still being read"
    assert enqueued == [min(30, done + 3) for done in range(30)]
    assert filled == 33, "the ring of the next pass"


def test_in_place_nothing_is_copied() -> None:
    kv = random_kv(30)
    with engine_over(CpuLink(), kv) as engine:
        check_pass(engine, kv, 28)
        (first, *_), views = list(engine.stream(28).segments(0)), engine.sequence.views(0)
        assert first[0].data_ptr() == views[0][0].data_ptr()
        block = random_kv(4, 1)
        engine.write_back(block)
        assert engine.sequence.layer_length(0) == 34  # at once
        engine.read(27, 34)
        assert engine.counters.bytes_to_device == engine.counters.bytes_to_host == 0
        assert engine.counters.copies == 0


def test_streams_are_read_in_their_order_and_one_at_a_time() -> None:
    kv = random_kv(12)
    with engine_over(UnevenLink(), kv) as engine:
        stream = engine.stream(12)
        following = engine.stream(12)
        with pytest.raises(RuntimeError, match="close the stream before it"):
            next(following.segments(0))
        following.close()
        with pytest.raises(RuntimeError, match="cannot read layer 1: the next layer of this stream is 0"):
            next(stream.segments(1))
        half_read = stream.segments(0)
        next(half_read)
        with pytest.raises(RuntimeError, match="cannot read layer 1"):
            next(stream.segments(1))
        stream.close()
        with pytest.raises(RuntimeError, match="closed while"):
            next(half_read)
        stream.close()
        with pytest.raises(ValueError, match="12 are present"):
            engine.stream(16)
        with pytest.raises(ValueError, match="tokens 0 to 10 are not whole pages of 4"):
            engine.stream(10)
        check_pass(engine, kv, 12)


def test_a_stream_ahead_is_copied_before_the_one_before_it_is_asked_for_its_end() -> None:
    with engine_over(UnevenLink(), random_kv(12), segment_tokens=4, ring_buffers=2) as engine:
        stream, _ = engine.stream(4), engine.stream(12)
        list(stream.segments(0))
        # One buffer takes the last layer of the first stream, the other one what comes first of the second.
        list(stream.segments(1))
        assert engine.counters.copies == 4
        assert engine.counters.bytes_to_device == 16 * LAYOUT.layer_token_bytes
        stream.close()


def test_a_failed_segment_raises_and_the_next_pass_is_whole() -> None:
    kv = random_kv(12)
    link = UnevenLink()
    with engine_over(link, kv) as engine:
        link.failing = lambda pairs: True
        stream = engine.stream(12)
        with pytest.raises(CopyFailed, match="copy to the device of .* failed: the cable was pulled"):
            list(stream.segments(0))
        stream.close()
        link.failing = lambda pairs: False
        check_pass(engine, kv, 12)


def test_a_failed_write_back_leaves_no_hole() -> None:
    link = UnevenLink(delay_s=5e-3)
    link.failing = lambda pairs: float(pairs[0][1].flatten()[0]) == 13.0
    with engine_over(link, random_kv(5)) as engine:
        for value in (1.0, 13.0, 2.0):
            block = torch.full((3, 2, 2, 2, 4), value)
            try:
                engine.write_back(block)
            except CopyFailed:
                break
        else:
            with pytest.raises(CopyFailed, match="copy to the host"):
                engine.flush()
        assert engine.sequence.layer_length(0) == 7
        engine.flush()
        engine.write_back(torch.full((3, 2, 2, 2, 4), 3.0))
        engine.flush()
        assert engine.read(6, 8)[0, 0, 0, :, 0].tolist() == [1.0, 3.0]


def test_use_after_close() -> None:
    with engine_over(UnevenLink(), random_kv(5)) as engine:
        engine.stream(4)
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="engine is closed"):
            engine.stream(4)


@pytest.mark.gpu
@pytest.mark.parametrize("ring_buffers", [1, 2, 3])
def test_cuda_streams_under_load(ring_buffers: int) -> None:
    layout = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    tokens = 20 * layout.page_size
    kv = random_kv(tokens + 17, layout=layout)
    link = CudaLink("cuda")
    with PagedKVStore(layout, pin=True, slab_tokens=2048) as store:
        sequence = store.new_sequence()
        engine = TransferEngine(sequence, link, segment_tokens=768, ring_buffers=ring_buffers)
        load = torch.randn(*2 * [64 if EMULATED else 2048], device="cuda")
        for start in range(0, tokens, 1280):
            for layer in range(layout.layers):
                block = kv[layer, :, :, start : start + 1280].cuda()
                late = (load @ load).sum() * 0  # the source is made late on the compute's stream
                engine.write_prompt(layer, block[0] + late, block[1] + late)
        engine.flush()
        last = kv[:, :, :, tokens:].cuda() + (load @ load).sum() * 0
        engine.write_back(last)
        engine.flush()
        assert sequence.length == tokens + 17
        for _ in range(3):
            stream = engine.stream(tokens)
            copies: list[list[Tensor]] = []
            for layer in range(layout.layers):
                pieces = []
                for keys, values in stream.segments(layer):
                    late = (load @ load).sum() * 0  # the segment is read late: its slot may not be reused
                    pieces.append(torch.stack([head_major(keys) + late, head_major(values) + late]))
                copies.append(pieces)
            for layer, pieces in enumerate(copies):
                assert torch.equal(torch.cat(pieces, dim=2).cpu(), kv[layer, :, :, :tokens])
        read = engine.read(tokens - 13, tokens + 17)
        assert torch.equal(read.cpu(), kv[:, :, :, -30:])
        engine.close()
        link.close()


@pytest.mark.gpu
def test_a_destination_that_is_let_go_is_nobody_elses_before_the_copy() -> None:
    link = CudaLink("cuda")
    source = torch.ones(2**20, pin_memory=True)
    with torch.cuda.stream(device_streams(link.device).to_device):
        torch.cuda._sleep(10**7)  # the link is busy meanwhile
    copied = link.copy([(torch.empty_like(source, device="cuda"), source)], link.record_event())
    others = torch.zeros(2**20, device="cuda")
    torch.cuda.current_stream().synchronize()
    copied.synchronize()
    assert not others.any()
    link.close()


@pytest.mark.gpu
def test_what_is_sent_arrives_whole_however_late() -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=8, dtype=torch.float32)
    link = CudaLink("cuda")
    with PagedKVStore(layout, pin=True) as store:
        engine = TransferEngine(store.new_sequence(), link)
        load = torch.ones(2**20, device="cuda")
        for _ in range(4):
            load = load + 1  # its memory goes to what is sent next, which may not come before
        sent = [engine.send([2**20], methodcaller("fill_", number)) for number in range(6)]
        for number, one in enumerate(sent):
            assert bool((engine.await_copy(one) == number).all())
        assert bool((load == 5).all())
        engine.close()
    link.close()
