"""The checks of `python -m bench gpu` that need no model, and what all checks share.

A check yields figures by name, as JSON values. `failed` says what is wrong, and the check goes on; `skipped`
says why there is nothing to check. A check whose description names no failure fails only by an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from bench import machine
from bench.attention import attended, exact
from bench.cases import ON_CUDA
from bench.report import Row
from cpu_kv import CudaLink, Event, SlabAllocator, head_major
from cpu_kv.mapped import computed_copy, device_view
from cpu_kv.streams import device_streams
from offload_rt.attention import triton_operators
from offload_rt.attention.backends import (
    AttentionBackend,
    TorchCudaBackend,
    choose_backend,
    fold,
    folded_mask,
)
from offload_rt.attention.sums import AttentionSum
from offload_rt.config import StoreConfig
from offload_rt.errors import first_line
from offload_rt.machine.hardware import GIB
from offload_rt.machine.inventory import read_gpus
from offload_rt.machine.measuring import PinnedCopies, least_seconds, measure_link, seconds

MIB = 2**20
BULK_BYTES, BULK_COPIES = 64 * MIB, 3
LONGEST_WAIT_MS = 1.0  # of what is urgent, behind bulk copies
REPEATS = 7
ALLOWED_ERROR = 0.02  # of attention, over its largest entry: far above rounding, far below a wrong result
HEAD_DIM, MASKED_KEYS = 128, 4096
FEW = {  # keys of a composition for short texts
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "speculation.gamma2": 3,
    "store.page": 16,
    "store.slab_tokens": 64,
    "store.segment_bytes": 8192,
}


@dataclass(frozen=True)
class Sizes:
    """How much the checks do; a check is ended after `limit_s`."""

    name: str = "full"
    limit_s: int = 600
    shape: str = "llama3.1-8b"
    locked_bytes: int = 4 * GIB
    heads: Sequence[tuple[int, int]] = ((32, 32), (32, 8), (28, 4))
    dtypes: Sequence[str] = ("bfloat16", "float16")
    keys: int = 131_072  # that attention is measured over
    drafted_entries: int = 4096
    short: int = 4096  # tokens of contexts
    planned: int = 32_768
    streamed: int = 131_072
    new_tokens: int = 48
    steps: int = 20
    config: Mapping[str, object] = field(default_factory=lambda: dict(ON_CUDA))


FULL = Sizes()
QUICK = replace(
    FULL, name="quick", limit_s=240, locked_bytes=9 * GIB // 4, heads=((32, 8),), dtypes=("bfloat16",)
)
TINY = Sizes(
    *("tiny", 60, "tiny", 4 * MIB, ((4, 2),), ("bfloat16",), 1024),
    *(64, 200, 200, 200, 14, 2),
    config=ON_CUDA | FEW,
)


@dataclass(frozen=True)
class Given:
    """What a check is given."""

    device: torch.device
    sizes: Sizes


def registration(given: Given) -> Iterator[Row]:
    """Page-locks memory, lets kernels read and write it, and measures the link each way."""
    device, size = given.device, given.sizes.locked_bytes
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    (facts, *_), refusals = read_gpus(), list[str]()
    yield {"gpus": gpus, "attention": facts.attention, "triton": facts.triton or "runs"}
    with closing(SlabAllocator(True, refusals.append)) as slabs:
        slab = slabs.allocate((size,), torch.uint8)
        yield {"locked_bytes": size, "lock_s": seconds(slab.result)}
        if refusals:
            yield {"failed": refusals[0]}
        else:
            last = slab.result()[-MIB:]
            last.copy_(torch.arange(MIB) % 251)
            read = computed_copy(view := device_view(last, device))
            computed_copy(read.flip(0), out=view)
            torch.cuda.synchronize(device)
            wanted = (torch.arange(MIB) % 251).to(torch.uint8)
            if not (torch.equal(read.cpu(), wanted) and torch.equal(last, wanted.flip(0))):
                yield {"failed": "kernels read or write other bytes than the host in page-locked memory"}
    with closing(PinnedCopies(device, 8 * size)) as copies:  # buffers of `size`, or 256 MiB
        to_device, to_host_rate, (generation, width) = measure_link(copies, facts.uuid)
    rates = {"to_device_gb_s": to_device, "to_host_gb_s": to_host_rate}
    yield rates | {"generation": generation, "width": width}


@contextmanager
def linked(device: torch.device) -> Iterator[tuple[CudaLink, Callable[[], Event]]]:
    """A link, and what starts a bulk copy over it."""
    with closing(CudaLink(device)) as link:
        here = torch.zeros(BULK_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(here, device=device)
        torch.cuda.synchronize(device)
        yield link, lambda: link.copy([(there, here)])


def behind(
    bulk: Sequence[Callable[[], Event]], stream: torch.cuda.Stream, work: Callable[[], object]
) -> tuple[float, bool]:
    """Median ms of `work` on `stream` behind bulk copies, and whether it overtook them each time."""
    spent, overtook = list[float](), True
    for _ in range(REPEATS):
        copied = [copy() for _ in range(BULK_COPIES) for copy in bulk]
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        work()
        ended.record(stream)
        ended.synchronize()
        overtook &= not copied[-1].done()
        spent.append(began.elapsed_time(ended))
        for event in copied:
            event.synchronize()
    return median(spent), overtook


def overtaking(given: Given) -> Iterator[Row]:
    """Times an urgent copy, and one on the default stream, behind 192 MiB; fails above 1 ms."""
    device, here = given.device, torch.ones(1024, pin_memory=True)
    there = torch.empty_like(here, device=device)
    default = torch.cuda.current_stream(device)
    with linked(device) as (link, bulk):
        for name, stream, work in (
            ("urgent", device_streams(device).urgent, lambda: link.copy([(there, here)], urgent=True)),
            ("default_stream", default, lambda: there.copy_(here, non_blocking=True)),
        ):
            ms, overtook = behind([bulk], stream, work)
            yield {f"{name}_ms": ms, f"{name}_overtook": overtook}
            if ms > LONGEST_WAIT_MS:
                yield {"failed": f"{name}: a small copy took {ms:.1f} ms behind bulk copies"}


def attention(given: Given) -> Iterator[Row]:
    """Compares attention with float64, and Triton kernels with the plain form; tells shares of the rate."""
    device, sizes, page = given.device, given.sizes, StoreConfig.page
    chosen, scale = choose_backend(device), HEAD_DIM**-0.5
    backends = {one.name: one for one in (chosen, TorchCudaBackend())}
    yield {"backend": chosen.name}
    try:
        triton_operators.check(str(device))
        yield {"triton": "as the plain form"}
    except Exception as error:  # Triton raises errors of many kinds
        yield {"failed": f"Triton kernels: {type(error).__name__}: {first_line(error)}"}
    rate, cases = machine.read_rate(device), list[Row]()
    for (heads, kv_heads), dtype in product(sizes.heads, sizes.dtypes):
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=getattr(torch, dtype))
        pages = draw(sizes.keys // page, 2, kv_heads, page, HEAD_DIM)
        keys, values = (head_major(pages[:, part]) for part in range(2))
        layouts = {
            "resident": [(keys[None], values[None])],
            "segments": [(one[:, 0], one[:, 1]) for one in pages.split(16)],
            "pages": [(pages[:, 0], pages[:, 1])],
        }
        for count in (1, 17, 64):
            asked = fold(draw(heads, count, HEAD_DIM), kv_heads)
            want = exact(asked, keys, values, scale)
            few, hidden = slice(0, MASKED_KEYS), slice(page, MASKED_KEYS)
            seen = exact(asked, keys[:, hidden], values[:, hidden], scale)
            for name, backend in backends.items():
                case: Row = {"heads": f"{heads}/{kv_heads}", "dtype": dtype}
                case |= {"queries": count, "backend": name}
                for layout, parts in layouts.items():
                    attend = partial(attended, backend, asked, parts, scale)
                    gb_s = pages.nbytes / least_seconds(attend, device) / 1e9
                    case |= {"layout": layout, "off": _off(attend(), want)}
                    cases.append(case | {"gb_s": gb_s, "share_of_rate": gb_s / rate})
                masked = _masked(backend, asked, keys[:, few], values[:, few], page)
                cases.append(case | {"layout": "masked", "off": _off(masked, seen)})
    yield {"largest_error": max(one["off"] for one in cases)}
    yield {"shares_of_rate": {one: _most(cases, one, chosen.name) for one in layouts}, "cases": cases}
    wrong = [one for one in cases if not one["off"] < ALLOWED_ERROR]  # which NaN is not
    if wrong:
        yield {"failed": f"attention differs from float64 in {len(wrong)} cases, the first: {wrong[0]}"}


def _off(found: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> float:
    """Largest error of output or log-sum-exp, over the largest entry."""
    pairs = zip(found, want, strict=True)
    return float(torch.stack([(one - other).abs().max() / other.abs().max() for one, other in pairs]).max())


def _masked(
    backend: AttentionBackend, asked: Tensor, keys: Tensor, values: Tensor, hidden: int
) -> tuple[Tensor, Tensor]:
    """Attention under a mask that hides the first `hidden` keys, whole pages of the kernel."""
    mask = torch.zeros(asked.shape[1], keys.shape[1], device=asked.device)
    mask[:, :hidden] = -torch.inf
    total = AttentionSum(backend, asked, len(asked), HEAD_DIM**-0.5)
    total.attend(keys, values, folded_mask(backend, mask, asked, len(asked)))
    assert total.lse is not None
    return total.result(), total.lse


def _most(cases: Sequence[Row], layout: str, backend: str) -> float:
    """The highest share of the memory rate."""
    of = [one for one in cases if (one["layout"], one["backend"]) == (layout, backend)]
    return float(max(one["share_of_rate"] for one in of))
