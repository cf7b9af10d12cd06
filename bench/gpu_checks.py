"""The checks of `python -m bench gpu` that need no model, and what all checks share.

A check yields figures by name, as JSON values. `failed` says what is wrong, and the check continues;
`skipped` says why there is nothing to check. A check whose description names no failure fails by an exception
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor

from bench import machine
from bench.cases import ON_CUDA
from bench.results import Row
from cpu_kv import CudaLink, Event, KVLayout, KVPages, PlainPages, SlabAllocator, head_major
from cpu_kv.mapped import computed_copy, device_view
from cpu_kv.streams import device_streams
from offload_rt.attention.backends import AttentionBackend, fold, folded_mask
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.config.schema import StoreConfig
from offload_rt.errors import first_line
from offload_rt.kernels import triton_operators
from offload_rt.machine.measuring import least_seconds, seconds
from offload_rt.system.hardware import GIB

MIB = 2**20
BULK_BYTES, BULK_COPIES = 64 * MIB, 3
LONGEST_WAIT_MS = 1.0  # of an urgent copy behind bulk copies
REPEATS = 7
ALLOWED_ERROR = 0.02  # of attention, over its largest entry: far above rounding, far below a wrong result
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks; a check is ended after `limit_s`."""

    name: str = "full"
    limit_s: int = 600
    shape: str = "llama3.1-8b"
    locked_bytes: int = 4 * GIB
    keys: int = 131_072  # that attention is measured over
    drafted_entries: int = 4096
    short: int = 4096  # tokens of contexts
    planned: int = 32_768
    streamed: int = 131_072
    largest: int = 129_792
    largest_shape: str = "llama2-7b"
    largest_config: Mapping[str, object] = field(
        default_factory=lambda: {"retrieval.budget": 16_384, "speculation.gamma2": 23}
    )
    new_tokens: int = 48
    steps: int = 20
    repeats: int = 5
    pages: int = 64  # of a shape with 8 key heads; of others as many values
    ring_pages: int = 256
    quantized_entries: int = 16_384
    chunks: int = 16_224  # of 127K tokens
    copied_bytes: int = GIB // 2
    product: int = 8192  # side of a matrix
    tokens_context: int = 6000
    config: Mapping[str, object] = field(default_factory=lambda: dict(ON_CUDA))


