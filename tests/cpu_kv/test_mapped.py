"""Small data crosses the link by kernels that read and write page-locked memory, not by a copy engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED, GPUS
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_kv.mapped import (
    MappedBuffer,
    PeerCopies,
    SmallCopies,
    computed_copy,
    device_view,
    joined_bytes,
    kernels_use_host_pointers,
    split_bytes,
)

DTYPES = [torch.uint8, torch.bool, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
INDICES = [0, pytest.param(1, marks=pytest.mark.skipif("torch.cuda.device_count() < 2"))]


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def engines_used() -> int:
    return GPUS.counters.copies_to_device + GPUS.counters.copies_to_host


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5))
def test_joined_tensors_are_split_as_they_were(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    tensors = [values(dtype, *shape) for dtype, shape in kinds]
    data = joined_bytes(tensors) if tensors else torch.empty(0, dtype=torch.uint8)
    found = split_bytes(data, [(tensor.shape, tensor.dtype) for tensor in tensors])
    assert all(torch.equal(*pair) for pair in zip(found, tensors, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_and_kernels_share_memory(dtype: torch.dtype, index: int) -> None:
    """Whichever device is current: the view belongs to the one that was asked for."""
    device = torch.device("cuda", index)
    memory = torch.empty(3, 5, dtype=dtype, pin_memory=True)
    memory.copy_(values(dtype, 3, 5))
    there = device_view(memory, device)
    assert there.device == device and there.shape == memory.shape and there.dtype == dtype
    before, used = memory.clone(), engines_used()
    read = computed_copy(there)
    computed_copy(values(dtype, 3, 5).zero_().to(device), out=there)
    torch.cuda.synchronize(device)
    if EMULATED:
        assert engines_used() == used + 1, "the zeros alone came by a copy engine"
    assert torch.equal(read.cpu(), before) and not memory.any()


@pytest.mark.parametrize(("refused", "answer"), [(0, 1), (0, 0), (3, 1)])
def test_a_device_is_asked_whether_it_takes_host_pointers(
    refused: int, answer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attribute(value: Any, number: int, device: object) -> int:
        assert number == 91
        value._obj.value = answer
        return 0

    driver = SimpleNamespace(cuDeviceGet=lambda number, index: refused, cuDeviceGetAttribute=attribute)
    monkeypatch.setattr("ctypes.CDLL", lambda name: driver)
    expected = not refused and bool(answer)
    assert kernels_use_host_pointers.__wrapped__(torch.device("cuda", 0)) is expected


@pytest.mark.gpu
def test_the_host_overwrites_a_buffer_only_after_its_kernels() -> None:
    (buffer,) = MappedBuffer.allocate(16, torch.device("cuda"))
    buffer.host.fill_(1)
    torch.cuda._sleep(10**7)
    read = computed_copy(buffer.device)
    buffer.mark_used()
    buffer.last_use.synchronize()
    buffer.host.fill_(2)
    torch.cuda.synchronize()
    assert read.tolist() == [1] * 16


@pytest.mark.gpu
def test_small_copies_use_no_copy_engine_and_large_ones_do() -> None:
    copies, used = SmallCopies(torch.device("cuda")), engines_used()
    sources = [values(dtype, 7, 3) for dtype in DTYPES]
    there = []
    for source in sources:
        expected = source.clone()
        there.append((copies.to_device(source), expected))
        source.zero_()  # which the caller may do at once
    found = copies.to_host([tensor for tensor, _ in there])
    assert all(torch.equal(one, expected) for one, (_, expected) in zip(found, there, strict=True))
    assert not EMULATED or engines_used() == used
    large = values(torch.float32, SmallCopies.MOST_BYTES)
    (back,) = copies.to_host([copies.to_device(large)])
    assert torch.equal(back, large) and (not EMULATED or engines_used() == used + 2)


@pytest.mark.gpu
def test_more_small_copies_than_buffers_disturb_one_another_never() -> None:
    copies = SmallCopies(torch.device("cuda"))
    there = [copies.to_device(torch.full((9,), number)) for number in range(3 * copies.BUFFERS)]
    assert [int(one.sum()) for one in there] == [9 * number for number in range(len(there))]


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1])
def test_between_streams_of_two_devices_and_of_one(number: int) -> None:
    """More at a time than there are buffers, small and large."""
    if number >= torch.cuda.device_count():
        pytest.skip("there is one GPU")
    here, other = torch.device("cuda", 0), torch.device("cuda", number)
    copies, used = PeerCopies(here, other), engines_used()
    sending, receiving = torch.cuda.Stream(here), torch.cuda.Stream(other)
    with torch.cuda.stream(sending):
        sources = [torch.full((5, 8), float(number), device=here) for number in range(3 * copies.BUFFERS)]
        there = [copies.copy(source, sending, receiving) for source in sources]
        assert not EMULATED or engines_used() == used
        large = torch.arange(copies.MOST_BYTES, device=here)
        there.append(copies.copy(large, sending, receiving))
    with torch.cuda.stream(receiving):
        sums = [one.double().sum() for one in there]
    receiving.synchronize()
    assert all(one.device == other for one in there)
    expected = [40.0 * number for number in range(len(sources))] + [float(sum(range(len(large))))]
    assert [one.item() for one in sums] == expected
