"""Slabs: order, refusal, and that nothing outlives close."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from cpu_kv import PageLocking, SlabAllocator


class FakeDriver:
    """Registers memory as CUDA would; refuses from the ``refuse_from``-th request on."""

    def __init__(self, refuse_from: int = 1_000):
        self.registered: dict[int, int] = {}
        self.requests = 0
        self.refuse_from = refuse_from

    def locking(self) -> PageLocking:
        return PageLocking(self.register, self.unregister)

    def register(self, address: int, size: int) -> int:
        self.requests += 1
        assert address % 4096 == 0
        assert size % 4096 == 0
        if self.requests >= self.refuse_from:
            return 2
        assert address not in self.registered
        self.registered[address] = size
        return 0

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def slab_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu_kv-slabs")]


def test_pinned_slabs_are_counted_and_given_back() -> None:
    driver = FakeDriver()
    allocator = SlabAllocator(True, pytest.fail, driver.locking())
    first = allocator.allocate((2, 3, 100, 5), torch.float32).result()
    second = allocator.allocate([7], torch.bfloat16).result()
    assert first.shape == (2, 3, 100, 5)
    assert second.dtype == torch.bfloat16
    assert allocator.bytes_allocated == allocator.bytes_pinned == first.nbytes + second.nbytes
    assert set(driver.registered) == {first.data_ptr(), second.data_ptr()}
    allocator.release(first)
    assert set(driver.registered) == {second.data_ptr()}
    assert allocator.bytes_allocated == second.nbytes
    with pytest.raises(ValueError, match="not a slab"):
        allocator.release(first)
    allocator.close()
    allocator.close()
    assert not driver.registered
    assert allocator.bytes_allocated == allocator.bytes_pinned == 0
    assert not slab_threads()
    with pytest.raises(RuntimeError, match="closed"):
        allocator.allocate((1,), torch.float32)


def test_refusal_warns_once_and_goes_on_in_pageable_memory() -> None:
    driver = FakeDriver(refuse_from=2)
    warnings: list[str] = []
    allocator = SlabAllocator(True, warnings.append, driver.locking())
    slabs = [allocator.allocate((1000,), torch.float32) for _ in range(4)]
    for number, slab in enumerate(slabs):
        slab.result().fill_(number)
    assert driver.requests == 2  # not asked again after the refusal
    assert allocator.bytes_allocated == 16_000
    assert allocator.bytes_pinned == 4_000
    assert len(warnings) == 1
    for said in ("error 2", "pageable", "block", "ulimit -l", "memlock"):
        assert said in warnings[0]
    allocator.close()
    assert not driver.registered


def test_without_a_listener_the_warning_is_a_python_warning() -> None:
    allocator = SlabAllocator(True, locking=FakeDriver(refuse_from=1).locking())
    with pytest.warns(RuntimeWarning, match="page-lock"):
        allocator.allocate((10,), torch.float32).result()
    allocator.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_memory_is_ordinary_and_nobody_is_warned() -> None:
    allocator = SlabAllocator(True, pytest.fail)
    allocator.allocate((10,), torch.float32).result()
    assert allocator.bytes_pinned == 0
    allocator.close()


def test_lack_of_memory_is_memory_error_where_it_is_awaited() -> None:
    driver = FakeDriver()
    allocator = SlabAllocator(True, pytest.fail, driver.locking())
    good = allocator.allocate((10,), torch.float32)
    too_large = allocator.allocate((1 << 46,), torch.float32)
    after = allocator.allocate((10,), torch.float32)
    with pytest.raises(MemoryError, match=r"281,474,976,710,656 bytes"):
        too_large.result()
    assert {good.result().data_ptr(), after.result().data_ptr()} == set(driver.registered)
    allocator.close()
    assert not driver.registered
    assert not slab_threads()


def test_close_waits_for_the_slab_under_way_and_drops_the_rest() -> None:
    driver = FakeDriver()
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


def test_a_forgotten_allocator_unlocks_its_slabs() -> None:
    driver = FakeDriver()
    allocator = SlabAllocator(True, pytest.fail, driver.locking())
    allocator.allocate((10,), torch.float32).result()
    allocator.release(allocator.allocate((10,), torch.float32).result())  # the thread is past the first one
    assert len(driver.registered) == 1
    del allocator
    gc.collect()
    assert not driver.registered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_slabs_are_pinned() -> None:
    allocator = SlabAllocator(True, pytest.fail)
    slab = allocator.allocate((3, 5000), torch.bfloat16).result()
    assert slab.is_pinned()
    allocator.close()
    assert not slab.is_pinned()
