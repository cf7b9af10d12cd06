"""Triton kernels that pack and unpack pages of 12 bits per value; `cpu_kv.packed` describes the form."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpu_kv.packed import ESCAPE, PackedShape

ROWS_AT_A_TIME = 16
WORDS_AT_A_TIME = 256
_ESCAPE: Any = tl.constexpr(ESCAPE)


# fmt: off
@triton.jit
def _unpack_rows(
    packed, out, nbytes, bases_at, rows_at, first_head, rows, page_size, half,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):
    page, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    valid = (row < rows)[:, None] & (column < half)[None, :]
    packed += page * nbytes
    source = rows_at + (first_head * page_size + row)[:, None] * (3 * half) + column[None, :]
    base = bases_at + (first_head + row // page_size)[:, None] * (2 * half) + column[None, :]
    codes = tl.load(packed + source + 2 * half, mask=valid, other=0).to(tl.int32)
    place = page * rows * (2 * half) + row[:, None] * (2 * half) + column[None, :]
    # The lower half of a code belongs to the first channels, the upper one to the others.
    for part in tl.static_range(2):
        exact = tl.load(packed + source + part * half, mask=valid, other=0).to(tl.int32)
        exponent = tl.load(packed + base + part * half, mask=valid, other=0).to(tl.int32)
        exponent += (codes >> 4) if part else (codes & 15)
        bits = ((exact & 128) << 8) | ((exponent & 255) << 7) | (exact & 127)
        tl.store(out + place + part * half, bits.to(tl.int16), mask=valid)


@triton.jit
def _restore_escapes(lists, out, stride, words, first, values, WORDS: tl.constexpr):
    page, word = tl.program_id(0).to(tl.int64), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    lists += page * stride
    valid = (word > 0) & (word < words) & (word <= tl.load(lists))
    entry = tl.load(lists + word, mask=valid, other=0)
    position = (entry >> 8) - first
    valid = valid & (position >= 0) & (position < values)
    place = out + page * values + position
    bits = tl.load(place, mask=valid, other=0).to(tl.int32) & 0x807F
    tl.store(place, (bits | ((entry & 255) << 7)).to(tl.int16), mask=valid)


@triton.jit
def _pack_rows(
    values, packed, counts, nbytes, bases_at, rows_at, page_size, half,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):
    page, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token, column = tl.arange(0, ROWS), tl.arange(0, HALF)
    source = values + (page * heads + head) * page_size * 2 * half + column[None, :]
    packed += page * nbytes
    found = tl.full([], 0, tl.int32)
    # The largest exponent of each channel, of the first half of the channels and of the second one.
    first, second = tl.zeros([HALF], dtype=tl.int32), tl.zeros([HALF], dtype=tl.int32)
    for start in range(0, page_size, ROWS):
        valid = (start + token < page_size)[:, None] & (column < half)[None, :]
        place = source + (start + token)[:, None] * (2 * half)
        first = tl.maximum(first, tl.max((tl.load(place, mask=valid, other=0).to(tl.int32) >> 7) & 255, 0))
        bits = tl.load(place + half, mask=valid, other=0).to(tl.int32)
        second = tl.maximum(second, tl.max((bits >> 7) & 255, 0))
    first, second = tl.maximum(first - (_ESCAPE - 1), 0), tl.maximum(second - (_ESCAPE - 1), 0)
    base = packed + bases_at + head * 2 * half + column
    tl.store(base, first.to(tl.uint8), mask=column < half)
    tl.store(base + half, second.to(tl.uint8), mask=column < half)
    for start in range(0, page_size, ROWS):
        valid = (start + token < page_size)[:, None] & (column < half)[None, :]
        place = source + (start + token)[:, None] * (2 * half)
        row = packed + rows_at + (head * page_size + start + token)[:, None] * (3 * half) + column[None, :]
        bits = tl.load(place, mask=valid, other=0).to(tl.int32)
        low = ((bits >> 7) & 255) - first[None, :]
        tl.store(row, (((bits >> 8) & 128) | (bits & 127)).to(tl.uint8), mask=valid)
        bits = tl.load(place + half, mask=valid, other=0).to(tl.int32)
        high = ((bits >> 7) & 255) - second[None, :]
        tl.store(row + half, (((bits >> 8) & 128) | (bits & 127)).to(tl.uint8), mask=valid)
        codes = tl.where(low < 0, _ESCAPE, low) | (tl.where(high < 0, _ESCAPE, high) << 4)
        tl.store(row + 2 * half, codes.to(tl.uint8), mask=valid)
        found += tl.sum(tl.where(valid, (low < 0).to(tl.int32) + (high < 0).to(tl.int32), 0))
    tl.store(counts + page * heads + head, found)


@triton.jit
def _list_escapes(
    values, packed, lists, counts, nbytes, bases_at, stride, words, page_size, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
):
    page, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    lists += page * stride
    each, column, token = tl.arange(0, HEADS), tl.arange(0, DIM), tl.arange(0, ROWS)
    found = tl.load(counts + page * heads + each, mask=each < heads, other=0)
    number = 1 + tl.sum(tl.where(each < head, found, 0))
    if head == 0:
        tl.store(lists, tl.sum(found))
    end = number + tl.sum(tl.where(each == head, found, 0))
    at = column < dim
    base = tl.load(packed + page * nbytes + bases_at + head * dim + column, mask=at, other=0).to(tl.int32)
    start = 0
    while (number < end) & (number < words):
        position = (head * page_size + start + token)[:, None] * dim + column[None, :]
        valid = (start + token < page_size)[:, None] & at[None, :]
        bits = tl.load(values + page * heads * page_size * dim + position, mask=valid, other=0).to(tl.int32)
        exponent = (bits >> 7) & 255
        escaped = tl.ravel((valid & (exponent < base[None, :])).to(tl.int32))
        place = number + tl.cumsum(escaped, 0) - escaped
        entry = tl.ravel((position << 8) | exponent)
        tl.store(lists + place, entry, mask=(escaped > 0) & (place < words))
        number += tl.sum(escaped)
        start += ROWS
# fmt: on


def encode(shape: PackedShape, pages: Tensor) -> Tensor:
    """See `PageCodec.encode`."""
    packed = pages.new_empty(len(pages), shape.nbytes, dtype=torch.uint8)
    lists, bits, heads = shape.escapes(packed), pages.contiguous().view(torch.int16), 2 * shape.kv_heads
    if not len(pages):
        return packed
    counts = torch.empty(len(pages), heads, dtype=torch.int32, device=pages.device)
    lists.zero_()
    packed[:, shape.rows_end :].zero_()
    half = shape.head_dim // 2
    _pack_rows[(len(pages), heads)](
        *(bits, packed, counts, shape.nbytes, shape.bases_at, shape.rows_at, shape.page_size, half),
        ROWS=ROWS_AT_A_TIME,
        HALF=triton.next_power_of_2(half),
    )
    _list_escapes[(len(pages), heads)](
        *(bits, packed, lists, counts, shape.nbytes, shape.bases_at, shape.nbytes // 4, shape.words),
        *(shape.page_size, shape.head_dim),
        ROWS=ROWS_AT_A_TIME,
        DIM=triton.next_power_of_2(shape.head_dim),
        HEADS=triton.next_power_of_2(heads),
    )
    return packed


def decode(shape: PackedShape, packed: Tensor, out: Tensor, first_side: int = 0) -> None:
    """See `PageCodec.decode`. ``packed`` and ``out`` must be contiguous."""
    pages, sides = out.shape[:2]
    if not out.numel():
        return
    heads, half, bits = sides * shape.kv_heads, shape.head_dim // 2, out.view(torch.int16)
    first, rows = first_side * shape.kv_heads, heads * shape.page_size
    _unpack_rows[(pages, triton.cdiv(rows, ROWS_AT_A_TIME))](
        *(packed, bits, shape.nbytes, shape.bases_at, shape.rows_at, first, rows, shape.page_size, half),
        ROWS=ROWS_AT_A_TIME,
        HALF=triton.next_power_of_2(half),
    )
    lists, values = packed.view(torch.int32), rows * shape.head_dim
    _restore_escapes[(pages, triton.cdiv(shape.words, WORDS_AT_A_TIME))](
        *(lists, bits, shape.nbytes // 4, shape.words, first_side * shape.values // 2, values),
        WORDS=WORDS_AT_A_TIME,
    )
