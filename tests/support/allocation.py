"""Counts the memory of tensors while some work runs, as an allocator of a device would."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Counted(TorchDispatchMode):
    """Counts the storages that operators make, from their first tensor on until they are freed."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self._known = {one.untyped_storage().data_ptr() for one in given}
        self._live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._known or not size:
            return
        self._known.add(address)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._free, address, size)

    def _free(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._live -= size


def peak_bytes(work: Callable[[], object], *given: torch.Tensor) -> int:
    """Returns the most bytes that tensors made by `work` hold at a time, what it returns among them.

    Args:
        given: tensors that are there before.
    """
    counted = _Counted(list(given))
    with counted:
        result = work()
        del result
    return counted.peak
