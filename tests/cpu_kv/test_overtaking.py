"""What a copy engine does that ignores priorities: the emulated device's schedule `engine`, in virtual time.

A real one is measured by `python -m bench gpu`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from time import perf_counter

import pytest
import torch
from emulated.gpu import EMULATED, GPUS

from cpu_kv import CudaLink, KVLayout, PagedKVStore, TransferEngine, cuda_link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="of the emulated device alone"),
]

MIB = 2**20
BULK = 64 * MIB


@pytest.fixture(autouse=True)
def _one_copy_engine_a_direction() -> Iterator[None]:
    torch.cuda.synchronize()
    schedule, GPUS.schedule = GPUS.schedule, "engine"
    GPUS.now = perf_counter()  # by which other schedules tell when a stream's work has ended
    GPUS.copies.clear()
    yield
    torch.cuda.synchronize()
    GPUS.schedule = schedule
    GPUS.copies.clear()


@pytest.mark.parametrize("which", ["urgent", "default stream"])
def test_a_small_copy_waits_less_than_a_millisecond_for_bulk_ones(which: str) -> None:
    assert waited_ms(which) < 1


@pytest.mark.parametrize("which", ["urgent", "default stream"])
def test_pieces_alone_do_not_help(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes the copies of one stream back to back as long as the next one is ready."""
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)
    assert waited_ms(which) > 2  # for the end of one of the three at least


def waited_ms(which: str) -> float:
    """How long a small copy behind three of 64 MiB waits for its engine, in ms of virtual time."""
    link = CudaLink("cuda")
    bulk = torch.zeros(BULK, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(bulk, device="cuda")
    small, to = torch.ones(8, pin_memory=True), torch.empty(8, device="cuda")
    copied = [link.copy([(there, bulk)], link.record_event()) for _ in range(3)]
    if which == "urgent":
        link.copy([(to, small)], link.record_event(), urgent=True)
    else:
        to.copy_(small, non_blocking=True)
    for event in copied:
        event.synchronize()
    torch.cuda.synchronize()
    link.close()
    (copy,) = (copy for copy in GPUS.copies if copy.byte_count == small.nbytes)
    assert sum(copy.byte_count for copy in GPUS.copies) == 3 * BULK + small.nbytes
    return 1e3 * (copy.start - copy.submitted)


def test_bulk_copies_go_out_in_pieces() -> None:
    link = CudaLink("cuda")
    source = torch.arange(5 * MIB, dtype=torch.int64, pin_memory=True)
    source.copy_(torch.arange(5 * MIB))
    there = torch.empty_like(source, device="cuda")
    link.copy([(there, source)], link.record_event()).synchronize()
    link.close()
    assert torch.equal(there.cpu(), torch.arange(5 * MIB))
    sizes = [copy.byte_count for copy in GPUS.copies if not copy.to_host]
    assert sum(sizes) == 40 * MIB and max(sizes) <= cuda_link.PIECE_BYTES <= 16 * MIB


@pytest.mark.parametrize("host_away_ms", [0.0, 3.9])
def test_the_link_never_idles_while_the_ring_has_room(host_away_ms: float) -> None:
    """Nor where the host is busy elsewhere before a layer, for less time than a ring lasts."""
    layout = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype=torch.float16, page_size=64)
    tokens = 128 * layout.page_size
    with PagedKVStore(layout, pin=True, slab_tokens=tokens) as store:
        sequence = store.new_sequence()
        for layer in range(layout.layers):
            sequence.append(layer, *torch.zeros(2, layout.kv_heads, tokens, layout.head_dim).half())
        link = CudaLink("cuda")
        segment = tokens // 8
        engine = TransferEngine(sequence, link, segment_tokens=segment, ring_buffers=3)
        GPUS.bytes_per_second = segment * layout.token_bytes / layout.layers / 1e-3  # 1 ms a segment
        try:
            for _ in range(2):  # the second pass has begun before the first one ends
                stream = engine.stream(tokens)
                for layer in range(layout.layers):
                    GPUS.now += host_away_ms / 1e3
                    for pages in stream.segments(layer):
                        (pages.side(0) + pages.side(1)).sum()
            engine.close()
        finally:
            GPUS.bytes_per_second = 25e9
        link.close()
    copies = [copy for copy in GPUS.copies if not copy.to_host]
    assert len(copies) == 2 * layout.layers * 8
    # The kernel behind a piece makes the stream's next copy wait for its launch, and nothing else does.
    idle = [later.start - copy.end for copy, later in itertools.pairwise(copies)]
    assert sum(idle) < 0.03 * (copies[-1].end - copies[0].start), [round(1e3 * gap, 3) for gap in idle]
