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


@pytest.mark.usefixtures("small_pieces")
def test_slabs_are_locked_in_pieces_counted_and_given_back(
    driver: FakeDriver, allocator: SlabAllocator
) -> None:
    first = allocator.allocate((2, 5, 100, 5), torch.float32).result()
    second = allocator.allocate([7], torch.bfloat16).result()
    empty = allocator.allocate((0, 5), torch.bfloat16).result()
    assert (first.shape, second.dtype, empty.shape) == ((2, 5, 100, 5), torch.bfloat16, (0, 5))
    start = first.data_ptr()
    pieces = {start: 8192, start + 8192: 8192, start + 16384: 4096}
    assert driver.registered.items() >= pieces.items() and second.data_ptr() in driver.registered
    assert allocator.bytes_pinned == 20_000 + 14 and allocator.is_locked(first)
    allocator.release(first)
    assert not driver.registered.keys() & pieces and allocator.bytes_pinned == 14
    with pytest.raises(ValueError, match="not a slab"):
        allocator.release(first)
    allocator.release(empty)
    allocator.close()
    with pytest.raises(RuntimeError, match="closed"):
        allocator.allocate((1,), torch.float32)


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
    assert not allocator.is_locked(first) and not allocator.is_locked(second)
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
    ordinary = SlabAllocator(not torch.cuda.is_available(), pytest.fail)  # without CUDA nothing is locked
    slab = ordinary.allocate((16, mmap.PAGESIZE), torch.uint8).result()
    assert resident_pages(slab.data_ptr(), slab.nbytes) == ordinary.bytes_pinned == 0
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
    allocator = SlabAllocator(True, locking=driver.locking())
    with pytest.warns(RuntimeWarning, match="page-lock"):  # without a listener
        allocator.allocate((5000,), torch.float32).result()
        allocator.release(allocator.allocate((10,), torch.float32).result())  # the thread is past the first
    assert len(driver.registered) == 2
    del allocator
    gc.collect()
    assert not driver.registered


@pytest.mark.gpu
def test_memory_is_unlocked_after_the_kernels_that_read_it() -> None:
    device = torch.device("cuda", 0)
    link = CudaLink(device)
    allocator = SlabAllocator(True, pytest.fail)
    slab = allocator.allocate((4096,), torch.int32).result().fill_(1)
    assert slab.is_pinned()
    torch.cuda._sleep(10**7)
    read = computed_copy(device_view(slab, device))
    allocator.release(slab)
    assert not slab.is_pinned()
    slab.fill_(2)
    assert bool((read == 1).all())
    link.close()
