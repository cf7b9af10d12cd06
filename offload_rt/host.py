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
