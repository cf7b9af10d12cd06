"""Triton kernels that pack and unpack pages of 12 bits per value; `cpu_kv.packed` has the form.

The two halves of the channels are unpacked apart, because their exponents share bytes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpu_kv import sizes
from cpu_kv.packed import ESCAPE, PackedShape
from offload_rt.kernels.sizes import TILE

ROWS_AT_A_TIME = 16
MOST_VALUES: Any = tl.constexpr(sizes.MOST_VALUES)
SEARCHED: Any = tl.constexpr(256)
"""Entries of a list that are compared at a time: two times cover the longest list, of `MOST_VALUES` / 256."""
_ESCAPE: Any = tl.constexpr(ESCAPE)


# fmt: off
@triton.jit
def _first_escape(lists, count, position):
    """Returns the place in a page's list of its first escape at `position` or after it."""
    # Entries at equal distances, then those between two of them: each load of a binary search would wait for
    # the one before.
    each, step = tl.arange(0, SEARCHED), tl.cdiv(count, SEARCHED)
    place = 1 + each * step
    entries = tl.load(lists + place, mask=place <= count, other=0)
    before = (place <= count) & ((entries >> 8) < position)
    start = 1 + tl.maximum(tl.sum(before.to(tl.int32)) - 1, 0) * step
    place = start + each
    valid = (each < step) & (place <= count)
    entries = tl.load(lists + place, mask=valid, other=0)
    return start + tl.sum((valid & ((entries >> 8) < position)).to(tl.int32))


@triton.jit
def _bases(packed, bases_at, head, half, HALF: tl.constexpr):
    """Loads the bases of the first and of the second half of a head's channels, int32 `[1, HALF]`."""
    column = tl.arange(0, HALF)[None, :]
    base = packed + bases_at + head * 2 * half + column
    first = tl.load(base, mask=column < half, other=0).to(tl.int32)
    return first, tl.load(base + half, mask=column < half, other=0).to(tl.int32)


@triton.jit
def _bits(exact, code, base):
    exponent = (base + code) & 255
    return ((exact & 128) << 8) | (exponent << 7) | (exact & 127)


@triton.jit
def _unpacked_tile(
    rows, lists, count, escape, first_base, second_base, first_position, start, end, half,
    TOKENS: tl.constexpr, HALF: tl.constexpr,
):
    """Unpacks the tokens `start` .. `start + TOKENS` of a page and head.

    `rows` are those of the head, `first_position` is the position of its first value, `escape` the place of
    its first escape from `start` on. Returns the bits of both halves of the channels, int32 `[TOKENS, HALF]`,
    and the place of the next escape. Tokens from `end` on are finite.
    """
    token, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF)[None, :]
    valid = (start + token < end) & (column < half)
    place = rows + (start + token) * (3 * half) + column
    codes = tl.load(place + 2 * half, mask=valid, other=0).to(tl.int32)
    # The lower half of a code belongs to the first channels, the upper one to the others.
    low = _bits(tl.load(place, mask=valid, other=0).to(tl.int32), codes & 15, first_base)
    high = _bits(tl.load(place + half, mask=valid, other=0).to(tl.int32), codes >> 4, second_base)
    # Positions are counted from `start` here; columns that a head does not have get none.
    position = tl.where(column < half, token * (2 * half) + column, -MOST_VALUES)
    first_position += start * (2 * half)
    entry = tl.load(lists + escape, mask=escape <= count, other=0)
    while (escape <= count) & ((entry >> 8) - first_position < TOKENS * 2 * half):
        escaped, exponent = (entry >> 8) - first_position, (entry & 255) << 7
        low = tl.where(position == escaped, (low & 0x807F) | exponent, low)
        high = tl.where(position == escaped - half, (high & 0x807F) | exponent, high)
        escape += 1
        entry = tl.load(lists + escape, mask=escape <= count, other=0)
    return low, high, escape


@triton.jit(do_not_specialize_on_alignment=["pages", "heads", "tokens"])
def _unpack_runs(
    packed, out, pages, heads, tokens, nbytes, bases_at, rows_at, words, first_head, sides_heads, length,
    page_size, half, LISTED: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
):
    """Unpacks runs of `length` tokens: those that are listed, or all pages of some heads."""
    run, start = tl.program_id(0), tl.program_id(1) * TOKENS
    if LISTED:
        page, head = tl.load(pages + run), tl.load(heads + run).to(tl.int32)
        begin = tl.load(tokens + run).to(tl.int32)
    else:
        page, head, begin = (run // sides_heads).to(tl.int64), run % sides_heads, 0
    head += first_head
    packed += page * nbytes
    lists = packed.to(tl.pointer_type(tl.int32), bitcast=True)
    count = tl.minimum(tl.load(lists), words - 1)
    first_position = head * page_size * (2 * half)
    escape = _first_escape(lists, count, first_position + (begin + start) * (2 * half))
    first_base, second_base = _bases(packed, bases_at, head, half, HALF)
    low, high, escape = _unpacked_tile(
        packed + rows_at + head * page_size * (3 * half), lists, count, escape, first_base, second_base,
        first_position, begin + start, begin + length, half, TOKENS, HALF,
    )
    token, column = start + tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF)[None, :]
    valid = (token < length) & (column < half)
    out += (run.to(tl.int64) * length + token) * (2 * half) + column
    tl.store(out, low.to(tl.int16), mask=valid)
    tl.store(out + half, high.to(tl.int16), mask=valid)


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
    """See `PageCodec.decode`. `packed` and `out` must be contiguous."""
    if out.numel():
        heads = out.shape[1] * shape.kv_heads
        unlisted = packed, packed, packed
        _unpack(shape, packed, out.flatten(0, 2), *unlisted, first_side * shape.kv_heads, heads, listed=False)


def take(
    shape: PackedShape, packed: Tensor, side: int, page: Tensor, head: Tensor, token: Tensor, out: Tensor
) -> None:
    """See `PageCodec.take`. `packed` and `out` must be contiguous."""
    if out.numel():
        each = (page.contiguous(), head.contiguous(), token.contiguous())
        _unpack(shape, packed, out, *each, side * shape.kv_heads, shape.kv_heads, listed=True)


def _unpack(
    shape: PackedShape,
    packed: Tensor,
    out: Tensor,
    page: Tensor,
    head: Tensor,
    token: Tensor,
    first_head: int,
    heads: int,
    *,
    listed: bool,
) -> None:
    """Unpacks to `out`, `[runs, tokens, head_dim]`: listed runs, or `heads` heads of each page.

    Heads of keys and of values are counted together, from `first_head` on.
    """
    runs, length, _ = out.shape
    half, tokens = shape.head_dim // 2, min(TILE, triton.next_power_of_2(length))
    _unpack_runs[(runs, triton.cdiv(length, tokens))](
        *(packed, out.view(torch.int16), page, head, token, shape.nbytes, shape.bases_at, shape.rows_at),
        *(shape.words, first_head, heads, length, shape.page_size, half),
        LISTED=listed,
        TOKENS=tokens,
        HALF=triton.next_power_of_2(half),
    )
