"""Measures the rates of a processor, of GPUs and of their links, as `hardware.Hardware` holds them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from cpu_kv import PlainPages, SlabAllocator
from cpu_kv.streams import finish_device
from offload_rt.attention.selector import choose_backend, cpu_share_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.machine.inventory import GpuFacts, PcieLink, link_now
from offload_rt.model.passes import PassInput
from offload_rt.model.quantization import INT8, NF4, Quantization
from offload_rt.model.quantized_weights import quantized_linear
from offload_rt.model.runner import CausalModel
from offload_rt.system.device_copies import to_host
from offload_rt.system.hardware import AttentionRate, Gpu, Host, ProductRate

CPU = torch.device("cpu")
ATTENTION_QUERIES = (1, 8, 16, 32)
BESIDE_QUERIES = 8  # beside copies: few enough that memory binds attention
# Buffers are far larger than any processor cache.
MEMORY_BYTES = 2**30
ATTENTION_BYTES = 2**29
COPY_BYTES = 2**28
PRODUCT = (512, 2048)  # rows and width of matrix products on the CPU
GPU_PRODUCT = (8192, 8192)
PRODUCT_ROWS = (1, 16, 64)  # of products with quantised weights
QUANTIZED = (2048, 4)  # width and number of their matrices on the CPU, which computes longer than it reads
GPU_QUANTIZED = (8192, 4)
LAYERS = 8  # of the model whose launches are timed
REPEATS = 7

_KV_HEADS, _HEAD_DIM, _PAGE, _CHUNK = 4, 128, 256, 8
_ENTRIES = 256  # in the cache of the model whose launches are timed
_COPIES = 4  # enqueued together and timed as one
_COPIES_BESIDE = 8


def within(size: int, available: int) -> int:
    """Returns `size` bytes, or fewer where that would take more than an eighth of the available memory."""
    return min(size, max(2**20, available // 8))


def seconds(work: Callable[..., object], *arguments: object) -> float:
    """Returns the wall time of one call."""
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of several calls, on a GPU of their kernels."""
    if device.type == "cpu":
        return min(seconds(work) for _ in range(REPEATS))
    times: list[float] = []
    with torch.cuda.device(device):
        for _ in range(REPEATS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
    return min(times)


def memory_rate(device: torch.device, size: int) -> float:
    """Returns the GB/s at which a device reads `size` bytes of its memory: the best of several sums."""
    block = torch.ones(size // 4, device=device)
    return block.nbytes / least_seconds(block.sum, device) / 1e9


def compute_rate(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """Returns the GFLOP/s of `[rows, width] @ [width, width]`: the best of several products."""
    # With zeros or ones a GPU draws less power, and computes faster, than with a model's numbers.
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    left, right = torch.randn(rows, width, **options), torch.randn(width, width, **options)
    return 2 * rows * width**2 / least_seconds(lambda: left @ right, device) / 1e9


def quantized_rates(
    device: torch.device, dtype: torch.dtype, width: int, count: int
) -> tuple[ProductRate, ...]:
    """Returns rates of products with quantised weights, of each format whose packages are installed.

    Args:
        width, count: of the square matrices, each of which is multiplied in turn.
    """
    rates = list[ProductRate]()
    options: Any = {"generator": torch.Generator(device).manual_seed(0), "device": device, "dtype": dtype}
    for name in (NF4, INT8):
        if Quantization.named(name).missing_packages:
            continue
        try:
            first = quantized_linear(name, torch.randn(width, width, **options))
        except (ImportError, AttributeError, OSError):  # a package that does not go with this torch
            continue
        matrices = [first, *(copy.deepcopy(first) for _ in range(count - 1))]
        for rows in PRODUCT_ROWS:
            multiply = partial(_multiply_all, matrices, torch.randn(1, rows, width, **options))
            multiply()  # packs the weights, and initialises libraries
            rates.append(ProductRate(name, rows, count * width**2 / least_seconds(multiply, device) / 1e9))
    return tuple(rates)


@torch.inference_mode()
def _multiply_all(matrices: Sequence[torch.nn.Module], rows: Tensor) -> None:
    for matrix in matrices:
        matrix(rows)


def launch_ms(device: torch.device) -> float:
    """Returns the ms of one decoder layer's operations for one token, in a model too small to cost more."""
    step = _small_step(device)
    for _ in range(3):
        step()
    # Disturbances lengthen most of many small operations: the first quartile is the machine's own time.
    first_quartile, *_ = quantiles([seconds(step) for _ in range(40 * REPEATS)], n=4)
    return first_quartile / LAYERS * 1e3


def _small_step(device: torch.device) -> Callable[[], None]:
    """Returns a step that decodes one token with a tiny model over a bounded cache."""
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
        to_host(output.logits)  # waits for the device
        cache.commit([0])
        cache.keep([])

    return step


class CpuAttention:
    """CPU attention over `size` bytes of bfloat16 KV, as a run computes it."""

    def __init__(self, size: int) -> None:
        # The numbers do not matter, and drawing them all would take longer than measuring.
        page = torch.randn(1, 2, _KV_HEADS, _PAGE, _HEAD_DIM, generator=torch.Generator()).to(torch.bfloat16)
        self._memory = SlabAllocator(pin=False)  # as the store's
        shape = (max(1, size // page.nbytes), *page.shape[1:])
        self._pages = self._memory.allocate(shape, page.dtype).result().copy_(page)
        self._backend = cpu_share_backend(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.read_bytes = self._pages.nbytes

    def attend(self, queries: int) -> None:
        """Attends to everything with `queries` queries a key head, and takes the attention mass."""
        query_rows = torch.ones(_KV_HEADS, queries, _HEAD_DIM, dtype=torch.bfloat16)
        total = AttentionSum(self._backend, query_rows, _KV_HEADS, _HEAD_DIM**-0.5, _CHUNK)
        total.track_mass(0, len(self._pages) * _PAGE)
        total.attend_tracked(PlainPages.of(self._pages))

    def rates(self) -> tuple[AttentionRate, ...]:
        """Returns rates at rising numbers of queries, measured in turns: a disturbance hits them all."""
        _, *turns = [  # the first turn warms up
            [seconds(self.attend, queries) for queries in ATTENTION_QUERIES] for _ in range(1 + REPEATS)
        ]
        rates = (self.read_bytes / median(times) / 1e9 for times in zip(*turns, strict=True))
        return tuple(map(AttentionRate, ATTENTION_QUERIES, rates))

    def shares_beside(self, copy: Callable[[], None]) -> tuple[float, float]:
        """Returns the shares of their rates that attention and repeated copies leave each other."""
        attend = partial(self.attend, BESIDE_QUERIES)
        shares: list[tuple[float, float]] = []
        copy()
        for _ in range(REPEATS):
            attending, copying = seconds(attend), seconds(copy)
            with ThreadPoolExecutor(1) as pool:
                copies = pool.submit(lambda: [seconds(copy) for _ in range(_COPIES_BESIDE)])
                attended = [seconds(attend)]
                while not copies.done():
                    attended.append(seconds(attend))
                _, *copied = copies.result()  # the first may have begun before any attention
            shares.append((min(1.0, attending / median(attended)), min(1.0, copying / fmean(copied))))
        attention, link = map(median, zip(*shares, strict=True))
        return attention, link


def measure_host(available: int, copy: Callable[[], None] | None) -> Host:
    """Measures the processor; the caller fills in the memory.

    Args:
        available: bytes of available memory.
        copy: copies over the link and waits; None: there is no link.
    """
    read_rate = memory_rate(CPU, within(MEMORY_BYTES, available))
    products = compute_rate(CPU, torch.float32, *PRODUCT)
    launch = launch_ms(CPU)
    attention = CpuAttention(within(ATTENTION_BYTES, available))
    rates = attention.rates()
    shares = (1.0, 1.0) if copy is None else attention.shares_beside(copy)
    quantized = quantized_rates(CPU, torch.float32, *QUANTIZED)
    return Host(0, 0, read_rate, products, rates, *shares, launch, quantized)


class PinnedCopies:
    """Timed copies between a buffer on a GPU and a page-locked one; `close` frees both.

    Attributes:
        to_device, to_host: enqueue copies; the result waits for them and returns their GB/s.

    Args:
        free_bytes: bytes of free GPU memory.
    """

    def __init__(self, device: torch.device, free_bytes: int) -> None:
        size = within(COPY_BYTES, free_bytes)
        self._slabs = SlabAllocator(pin=True, on_warning=lambda _: None)  # recommendations tell of it
        self.on_host = self._slabs.allocate((size,), torch.uint8).result().zero_()
        self.on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.to_device = partial(_timed_copies, self.on_device, self.on_host)
        self.to_host = partial(_timed_copies, self.on_host, self.on_device)

    def close(self) -> None:
        """Idempotent."""
        with suppress(RuntimeError):  # a GPU that has failed has said so before
            finish_device(self.on_device.device)
        self._slabs.close()

    def copy(self) -> None:
        """Copies to the device, and waits without keeping other threads from running."""
        self.to_device()()


def _timed_copies(destination: Tensor, source: Tensor) -> Callable[[], float]:
    device = source.device if source.is_cuda else destination.device
    with torch.cuda.device(device):
        # Waiting for an event that does not block would keep a processor from attending.
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        began.record()
        for _ in range(_COPIES):
            destination.copy_(source, non_blocking=True)
        ended.record()

    def rate() -> float:
        ended.synchronize()
        return _COPIES * source.nbytes / float(began.elapsed_time(ended)) / 1e6

    return rate


def measure_link(copies: PinnedCopies, uuid: str) -> tuple[float, float, PcieLink]:
    """Returns the GB/s to the GPU with that UUID and back, each alone, and its link meanwhile."""
    copies.to_device()(), copies.to_host()()  # wakes the GPU
    turns = [(copies.to_device()(), copies.to_host()()) for _ in range(REPEATS)]
    busy = copies.to_device()
    link = link_now(uuid)
    busy()
    to_device, to_host = map(median, zip(*turns, strict=True))
    return to_device, to_host, link


def measure_gpu(facts: GpuFacts, copies: PinnedCopies, device: torch.device) -> tuple[Gpu, PcieLink]:
    """Measures a GPU and its link; the caller fills in its free memory."""
    to_device, to_host, link = measure_link(copies, facts.uuid)
    read_rate = memory_rate(device, within(MEMORY_BYTES, facts.free_bytes))
    products = compute_rate(device, torch.bfloat16, *GPU_PRODUCT) / 1e3
    quantized = quantized_rates(device, torch.bfloat16, *GPU_QUANTIZED)
    rates = read_rate, products, to_device, to_host, launch_ms(device), quantized
    return Gpu(facts.name, 0, *rates, triton=facts.triton is None), link
