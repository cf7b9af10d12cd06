"""Measures what the processor and its memory do: the figures of `hardware.Host`."""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload_rt.attention import choose_backend
from offload_rt.caches.base import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.host import to_host
from offload_rt.machine.hardware import AttentionRate, Host
from offload_rt.model import CausalModel, Part

Progress = Callable[[str, int, int], None]
"""Told what is measured next, how many measurements are done, and how many there are."""

ATTENTION_QUERIES = (1, 8, 16, 32)
BESIDE_QUERIES = 8
"""Queries at which attention and link are measured beside each other: few enough that memory decides."""

_HEAD_DIM = 128
_KV_HEADS = 4
_ENTRIES = 256
_PATTERN_TOKENS = 1024
_COPIES_BESIDE = 3


@dataclass(frozen=True)
class Sizes:
    """How much is measured with; the smallest sizes measure nothing but that it works.

    Attributes:
        memory_bytes: read to see the rate of memory; far more than any cache holds.
        attention_bytes: bf16 keys and values; likewise.
        copy_bytes: of one copy.
        product_rows, product_width: of the matrix products on the processor.
        device_product: rows, columns and depth of those on a GPU.
        layers: of the model that is launched.
        repeats: of each measurement.
    """

    memory_bytes: int = 2**30
    attention_bytes: int = 2**29
    copy_bytes: int = 2**28
    product_rows: int = 512
    product_width: int = 2048
    device_product: int = 8192
    layers: int = 8
    repeats: int = 7

    def within(self, available: int) -> Sizes:
        """The same, with buffers that take at most a part of `available` bytes."""
        most = max(2**20, available // 8)
        return replace(
            self,
            memory_bytes=min(self.memory_bytes, most),
            attention_bytes=min(self.attention_bytes, most),
            copy_bytes=min(self.copy_bytes, most),
        )


@dataclass(frozen=True)
class Beside:
    """What attention and copying leave each other when both go on at once.

    Attributes:
        attention, copying: share of the rate that each has alone, in (0, 1].
    """

    attention: float
    copying: float


class HostKV:
    """Keys and values far larger than the caches, and the processor's attention over them.

    Args:
        size: bytes of both together.
    """

    def __init__(self, size: int) -> None:
        tokens = max(1, size // (2 * _KV_HEADS * _HEAD_DIM * torch.bfloat16.itemsize))
        generator = torch.Generator().manual_seed(0)
        # What the numbers are changes nothing; drawing them all would take longer than measuring.
        shape = (_KV_HEADS, _PATTERN_TOKENS, _HEAD_DIM)
        pattern = torch.randn(shape, generator=generator).to(torch.bfloat16)
        repeats = -(-tokens // _PATTERN_TOKENS)
        self._keys, self._values = (pattern.repeat(1, repeats, 1)[:, :tokens] for _ in range(2))
        self._backend = choose_backend(torch.device("cpu"))
        self.read_bytes = 2 * self._keys.nbytes

    def attend(self, queries: int) -> None:
        """Attention of `queries` tokens a key head over everything."""
        asked = torch.ones(_KV_HEADS, queries, _HEAD_DIM, dtype=torch.bfloat16)
        self._backend(asked, self._keys, self._values, _HEAD_DIM**-0.5, None)

    def rates(self, repeats: int) -> tuple[AttentionRate, ...]:
        """GB/s at rising numbers of queries; the numbers take turns, so that a disturbance hits them all."""
        seconds: dict[int, list[float]] = {queries: [] for queries in ATTENTION_QUERIES}
        for queries in ATTENTION_QUERIES:
            self.attend(queries)
        for _ in range(repeats):
            for queries, spent in seconds.items():
                spent.append(_seconds(lambda: self.attend(queries)))  # noqa: B023 - called at once
        return tuple(
            AttentionRate(queries, self.read_bytes / statistics.median(spent) / 1e9)
            for queries, spent in seconds.items()
        )


def memory_rate(size: int, repeats: int) -> float:
    """GB/s at which all threads read `size` bytes: the best of some sums."""
    block = torch.ones(size // 4)
    return block.nbytes / min(_seconds(block.sum) for _ in range(repeats)) / 1e9


def compute_rate(rows: int, width: int, repeats: int) -> float:
    """GFLOP/s of float32 products `[rows, width] @ [width, width]`: the best of some."""
    left, right = torch.ones(rows, width), torch.ones(width, width)
    return 2 * rows * width**2 / min(_seconds(lambda: left @ right) for _ in range(repeats + 1)) / 1e9


def launch_ms(device: torch.device, layers: int, repeats: int) -> float:
    """ms of one decoder layer's operations for one token: a pass of a model too small to cost anything else.

    The pass goes through the runtime's own runner over a bounded cache, as a middle-level step does.
    """
    model = _small_model(device, layers)
    cache = StreamingCache(
        model.layers,
        model.kv_heads,
        model.head_dim,
        model.dtype,
        device,
        sinks=4,
        window=_ENTRIES - 4,
        inverse_frequencies=model.rotary_frequencies,
        backend=choose_backend(device),
    )
    model.forward([Part(cache, NewTokens.chain(_ENTRIES), 1)])
    cache.commit(range(_ENTRIES))
    cache.settle()

    def step() -> None:
        (output,) = model.forward([Part(cache, NewTokens.chain(1), 1)])
        to_host(output.logits)  # what a device does counts
        cache.commit([0])
        cache.keep([])

    for _ in range(3):
        step()
    # Of many small operations, a disturbance adds to most: the quicker ones show what the machine does.
    spent = statistics.quantiles([_seconds(step) for _ in range(40 * repeats)], n=4)
    return spent[0] / layers * 1e3


def beside(kv: HostKV, copy: Callable[[], None], repeats: int) -> Beside:
    """What attention over `kv` and a copy, made over and over, leave each other."""
    shares: list[Beside] = []

    def attend() -> None:
        kv.attend(BESIDE_QUERIES)

    copy()
    for _ in range(repeats):
        attention, copying = _seconds(attend), _seconds(copy)
        with _repeated(copy) as ends:
            spent = [_seconds(attend)]
            while len(ends()) <= _COPIES_BESIDE:
                spent.append(_seconds(attend))
            passed = ends()
        # Between two ends of copies, so that none is cut off.
        copying_beside = (passed[-1] - passed[0]) / (len(passed) - 1)
        shares.append(
            Beside(min(1.0, attention / statistics.median(spent)), min(1.0, copying / copying_beside))
        )
    return Beside(
        statistics.median(share.attention for share in shares),
        statistics.median(share.copying for share in shares),
    )


def memory_copy(size: int) -> Callable[[], None]:
    """A copy of `size` bytes by one thread, in the place of a link where there is none."""
    source, destination = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)

    def copy() -> None:
        # torch would copy with all its threads, which are those that attend.
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), size)

    return copy


def measure_host(sizes: Sizes, copy: Callable[[], None] | None, on_progress: Progress) -> Host:
    """All figures of the processor; memory that is free or lockable is for the caller to fill in.

    Args:
        copy: copies over the link; None: there is no link, and a memory copy takes its place.
    """
    steps = iter(range(5))

    def begin(what: str) -> None:
        on_progress(f"processor: {what}", next(steps), 5)

    begin("memory")
    read = memory_rate(sizes.memory_bytes, sizes.repeats)
    begin("matrix products")
    products = compute_rate(sizes.product_rows, sizes.product_width, sizes.repeats)
    begin("attention")
    kv = HostKV(sizes.attention_bytes)
    attention = kv.rates(sizes.repeats)
    begin("attention beside copies")
    together = beside(kv, copy or memory_copy(sizes.copy_bytes), sizes.repeats)
    begin("launches")
    return Host(
        memory_bytes=0,
        lockable_bytes=0,
        memory_rate=read,
        compute_rate=products,
        attention=attention,
        attention_beside_link=together.attention,
        link_beside_attention=together.copying,
        launch_ms=launch_ms(torch.device("cpu"), sizes.layers, sizes.repeats),
        threads=torch.get_num_threads(),
    )


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _repeated(copy: Callable[[], None]) -> Iterator[Callable[[], list[float]]]:
    """Copies in a thread of its own meanwhile; gives what says when the copies so far ended.

    What `copy` raises is raised there.
    """
    enough = threading.Event()
    passed: list[float] = []

    def work() -> None:
        while not enough.is_set():
            copy()
            passed.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)

        def ends() -> list[float]:
            if working.done():
                working.result()
            return list(passed)

        try:
            yield ends
        finally:
            enough.set()


def _small_model(device: torch.device, layers: int) -> CausalModel:
    """A Llama whose weights and KV weigh nothing."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * _ENTRIES,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():  # whoever asked may have seeded what it draws next
        torch.manual_seed(0)
        module: Any = LlamaForCausalLM(config)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return CausalModel(module.to(device, dtype), "a small model")
