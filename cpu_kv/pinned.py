"""Page-locked slabs, allocated in the background and given back for certain."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

_OS_PAGE_BYTES = 4096
_HOST_REGISTER_PORTABLE = 1  # pinned for every CUDA context, not only for the thread's own


def _register_with_cuda(address: int, size: int) -> int:
    runtime = torch.cuda.cudart()
    return int(runtime.cudaHostRegister(address, size, _HOST_REGISTER_PORTABLE))


def _unregister_with_cuda(address: int) -> int:
    runtime = torch.cuda.cudart()
    return int(runtime.cudaHostUnregister(address))


@dataclass(frozen=True)
class PageLocking:
    """How memory is page-locked: ``register(address, bytes)`` and ``unregister(address)``, 0 for success."""

    register: Callable[[int, int], int] = _register_with_cuda
    unregister: Callable[[int], int] = _unregister_with_cuda


@dataclass(frozen=True)
class _Slab:
    tensor: Tensor
    size: int
    pinned: bool


class SlabAllocator:
    """Allocates slabs one after another in a background thread.

    ``pin``: page-lock the slabs; without CUDA (and without a ``locking`` of one's own) they are ordinary
    memory. Where page-locking is refused, this slab and all later ones are pageable, and ``on_warning``
    (Python's ``warnings`` if None) is told once. Calls come from one thread.
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
        self._refused = False
        self._on_warning = on_warning or _warn
        self._slabs: dict[int, _Slab] = {}  # by the address of the tensor
        self._slabs_lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu_kv-slabs")
        # Memory that is freed while it is page-locked poisons its addresses, so an allocator that is
        # forgotten unlocks its slabs too.
        self._give_back_all = weakref.finalize(self, _give_back_all, self._slabs, self._locking)

    @property
    def bytes_allocated(self) -> int:
        """Bytes of the slabs that exist now."""
        with self._slabs_lock:
            return sum(slab.size for slab in self._slabs.values())

    @property
    def bytes_pinned(self) -> int:
        """Bytes of the slabs that exist now and are page-locked."""
        with self._slabs_lock:
            return sum(slab.size for slab in self._slabs.values() if slab.pinned)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Future[Tensor]:
        """Ask for an uninitialised CPU tensor; it is made in the background, in the order asked.

        The future raises MemoryError where there is no memory. Raises RuntimeError after ``close``.
        """
        if not self._give_back_all.alive:
            raise RuntimeError("the slab allocator is closed")
        return self._thread.submit(self._make, tuple(shape), dtype)

    def release(self, tensor: Tensor) -> None:
        """Give a slab back. Its memory is free once nothing else refers to the tensor.

        Raises ValueError for a tensor that is not a slab of this allocator.
        """
        with self._slabs_lock:
            slab = self._slabs.pop(tensor.data_ptr(), None)
        if slab is None:
            raise ValueError("this tensor is not a slab of this allocator, or was released before")
        _unlock(slab, self._locking)

    def close(self) -> None:
        """Wait for the thread, drop what it has not begun, and give every slab back. Idempotent."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._give_back_all()

    def _make(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        locked_size = -(-size // _OS_PAGE_BYTES) * _OS_PAGE_BYTES
        try:
            memory = torch.empty(locked_size + _OS_PAGE_BYTES, dtype=torch.uint8)
        except RuntimeError as error:  # torch reports a lack of memory in this way
            raise MemoryError(f"no memory for a KV slab of {size:,} bytes ({list(shape)} {dtype})") from error
        # A slab starts at a page of its own: two registrations may not share one.
        offset = -memory.data_ptr() % _OS_PAGE_BYTES
        tensor = memory[offset : offset + size].view(dtype).view(shape)
        pinned = self._lock(tensor.data_ptr(), locked_size)
        with self._slabs_lock:
            self._slabs[tensor.data_ptr()] = _Slab(tensor, size, pinned)
        return tensor

    def _lock(self, address: int, size: int) -> bool:
        if self._locking is None or self._refused:
            return False
        # The driver leaves a refusal behind as the thread's last error. This thread launches no kernel
        # that could mistake it for its own.
        code = self._locking.register(address, size)
        if code == 0:
            return True
        self._refused = True
        self._on_warning(
            f"CUDA refused to page-lock {size:,} bytes for the KV cache (error {code}). The cache uses "
            "pageable memory from here on: copies to and from the GPU run at a fraction of the link's rate "
            "and block the program. Raise the limit on locked memory ('ulimit -l unlimited', in a container "
            "'--ulimit memlock=-1') or ask for fewer tokens."
        )
        return False


def _unlock(slab: _Slab, locking: PageLocking | None) -> None:
    # The result is not checked: it fails only after an error that the program has already met, and hiding
    # that one would not help.
    if slab.pinned and locking is not None:
        locking.unregister(slab.tensor.data_ptr())


def _give_back_all(slabs: dict[int, _Slab], locking: PageLocking | None) -> None:
    for slab in slabs.values():
        _unlock(slab, locking)
    slabs.clear()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
