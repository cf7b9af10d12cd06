"""Measures what the processor and graphics cards do, and their links: the figures of `hardware.Hardware`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cpu_kv import SlabAllocator
from offload_rt.attention.backends import choose_backend, cpu_share_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.host import to_host
from offload_rt.machine.hardware import AttentionRate, Gpu, Host
from offload_rt.machine.inventory import Card, link_now
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel

Progress = Callable[[str, int, int], None]
"""Told what is measured next, how many measurements are done, and how many there are."""

Rate = Callable[[], float]
"""Waits until copies that were enqueued have ended, and returns their GB/s."""

ATTENTION_QUERIES = (1, 8, 16, 32)
BESIDE_QUERIES = 8
"""Queries at which attention and link are measured side by side: few enough that memory decides."""

CPU = torch.device("cpu")
# What is measured with; buffers are far larger than any cache.
MEMORY_BYTES = 2**30
ATTENTION_BYTES = 2**29
COPY_BYTES = 2**28
PRODUCT = (512, 2048)  # rows and width of the matrix products on the processor
PRODUCT_WIDTH = 8192  # on a card, of as many rows
LAYERS = 8  # of the model that is launched
REPEATS = 7

_HEAD_DIM = 128
_CHUNK = 8
_KV_HEADS = 4
_ENTRIES = 256
_PAGE = 256  # tokens, as in the store
_COPIES = 4  # of one measurement of a link's rate, enqueued at once
_COPIES_BESIDE = 8  # of as many bytes each, one after the other beside attention


def within(size: int, available: int) -> int:
    """As much of `size` bytes as leaves most of the memory alone."""
    return min(size, max(2**20, available // 8))


class HostKV:
    """Keys and values far larger than the processor's caches, and its attention over them.

    Args:
        size: bytes of both together.
    """

    def __init__(self, size: int) -> None:
        # The numbers do not matter, and drawing them all would take longer than measuring.
        page = torch.randn(1, 2, _KV_HEADS, _PAGE, _HEAD_DIM, generator=torch.Generator()).to(torch.bfloat16)
        self._memory = SlabAllocator(pin=False)  # as the store's
        shape = (max(1, size // page.nbytes), *page.shape[1:])
        self._pages = self._memory.allocate(shape, page.dtype).result().copy_(page)
        self._backend = cpu_share_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.read_bytes = self._pages.nbytes

    def attend(self, queries: int) -> None:
        """Attention of `queries` tokens a key head over everything."""
        asked = torch.ones(_KV_HEADS, queries, _HEAD_DIM, dtype=torch.bfloat16)
        # With the attention mass by which chunks are chosen, as most configurations want it.
        total = AttentionSum(self._backend, asked, _KV_HEADS, _HEAD_DIM**-0.5, _CHUNK)
        total.track_mass(0, len(self._pages) * _PAGE)
        total.attend_tracked(self._pages[:, 0], self._pages[:, 1])

    def rates(self) -> tuple[AttentionRate, ...]:
        """GB/s at rising numbers of queries; they take turns, so that a disturbance hits them all."""
        _, *turns = [  # the first turn warms up
            [seconds(self.attend, queries) for queries in ATTENTION_QUERIES] for _ in range(1 + REPEATS)
        ]
        rates = (self.read_bytes / median(spent) / 1e9 for spent in zip(*turns, strict=True))
        return tuple(map(AttentionRate, ATTENTION_QUERIES, rates))


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The shortest of some calls; on a GPU, of their kernels."""
    if device.type == "cpu":
        return min(seconds(work) for _ in range(REPEATS))
    spent: list[float] = []
    with torch.cuda.device(device):
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            spent.append(began.elapsed_time(ended) / 1e3)
    return min(spent)


