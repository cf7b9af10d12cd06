"""Triton kernels for merging partial attention and for attention mass; `triton_operators.py` launches them.

A program of `_combine` merges a row, one of `_chunk_mass` takes the mass of a block of keys. Folded rows,
sampled queries and chunks are those of `operators.py`.

`_quantized` attends to keys and values of 8 or 4 bits: a program takes a tile of queries of a key head over
some consecutive groups of tokens. It goes through the two halves of the dimensions apart: they share bytes.
`_quantize` makes them: a program takes a group of tokens of a head, and needs no memory besides; so does
`_quantize_chunks` with a chunk, by ranges of keys that are there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from offload_rt.kernels import operators, quantized

# Values that change from pass to pass. Triton would compile a kernel for each that is 1 or divisible by 16.
VARIES = ["pages", "queries", "rows", "period", "step", "offset", "sampled", "folded"]
VARIES += ["tokens", "groups_each"]
VARIES += ["blocks", "chunks", "score_stride", "mass_head_stride", "mass_row_stride"]
MAX_EXPONENT: Any = tl.constexpr(operators.MAX_EXPONENT)
AT_A_TIME: Any = tl.constexpr(4)
MIN_ROWS = 16  # of a matrix product on tensor cores
SLACK: Any = tl.constexpr(quantized.SLACK)
SMALLEST_STEP: Any = tl.constexpr(float(torch.finfo(torch.bfloat16).tiny))
TO_WHOLE: Any = tl.constexpr(1.5 * 2.0**23)  # added and taken off, it rounds a float32 to a whole number


# fmt: off
@triton.jit
def _with_part(summed, total, part, lse):
    """Adds attention over a part, and its log-sum-exp, to a sum; -inf: it does not count."""
    higher, lower = tl.maximum(total, lse), tl.minimum(total, lse)
    counts = lse > float("-inf")
    share = tl.where(counts, 1.0 / (1.0 + tl.exp(total - lse)), 0.0)
    joined = tl.where(counts, higher + tl.log(1.0 + tl.exp(lower - higher)), total)
    return summed + share * (part - summed), joined


@triton.jit(do_not_specialize=VARIES)
def _combine(
    parts, lses, out, lse, new_out, new_lse, pages, queries, rows, dim,
    page_stride, head_stride, row_stride,
    HAS_SUM: tl.constexpr, DIM: tl.constexpr,
):
    row, column = tl.program_id(0), tl.arange(0, DIM)
    seen = column < dim
    parts += (row // queries) * head_stride + (row % queries) * row_stride + column
    summed, total = tl.zeros([DIM], dtype=tl.float32), tl.full([], float("-inf"), tl.float32)
    if HAS_SUM:
        summed, total = tl.load(out + row * dim + column, mask=seen, other=0.0), tl.load(lse + row)
    # In order, one after the other: a sum has the same bits however the pages are grouped in calls.
    first, first_lse, second, second_lse, third, third_lse, fourth, fourth_lse = _parts(
        parts, lses, 0, pages, row, rows, page_stride, seen
    )
    for page in range(0, pages, AT_A_TIME):
        # While these are added, the next ones are loaded.
        next_first, next_first_lse, next_second, next_second_lse, next_third, next_third_lse, \
            next_fourth, next_fourth_lse = _parts(
                parts, lses, page + AT_A_TIME, pages, row, rows, page_stride, seen
            )
        summed, total = _with_part(summed, total, first, first_lse)
        summed, total = _with_part(summed, total, second, second_lse)
        summed, total = _with_part(summed, total, third, third_lse)
        summed, total = _with_part(summed, total, fourth, fourth_lse)
        first, first_lse, second, second_lse = next_first, next_first_lse, next_second, next_second_lse
        third, third_lse, fourth, fourth_lse = next_third, next_third_lse, next_fourth, next_fourth_lse
    tl.store(new_out + row * dim + column, summed, mask=seen)
    tl.store(new_lse + row, total)


@triton.jit
def _parts(parts, lses, page, pages, row, rows, page_stride, seen):
    """Loads a row of `AT_A_TIME` parts and their log-sum-exps."""
    first, first_lse = _part(parts, lses, page, pages, row, rows, page_stride, seen)
    second, second_lse = _part(parts, lses, page + 1, pages, row, rows, page_stride, seen)
    third, third_lse = _part(parts, lses, page + 2, pages, row, rows, page_stride, seen)
    fourth, fourth_lse = _part(parts, lses, page + 3, pages, row, rows, page_stride, seen)
    return first, first_lse, second, second_lse, third, third_lse, fourth, fourth_lse


@triton.jit
def _part(parts, lses, page, pages, row, rows, page_stride, seen):
    """Loads a row of a part and its log-sum-exp; behind the last part, -inf."""
    there = page < pages
    part = tl.load(parts + tl.cast(page, tl.int64) * page_stride, mask=seen & there, other=0.0)
    return part.to(tl.float32), tl.load(lses + page * rows + row, mask=there, other=float("-inf"))


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["mass"])
def _chunk_mass(
    mass, asking, keys, reference, scale, dim,
    period, step, offset, sampled, rows, folded, blocks,
    mass_head_stride, mass_row_stride, query_head_stride, query_row_stride,
    key_page_stride, key_head_stride, key_row_stride,
    ROWS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, CHUNK: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
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


@triton.jit
def _half(
    codes, ranges, place, column, half, zero_at,
    SHIFT: tl.constexpr, BITS: tl.constexpr, GROUPED: tl.constexpr,
):
    """Decodes half of the dimensions of a group, `[tokens, HALF]`; SHIFT is 1 for the high one."""
    seen = (column < half)[None, :]
    read = tl.load(codes + place + (column[None, :] + (SHIFT * half if BITS == 8 else 0)), mask=seen, other=0)
    if BITS == 4:
        read = (read >> 4) if SHIFT else (read & 15)
    if GROUPED:
        zero = tl.load(ranges + zero_at + SHIFT * half + column, mask=column < half, other=0.0)[None, :]
        step = tl.load(ranges + zero_at + (2 + SHIFT) * half + column, mask=column < half, other=0.0)[None, :]
    else:
        zero, step = tl.load(ranges + zero_at)[:, None], tl.load(ranges + zero_at + 1)[:, None]
    decoded = zero.to(tl.float32) + step.to(tl.float32) * read.to(tl.float32)
    return tl.where(seen, decoded, 0.0)


@triton.jit(do_not_specialize=VARIES)
def _quantized(
    asking, key_codes, key_ranges, value_codes, value_ranges, out, lse, scale,
    count, tokens, rows, dim, heads, groups_each,
    query_head_stride, query_row_stride, code_head_stride, code_row_stride,
    key_range_stride, value_range_stride,
    COUNTED: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):
    part, head, half = tl.program_id(0), tl.program_id(1), dim // 2
    row, column, token = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF), tl.arange(0, GROUP)
    place = asking + head * query_head_stride + row[:, None] * query_row_stride + column[None, :]
    valid = (row < rows)[:, None] & (column < half)[None, :]
    low_query = tl.load(place, mask=valid, other=0.0)
    high_query = tl.load(place + half, mask=valid, other=0.0)
    kind = low_query.dtype
    seen = tokens
    if COUNTED:
        seen = tl.minimum(tl.load(count), tokens).to(tl.int32)
    key_codes += head * code_head_stride
    value_codes += head * code_head_stride
    key_ranges += head * key_range_stride
    value_ranges += head * value_range_stride
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    low_sum, high_sum = tl.zeros([ROWS, HALF], dtype=tl.float32), tl.zeros([ROWS, HALF], dtype=tl.float32)
    first = part * groups_each * GROUP
    for start in range(first, tl.minimum(first + groups_each * GROUP, seen), GROUP):
        at = (start + token)[:, None] * code_row_stride
        zero_at = start // GROUP * 2 * dim
        low = _half(key_codes, key_ranges, at, column, half, zero_at, 0, BITS, True).to(kind)
        high = _half(key_codes, key_ranges, at, column, half, zero_at, 1, BITS, True).to(kind)
        scores = tl.dot(low_query, tl.trans(low), input_precision="ieee")
        scores += tl.dot(high_query, tl.trans(high), input_precision="ieee")
        scores = tl.where((start + token < seen)[None, :], scale * scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink, weights = tl.exp(peak - higher), tl.exp(scores - higher[:, None])
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        weights = weights.to(kind)
        zero_at = (start + token) * 2
        low = _half(value_codes, value_ranges, at, column, half, zero_at, 0, BITS, False).to(kind)
        high = _half(value_codes, value_ranges, at, column, half, zero_at, 1, BITS, False).to(kind)
        low_sum = low_sum * shrink[:, None] + tl.dot(weights, low, input_precision="ieee")
        high_sum = high_sum * shrink[:, None] + tl.dot(weights, high, input_precision="ieee")
    whole = tl.where(total == 0.0, 1.0, total)
    at = (part * heads + head) * rows + row
    place = out + at[:, None].to(tl.int64) * dim + column[None, :]
    tl.store(place, (low_sum / whole[:, None]).to(kind), mask=valid)
    tl.store(place + half, (high_sum / whole[:, None]).to(kind), mask=valid)
    tl.store(lse + at, tl.where(total == 0.0, float("-inf"), peak + tl.log(whole)), mask=row < rows)


@triton.jit
def _range(low, high, MOST: tl.constexpr):
    """Returns the zero and the step of a range in bfloat16, see `quantized.encoded`."""
    zero = (low - tl.abs(low) * SLACK).to(tl.bfloat16)
    return zero, ((high - zero.to(tl.float32)) * ((1 + 2 * SLACK) / MOST)).to(tl.bfloat16)


@triton.jit
def _codes(x, zero, step, MOST: tl.constexpr):
    far = tl.div_rn(x - zero.to(tl.float32), tl.maximum(step.to(tl.float32), SMALLEST_STEP))
    far = tl.minimum(tl.maximum(far, 0.0), MOST)
    return (far + TO_WHOLE - TO_WHOLE).to(tl.uint8)


@triton.jit
def _store_codes(codes, low, high, half, valid, BITS: tl.constexpr):
    if BITS == 4:
        tl.store(codes, low | (high << 4), mask=valid)
    else:
        tl.store(codes, low, mask=valid)
        tl.store(codes + half, high, mask=valid)


@triton.jit
def _quantize_tokens(first, second, codes, ranges, half, valid, seen, BITS: tl.constexpr, MOST: tl.constexpr):
    """Quantises rows, each by its own range."""
    infinity = float("inf")
    least = tl.minimum(tl.where(valid, first, infinity), tl.where(valid, second, infinity))
    most = tl.maximum(tl.where(valid, first, -infinity), tl.where(valid, second, -infinity))
    zero, step = _range(tl.min(least, 1), tl.max(most, 1), MOST)
    tl.store(ranges, zero, mask=seen)
    tl.store(ranges + 1, step, mask=seen)
    low = _codes(first, zero[:, None], step[:, None], MOST)
    high = _codes(second, zero[:, None], step[:, None], MOST)
    _store_codes(codes, low, high, half, valid, BITS)


@triton.jit
def _quantize_chunks(
    keys, values, heads, slots, key_codes, key_ranges, value_codes, value_ranges, chunk, dim,
    key_chunk_stride, key_row_stride, value_chunk_stride, value_row_stride,
    code_head_stride, code_row_stride, key_range_stride, value_range_stride,
    BITS: tl.constexpr, HALF: tl.constexpr, CHUNK: tl.constexpr,
):
    number, half = tl.program_id(0).to(tl.int64), dim // 2
    MOST: tl.constexpr = 2**BITS - 1
    token, column = tl.arange(0, CHUNK), tl.arange(0, HALF)
    seen, within = token < chunk, column < half
    valid = seen[:, None] & within[None, :]
    head, to = tl.load(heads + number), tl.load(slots + number) * chunk + token
    codes = head * code_head_stride + to[:, None] * code_row_stride + column[None, :]
    place = keys + number * key_chunk_stride + token[:, None] * key_row_stride + column[None, :]
    first = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=valid, other=0.0).to(tl.float32)
    ranges = key_ranges + head * key_range_stride + column
    zero, step = tl.load(ranges, mask=within, other=0.0), tl.load(ranges + dim, mask=within, other=0.0)
    low = _codes(first, zero[None, :], step[None, :], MOST)
    zero = tl.load(ranges + half, mask=within, other=0.0)
    step = tl.load(ranges + dim + half, mask=within, other=0.0)
    high = _codes(second, zero[None, :], step[None, :], MOST)
    _store_codes(key_codes + codes, low, high, half, valid, BITS)
    place = values + number * value_chunk_stride + token[:, None] * value_row_stride + column[None, :]
    first = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=valid, other=0.0).to(tl.float32)
    ranges = value_ranges + head * value_range_stride + to * 2
    _quantize_tokens(first, second, value_codes + codes, ranges, half, valid, seen, BITS, MOST)


@triton.jit
def _quantize(
    x, codes, ranges, dim, head_stride, row_stride, code_head_stride, code_row_stride, range_head_stride,
    BY_CHANNEL: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr,
):
    group, head, half = tl.program_id(0), tl.program_id(1), dim // 2
    MOST: tl.constexpr = 2**BITS - 1
    token, column = group * GROUP + tl.arange(0, GROUP), tl.arange(0, HALF)
    valid = (column < half)[None, :]
    place = x + head.to(tl.int64) * head_stride + token[:, None] * row_stride + column[None, :]
    first = tl.load(place, mask=valid, other=0.0).to(tl.float32)
    second = tl.load(place + half, mask=valid, other=0.0).to(tl.float32)
    ranges += head.to(tl.int64) * range_head_stride
    codes += head.to(tl.int64) * code_head_stride + token[:, None] * code_row_stride + column[None, :]
    if BY_CHANNEL:
        zero, step = _range(tl.min(first, 0), tl.max(first, 0), MOST)
        other_zero, other_step = _range(tl.min(second, 0), tl.max(second, 0), MOST)
        ranges += group * 2 * dim + column
        tl.store(ranges, zero, mask=column < half)
        tl.store(ranges + half, other_zero, mask=column < half)
        tl.store(ranges + dim, step, mask=column < half)
        tl.store(ranges + dim + half, other_step, mask=column < half)
        low = _codes(first, zero[None, :], step[None, :], MOST)
        high = _codes(second, other_zero[None, :], other_step[None, :], MOST)
        _store_codes(codes, low, high, half, valid, BITS)
    else:
        _quantize_tokens(first, second, codes, ranges + token * 2, half, valid, token >= 0, BITS, MOST)
# fmt: on
