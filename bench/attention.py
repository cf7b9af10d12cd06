"""`python -m bench attention`: our CPU attention kernel beside torch's own, over one layer's KV.

Both read the same keys and values, which are far more than a cache of the processor holds: ours in the pages
of the store, torch's head by head, as it is fastest. They take turns (ours, torch, ours, torch, …), so that a
machine that slows down slows both. A time is a median over repeats, after one that is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor

from bench import inputs, machine
from bench.inputs import say, size
from bench.report import Row
from bench.studies import Part, Study
from cpu_kv import KeysValues, KVLayout, PagedKVStore
from offload_rt.attention.backends import AttentionBackend, NativeCpuBackend, TorchCpuBackend
from offload_rt.attention.sums import AttentionSum
from offload_rt.config import StoreConfig
from offload_rt.errors import UsageError
from offload_rt.machine.hardware import GIB
from offload_rt.machine.measuring import CPU, seconds
from offload_rt.native import load_kernel


@dataclass(frozen=True)
class AttentionCase:
    """How much `attention` measures; `shapes` are key heads and their dimensions."""

    shapes: tuple[tuple[int, int], ...] = ((4, 64), (8, 128))
    tokens: int = size(131072, "keys a head", inputs.count(1))
    queries: tuple[int, ...] = size(
        (1, 8, 16, 32, 64), "tokens times the heads that share a key head", inputs.counts(1), metavar="N,N"
    )
    repeats: int = size(9, "interleaved runs, after one that is not timed", inputs.count(1))
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


@dataclass(frozen=True)
class Ours:
    """Our kernel, and how much to measure of it."""

    backend: AttentionBackend
    case: AttentionCase
    settings: dict[str, Any]
    device: torch.device = CPU


def opened(_: object, case: AttentionCase) -> Ours:
    """
    Raises:
        UsageError: what the case needs does not fit in free memory, or there is no compiler for the kernel.
    """
    kv = 2 * max(2 * heads * case.tokens * dim * 4 for heads, dim in case.shapes)  # in pages, and by head
    # One head's keys and values in float64, with its scores and their softmax.
    checked = max(case.tokens * (2 * dim + 2 * max(case.queries)) * 8 for _, dim in case.shapes)
    needed, free = kv + max(checked, machine.READ_BYTES), psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"--tokens {case.tokens} needs {needed / GIB:.1f} GiB of memory, and "
            f"{free / GIB:.1f} GiB are free; use fewer tokens"
        )
    kernel = load_kernel()
    if kernel is None:
        raise UsageError(
            "the native kernel cannot be built here: install a C++ compiler (g++, or name one in CXX), "
            "and do not set OFFLOAD_RT_NATIVE=0"
        )
    settings = {"lanes": kernel.lanes, "bfloat16_dots": kernel.bfloat16_dots}
    return Ours(NativeCpuBackend(kernel), case, settings)


def measured(ours: Ours) -> list[Row]:
    """Over one layer's keys and values.

    `over torch`: how many times as fast ours is. `of read rate`: the GB/s of ours over those at which torch
    reads memory, measured just before; attention reads every key and value once. Errors are the largest of
    any entry, against float64.
    """
    rows, case = list[Row](), ours.case
    for (heads, dim), name in product(case.shapes, case.dtypes):
        say(f"{heads} key heads of {dim}, {name}")
        kind = {"key_heads": heads, "head_dim": dim, "dtype": name}
        rows += [kind | row for row in measure(ours.backend, heads, dim, getattr(torch, name), case)]
    return rows


def measure(
    ours: AttentionBackend, heads: int, dim: int, dtype: torch.dtype, case: AttentionCase
) -> list[Row]:
    """Both kernels over one layer's keys and values, for every number of queries."""
    rate = machine.read_rate(CPU)
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(heads, count, dim, generator=generator).to(dtype)
        for count in (max(case.queries), case.tokens, case.tokens)
    )
    scale = dim**-0.5
    wanted, _ = exact(queries, keys, values, scale)
    store = PagedKVStore(KVLayout(1, heads, dim, dtype, StoreConfig.page), slab_tokens=case.tokens)
    sequence = store.new_sequence()
    sequence.append(0, keys, values)
    both = (ours, sequence.views(0)), (TorchCpuBackend(), [(keys[None], values[None])])
    rows = []
    for count in case.queries:
        calls = [partial(attended, backend, queries[:, :count], parts, scale) for backend, parts in both]
        errors = [float((call()[0] - wanted[:, :count]).abs().max()) for call in calls]
        turns = [[1e3 * seconds(call) for call in calls] for _ in range(case.repeats)]
        ms, torch_ms = map(median, zip(*turns, strict=True))
        gb_s, torch_gb_s = ((keys.nbytes + values.nbytes) / taken / 1e6 for taken in (ms, torch_ms))
        row: Row = {"queries": count, "ms": ms, "torch_ms": torch_ms, "over_torch": torch_ms / ms}
        row |= {"gb_s": gb_s, "torch_gb_s": torch_gb_s, "read_gb_s": rate, "of_read_rate": gb_s / rate}
        rows.append(row | {"error": errors[0], "torch_error": errors[1]})
    store.close()
    return rows


def attended(
    backend: AttentionBackend, queries: Tensor, parts: Sequence[KeysValues], scale: float
) -> tuple[Tensor, Tensor]:
    """Over parts `[pages, heads, tokens, dim]`: out `[heads, query, dim]` and lse `[heads, query]`."""
    total = AttentionSum(backend, queries, len(queries), scale)
    for part in parts:
        total.attend(*part)
    assert total.lse is not None
    return total.result(), total.lse


def exact(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in float64, a head at a time: out `[heads, query, dim]` and lse `[heads, query]`."""
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = q.double() @ k.double().T * scale
        parts.append((scores.softmax(-1) @ v.double(), scores.logsumexp(-1)))
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


ATTENTION = Study(
    name="attention",
    about="our CPU attention kernel beside torch's",
    note=(__doc__ or "").partition("\n\n")[2],
    sizes=AttentionCase(),
    if_quick={"shapes": ((4, 64),), "tokens": 65536, "repeats": 5},
    opened=opened,
    parts={"measured": Part(measured, ("key_heads", "dtype", "queries"), ("gb_s", "torch_gb_s"))},
)
