"""Between host and device in decoding: numbers go there unawaited, results come back in one wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """`numbers` on the device, int64, in one copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.long)
    # Pinned: a copy from pageable memory makes the host wait for the device.
    return torch.tensor(numbers, dtype=torch.long, pin_memory=True).to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The tensors in host memory; the host waits once for all, and only for the current stream."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    copies = [
        torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        for tensor in tensors
    ]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


class Arriving:
    """A tensor on its way to host memory; made where it is computed, waited for in any thread.

    Args:
        into: page-locked memory of its shape to arrive in; None: some of its own.
    """

    def __init__(self, tensor: Tensor, into: Tensor | None = None) -> None:
        self._there = tensor
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._there = torch.empty_like(tensor, device="cpu", pin_memory=True) if into is None else into
            self._there.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a thread that spins would take a core
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._there
