"""Triton kernels for merging partial attention and for attention mass; `triton_operators.py` launches them.

A launch of `_segment` may do both for one segment: its first programs merge a row each, the others take the
mass of a block of keys each. Folded rows, sampled queries and chunks are those of `operators.py`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from offload_rt.attention import operators

# Values that change from pass to pass. Triton would compile a kernel for each that is 1 or divisible by 16.
VARIES = ["pages", "queries", "rows", "period", "step", "offset", "sampled", "sampled_rows", "folded"]
VARIES += ["blocks", "all_blocks", "chunks", "score_stride", "mass_head_stride", "mass_row_stride"]
MAX_EXPONENT: Any = tl.constexpr(operators.MAX_EXPONENT)


# fmt: off
@triton.jit
def _combine_row(
    row, parts, lses, out, lse, new_out, new_lse, pages, queries, rows, dim,
    page_stride, head_stride, row_stride,
    HAS_SUM: tl.constexpr, PAGES: tl.constexpr, DIM: tl.constexpr,
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
        valid = start + page < pages
        each = tl.load(lses + (start + page) * rows + row, mask=valid, other=float("-inf"))
        weights = tl.exp(each - shift)
        place = (start + page).to(tl.int64)[:, None] * page_stride + column[None, :]
        values = tl.load(parts + place, mask=valid[:, None] & (column < dim)[None, :], other=0.0)
        summed += tl.sum(values.to(tl.float32) * weights[:, None], 0)
        total += tl.sum(weights, 0)
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(new_out + row * dim + column, summed / whole, mask=column < dim)
    tl.store(new_lse + row, tl.where(total == 0.0, float("-inf"), shift + tl.log(whole)))


@triton.jit
def _mass_block(
    block, head, mass, asking, keys, reference, scale,
    period, step, offset, sampled, rows, folded, dim, blocks,
    mass_head_stride, mass_row_stride, query_head_stride, query_row_stride,
    key_page_stride, key_head_stride, key_row_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    row, column, token = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, TOKENS)
    # Of every `period` folded queries each `step`th one, the last one among them.
    query = (row // sampled) * period + offset + (row % sampled) * step
    place = head * query_head_stride + query[:, None] * query_row_stride + column[None, :]
    queries = tl.load(asking + place, mask=(row < rows)[:, None] & (column < dim)[None, :], other=0.0)
    shift = tl.load(reference + head * folded + query, mask=row < rows, other=0.0)
    # A layer's resident pages may have more elements than an int32 counts.
    keys += (block // blocks).to(tl.int64) * key_page_stride + head * key_head_stride
    keys += (block % blocks) * TOKENS * key_row_stride
    place = token[:, None] * key_row_stride + column[None, :]
    read = tl.load(keys + place, mask=(column < dim)[None, :], other=0.0)
    scores = scale * tl.dot(queries, tl.trans(read), input_precision="ieee") - shift[:, None]
    weights = tl.exp(tl.minimum(scores, MAX_EXPONENT))
    summed = tl.sum(tl.reshape(weights, (ROWS, TOKENS // CHUNK, CHUNK)), 2)
    chunk = block * (TOKENS // CHUNK) + tl.arange(0, TOKENS // CHUNK)
    mass += head * mass_head_stride + row[:, None] * mass_row_stride + chunk[None, :]
    tl.store(mass, summed, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["mass"])
def _segment(
    # for merging
    parts, lses, out, lse, new_out, new_lse, pages, queries, rows, dim,
    page_stride, head_stride, row_stride,
    # for attention mass
    mass, asking, keys, reference, scale,
    period, step, offset, sampled, sampled_rows, folded, blocks, all_blocks,
    mass_head_stride, mass_row_stride, query_head_stride, query_row_stride,
    key_page_stride, key_head_stride, key_row_stride,
    COMBINES: tl.constexpr, MASS: tl.constexpr, HAS_SUM: tl.constexpr,
    PAGES: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    number = tl.program_id(0)
    if COMBINES:
        if number < rows:
            _combine_row(
                number, parts, lses, out, lse, new_out, new_lse, pages, queries, rows, dim,
                page_stride, head_stride, row_stride, HAS_SUM, PAGES, DIM,
            )
    if MASS:
        if number >= rows:
            _mass_block(
                (number - rows) % all_blocks, (number - rows) // all_blocks,
                mass, asking, keys, reference, scale,
                period, step, offset, sampled, sampled_rows, folded, dim, blocks,
                mass_head_stride, mass_row_stride, query_head_stride, query_row_stride,
                key_page_stride, key_head_stride, key_row_stride, ROWS, DIM, TOKENS, CHUNK,
            )


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["mass", "scores"])
def _add_mass(
    scores, mass, reference, lse, decay, period, step, offset, sampled, rows, folded, chunks,
    score_stride, mass_head_stride, mass_row_stride,
    SUMMED: tl.constexpr, CHUNKS: tl.constexpr,
):
    head = tl.program_id(1)
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    valid = chunk < chunks
    added = tl.zeros([CHUNKS], dtype=tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    for row in range(rows):
        query = head * folded + (row // sampled) * period + offset + (row % sampled) * step
        share = tl.exp(tl.minimum(tl.load(reference + query) - tl.load(lse + query), MAX_EXPONENT))
        weight += share
        if not SUMMED:
            place = head * mass_head_stride + row * mass_row_stride + chunk
            added += share * tl.load(mass + place, mask=valid, other=0.0)
    if SUMMED:
        added = weight / rows * tl.load(mass + head * mass_head_stride + chunk, mask=valid, other=0.0)
    scores += head * score_stride + chunk
    tl.store(scores, decay * tl.load(scores, mask=valid, other=0.0) + added, mask=valid)
# fmt: on
