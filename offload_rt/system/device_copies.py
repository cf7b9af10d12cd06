"""Small tensors between host and device: asynchronous uploads; one synchronisation per download."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from cpu_kv.mapped import SmallCopies


def to_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Returns `numbers` on the device, int64. The host does not wait, and few need no copy engine."""
    source = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    return source if device.type == "cpu" else _small_copies(device).to_device(source)


def selection(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Returns an index of rising numbers of rows; adjacent ones are a slice, which copies nothing."""
    adjacent = rows[-1] - rows[0] == len(rows) - 1
    return slice(rows[0], rows[-1] + 1) if adjacent else to_device(rows, device)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors in host memory; the host waits once for all, and only for the current stream."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    return _small_copies(tensors[0].device).to_host(tensors)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates tensors; a single one is returned as it is: its copy might wait for a copy engine."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


@cache
def _small_copies(device: torch.device) -> SmallCopies:
    return SmallCopies(device)


class PendingRead:
    """An asynchronous copy of a tensor to host memory. Any thread may wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._copy.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a spinning thread would occupy a core
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Waits for the copy; returns the tensor in host memory."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
