"""The operators of `fused.py` as Triton kernels, for CUDA devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload_rt.attention import fused

PAGES_AT_A_TIME = 16
TOKENS_AT_A_TIME = 64
CHUNKS_AT_A_TIME = 1024
LEAST_ROWS = 16  # of a matrix product on tensor cores
# What differs from pass to pass: Triton would compile a kernel for each that is 1, or divisible by 16.
VARIES = [
    "pages",
    "queries",
    "rows",
    "period",
    "step",
    "offset",
    "sampled",
    "sampled_rows",
    "folded",
    "blocks",
]
VARIES += ["all_blocks", "chunks", "score_stride", "unit_head_stride", "unit_row_stride"]
HIGHEST: Any = tl.constexpr(fused.HIGHEST)


@triton.jit
def _combine_row(
    row,
    parts,
    lses,
    out,
    lse,
    new_out,
    new_lse,
    pages,
    queries,
    rows,
    dim,
    page_stride,
    head_stride,
    row_stride,
    HAS_SUM: tl.constexpr,
    PAGES: tl.constexpr,
    DIM: tl.constexpr,
):
    parts += (row // queries) * head_stride + (row % queries) * row_stride
    page, column = tl.arange(0, PAGES), tl.arange(0, DIM)
    peak = tl.full([], float("-inf"), tl.float32)
    if HAS_SUM:
        peak = tl.load(lse + row)
    for start in range(0, pages, PAGES):
        each = tl.load(lses + (start + page) * rows + row, mask=start + page < pages, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(each, 0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.full([], 0.0, tl.float32)
    summed = tl.zeros([DIM], dtype=tl.float32)
    if HAS_SUM:
        total = tl.exp(tl.load(lse + row) - shift)
        summed = tl.load(out + row * dim + column, mask=column < dim, other=0.0) * total
    for start in range(0, pages, PAGES):
        there = start + page < pages
        each = tl.load(lses + (start + page) * rows + row, mask=there, other=float("-inf"))
        weights = tl.exp(each - shift)
        place = (start + page).to(tl.int64)[:, None] * page_stride + column[None, :]
        values = tl.load(parts + place, mask=there[:, None] & (column < dim)[None, :], other=0.0)
        summed += tl.sum(values.to(tl.float32) * weights[:, None], 0)
        total += tl.sum(weights, 0)
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(new_out + row * dim + column, summed / whole, mask=column < dim)
    tl.store(new_lse + row, tl.where(total == 0.0, float("-inf"), shift + tl.log(whole)))


@triton.jit
def _mass_block(
    block,
    head,
    units,
    queries,
    keys,
    reference,
    scale,
    period,
    step,
    offset,
    sampled,
    rows,
    folded,
    dim,
    blocks,
    unit_head_stride,
    unit_row_stride,
    query_head_stride,
    query_row_stride,
    key_page_stride,
    key_head_stride,
    key_row_stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, column, token = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    # Of every `period` folded queries each `step`th one, the last one among them.
    query = (row // sampled) * period + offset + (row % sampled) * step
    place = head * query_head_stride + query[:, None] * query_row_stride + column[None, :]
    asking = tl.load(queries + place, mask=(row < rows)[:, None] & (column < dim)[None, :], other=0.0)
    asked = tl.load(reference + head * folded + query, mask=row < rows, other=0.0)
    # A layer's resident pages may have more elements than an int32 counts.
    keys += (block // blocks).to(tl.int64) * key_page_stride + head * key_head_stride
    keys += (block % blocks) * TOKENS * key_row_stride
    place = token[:, None] * key_row_stride + column[None, :]
    read = tl.load(keys + place, mask=(column < dim)[None, :], other=0.0)
    scores = scale * tl.dot(asking, tl.trans(read), input_precision="ieee") - asked[:, None]
    weights = tl.exp(tl.minimum(scores, HIGHEST))
    summed = tl.sum(tl.reshape(weights, (ROWS, TOKENS // CHUNK, CHUNK)), 2)
    chunk = block * (TOKENS // CHUNK) + tl.arange(0, TOKENS // CHUNK)
    units += head * unit_head_stride + row[:, None] * unit_row_stride + chunk[None, :]
    tl.store(units, summed, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["units"])
def _segment(
    # combine
    parts,
    lses,
    out,
    lse,
    new_out,
    new_lse,
    pages,
    queries,
    rows,
    dim,
    page_stride,
    head_stride,
    row_stride,
    # mass
    units,
    asking,
    keys,
    reference,
    scale,
    period,
    step,
    offset,
    sampled,
    sampled_rows,
    folded,
    blocks,
    all_blocks,
    unit_head_stride,
    unit_row_stride,
    query_head_stride,
    query_row_stride,
    key_page_stride,
    key_head_stride,
    key_row_stride,
    COMBINES: tl.constexpr,
    MASS: tl.constexpr,
    HAS_SUM: tl.constexpr,
    PAGES: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    # The first programs combine a row each, the others take the mass of a block of keys.
    number = tl.program_id(0)
    if COMBINES:
        if number < rows:
            _combine_row(
                number,
                parts,
                lses,
                out,
                lse,
                new_out,
                new_lse,
                pages,
                queries,
                rows,
                dim,
                page_stride,
                head_stride,
                row_stride,
                HAS_SUM,
                PAGES,
                DIM,
            )
    if MASS:
        if number >= rows:
            _mass_block(
                (number - rows) % all_blocks,
                (number - rows) // all_blocks,
                units,
                asking,
                keys,
                reference,
                scale,
                period,
                step,
                offset,
                sampled,
                sampled_rows,
                folded,
                dim,
                blocks,
                unit_head_stride,
                unit_row_stride,
                query_head_stride,
                query_row_stride,
                key_page_stride,
                key_head_stride,
                key_row_stride,
                ROWS,
                DIM,
                TOKENS,
                CHUNK,
            )


def combine(
    parts: Tensor, lses: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `fused.combine`."""
    if not _combines(parts, lses):
        return fused.combine(parts, lses, out, lse)
    pages, heads, queries, dim = parts.shape
    new_out = torch.empty(heads, queries, dim, dtype=torch.float32, device=parts.device)
    new_lse = torch.empty(heads, queries, dtype=torch.float32, device=parts.device)
    given = parts, lses.contiguous(), new_out if out is None else out, new_lse if lse is None else lse
    with _current(parts):
        _segment[(heads * queries,)](
            *(*given, new_out, new_lse, pages, queries, heads * queries, dim, *parts.stride()[:3]),
            *(new_out, new_out, new_out, new_out, 1.0, *([1] * 15)),
            COMBINES=True,
            MASS=False,
            HAS_SUM=out is not None,
            DIM=triton.next_power_of_2(dim),
            PAGES=PAGES_AT_A_TIME,
            **_NO_MASS,
        )
    return new_out, new_lse


