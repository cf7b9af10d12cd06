"""Slabs: order, pieces, refusal, and that nothing outlives close."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import weakref
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
import torch

from cpu_kv import CudaLink, PageLocking, SlabAllocator
from cpu_kv.mapped import computed_copy, device_view
from cpu_kv.pinned import PIECE_BYTES, pieces


class FakeDriver:
    """Registers memory as CUDA would; refuses the requests with the numbers ``refuse``, from 1 on."""

    def __init__(self, refuse: Container[int] = ()):
        self.registered: dict[int, int] = {}
        self.requests = 0
        self.refuse = refuse

    def locking(self) -> PageLocking:
        return PageLocking(self.register, self.unregister)

    def register(self, address: int, size: int) -> int:
        self.requests += 1
        assert address % 4096 == 0
        assert size % 4096 == 0
        assert all(
            address + size <= other or other + length <= address for other, length in self.registered.items()
        )
        if self.requests in self.refuse:
            return 2
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_kv.pinned.PIECE_BYTES", 8192)


def resident_pages(address: int, size: int) -> int:
    """How many pages of a range of whole pages are in memory."""
    pages = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    return sum(page & 1 for page in pages)


def slab_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu_kv-slabs")]


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def allocator(driver: FakeDriver) -> Iterator[SlabAllocator]:
    """Leaves nothing behind, and nobody is warned."""
    made = SlabAllocator(True, pytest.fail, driver.locking())
    yield made
    made.close()
    assert not driver.registered
    assert made.bytes_pinned == 0
    assert not slab_threads()


def test_pinned_slabs_are_counted_and_given_back(driver: FakeDriver, allocator: SlabAllocator) -> None:
    first = allocator.allocate((2, 3, 100, 5), torch.float32).result()
    second = allocator.allocate([7], torch.bfloat16).result()
    assert first.shape == (2, 3, 100, 5)
    assert second.dtype == torch.bfloat16
    assert allocator.bytes_pinned == first.nbytes + second.nbytes
    assert set(driver.registered) == {first.data_ptr(), second.data_ptr()}
    allocator.release(first)
    assert set(driver.registered) == {second.data_ptr()}
    assert allocator.bytes_pinned == second.nbytes
    with pytest.raises(ValueError, match="not a slab"):
        allocator.release(first)
    allocator.close()
    with pytest.raises(RuntimeError, match="closed"):
        allocator.allocate((1,), torch.float32)


def test_pieces_cover_a_slab() -> None:
    assert pieces(0) == []
    assert pieces(PIECE_BYTES) == [(0, PIECE_BYTES)]
    assert pieces(2 * PIECE_BYTES + 1) == [
        (0, PIECE_BYTES),
        (PIECE_BYTES, 2 * PIECE_BYTES),
        (2 * PIECE_BYTES, 2 * PIECE_BYTES + 1),
    ]


@pytest.mark.usefixtures("small_pieces")
def test_a_slab_is_locked_in_pieces(driver: FakeDriver, allocator: SlabAllocator) -> None:
    slab = allocator.allocate((5000,), torch.float32).result()
    start = slab.data_ptr()
    assert driver.registered == {start: 8192, start + 8192: 8192, start + 16384: 4096}
    assert allocator.bytes_pinned == 20_000
    allocator.release(slab)
    assert not driver.registered


@pytest.mark.usefixtures("small_pieces")
def test_a_refusal_costs_one_piece_and_is_told_once() -> None:
    driver = FakeDriver(refuse={2, 6})
    warnings: list[str] = []
    allocator = SlabAllocator(True, warnings.append, driver.locking())
    first, second = (allocator.allocate((5000,), torch.float32).result().fill_(1) for _ in range(2))
    assert set(driver.registered) == {
        first.data_ptr(),
        first.data_ptr() + 16384,
        second.data_ptr(),
        second.data_ptr() + 8192,
    }
    assert allocator.bytes_pinned == 40_000 - 8192 - (20_000 - 16384)
    assert len(warnings) == 1
    for said in ("8,192 of 20,000 bytes", "error 2", "pageable", "block", "ulimit -l", "memlock"):
        assert said in warnings[0]
    allocator.release(first)
    assert set(driver.registered) == {second.data_ptr(), second.data_ptr() + 8192}
    allocator.close()
    assert not driver.registered


@pytest.mark.usefixtures("small_pieces")
def test_an_error_between_pieces_leaves_none_locked(driver: FakeDriver) -> None:
    def register(address: int, size: int) -> int:
        if driver.requests == 2:
            raise RuntimeError("the driver is gone")
        return driver.register(address, size)

    allocator = SlabAllocator(True, pytest.fail, PageLocking(register, driver.unregister))
    with pytest.raises(RuntimeError, match="gone"):
        allocator.allocate((5000,), torch.float32).result()
    assert len(driver.registered) == 2
    allocator.close()
    assert not driver.registered


@pytest.mark.usefixtures("small_pieces")
def test_memory_is_touched_before_it_is_locked_and_not_at_all_otherwise(driver: FakeDriver) -> None:
    resident: list[tuple[int, int]] = []

    def register(address: int, size: int) -> int:
        resident.append((resident_pages(address, size), size // mmap.PAGESIZE))
        return driver.register(address, size)

    locked = SlabAllocator(True, pytest.fail, PageLocking(register, driver.unregister))
    locked.allocate((5000,), torch.float32).result()
    assert len(resident) == 3
    assert all(present == pages for present, pages in resident)
    locked.close()
    ordinary = SlabAllocator(False)
    slab = ordinary.allocate((16, mmap.PAGESIZE), torch.uint8).result()
    assert resident_pages(slab.data_ptr(), slab.nbytes) == 0
    assert resident_pages(slab.fill_(1).data_ptr(), slab.nbytes) == 16
    ordinary.close()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages here")
def test_slabs_ask_for_huge_pages() -> None:
    allocator = SlabAllocator(False)
    address = allocator.allocate((10,), torch.float32).result().data_ptr()
    flags: list[str] = []
    within = False
    for words in map(str.split, Path("/proc/self/smaps").read_text().splitlines()):
        if not words[0].endswith(":"):
            start, end = (int(bound, 16) for bound in words[0].split("-"))
            within = start <= address < end
        elif within and words[0] == "VmFlags:":
            flags = words[1:]
    assert "hg" in flags
    assert "sh" not in flags  # of shared memory, which is seldom given any
    allocator.close()


@pytest.mark.parametrize("give_back", ["release", "close"])
def test_memory_lives_as_long_as_a_view(
    give_back: str, driver: FakeDriver, allocator: SlabAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []
    make = mmap.mmap

    def recorded(file: int, length: int, flags: int) -> mmap.mmap:
        mapping = make(file, length, flags=flags)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mmap, "mmap", recorded)
    slab = allocator.allocate((2, 5000), torch.float32).result()
    view = slab[1].fill_(3)
    if give_back == "release":
        allocator.release(slab)
    else:
        allocator.close()
    assert not driver.registered
    del slab
    assert view.add_(1).sum() == 20_000
    (mapping,) = mappings
    assert mapping() is not None
    allocator.close()  # with it ends the thread, which may still hold what it made last
    del view
    assert mapping() is None


def test_slabs_without_bytes(driver: FakeDriver, allocator: SlabAllocator) -> None:
    slabs = [allocator.allocate((0, 5), torch.bfloat16).result() for _ in range(2)]
    assert all(slab.shape == (0, 5) for slab in slabs)
    assert allocator.bytes_pinned == 0
    for slab in slabs:
        allocator.release(slab)
    assert not driver.registered


def test_without_a_listener_the_warning_is_a_python_warning() -> None:
    allocator = SlabAllocator(True, locking=FakeDriver(refuse={1}).locking())
    with pytest.warns(RuntimeWarning, match="page-lock"):
        allocator.allocate((10,), torch.float32).result()
    allocator.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_memory_is_ordinary_and_nobody_is_warned() -> None:
    allocator = SlabAllocator(True, pytest.fail)
    allocator.allocate((10,), torch.float32).result()
    assert allocator.bytes_pinned == 0
    allocator.close()


def test_lack_of_memory_is_memory_error_where_it_is_awaited(
    driver: FakeDriver, allocator: SlabAllocator
) -> None:
    good = allocator.allocate((10,), torch.float32)
    too_large = allocator.allocate((1 << 46,), torch.float32)
    after = allocator.allocate((10,), torch.float32)
    with pytest.raises(MemoryError, match=r"281,474,976,710,656 bytes"):
        too_large.result()
    with pytest.raises(MemoryError, match=r"no memory for a KV slab"):
        allocator.allocate((1 << 62,), torch.float32).result()
    assert {good.result().data_ptr(), after.result().data_ptr()} == set(driver.registered)


def test_close_waits_for_the_slab_under_way_and_drops_the_rest(driver: FakeDriver) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def register(address: int, size: int) -> int:
        begun.set()
        assert go_on.wait(30)
        return driver.register(address, size)

    allocator = SlabAllocator(True, pytest.fail, PageLocking(register, driver.unregister))
    under_way = allocator.allocate((10,), torch.float32)
    waiting = allocator.allocate((10,), torch.float32)
    assert begun.wait(30)
    closing = threading.Thread(target=allocator.close)
    closing.start()
    go_on.set()
    closing.join(30)
    assert not closing.is_alive()
    assert under_way.done()
    assert waiting.cancelled() or waiting.done()
    assert not driver.registered
    assert not slab_threads()


@pytest.mark.usefixtures("small_pieces")
def test_a_forgotten_allocator_unlocks_its_slabs() -> None:
    driver = FakeDriver(refuse={2})
    allocator = SlabAllocator(True, lambda warning: None, driver.locking())
    allocator.allocate((5000,), torch.float32).result()
    allocator.release(allocator.allocate((10,), torch.float32).result())  # the thread is past the first one
    assert len(driver.registered) == 2
    del allocator
    gc.collect()
    assert not driver.registered


@pytest.mark.gpu
def test_memory_is_unlocked_after_the_kernels_that_read_it() -> None:
    device = torch.device("cuda", 0)
    link = CudaLink(device)
    allocator = SlabAllocator(True, pytest.fail)
    slab = allocator.allocate((4096,), torch.int32).result()
    slab.fill_(1)
    torch.cuda._sleep(10**7)
    read = computed_copy(device_view(slab, device))
    allocator.release(slab)
    slab.fill_(2)
    assert bool((read == 1).all())
    link.close()


@pytest.mark.gpu
def test_cuda_slabs_are_pinned() -> None:
    allocator = SlabAllocator(True, pytest.fail)
    slab = allocator.allocate((3, 5000), torch.bfloat16).result()
    assert slab.is_pinned()
    allocator.close()
    assert not slab.is_pinned()
