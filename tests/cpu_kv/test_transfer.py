"""Streams, write-backs and gathers over slow and uneven links: contents, byte counts, and a whole ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from uneven_link import UnevenLink

from cpu_kv import (
    CopyFailed,
    CpuLink,
    CudaLink,
    KVLayout,
    Link,
    PacedLink,
    PagedKVStore,
    StagingRing,
    TransferEngine,
    TransferStalled,
)
from cpu_kv.link import Pairs, pair_bytes

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=4, dtype=torch.float32, page_size=4)


def random_kv(tokens: int, seed: int = 0, layout: KVLayout = LAYOUT) -> Tensor:
    """[layers, 2, kv_heads, tokens, head_dim]"""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.layers, *layout.slab_shape(tokens))
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
        stream = engine.stream(30)
        sent = torch.zeros(7)
        ticket = engine.start_sending([(sent, torch.ones(7))])
        link.go_on.set()
        engine.await_sent(ticket)
        assert sent.sum() == 7
        assert link.moved.index(28) < 2, "behind what had begun"
        stream.close()


def check_pass(engine: TransferEngine, kv: Tensor, length: int, rest_s: float = 0.0) -> None:
    stream = engine.stream(length)
    for layer in range(LAYOUT.layers):
        start = 0
        for keys, values in stream.segments(layer):
            time.sleep(rest_s)  # a segment must hold still while the link runs ahead
            end = start + keys.shape[1]
            assert torch.equal(keys.cpu(), kv[layer, 0, :, start:end])
            assert torch.equal(values.cpu(), kv[layer, 1, :, start:end])
            start = end
        assert start == length
    assert stream.finished


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 40),
    segment_tokens=st.integers(1, 17),
    ring_buffers=st.integers(1, 4),
    passes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_streams_equal_the_store_and_count_their_bytes(
    tokens: int, segment_tokens: int, ring_buffers: int, passes: list[tuple[float, int]], seed: int
) -> None:
    kv = random_kv(tokens, seed)
    with engine_over(UnevenLink(seed, 5e-4), kv, segment_tokens, ring_buffers) as engine:
        for share, abandoned_after in passes:
            length = round(share * tokens)
            before = engine.counters.bytes_to_device
            check_pass(engine, kv, length, rest_s=2e-4)
            assert engine.counters.bytes_to_device - before == LAYOUT.kv_bytes(length)
            # A pass that is given up half-way leaves the next one whole.
            stream = engine.stream(tokens)
            segments = (piece for layer in range(LAYOUT.layers) for piece in stream.segments(layer))
            for _ in zip(range(abandoned_after), segments, strict=False):
                pass
            stream.close()
            assert engine._ring is not None
            assert engine._ring.room == ring_buffers
        assert engine.counters.bytes_to_host == 0


@settings(derandomize=True, deadline=None, max_examples=25)
@given(
    blocks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.booleans()), min_size=1, max_size=10),
    seed=st.integers(0, 99),
)
def test_write_backs_arrive_in_order(blocks: list[tuple[int, int, bool]], seed: int) -> None:
    start = random_kv(3, seed)
    expected = list(start)
    with engine_over(UnevenLink(seed, 1e-3), start) as engine:
        for number, (layer, tokens, flush) in enumerate(blocks):
            block = random_kv(tokens, 1000 + number)[0]
            engine.write_back(layer, block[0].clone(), block[1].clone())
            expected[layer] = torch.cat([expected[layer], block], dim=2)
            if flush:
                engine.flush()
                assert engine.sequence.layer_length(layer) == expected[layer].shape[2]
        length = min(kv.shape[2] for kv in expected)
        check_pass(engine, torch.stack([kv[:, :, :length] for kv in expected]), length)
        engine.flush()
        for layer, kv in enumerate(expected):
            pieces = [torch.stack(piece) for piece in engine.sequence.views(layer)]
            assert torch.equal(torch.cat(pieces, dim=2), kv)
        written = sum(tokens for _, tokens, _ in blocks)
        assert engine.counters.bytes_to_host == written * LAYOUT.layer_token_bytes


def test_the_link_runs_ahead_across_layers() -> None:
    kv = random_kv(8)
    with engine_over(UnevenLink(), kv, segment_tokens=8, ring_buffers=2) as engine:
        stream = engine.stream(8)
        assert engine.counters.bytes_to_device == 2 * 8 * LAYOUT.layer_token_bytes  # layers 0 and 1
        assert engine.counters.copies == 2
        list(stream.segments(0))
        assert engine.counters.bytes_to_device == LAYOUT.kv_bytes(8)
        stream.close()


def test_layers_may_be_chosen() -> None:
    kv = random_kv(12)
    with engine_over(UnevenLink(), kv) as engine:
        stream = engine.stream(12, layers=[2, 0])
        for layer in (2, 0):
            keys = torch.cat([keys.clone() for keys, _ in stream.segments(layer)], dim=1)
            assert torch.equal(keys, kv[layer, 0])
        assert engine.counters.bytes_to_device == 2 * 12 * LAYOUT.layer_token_bytes


def test_in_place_nothing_is_copied() -> None:
    kv = random_kv(30)
    with engine_over(CpuLink(), kv) as engine:
        check_pass(engine, kv, 30)
        (first, *_), views = list(engine.stream(30, [1]).segments(1)), engine.sequence.views(1)
        assert first[0].data_ptr() == views[0][0].data_ptr()
        block = random_kv(4, 1)[0]
        engine.write_back(0, block[0], block[1])
        assert engine.sequence.layer_length(0) == 34  # at once
        engine.gather_chunks(0, torch.zeros(2, 3, dtype=torch.long), 1)
        assert engine.counters.bytes_to_device == engine.counters.bytes_to_host == 0
        assert engine.counters.copies == 0


@pytest.mark.parametrize("make_link", [CpuLink, UnevenLink])
def test_gathers(make_link: type[CpuLink]) -> None:
    kv = random_kv(30)
    with engine_over(make_link(), kv) as engine:
        block = random_kv(6, 1)[0]
        engine.write_back(1, block[0], block[1])
        layer = torch.cat([kv[1], block], dim=2)
        keys, values = engine.gather_chunks(1, torch.tensor([[35, 0], [7, 7]]), 1)
        assert torch.equal(keys[0], layer[0, 0, [35, 0]])
        assert torch.equal(values[1], layer[1, 1, [7, 7]])
        out = (torch.zeros(2, 8, 4), torch.zeros(2, 8, 4))
        assert engine.gather_chunks(1, torch.tensor([[8, 2], [0, 5]]), 4, out) is out
        assert torch.equal(out[0][0], torch.cat([layer[0, 0, 32:36], layer[0, 0, 8:12]]))
        assert torch.equal(out[1][1], torch.cat([layer[1, 1, 0:4], layer[1, 1, 20:24]]))
        with pytest.raises(ValueError, match="out must be"):
            engine.gather_chunks(1, torch.zeros(2, 8, dtype=torch.long), 1, (out[0][:, :1], out[1][:, :1]))
        if not engine.link.in_place:
            assert engine.counters.bytes_to_device == (2 + 8) * LAYOUT.layer_token_bytes


def test_streams_are_read_in_their_order_and_one_at_a_time() -> None:
    kv = random_kv(12)
    with engine_over(UnevenLink(), kv) as engine:
        stream = engine.stream(12)
        following = engine.stream(12)
        with pytest.raises(RuntimeError, match="neither at its end nor closed"):
            next(following.segments(0))
        following.close()
        with pytest.raises(RuntimeError, match="the layers left are 0, 1, 2"):
            next(stream.segments(1))
        half_read = stream.segments(0)
        next(half_read)
        with pytest.raises(RuntimeError, match="not the turn"):
            next(stream.segments(1))
        stream.close()
        with pytest.raises(RuntimeError, match="closed while"):
            next(half_read)
        stream.close()
        with pytest.raises(ValueError, match="12 are present"):
            engine.stream(13)
        check_pass(engine, kv, 12)


@given(
    seed=st.integers(0, 1000),
    segment_tokens=st.integers(1, 9),
    ring_buffers=st.integers(1, 4),
    ranges=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), min_size=1, max_size=4),
    read=st.integers(0, 4),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_the_link_runs_ahead_into_the_next_streams(
    seed: int, segment_tokens: int, ring_buffers: int, ranges: list[list[int]], read: int
) -> None:
    """Each stream shows its own tokens; every byte that crossed is read, or counted as abandoned."""
    kv = random_kv(30, seed)
    with engine_over(UnevenLink(seed, 2e-4), kv, segment_tokens, ring_buffers) as engine:
        streams = [engine.stream(end, start=start) for start, end in ranges]
        for stream, (start, end) in list(zip(streams, ranges, strict=True))[:read]:
            for layer in range(LAYOUT.layers):
                parts = [torch.stack(pair).clone() for pair in stream.segments(layer)]
                if start < end:
                    assert torch.equal(torch.cat(parts, dim=2), kv[layer, :, :, start:end])
            assert stream.finished
        for stream in streams[read:]:
            stream.close()
        tokens = sum(end - start for start, end in ranges[:read])
        counters = engine.counters
        assert counters.bytes_to_device - counters.bytes_abandoned == tokens * LAYOUT.token_bytes
        check_pass(engine, kv, 30)


def test_a_stream_ahead_is_copied_before_the_one_before_it_is_asked_for_its_end() -> None:
    with engine_over(UnevenLink(), random_kv(12), segment_tokens=4, ring_buffers=2) as engine:
        stream, _ = engine.stream(4, layers=[0]), engine.stream(12, layers=[1])
        # One buffer holds the first stream whole, the other one what comes first of the second.
        assert engine.counters.copies == 2
        assert engine.counters.bytes_to_device == 8 * LAYOUT.layer_token_bytes
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
            block = torch.full((2, 2, 4), value)
            try:
                engine.write_back(0, block, block)
            except CopyFailed:
                break
        else:
            with pytest.raises(CopyFailed, match="copy to the host"):
                engine.flush()
        assert engine.sequence.layer_length(0) == 7
        engine.flush()
        engine.write_back(0, torch.full((2, 2, 4), 3.0), torch.full((2, 2, 4), 3.0))
        engine.flush()
        assert engine.gather_chunks(0, torch.tensor([[6, 7]] * 2), 1)[0][0, :, 0].tolist() == [1.0, 3.0]


def test_a_stalled_link_raises() -> None:
    link = PacedLink(1.0, timeout=0.02)
    with PagedKVStore(LAYOUT) as store:
        sequence = store.new_sequence()
        kv = random_kv(5)
        for layer in range(3):
            sequence.append(layer, kv[layer, 0], kv[layer, 1])
        engine = TransferEngine(sequence, link)
        with pytest.raises(TransferStalled):
            next(engine.stream(5).segments(0))
        link.close()
        engine.close()


def test_use_after_close() -> None:
    with engine_over(UnevenLink(), random_kv(5)) as engine:
        engine.stream(5)
        engine.close()
        engine.close()
        with pytest.raises(RuntimeError, match="engine is closed"):
            engine.stream(5)


def test_the_ring_refuses_what_it_cannot_do() -> None:
    link = CpuLink()
    ring = StagingRing(link, LAYOUT, segment_tokens=3, buffers=2)
    first, second = ring.acquire(), ring.acquire()
    assert first.keys.shape == (2, 3, 4)
    with pytest.raises(RuntimeError, match="all 2 buffers"):
        ring.acquire()
    ring.release(second)
    with pytest.raises(ValueError, match="not held"):
        ring.release(second)
    ring.release(first)
    assert ring.acquire() is second  # released longest ago
    with pytest.raises(ValueError, match="at least 1"):
        StagingRing(link, LAYOUT, 0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("ring_buffers", [1, 2, 3])
def test_cuda_streams_under_load(ring_buffers: int) -> None:
    layout = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    kv = random_kv(5000, layout=layout)
    link = CudaLink("cuda")
    with PagedKVStore(layout, pin=True, slab_tokens=2048) as store:
        sequence = store.new_sequence()
        engine = TransferEngine(sequence, link, segment_tokens=700, ring_buffers=ring_buffers)
        load = torch.randn(2048, 2048, device="cuda")
        for start in range(0, 5000, 1250):
            for layer in range(layout.layers):
                block = kv[layer, :, :, start : start + 1250].cuda()
                late = (load @ load).sum() * 0  # the source is made late on the compute's stream
                engine.write_back(layer, block[0] + late, block[1] + late)
        engine.flush()
        assert sequence.length == 5000
        for _ in range(3):
            stream = engine.stream(5000)
            copies: list[list[Tensor]] = []
            for layer in range(layout.layers):
                pieces = []
                for keys, values in stream.segments(layer):
                    late = (load @ load).sum() * 0  # the segment is read late: its slot may not be reused
                    pieces.append(torch.stack([keys + late, values + late]))
                copies.append(pieces)
            for layer, pieces in enumerate(copies):
                assert torch.equal(torch.cat(pieces, dim=2).cpu(), kv[layer])
        chunks = torch.randint(0, 5000 // 8, (4, 64))
        keys, _ = engine.gather_chunks(1, chunks.cuda(), 8)
        expected = kv[1, 0].unflatten(1, (625, 8))[torch.arange(4)[:, None], chunks].flatten(1, 2)
        assert torch.equal(keys.cpu(), expected)
        engine.close()
        link.close()
