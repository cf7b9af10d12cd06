"""Allocates slabs of host memory in the background, page-locks them in pieces, and always unlocks them."""

from __future__ import annotations

import math
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from cpu_kv.streams import finish_devices

# Linux 6.11 to 6.13 refuse to lock more than 2 GiB at a time, and drivers have limits of their own.
PIECE_BYTES = 2**28
"""Slabs are page-locked in pieces of this size. To CUDA each is an allocation, which no copy may cross."""

_HOST_REGISTER_FLAGS = 1 | 2  # portable (for every CUDA context) and mapped (for kernels)


def _register_with_cuda(address: int, size: int) -> int:
    runtime = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(address, size, _HOST_REGISTER_FLAGS))


def _unregister_with_cuda(address: int) -> int:
    finish_devices()  # kernels may still be reading the memory
    return int(torch.cuda.cudart().cudaHostUnregister(address))


@dataclass(frozen=True)
class PageLocking:
    """Functions that page-lock memory; they return 0 for success.

    Attributes:
        register: takes an address and a number of bytes.
        unregister: takes the address.
    """

    register: Callable[[int, int], int] = _register_with_cuda
    unregister: Callable[[int], int] = _unregister_with_cuda


def pieces(byte_count: int) -> list[tuple[int, int]]:
    """Returns start and end of each piece of a slab of `byte_count` bytes, relative to the slab."""
    return [(start, min(start + PIECE_BYTES, byte_count)) for start in range(0, byte_count, PIECE_BYTES)]


@dataclass(frozen=True)
class _Slab:
    memory: Tensor  # uint8: `size` bytes, rounded up to whole pages of the system
    size: int
    locked: list[tuple[int, int]] = field(default_factory=list)  # address and bytes of each piece


class SlabAllocator:
    """Allocates slabs one after another in a background thread, in huge pages if the system has them.

    Must be used from one thread.

    Args:
        pin: whether to page-lock the slabs; without CUDA, and without `locking`, they stay pageable. A piece
            that CUDA refuses to lock stays pageable too.
        on_warning: called once if CUDA refuses (default: Python's `warnings`).
        locking: how memory is page-locked; None: by CUDA.
    """

    # torch's own pinned allocator rounds sizes up to powers of two: a slab of 33 GiB would take 64.

    def __init__(
        self,
        pin: bool,
        on_warning: Callable[[str], None] | None = None,
        locking: PageLocking | None = None,
    ):
        if locking is None and torch.cuda.is_available():
            locking = PageLocking()
        self._locking = locking if pin else None
        self._warned = False
        self._on_warning = on_warning or partial(warnings.warn, category=RuntimeWarning, stacklevel=2)
        self._slabs: dict[int, _Slab] = {}  # by the address of the memory
        self._slabs_lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu_kv-slabs")
        # Addresses of memory that is freed while it is page-locked cannot be locked again, so slabs are also
        # unlocked when the allocator is garbage-collected.
        self._give_back_all = weakref.finalize(self, _give_back_all, self._slabs, self._locking)

    @property
    def locks(self) -> bool:
        """Whether slabs are page-locked: the system gives their memory at once, else as it is written."""
        return self._locking is not None

    @property
    def bytes_pinned(self) -> int:
        """Bytes that are page-locked now."""
        with self._slabs_lock:
            return sum(count for slab in self._slabs.values() for _, count in slab.locked)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Future[Tensor]:
        """Starts allocating an uninitialised CPU tensor; allocations are made in the order of the calls.

        Returns:
            A future, which raises MemoryError if memory is short.

        Raises:
            RuntimeError: the allocator is closed.
        """
        if not self._give_back_all.alive:
            raise RuntimeError("the slab allocator is closed")
        return self._thread.submit(self._make, tuple(shape), dtype)

    def is_locked(self, tensor: Tensor) -> bool:
        """Returns whether a slab is page-locked as a whole."""
        with self._slabs_lock:
            slab = self._slabs.get(tensor.untyped_storage().data_ptr())
            return slab is not None and sum(count for _, count in slab.locked) == slab.size

    def release(self, tensor: Tensor) -> None:
        """Unlocks a slab. Its memory is freed once nothing refers to the tensor.

        Raises:
            ValueError: the tensor is not a slab of this allocator.
        """
        with self._slabs_lock:
            slab = self._slabs.pop(tensor.untyped_storage().data_ptr(), None)
        if slab is None:
            raise ValueError("this tensor is not a slab of this allocator, or was released before")
        _unlock(slab, self._locking)

    def close(self) -> None:
        """Waits for the allocation under way, cancels later ones, and unlocks every slab. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._give_back_all()

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        try:
            memory = _whole_pages(size)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no memory for a KV slab of {size:,} bytes ({list(shape)} {dtype})") from error
        tensor = memory[:size].view(dtype).view(shape)
        slab = _Slab(memory, size)
        with self._slabs_lock:  # registered before it is locked, so that it is unlocked even after an error
            self._slabs[memory.data_ptr()] = slab
        if self._locking is not None:
            self._lock(slab, self._locking)
        return tensor

    def _lock(self, slab: _Slab, locking: PageLocking) -> None:
        refusal = 0
        for start, end in pieces(slab.memory.nbytes):
            piece = slab.memory[start:end]
            # Touches every page with all of torch's threads; page-locking would do it with this one. torch
            # gives each thread at least 32,768 elements: with one byte a page only two would work.
            piece.view(-1, mmap.PAGESIZE)[:, :64].zero_()
            # A refusal stays the thread's last CUDA error. That is harmless: this thread launches no kernel.
            code = locking.register(piece.data_ptr(), piece.nbytes)
            if code == 0:
                slab.locked.append((piece.data_ptr(), min(end, slab.size) - start))
            refusal = refusal or code
        if refusal == 0 or self._warned:
            return
        self._warned = True
        pageable = slab.size - sum(count for _, count in slab.locked)
        self._on_warning(
            f"CUDA refused to page-lock {pageable:,} of {slab.size:,} bytes for the KV cache (error "
            f"{refusal}). These and any refused later stay pageable: copies to and from the GPU run at a "
            "fraction of the link's rate and block the program. Raise the limit on locked memory ('ulimit -l "
            "unlimited', in a container '--ulimit memlock=-1') or ask for fewer tokens."
        )


def _whole_pages(size: int) -> Tensor:
    """Returns at least `size` bytes of untouched memory, which lives as long as any view of it."""
    length = max(1, -(-size // mmap.PAGESIZE)) * mmap.PAGESIZE
    # mmap's default is shared memory, which seldom gets huge pages.
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE)
    with suppress(AttributeError, OSError):  # no such advice, or a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _unlock(slab: _Slab, locking: PageLocking | None) -> None:
    # Not checked: unlocking fails only after another error, which the program has already reported.
    if locking is not None:
        for address, _ in slab.locked:
            locking.unregister(address)


def _give_back_all(slabs: dict[int, _Slab], locking: PageLocking | None) -> None:
    for slab in slabs.values():
        _unlock(slab, locking)
    slabs.clear()