def chunk_mass_(
    units: Tensor, queries: Tensor, keys: Tensor, reference: Tensor, scale: float, period: int, step: int
) -> None:
    """See `fused.chunk_mass_`."""
    block = _tokens_at_a_time(units, queries, keys, reference)
    if not block:
        return fused.chunk_mass_(units, queries, keys, reference, scale, period, step)
    numbers, sizes, programs = _mass_of(units, queries, keys, reference, scale, period, step, block)
    with _current(units):
        _segment[(programs,)](
            *([units] * 6),
            *(0, 1, 0, keys.shape[3], 1, 1, 1),
            *numbers,
            COMBINES=False,
            MASS=True,
            HAS_SUM=False,
            PAGES=PAGES_AT_A_TIME,
            DIM=triton.next_power_of_2(keys.shape[3]),
            **sizes,
        )
    return None


def combine_with_mass_(
    units: Tensor,
    parts: Tensor,
    lses: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    reference: Tensor,
    scale: float,
    period: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """See `fused.combine_with_mass_`."""
    block = _tokens_at_a_time(units, queries, keys, reference)
    if not (block and _combines(parts, lses)):
        chunk_mass_(units, queries, keys, reference, scale, period, step)
        return combine(parts, lses, out, lse)
    numbers, sizes, programs = _mass_of(units, queries, keys, reference, scale, period, step, block)
    pages, heads, folded, dim = parts.shape
    new_out, new_lse = torch.empty_like(out), torch.empty_like(lse)
    with _current(units):
        _segment[(heads * folded + programs,)](
            *(parts, lses.contiguous(), out, lse, new_out, new_lse, pages, folded, heads * folded, dim),
            *parts.stride()[:3],
            *numbers,
            COMBINES=True,
            MASS=True,
            HAS_SUM=True,
            PAGES=PAGES_AT_A_TIME,
            DIM=triton.next_power_of_2(dim),
            **sizes,
        )
    return new_out, new_lse


_NO_MASS = {"ROWS": LEAST_ROWS, "TOKENS": TOKENS_AT_A_TIME, "CHUNK": 1}


def _combines(parts: Tensor, lses: Tensor) -> bool:
    """Whether the kernel takes these."""
    return parts.stride(-1) == 1 and lses.dtype == torch.float32


def _tokens_at_a_time(units: Tensor, queries: Tensor, keys: Tensor, reference: Tensor) -> int:
    """Keys that a program takes the mass of; 0 where the kernel does not take these."""
    pages, _, tokens, dim = keys.shape
    chunk = pages * tokens // units.shape[2]
    strides = units.stride(2) == queries.stride(2) == keys.stride(3) == 1 and reference.is_contiguous()
    if chunk & (chunk - 1) or dim < 16 or reference.dtype != torch.float32 or not strides:
        return 0
    return next((n for n in (TOKENS_AT_A_TIME, 32, 16) if tokens % n == 0 and n % chunk == 0), 0)


def _mass_of(
    units: Tensor,
    queries: Tensor,
    keys: Tensor,
    reference: Tensor,
    scale: float,
    period: int,
    step: int,
    block: int,
) -> tuple[tuple[Any, ...], dict[str, int], int]:
    """Arguments of `_segment` from the mass on, its sizes, and how many programs take the mass."""
    pages, heads, tokens, _ = keys.shape
    folded, sampled = queries.shape[1], -(-period // step)
    rows, blocks = folded // period * sampled, tokens // block
    numbers = (
        *(units, queries, keys, reference, scale, period, step, (period - 1) % step, sampled, rows, folded),
        *(blocks, pages * blocks, *units.stride()[:2], *queries.stride()[:2], *keys.stride()[:3]),
    )
    rows_padded = max(LEAST_ROWS, triton.next_power_of_2(rows))
    sizes = {"ROWS": rows_padded, "TOKENS": block, "CHUNK": pages * tokens // units.shape[2]}
    return numbers, sizes, pages * blocks * heads


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["units", "scores"])
def _add_mass(
    scores,
    units,
    reference,
    lse,
    decay,
    period,
    step,
    offset,
    sampled,
    rows,
    folded,
    chunks,
    score_stride,
    unit_head_stride,
    unit_row_stride,
    SUMMED: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    head = tl.program_id(1)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    there = chunk < chunks
    mass = tl.zeros([CHUNKS], dtype=tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    for row in range(rows):
        query = head * folded + (row // sampled) * period + offset + (row % sampled) * step
        share = tl.exp(tl.minimum(tl.load(reference + query) - tl.load(lse + query), HIGHEST))
        weight += share
        if not SUMMED:
            place = head * unit_head_stride + row * unit_row_stride + chunk
            mass += share * tl.load(units + place, mask=there, other=0.0)
    if SUMMED:
        mass = weight / rows * tl.load(units + head * unit_head_stride + chunk, mask=there, other=0.0)
    scores += head * score_stride + chunk
    tl.store(scores, decay * tl.load(scores, mask=there, other=0.0) + mass, mask=there)


def add_mass_(
    scores: Tensor, units: Tensor, reference: Tensor, lse: Tensor, decay: float, period: int, step: int
) -> None:
    """See `fused.add_mass_`."""
    heads, chunks = scores.shape
    folded, sampled = lse.shape[1], -(-period // step)
    fits = scores.stride(1) == units.stride(2) == 1 and reference.is_contiguous() and lse.is_contiguous()
    if not fits or not reference.dtype == lse.dtype == torch.float32:
        return fused.add_mass_(scores, units, reference, lse, decay, period, step)
    with _current(scores):
        _add_mass[(triton.cdiv(chunks, CHUNKS_AT_A_TIME), heads)](
            *(scores, units, reference, lse, decay, period, step, (period - 1) % step, sampled),
            *(folded // period * sampled, folded, chunks, scores.stride(0), *units.stride()[:2]),
            SUMMED=units.shape[1] == 1 and folded // period * sampled > 1,
            CHUNKS=CHUNKS_AT_A_TIME,
        )
    return None


def _current(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's; its interpreter needs none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check(device: str = "cuda") -> None:
    """Runs every kernel once and compares it with the plain form.

    Raises:
        RuntimeError: a kernel computes something else. And whatever Triton raises where it cannot compile.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    half = torch.float16
    pages, heads, group, count, tokens, dim, chunk = 3, 2, 2, 5, 64, 64, 8
    parts, lses = draw(pages, heads, group * count, dim, dtype=half), draw(pages, heads, group * count)
    close(combine(parts, lses), fused.combine(parts, lses))
    out, lse = fused.combine(parts[:1], lses[:1])
    close(combine(parts[1:], lses[1:], out, lse), fused.combine(parts[1:], lses[1:], out, lse))
    queries, keys = (
        draw(heads, group * count, dim, dtype=half),
        draw(pages, 2, heads, tokens, dim, dtype=half),
    )
    step = 2
    sampled, chunks = group * -(-count // step), pages * tokens // chunk
    found, wanted = (torch.zeros(heads, sampled, chunks, device=device) for _ in range(2))
    asked = queries, keys[:, 0], lse, dim**-0.5, count, step
    chunk_mass_(found, *asked)
    fused.chunk_mass_(wanted, *asked)
    close([found], [wanted])
    found.zero_()
    pair = combine_with_mass_(found, parts[1:], lses[1:], out, lse, *asked)
    close([found, *pair], [wanted, *fused.combine(parts[1:], lses[1:], out, lse)])
    for units in (wanted, wanted.sum(1, keepdim=True)):
        scores = [draw(heads, chunks + 3)] * 2
        scores = [one.clone() for one in scores]
        mass = units, lses[0], lse, 0.5, count, step
        add_mass_(scores[0][:, 1:-2], *mass)
        fused.add_mass_(scores[1][:, 1:-2], *mass)
        close([scores[0]], [scores[1]])


def close(found: Any, wanted: Any) -> None:
    """Raises RuntimeError unless the tensors agree to what an order of sums may change."""
    for one, other in zip(found, wanted, strict=True):
        if not torch.allclose(one, other, rtol=1e-2, atol=1e-2):
            raise RuntimeError(
                f"a kernel differs from its plain form by {float((one - other).abs().max()):.3g}"
            )