def memory_rate(device: torch.device, size: int) -> float:
    """GB/s at which a device reads `size` bytes of its memory, with all threads: the best of some sums."""
    block = torch.ones(size // 4, device=device)
    return block.nbytes / least_seconds(block.sum, device) / 1e9


def compute_rate(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """GFLOP/s of products `[rows, width] @ [width, width]`: the best of some."""
    # With zeros or ones a card draws less power, and computes faster, than with a model's numbers.
    given: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    left, right = torch.randn(rows, width, **given), torch.randn(width, width, **given)
    return 2 * rows * width**2 / least_seconds(lambda: left @ right, device) / 1e9


def launch_ms(device: torch.device) -> float:
    """ms of one decoder layer's operations for one token, in a model too small to cost anything else."""
    step = _small_step(device)
    for _ in range(3):
        step()
    # A disturbance adds to most of many small operations: the quicker passes show what the machine does.
    spent = quantiles([seconds(step) for _ in range(40 * REPEATS)], n=4)
    return spent[0] / LAYERS * 1e3


def _small_step(device: torch.device) -> Callable[[], None]:
    """One token through the runtime's own runner, over a bounded cache, as in a middle level."""
    # Weights and KV weigh nothing.
    sizes: Any = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):  # the caller may have seeded what it draws next
        torch.manual_seed(0)
        module: Any = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model, backend = CausalModel(module.to(device, dtype), "a small model"), choose_backend(device)
    layout, frequencies = model.kv_layout(), model.rotary_frequencies
    cache = StreamingCache(layout, frequencies, sinks=4, window=_ENTRIES - 4, backend=backend)
    model.forward([PassInput(cache, NewTokens.chain(_ENTRIES), 1)])
    cache.commit(range(_ENTRIES))
    cache.settle()

    def step() -> None:
        (output,) = model.forward([PassInput(cache, NewTokens.chain(1), 1)])
        to_host(output.logits)  # what a device does counts
        cache.commit([0])
        cache.keep([])

    return step


def beside(kv: HostKV, copy: Callable[[], None]) -> tuple[float, float]:
    """Shares of their rates that attention over `kv` and a copy, made over and over, leave each other."""
    copy()
    shares = [_beside(lambda: kv.attend(BESIDE_QUERIES), copy) for _ in range(REPEATS)]
    attention, copying = map(median, zip(*shares, strict=True))
    return attention, copying


def _beside(attend: Callable[[], None], copy: Callable[[], None]) -> tuple[float, float]:
    attending, copying = seconds(attend), seconds(copy)
    with ThreadPoolExecutor(1) as pool:
        copies = pool.submit(lambda: [seconds(copy) for _ in range(_COPIES_BESIDE)])
        attended = [seconds(attend)]
        while not copies.done():
            attended.append(seconds(attend))
        _, *copied = copies.result()  # the first may have begun before any attention
    return min(1.0, attending / median(attended)), min(1.0, copying / fmean(copied))


def measure_host(available: int, copy: Callable[[], None] | None, on_progress: Progress) -> Host:
    """All figures of the processor; free and lockable memory are for the caller to fill in.

    Args:
        available: bytes of memory.
        copy: copies over the link; None: there is no link, and nothing to share with it.
    """
    total = 4 if copy is None else 5
    on_progress("processor: memory", 0, total)
    read = memory_rate(CPU, within(MEMORY_BYTES, available))
    on_progress("processor: matrix products", 1, total)
    products = compute_rate(CPU, torch.float32, *PRODUCT)
    on_progress("processor: launches", 2, total)
    launch = launch_ms(CPU)
    on_progress("processor: attention", 3, total)
    kv = HostKV(within(ATTENTION_BYTES, available))
    attention, shares = kv.rates(), (1.0, 1.0)
    if copy is not None:
        on_progress("processor: attention beside copies", 4, total)
        shares = beside(kv, copy)
    return Host(0, 0, read, products, attention, *shares, launch)


@dataclass(frozen=True)
class LinkFigures:
    """What is seen of a link besides the rates to plan with."""

    to_device_rate_both: float  # GB/s of pinned copies, both ways at once
    to_host_rate_both: float
    generation: int | None  # PCIe while copying; None where the driver does not say
    width: int | None
    pinned: bool  # the memory copied from and to was page-locked; False: that was refused


class PinnedCopies:
    """A buffer on the card and one in page-locked memory for each direction; `close` gives them back.

    `to_device` and `to_host` enqueue copies.

    Args:
        free: bytes of the card's memory.
    """

    def __init__(self, device: torch.device, free: int) -> None:
        size = within(COPY_BYTES, free)
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
    for _ in range(REPEATS):
        alone = copies.to_device()(), copies.to_host()()
        inwards, outwards = copies.to_device(), copies.to_host()
        turns.append((*alone, inwards(), outwards()))
    busy = copies.to_device()
    generation, width = link_now(card.uuid)
    busy()
    to_device, to_host, to_device_both, to_host_both = map(median, zip(*turns, strict=True))
    return to_device, to_host, LinkFigures(to_device_both, to_host_both, generation, width, copies.pinned)


def measure_gpu(
    card: Card, copies: PinnedCopies, device: torch.device, on_progress: Progress
) -> tuple[Gpu, LinkFigures]:
    """All figures of the card that is torch's `device`; free memory is for the caller to fill in."""
    name = f"GPU {device.index}"
    on_progress(f"{name}: copies", 0, 3)
    to_device, to_host, link = measure_link(copies, card)
    on_progress(f"{name}: memory and matrix products", 1, 3)
    size = within(MEMORY_BYTES, card.free_bytes)
    read = memory_rate(device, size)
    products = compute_rate(device, torch.bfloat16, PRODUCT_WIDTH, PRODUCT_WIDTH) / 1e3
    on_progress(f"{name}: launches", 2, 3)
    launch = launch_ms(device)
    return Gpu(card.name, 0, read, products, to_device, to_host, launch), link
