"""The emulated device itself: what a missing wait would do on a GPU, it does here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from support.small_engine import PROMPT, again, small_llm
from torch import Tensor

from cpu_kv import CopyFailed
from cpu_kv.cuda_link import _CudaEvent
from cpu_kv.mapped import MappedBuffer
from emulated.gpu import CUDA, DEVICES, EMULATED, GPUS, MEMORY
from offload_rt import SamplingParams
from offload_rt.caches.full import FullCache
from offload_rt.model.decoder import NotANumber

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="of the emulated device alone"),
]


@pytest.fixture(autouse=True)
def _late() -> Iterator[None]:
    schedule, GPUS.schedule = GPUS.schedule, "late"
    yield
    GPUS.schedule = schedule


def ones(count: int = 8) -> torch.Tensor:
    return torch.ones(count, device=CUDA)


def test_another_stream_sees_garbage_unless_it_waits() -> None:
    made, other = ones(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        early = made + 1
        other.wait_stream(torch.cuda.default_stream())
        right = made + 1
    other.synchronize()
    assert early.isnan().all() and right.tolist() == [2.0] * 8


def test_an_event_covers_what_was_enqueued_before_it() -> None:
    made, other = ones(), torch.cuda.Stream()
    event = torch.cuda.Event()
    event.record()
    made.add_(1)
    with torch.cuda.stream(other):
        event.wait()
        seen = made.clone()
    other.synchronize()
    assert seen.tolist() == [1.0] * 8 and made.tolist() == [2.0] * 8


def test_the_host_reads_and_overwrites_too_early() -> None:
    there, back = ones(), torch.zeros(8, pin_memory=True)
    back.copy_(there, non_blocking=True)
    assert back.tolist() == [0.0] * 8, "it has not arrived"
    torch.cuda.current_stream().synchronize()
    assert back.tolist() == [1.0] * 8
    source = torch.zeros(8, pin_memory=True)
    there.copy_(source, non_blocking=True)
    source.fill_(5)
    assert there.tolist() == [5.0] * 8, "the copy reads what stands there when it runs"
    pageable = torch.zeros(8)
    there.copy_(pageable, non_blocking=True)
    pageable.fill_(5)
    assert there.tolist() == [0.0] * 8, "pageable memory is read at once"


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_given_back_is_another_tensors(recorded: bool) -> None:
    other, made = torch.cuda.Stream(), ones()
    other.wait_stream(torch.cuda.default_stream())
    with torch.cuda.stream(other):
        seen = made + 1
    if recorded:
        made.record_stream(other)
    del made
    ones().sum().item()
    other.synchronize()
    assert seen.tolist() == [2.0] * 8 if recorded else seen.isnan().all()


def test_what_waits_is_refused_where_nothing_may() -> None:
    made = ones()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (
            made.sum().item,
            made.cpu,
            made.nonzero,
            lambda: made[made > 0],
            lambda: bool(made[0] > 0),
        ):
            with pytest.raises(RuntimeError, match="synchronizing"):
                wait()
        torch.zeros(8, pin_memory=True).copy_(made, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="a previous error"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        made.sum().item()
    assert torch.cuda.current_stream() is not stream and GPUS.open_pools, "as torch leaves them"
    torch.cuda.set_stream(stream)
    GPUS.open_pools.clear()
    with pytest.raises(RuntimeError, match="same device"):
        made + torch.ones(8)


def test_a_graph_computes_what_stands_there_when_it_is_replayed() -> None:
    graph, made = torch.cuda.CUDAGraph(), ones()
    with torch.cuda.graph(graph):
        doubled = made * 2
    assert doubled.isnan().all()
    made.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6.0] * 8


def test_two_devices_share_nothing_but_events() -> None:
    here, there = (torch.ones(4, device=torch.device("cuda", index)) for index in (0, 1))
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with torch.cuda.device(1):
        current = torch.zeros(1, device="cuda").device.index
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_device()))
        thread.start()
        thread.join()
    assert (current, seen) == (1, [0]), "each thread has a current device of its own"
    here.add_(1)
    made, other = torch.cuda.Event(), torch.cuda.Stream(1)
    made.record(torch.cuda.current_stream(0))
    with torch.cuda.stream(other):
        copied = here.to(there.device, non_blocking=True)
        other.wait_event(made)
    torch.cuda.synchronize(1)
    assert copied.device == there.device and copied.tolist() == [2.0] * 4


@pytest.mark.parametrize("missing", ["copies", "compute", "results"])
def test_a_wait_that_is_missing_changes_what_is_written(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=12)
    expected: list[int] = []
    found: list[int] = []
    with (
        suppress(NotANumber, CopyFailed, IndexError),  # of a token that is garbage
        small_llm(CUDA, "retrieval", resident_tokens=32, cpu_tokens=48) as llm,
        llm.read(PROMPT, 12) as context,
        monkeypatch.context() as without,
    ):
        expected = again(context, params).tokens
        assert again(context, params).tokens == expected
        if missing == "copies":
            without.setattr(_CudaEvent, "wait", lambda event: None)
        elif missing == "compute":
            without.setattr(FullCache, "finish_compute", lambda cache: None)
        else:
            without.setattr(MappedBuffer, "mark_used", lambda buffer: None)
        found = again(context, params).tokens
    assert expected and found != expected


def test_the_allocator_reserves_segments() -> None:
    """Of 2 MiB for small requests, of 20 below 10 MiB, and whole 2 MiB for others; streams share none."""
    device, mib = torch.device("cuda", DEVICES - 1), 2**20
    torch.cuda.empty_cache()
    begun, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)

    def reserved() -> float:
        return (torch.cuda.memory_reserved(device) - begun) / mib

    def make(size: float) -> Tensor:
        return torch.empty(int(size * mib), dtype=torch.uint8, device=device)

    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        small, middle = [make(0.7), make(0.7)], [make(3), make(7), make(9.5)]
        assert reserved() == 2 + 20
        large = make(11)
        assert reserved() == 2 + 20 + 12
        assert torch.cuda.memory_allocated(device) - allocated == sum(
            one.nbytes for one in (*small, *middle, large)
        )
        del large
        assert reserved() == 34, "it is kept for the next request of the stream"
        with torch.cuda.stream(torch.cuda.Stream(device)):
            other = make(11)
            assert reserved() == 46
        again = make(10.5)
        assert reserved() == 46
        del middle[1], middle[1]
        middle.append(make(16))
        assert reserved() == 46, "free neighbours are one block"
        del again, other
        torch.cuda.empty_cache()
        assert reserved() == 22
        assert torch.cuda.max_memory_reserved(device) - begun >= 46 * mib


def test_what_has_no_room_is_refused() -> None:
    device = torch.device("cuda", DEVICES - 1)
    torch.cuda.set_per_process_memory_fraction(2**20 / MEMORY, device)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 3145728 bytes"):
            torch.empty(3 * 2**20, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
