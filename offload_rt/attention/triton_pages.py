"""Triton kernels that unpack pages of 12 bits a value; `cpu_kv.packed` describes the form."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpu_kv.packed import PackedShape

ROWS_AT_A_TIME = 16
WORDS_AT_A_TIME = 256


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
# fmt: on


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
