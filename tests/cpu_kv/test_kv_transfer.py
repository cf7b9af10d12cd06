"""Streams, write-backs and reads over slow and uneven links: contents, byte counts, and a whole ring."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sized
from concurrent.futures import Future
from contextlib import contextmanager
from operator import methodcaller

import pytest
import torch
from emulated.gpu import EMULATED
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.uneven_link import UnevenLink
from torch import Tensor

from cpu_kv import (
    CopyFailed,
    CpuLink,
    CudaLink,
    Event,
    KVLayout,
    KVPages,
    LayerStream,
    Link,
    PacedLink,
    PagedKVStore,
    TransferEngine,
)
from cpu_kv.gathering import PendingCopy, TransferCounters
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


Segment = tuple[int, int, KVPages]
"""Layer, first token, and what a stream shows of it."""


def segments_of(stream: LayerStream) -> Iterator[Segment]:
    """All segments, one after the other."""
    for layer in range(LAYOUT.layers):
        at = stream.start
        for pages in stream.segments(layer):
            yield layer, at, pages
            at += pages.tokens
        assert at == stream.end


def check_segment(kv: Tensor, segment: Segment) -> int:
    """It shows what it should; its bytes."""
    time.sleep(2e-4)  # it must hold still while the link runs ahead
    layer, at, pages = segment
    found = torch.stack(pages.head_major())
    assert torch.equal(found, kv[layer, :, :, at : at + found.shape[2]])
    return found.nbytes


def check_pass(engine: TransferEngine, kv: Tensor) -> int:
    """All whole pages pass by; their bytes."""
    return sum(check_segment(kv, one) for one in segments_of(engine.stream(kv.shape[3] // 4 * 4)))


class TransferMachine(RuleBasedStateMachine):
    """A prompt, layer by layer; then rounds write to all, while streams are opened, read and given up.

    Attributes:
        kv: what the sequence holds, or will once its write-backs are counted.
        read: bytes that were read or asked for, and crossed the link.
    """

    @initialize(
        prompt=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=6),
        rest=st.integers(0, 11),
        segment_tokens=st.integers(1, 17),
        ring_buffers=st.integers(1, 4),
        delay=st.sampled_from([2e-4, 1e-3]),
        seed=st.integers(0, 99),
    )
    def prompt(
        self,
        prompt: list[tuple[int, int]],
        rest: int,
        segment_tokens: int,
        ring_buffers: int,
        delay: float,
        seed: int,
    ) -> None:
        self.link, self.segment, self.ring = (
            UnevenLink(seed, delay),
            -(-segment_tokens // 4) * 4,
            ring_buffers,
        )
        self.opened = engine_over(self.link, random_kv(0), segment_tokens, ring_buffers)
        self.engine, self.counters = (engine := self.opened.__enter__()), engine.counters
        layers = [random_kv(0)[0] for _ in range(LAYOUT.layers)]
        longest = 4 * sum(pages for _, pages in prompt) + rest
        for layer, pages in [*prompt, *((layer, None) for layer in range(LAYOUT.layers))]:
            tokens = longest - layers[layer].shape[2] if pages is None else 4 * pages
            block = random_kv(tokens, 1000 * layer + tokens)[0]
            if tokens:
                engine.write_prompt(layer, block[0].clone(), block[1].clone())
            layers[layer] = torch.cat([layers[layer], block], dim=2)
        engine.READ_TOKENS = 10
        self.kv, self.read = torch.stack(layers), 0
        self.streams: list[tuple[LayerStream, Iterator[Segment]]] = []
        self.sent: list[tuple[int, PendingCopy]] = []

    def pages(self, *shares: float) -> list[int]:
        return sorted(round(share * (self.kv.shape[3] // 4)) * 4 for share in shares)

    @rule(ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def open(self, ends: tuple[float, float]) -> None:
        start, end = self.pages(*ends)
        stream = self.engine.stream(end, start=start)
        self.streams.append((stream, segments_of(stream)))

    @precondition(lambda self: self.streams)
    @rule(count=st.integers(1, 12) | st.just(99))
    def read_segments(self, count: int) -> None:
        for _ in range(count):
            segment = next(self.streams[0][1], None)
            if segment is None:
                del self.streams[0]
                return
            self.read += check_segment(self.kv, segment)

    @precondition(lambda self: self.streams)
    @rule(which=st.integers(0, 3))
    def give_up(self, which: int) -> None:
        self.streams.pop(which % len(self.streams))[0].close()

    @rule(tokens=st.integers(1, 12), seed=st.integers(0, 99))
    def write(self, tokens: int, seed: int) -> None:
        block, copies = random_kv(tokens, seed), self.counters.copies
        self.engine.write_back(block.clone())
        assert self.counters.copies == copies + 1, "of all layers and heads"
        self.kv = torch.cat([self.kv, block], dim=3)

    @rule()
    def flush(self) -> None:
        self.engine.flush()
        assert self.engine.sequence.length == self.kv.shape[3]

    @rule(ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
    def read_tokens(self, ends: tuple[float, float]) -> None:
        start, end = sorted(round(share * self.kv.shape[3]) for share in ends)
        copies, found = self.counters.copies, self.engine.read(start, end)
        assert torch.equal(found, self.kv[:, :, :, start:end])
        assert self.counters.copies - copies == -(-(end - start) // 10), "of all layers"
        self.read += found.nbytes
        start, end = self.pages(*ends)
        memory = torch.empty((end - start) * LAYOUT.layer_token_bytes, dtype=torch.uint8)
        for layer, kv in enumerate(self.kv):
            self.engine.load(layer, start, end, memory, packed=False)
            if start < end:
                pages = self.engine.resident_pages(memory, packed=False)
                assert torch.equal(torch.stack(pages.head_major()), kv[:, :, start:end])
            self.read += memory.nbytes

    @rule(count=st.integers(1, 4), entries=st.integers(1, 9))
    def send(self, count: int, entries: int) -> None:
        """Not overwritten on its way, by what is sent after it and awaited before it."""
        for number in range(len(self.sent), len(self.sent) + count):
            self.sent.append((number, self.engine.send([entries], methodcaller("fill_", number))))
        self.read += count * entries * 4

    @rule(back=st.integers(0, 3))
    def receive(self, back: int) -> None:
        for number, copy in self.sent[back:]:
            assert self.engine.await_copy(copy).eq(number).all()
        del self.sent[back:]

    @rule(tokens=st.integers(1, 12), later=st.booleans())
    def write_what_fails(self, tokens: int, later: bool) -> None:
        """The write-back is dropped, and so is what is asked for before that is known: no hole is left."""
        self.engine.flush()
        block = random_kv(tokens)
        block.view(-1)[0] = -13.0  # what is sent is filled with a number from 0 on
        self.link.failing = lambda pairs: float(pairs[0][1].flatten()[0]) == -13.0
        with pytest.raises(CopyFailed, match="copy to the host of .* failed: the cable was pulled"):
            if later and self.kv.shape[3] % 4 == 0:
                for layer, sides in enumerate(block):
                    self.engine.write_prompt(layer, *sides)
            else:
                self.engine.write_back(block)
            self.engine.flush()
        self.engine.flush()
        self.link.failing = lambda pairs: False
        lengths = {self.engine.sequence.layer_length(layer) for layer in range(LAYOUT.layers)}
        assert lengths == {self.kv.shape[3]}

    def teardown(self) -> None:
        if not hasattr(self, "sent"):
            return
        for stream, _ in self.streams:
            stream.close()
        self.receive(0)
        assert self.counters.bytes_to_device - self.counters.bytes_abandoned == self.read
        before, whole = self.counters.bytes_to_device, self.kv.shape[3] // 4 * 4
        self.engine.stream(whole).close()
        ahead = [min(self.segment, whole - at) for at in range(0, whole, self.segment)] * LAYOUT.layers
        carried = sum(ahead[: self.ring]) * LAYOUT.layer_token_bytes
        assert self.counters.bytes_to_device - before == carried, "the ring is whole again"
        assert check_pass(self.engine, self.kv) == LAYOUT.layer_token_bytes * LAYOUT.layers * whole
        self.flush()
        for layer, expected in enumerate(self.kv):
            found = [torch.stack(pages.head_major()) for pages in self.engine.sequence.views(layer)]
            assert torch.equal(torch.cat([expected[:, :, :0], *found], dim=2), expected)
        self.opened.__exit__(None, None, None)


TransferMachine.TestCase.settings = settings(
    derandomize=True, deadline=None, max_examples=60, stateful_step_count=16
)
TestTransfer = TransferMachine.TestCase


def test_a_write_back_that_finds_no_room_leaves_every_layer_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv, make, asked = random_kv(16), mmap.mmap, []

    def last_layer_is_too_much(file: int, length: int, flags: int) -> mmap.mmap:
        asked.append(length)
        if len(asked) == LAYOUT.layers:
            raise OSError("too large")
        return make(file, length, flags=flags)

    with engine_over(PacedLink(1e9), kv) as engine:
        monkeypatch.setattr(mmap, "mmap", last_layer_is_too_much)
        with pytest.raises(MemoryError):
            engine.write_back(kv)
        engine.flush()
        assert {engine.sequence.layer_length(layer) for layer in range(LAYOUT.layers)} == {16}


class ComputeLink(PacedLink):
    """Its compute is as far behind what is enqueued as a test lets it be; so are its copies, if `held`."""

    def __init__(self) -> None:
        super().__init__(1e9)
        self.moved: list[int] = []
        self.go_on = threading.Event()
        self.go_on.set()
        self.marks: list[Future[None]] = []

    def move(self, pairs: Pairs) -> None:
        assert self.go_on.wait(30)
        self.moved.append(pair_bytes(pairs))
        super().move(pairs)

    def record_event(self) -> Event:
        self.marks.append(Future())
        return FutureEvent(self.marks[-1])

    def finish(self, count: int) -> None:
        """The first `count` marks are passed."""
        for mark in self.marks[:count]:
            if not mark.done():
                mark.set_result(None)


def test_what_is_sent_overtakes_what_is_carried_ahead() -> None:
    link = ComputeLink()
    with engine_over(link, random_kv(30), ring_buffers=3) as engine:
        link.finish(9)
        link.go_on.clear()
        stream = engine.stream(28)
        sent = engine.send([7], lambda packed: packed.fill_(1.0))
        link.finish(9)
        link.go_on.set()
        assert engine.await_copy(sent).sum() == 7
        assert link.moved.index(28) < 2, "behind what had begun"
        stream.close()
        link.finish(99)


def test_the_host_runs_ahead_of_the_compute_by_a_ring() -> None:
    """Compute that reads segments is enqueued and not done: the host stops with the ring, and not before."""
    link, seen = ComputeLink(), list[float]()
    moved, enqueued = list[int](), list[int]()

    def wait_until(values: Sized, count: int) -> None:
        deadline = time.monotonic() + 5
        while len(values) < count and time.monotonic() < deadline:
            time.sleep(1e-4)

    with engine_over(link, random_kv(40), segment_tokens=4, ring_buffers=3) as engine:
        link.finish(3)  # nothing reads the ring yet
        stream, following = engine.stream(40), engine.stream(40)

        def read() -> None:
            for layer in range(LAYOUT.layers):
                seen.extend(pages.side(0)[0, 0, 0, 0].item() for pages in stream.segments(layer))

        reader = threading.Thread(target=read)
        reader.start()
        for done in range(30):
            wait_until(link.marks, 3 + (ring := min(30, done + 3)))
            time.sleep(1e-3)
            moved.append(len(link.moved))
            enqueued.append(len(link.marks) - 3)
            if enqueued[-1] != ring:
                break
            link.finish(4 + done)
        reader.join(5)
        alive = reader.is_alive()
        threading.Timer(0.02, lambda: link.finish(99)).start()
        if not alive:
            engine.finish_compute()
        wait_until(link.moved, 33)
        filled = len(link.moved)
        link.finish(99)  # also where this test fails: closing waits for all compute
        following.close()
        link.finish(99)
    assert not alive and len(seen) == 30
    assert all(moved[done] <= 3 + done for done in range(30)), "a buffer was filled that was still being read"
    assert enqueued == [min(30, done + 3) for done in range(30)]
    assert filled == 33, "the ring of the next pass"


def test_in_place_nothing_is_copied() -> None:
    kv = random_kv(30)
    with engine_over(CpuLink(), kv) as engine:
        check_pass(engine, kv)
        (first, *_), views = list(engine.stream(28).segments(0)), engine.sequence.views(0)
        assert first.side(0).data_ptr() == views[0].side(0).data_ptr()
        new = random_kv(5, 1)
        engine.write_back(new[:, :, :, :2])
        engine.write_back(new[:, :, :, 2:3])
        assert engine.sequence.layer_length(0) == 30, "what is less than a page waits"
        engine.write_back(new[:, :, :, 3:])
        assert engine.sequence.layer_length(0) == 35
        assert torch.equal(engine.read(27, 35), torch.cat([kv[:, :, :, 27:], new], dim=3))
        engine.write_back(new[:, :, :, :1])
        engine.flush()
        assert engine.sequence.layer_length(0) == 36
        assert torch.equal(engine.read(35, 36), new[:, :, :, :1])
        assert vars(engine.counters) == vars(TransferCounters())


def test_streams_are_read_in_their_order_and_one_at_a_time() -> None:
    kv, link = random_kv(12), UnevenLink()
    with engine_over(link, kv) as engine:
        link.failing = lambda pairs: True
        stream = engine.stream(12)
        with pytest.raises(CopyFailed, match="copy to the device of .* failed: the cable was pulled"):
            list(stream.segments(0))
        stream.close()
        link.failing = lambda pairs: False
        stream, following = engine.stream(12), engine.stream(12)
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
        check_pass(engine, kv)
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
                for pages in stream.segments(layer):
                    late = (load @ load).sum() * 0  # the segment is read late: its slot may not be reused
                    pieces.append(torch.stack([side + late for side in pages.head_major()]))
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
