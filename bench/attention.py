"""`python -m bench attention`: our CPU attention kernel beside torch's own, over one layer's KV.

Both read the same keys and values, which are far more than a cache of the processor holds: ours in the pages
of the store, torch's head by head, as it is fastest. They take turns (ours, torch, ours, torch, …), so that a
machine that slows down slows both. A time is a median over repeats, after one that is not counted. The
ceiling is the rate at which torch reads memory, measured just before: attention reads every key and value
once. Errors are the largest of any entry, against float64.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor

from bench import inputs, machine, report
from bench.inputs import say
from cpu_kv import KeysValues, KVLayout, PagedKVStore
from offload_rt.attention import AttentionBackend, NativeCpuBackend, TorchCpuBackend, merge
from offload_rt.config import StoreConfig
from offload_rt.errors import UsageError
from offload_rt.machine.hardware import GIB
from offload_rt.machine.measuring import CPU, seconds
from offload_rt.native import load_kernel

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """How much `attention` measures.

    Attributes:
        shapes: key heads and their dimensions.
        tokens: keys a head.
        queries: query tokens times the heads that share a key head.
        repeats: interleaved runs of both kernels, after one that is not timed.
    """

    shapes: tuple[tuple[int, int], ...]
    tokens: int
    queries: tuple[int, ...]
    repeats: int
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


FULL = AttentionCase(((4, 64), (8, 128)), tokens=131072, queries=(1, 8, 16, 32, 64), repeats=9)
QUICK = AttentionCase(((4, 64),), tokens=65536, queries=(1, 8, 16, 32, 64), repeats=5)


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = inputs.command(commands, "attention", run, "our CPU attention kernel beside torch's")
    parser.add_argument("--tokens", type=inputs.count(1), metavar="N", help="keys a head")
    parser.add_argument("--queries", type=inputs.counts(1), metavar="N,N")
    parser.add_argument("--repeats", type=inputs.count(1), metavar="N")
    parser.add_argument("--quick", action="store_true", help="64K tokens of one shape, fewer repeats")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: in bench/results)")


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON, prints the tables."""
    case = inputs.fitted(QUICK if arguments.quick else FULL, arguments)
    check_memory(case)
    kernel = load_kernel()
    if kernel is None:
        raise UsageError(
            "the native kernel cannot be built here: install a C++ compiler (g++, or name one in CXX), "
            "and do not set OFFLOAD_RT_NATIVE=0"
        )
    described = machine.describe(CPU)
    out = inputs.destination(arguments.out, "attention", described)
    measured = []
    for (heads, dim), name in product(case.shapes, case.dtypes):
        say(f"{heads} key heads of {dim}, {name}")
        measured.append(measure(NativeCpuBackend(kernel), heads, dim, getattr(torch, name), case))
    result = report.envelope("attention", arguments, described) | {
        "kernel": {"lanes": kernel.lanes, "bfloat16_dots": kernel.bfloat16_dots},
        "case": dataclasses.asdict(case),
        "measured": measured,
    }
    report.finish(out, result, map(_table, measured), result)


def check_memory(case: AttentionCase) -> None:
    """
    Raises:
        UsageError: the keys and values and what they are checked with do not fit in free memory.
    """
    kv = 2 * max(2 * heads * case.tokens * dim * 4 for heads, dim in case.shapes)  # in pages, and by head
    # One head's keys and values in float64, with its scores and their softmax.
    exact = max(case.tokens * (2 * dim + 2 * max(case.queries)) * 8 for _, dim in case.shapes)
    needed, free = kv + max(exact, machine.READ_BYTES), psutil.virtual_memory().available
    if needed > free:
        raise UsageError(
            f"--tokens {case.tokens} needs {needed / GIB:.1f} GiB of memory, and "
            f"{free / GIB:.1f} GiB are free; use fewer tokens"
        )


def measure(
    ours: AttentionBackend, heads: int, dim: int, dtype: torch.dtype, case: AttentionCase
) -> dict[str, Any]:
    """Both kernels over one layer's keys and values, for every number of queries."""
    rate = machine.read_rate(CPU)
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(heads, count, dim, generator=generator).to(dtype)
        for count in (max(case.queries), case.tokens, case.tokens)
    )
    scale = dim**-0.5
    want, want_lse = exact(queries, keys, values, scale)
    kv_bytes = keys.nbytes + values.nbytes
    store = PagedKVStore(KVLayout(1, heads, dim, dtype, StoreConfig.page), slab_tokens=case.tokens)
    sequence = store.new_sequence()
    sequence.append(0, keys, values)
    pages = sequence.views(0)
    rows = []
    for count in case.queries:
        row: dict[str, Any] = {"queries": count}
        calls = [
            partial(attended, backend, queries[:, :count], parts, scale)
            for backend, parts in ((ours, pages), (TorchCpuBackend(), [(keys[None], values[None])]))
        ]
        timed = take_turns(calls, case.repeats)
        for name, ((out, lse), times) in zip(("ours", "torch"), timed, strict=True):
            gb_s = kv_bytes / median(times) / 1e6
            row[name] = {
                "ms": report.spread(times),
                "gb_s": gb_s,
                "share_of_read_rate": gb_s / rate,
                "error": float((out - want[:, :count]).abs().max()),
                "lse_error": float((lse - want_lse[:, :count]).abs().max()),
            }
        row["over_torch"] = row["torch"]["ms"]["median"] / row["ours"]["ms"]["median"]
        rows.append(row)
    store.close()
    return {
        "key_heads": heads,
        "head_dim": dim,
        "tokens": case.tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes": kv_bytes,
        "read_rate_gb_s": rate,
        "rows": rows,
    }


def attended(
    backend: AttentionBackend, queries: Tensor, parts: Sequence[KeysValues], scale: float
) -> tuple[Tensor, Tensor]:
    """Over parts `[pages, heads, tokens, dim]`, merged."""
    return merge([backend(queries, keys, values, scale, None) for keys, values in parts])


def take_turns(calls: Sequence[Callable[[], T]], repeats: int) -> list[tuple[T, list[float]]]:
    """What each call returns, and its times in ms, in interleaved runs after one that is not timed."""
    results = [call() for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, runs in zip(calls, times, strict=True):
            runs.append(1e3 * seconds(call))
    return list(zip(results, times, strict=True))


def exact(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention in float64, a head at a time: out `[heads, query, dim]` and lse `[heads, query]`."""
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = q.double() @ k.double().T * scale
        parts.append((scores.softmax(-1) @ v.double(), scores.logsumexp(-1)))
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def _table(part: dict[str, Any]) -> str:
    """One layer's KV as markdown."""
    head = (
        f"{part['key_heads']} key heads of {part['head_dim']}, {part['tokens']:,} tokens, {part['dtype']}: "
        f"{part['kv_bytes'] / 1e6:,.0f} MB of KV; memory is read at {part['read_rate_gb_s']:.1f} GB/s."
    )
    rows = []
    for row in part["rows"]:
        both, number = (row["ours"], row["torch"]), report.number
        cells = [number(one["ms"]["median"]) for one in both] + [number(row["over_torch"])]
        cells += [number(one["gb_s"], 1) for one in both] + [f"{row['ours']['share_of_read_rate']:.0%}"]
        rows.append([row["queries"], *cells, *(f"{one['error']:.1e}" for one in both)])
    header = [
        "queries",
        "ms",
        "torch ms",
        "× torch",
        "GB/s",
        "torch GB/s",
        "of read rate",
        "error",
        "torch's",
    ]
    return f"{head}\n\n{report.table(header, rows)}"
