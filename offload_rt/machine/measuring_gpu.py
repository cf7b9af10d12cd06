"""Measures what a graphics card and its link do: the figures of `hardware.Gpu`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from cpu_kv.pinned import SlabAllocator
from offload_rt.machine import measuring
from offload_rt.machine.hardware import Gpu
from offload_rt.machine.inventory import Card, link_now

PRODUCT_WIDTH = 8192
_COPIES = 4  # of one measurement of a rate, enqueued at once

Rate = Callable[[], float]
"""Waits until copies that were enqueued have ended, and returns their GB/s."""


@dataclass(frozen=True)
class LinkFigures:
    """What is seen of a link besides the rates to plan with.

    Attributes:
        to_device_rate_both, to_host_rate_both: GB/s of pinned copies, both ways at once.
        generation, width: PCIe while copying; None where the driver does not say.
        pinned: the memory copied from and to was page-locked; False: that was refused.
    """

    to_device_rate_both: float
    to_host_rate_both: float
    generation: int | None
    width: int | None
    pinned: bool


class PinnedCopies:
    """A buffer on the card and one in page-locked memory for each direction; `close` gives them back.

    `to_device` and `to_host` enqueue copies.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        refusals: list[str] = []
        self._device = device
        self._slabs = SlabAllocator(pin=True, on_warning=refusals.append)
        slabs = (self._slabs.allocate((size,), torch.uint8) for _ in range(2))
        self._sources, self._results = (slab.result().zero_() for slab in slabs)
        self.pinned = not refusals
        self._inwards, self._outwards = torch.zeros(2, size, dtype=torch.uint8, device=device)
        inwards, outwards = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.to_device = partial(_timed_copies, inwards, self._inwards, self._sources)
        self.to_host = partial(_timed_copies, outwards, self._results, self._outwards)
        torch.cuda.synchronize(device)  # the buffers were filled on another stream

    def close(self) -> None:
        """Idempotent."""
        with suppress(RuntimeError):  # a card that has failed has said so before
            torch.cuda.synchronize(self._device)
        self._slabs.close()

    def copy(self) -> None:
        """Copies to the device; the host waits for them without holding up other threads."""
        self.to_device()()


def _timed_copies(stream: torch.cuda.Stream, destination: Tensor, source: Tensor) -> Rate:
    # Waiting for an event that does not block would keep a processor from attending.
    began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
    began.record(stream)
    with torch.cuda.stream(stream):
        for _ in range(_COPIES):
            destination.copy_(source, non_blocking=True)
    ended.record(stream)

    def rate() -> float:
        ended.synchronize()
        return _COPIES * source.nbytes / float(began.elapsed_time(ended)) / 1e6

    return rate


def measure_link(copies: PinnedCopies, card: Card) -> tuple[float, float, LinkFigures]:
    """GB/s to the device, GB/s to the host, each direction alone, and what else is seen of the link."""
    copies.to_device()(), copies.to_host()()  # wakes the card
    turns = []
    for _ in range(measuring.REPEATS):
        alone = copies.to_device()(), copies.to_host()()
        inwards, outwards = copies.to_device(), copies.to_host()
        turns.append((*alone, inwards(), outwards()))
    busy = copies.to_device()
    generation, width = link_now(card.uuid)
    busy()
    to_device, to_host, to_device_both, to_host_both = map(median, zip(*turns, strict=True))
    return to_device, to_host, LinkFigures(to_device_both, to_host_both, generation, width, copies.pinned)


def measure_gpu(
    card: Card, copies: PinnedCopies, device: torch.device, on_progress: measuring.Progress
) -> tuple[Gpu, LinkFigures]:
    """All figures of the card that is torch's `device`; free memory is for the caller to fill in."""
    name = f"GPU {device.index}"
    on_progress(f"{name}: copies", 0, 3)
    to_device, to_host, link = measure_link(copies, card)
    on_progress(f"{name}: memory and matrix products", 1, 3)
    size = measuring.within(measuring.MEMORY_BYTES, card.free_bytes)
    read = measuring.memory_rate(device, size)
    products = measuring.compute_rate(device, torch.bfloat16, PRODUCT_WIDTH, PRODUCT_WIDTH) / 1e3
    on_progress(f"{name}: launches", 2, 3)
    launch = measuring.launch_ms(device)
    return Gpu(card.name, 0, read, products, to_device, to_host, launch), link