SIZES = {"full": Sizes(), "quick": Sizes("quick", limit_s=100, locked_bytes=9 * GIB // 4)}


@dataclass(frozen=True)
class Subject:
    """What a check runs on: a device, and sizes."""

    device: torch.device
    sizes: Sizes


def page_locking(subject: Subject) -> Iterator[Row]:
    """Page-locks memory; fails if that is refused, or kernels read or write it wrongly."""
    device, size, refusals = subject.device, subject.sizes.locked_bytes, list[str]()
    yield {"gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}
    with closing(SlabAllocator(True, refusals.append)) as slabs:
        slab = slabs.allocate((size,), torch.uint8)
        yield {"locked_bytes": size, "lock_s": seconds(slab.result)}
        if refusals:
            yield {"failed": refusals[0]}
            return
        last, pattern = slab.result()[-MIB:], (torch.arange(MIB) % 251).to(torch.uint8)
        last.copy_(pattern)
        copied = computed_copy(view := device_view(last, device))
        computed_copy(copied.flip(0), out=view)
        torch.cuda.synchronize(device)
        if not (torch.equal(copied.cpu(), pattern) and torch.equal(last, pattern.flip(0))):
            yield {"failed": "kernels read or write other bytes than the host in page-locked memory"}


@contextmanager
def linked(device: torch.device) -> Iterator[tuple[CudaLink, Callable[[], Event]]]:
    """A link, and a function that starts a bulk copy over it."""
    with closing(CudaLink(device)) as link:
        host_copy = torch.zeros(BULK_BYTES, dtype=torch.uint8, pin_memory=True)
        device_copy = torch.empty_like(host_copy, device=device)
        torch.cuda.synchronize(device)
        yield link, lambda: link.copy([(device_copy, host_copy)])


def behind(
    bulk: Sequence[Callable[[], Event]], stream: torch.cuda.Stream, work: Callable[[], object]
) -> tuple[float, bool]:
    """Median ms of `work` on `stream` behind bulk copies, and whether it overtook them each time."""
    times, overtook = list[float](), True
    for _ in range(REPEATS):
        copied = [copy() for _ in range(BULK_COPIES) for copy in bulk]
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        work()
        ended.record(stream)
        ended.synchronize()
        overtook &= not copied[-1].done()
        times.append(began.elapsed_time(ended))
        for event in copied:
            event.synchronize()
    return median(times), overtook


def overtaking(subject: Subject) -> Iterator[Row]:
    """Times an urgent copy, and one on the default stream, behind 192 MiB; fails above 1 ms."""
    device, on_host = subject.device, torch.ones(1024, pin_memory=True)
    on_device = torch.empty_like(on_host, device=device)
    default = torch.cuda.current_stream(device)
    with linked(device) as (link, bulk):
        for name, stream, work in (
            ("urgent", device_streams(device).urgent, lambda: link.copy([(on_device, on_host)], urgent=True)),
            ("default_stream", default, lambda: on_device.copy_(on_host, non_blocking=True)),
        ):
            ms, overtook = behind([bulk], stream, work)
            yield {f"{name}_ms": ms, f"{name}_overtook": overtook}
            if ms > LONGEST_WAIT_MS:
                yield {"failed": f"{name}: a small copy took {ms:.1f} ms behind bulk copies"}


def attention(subject: Subject) -> Iterator[Row]:
    """Compares attention with float64, and Triton kernels with the plain form; fails where they differ."""
    device, page, backend = subject.device, StoreConfig.page, choose_backend(subject.device)
    yield {"backend": backend.name}
    try:
        layout = KVLayout(1, KV_HEADS, HEAD_DIM, torch.bfloat16, page)
        triton_operators.check(backend.parts, layout, HEADS // KV_HEADS, str(device))
        yield {"triton": "as the plain form"}
    except Exception as error:  # Triton raises errors of many kinds
        yield {"failed": f"Triton kernels: {type(error).__name__}: {first_line(error)}"}
    rate, cases, scale, masked_tokens = machine.read_rate(device), list[Row](), HEAD_DIM**-0.5, 64 * page
    generator, dtype = torch.Generator(device).manual_seed(0), torch.bfloat16
    draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    pages = draw(subject.sizes.keys // page, 2, KV_HEADS, page, HEAD_DIM)
    keys, values = (head_major(pages[:, part]) for part in range(2))
    for count in (1, 17, 64):
        rows = fold(draw(HEADS, count, HEAD_DIM), KV_HEADS)

        def attend() -> tuple[Tensor, Tensor]:
            return attended(backend, rows, PlainPages.of(pages), scale)  # noqa: B023

        gb_s = pages.nbytes / least_seconds(attend, device) / 1e9
        off = largest_error(attend(), exact(rows, keys, values, scale))
        # A mask hides the first page, which is a whole block of a kernel.
        mask = torch.zeros(rows.shape[1], min(masked_tokens, keys.shape[1]), device=device)
        mask[:, :page] = -torch.inf
        near, of = (side[:, : mask.shape[1]] for side in (keys, values))
        folded = folded_mask(backend, mask, rows, len(rows))
        masked = attended(backend, rows, PlainPages.one(near, of), scale, folded)
        expected = exact(rows, near[:, page:], of[:, page:], scale)
        case = {"queries": count, "off": off, "masked_off": largest_error(masked, expected)}
        cases.append(case | {"gb_s": gb_s, "share_of_rate": gb_s / rate})
    yield {"largest_share_of_rate": max(case["share_of_rate"] for case in cases), "cases": cases}
    worst = max(
        (case[key] for case in cases for key in ("off", "masked_off")), key=lambda off: (off != off, off)
    )
    yield {"largest_error": worst}
    if not worst < ALLOWED_ERROR:  # NaN is not
        yield {"failed": f"attention differs from float64 by {worst:.2g} of its largest entry"}


def attended(
    backend: AttentionBackend,
    queries: Tensor,
    pages: KVPages,
    scale: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of folded queries: out `[kv_heads, query, head_dim]`, lse `[kv_heads, query]`."""
    total = AttentionSum(backend, queries, len(queries), scale)
    total.attend(pages, mask)
    assert total.lse is not None
    return total.result(), total.lse


def exact(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The same in float64, one head at a time."""
    parts = []
    for q, k, v in zip(queries, keys, values, strict=True):
        scores = q.double() @ k.double().T * scale
        parts.append((scores.softmax(-1) @ v.double(), scores.logsumexp(-1)))
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def largest_error(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest error of output, log-sum-exp or mass, over the largest entry."""
    pairs = zip(results, expected, strict=True)
    return float(
        torch.stack(
            [(result - reference).abs().max() / reference.abs().max() for result, reference in pairs]
        ).max()
    )
