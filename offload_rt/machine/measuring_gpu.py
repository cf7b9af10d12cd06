"""Measures what a graphics card and its link do: the figures of `hardware.Gpu`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.pinned import SlabAllocator
from offload_rt.machine.hardware import Gpu
from offload_rt.machine.inventory import Card, link_now
from offload_rt.machine.measuring import Progress, Sizes, launch_ms

_COPIES = 4
"""Copies of one measurement of a rate, enqueued at once."""


@dataclass(frozen=True)
class LinkFigures:
    """What is seen of a link besides the rates to plan with.

    Attributes:
        to_device_rate_both, to_host_rate_both: GB/s of pinned copies, both ways at once.
        generation, width: PCIe while copying; None where the driver does not say.
        pinned: the memory copied from and to was page-locked; False: it was refused.
    """

    to_device_rate_both: float
    to_host_rate_both: float
    generation: int | None
    width: int | None
    pinned: bool


class PinnedCopies:
    """A buffer on the card and one in page-locked memory for each direction.

    Page-locked as the store's slabs are; given back by `close`.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        refusals: list[str] = []
        self._device = device
        self._slabs = SlabAllocator(pin=True, on_warning=refusals.append)
        try:
            self._sources, self._results = (
                self._slabs.allocate((size,), torch.uint8).result().zero_() for _ in range(2)
            )
        except BaseException:
            self._slabs.close()
            raise
        self.pinned = not refusals
        self._inwards, self._outwards = (
            torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self._to_device, self._to_host = torch.cuda.Stream(device), torch.cuda.Stream(device)
        torch.cuda.synchronize(device)  # the buffers were filled on another stream

    def close(self) -> None:
        """Idempotent."""
        with suppress(RuntimeError):  # a card that has failed has said so before
            torch.cuda.synchronize(self._device)
        self._slabs.close()

    def to_device(self) -> _Timed:
        """Enqueues copies to the device."""
        return _Timed(self._to_device, self._inwards, self._sources)

    def to_host(self) -> _Timed:
        """Enqueues copies to the host."""
        return _Timed(self._to_host, self._results, self._outwards)

    def copy(self) -> None:
        """Some copies to the device; the host waits for them without holding up other threads."""
        self.to_device().rate()


class _Timed:
    """Copies that were enqueued on a stream between two events."""

    def __init__(self, stream: torch.cuda.Stream, destination: Tensor, source: Tensor) -> None:
        # Waiting for an event that does not block would keep a processor busy, and from attending.
        self._began, self._ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        self._bytes = _COPIES * source.nbytes
        self._began.record(stream)
        with torch.cuda.stream(stream):
            for _ in range(_COPIES):
                destination.copy_(source, non_blocking=True)
        self._ended.record(stream)

    def rate(self) -> float:
        """GB/s; waits until the copies have ended."""
        self._ended.synchronize()
        return self._bytes / float(self._began.elapsed_time(self._ended)) / 1e6


def measure_link(copies: PinnedCopies, card: Card, repeats: int) -> tuple[float, float, LinkFigures]:
    """GB/s to the device, GB/s to the host, each direction alone, and what else is seen of the link."""
    copies.to_device().rate(), copies.to_host().rate()  # wakes the card
    to_device, to_host, both = [], [], []
    for _ in range(repeats):
        to_device.append(copies.to_device().rate())
        to_host.append(copies.to_host().rate())
        inwards, outwards = copies.to_device(), copies.to_host()
        both.append((inwards.rate(), outwards.rate()))
    busy = copies.to_device()
    generation, width = link_now(card.uuid)
    busy.rate()
    figures = LinkFigures(
        to_device_rate_both=statistics.median(rate for rate, _ in both),
        to_host_rate_both=statistics.median(rate for _, rate in both),
        generation=generation,
        width=width,
        pinned=copies.pinned,
    )
    return statistics.median(to_device), statistics.median(to_host), figures


def device_memory_rate(device: torch.device, size: int, repeats: int) -> float:
    """GB/s at which a kernel reads `size` bytes of the card's memory: the best of some sums."""
    block = torch.ones(size // 4, device=device)
    return block.nbytes / _least_ms(block.sum, device, repeats) / 1e6


def device_compute_rate(device: torch.device, width: int, repeats: int) -> float:
    """TFLOP/s of a bf16 product of two matrices `[width, width]`: the best of some."""
    # Of zeros or ones a card computes more than of what a model has: they draw less power.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(width, width, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    return 2 * width**3 / _least_ms(lambda: left @ right, device, repeats) / 1e9


def measure_gpu(
    card: Card, copies: PinnedCopies, device: torch.device, sizes: Sizes, on_progress: Progress
) -> tuple[Gpu, LinkFigures]:
    """All figures of the card that is torch's `device`; its free memory is for the caller to fill in."""
    steps = iter(range(3))

    def begin(what: str) -> None:
        on_progress(f"GPU {device.index}: {what}", next(steps), 3)

    begin("copies")
    to_device, to_host, link = measure_link(copies, card, sizes.repeats)
    begin("memory and matrix products")
    read = device_memory_rate(device, sizes.memory_bytes, sizes.repeats)
    products = device_compute_rate(device, sizes.device_product, sizes.repeats)
    begin("launches")
    gpu = Gpu(
        name=card.name,
        memory_bytes=0,
        memory_rate=read,
        compute_rate=products,
        to_device_rate=to_device,
        to_host_rate=to_host,
        launch_ms=launch_ms(device, sizes.layers, sizes.repeats),
    )
    return gpu, link


def _least_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of a kernel, between two events; the first run is not counted."""
    spent: list[float] = []
    with torch.cuda.device(device):
        for _ in range(repeats + 1):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            spent.append(began.elapsed_time(ended))
    return min(spent[1:])
