"""Triton kernels for attention whose result for a query depends on nothing but the keys that it sees.

Every page is attended by itself, in tiles of `TILE` tokens from its beginning on, by tiles of as many rows of
queries for one query as for many: so a query has the same bits whatever the others are, and whether a page is
plain, packed, or gathered from the newest tokens. `triton_kernels._combine` adds the pages in order.

`_attend_pages` takes a tile of queries of a KV head over a page, which it unpacks in registers where it is
packed. `_attend_tail` takes the query heads of one token over a page of the tokens that it sees, which do not
lie side by side in a tree. The two halves of the channels are taken apart, as packed exponents share bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cpu_kv.packed import PackedShape
from offload_rt.kernels.sizes import TILE, tile_rows
from offload_rt.kernels.triton_kernels import MAX_EXPONENT, MIN_ROWS
from offload_rt.kernels.triton_packing import _bases, _first_escape, _unpacked_tile

# Values that change from pass to pass. Triton would compile a kernel for each that is 1 or divisible by 16.
VARIES = ["rows", "period", "step", "offset", "sampled", "mass_head_stride", "mass_row_stride"]
VARIES += ["count", "group", "shared", "longest"]


# fmt: off
@triton.jit
def _queries(asking, row, valid, half, row_stride, HALF: tl.constexpr):
    """Loads both halves of the channels of rows of queries, `[ROWS, HALF]`."""
    column = tl.arange(0, HALF)
    seen = valid[:, None] & (column < half)[None, :]
    place = asking + row[:, None] * row_stride + column[None, :]
    return tl.load(place, mask=seen, other=0.0), tl.load(place + half, mask=seen, other=0.0)


@triton.jit
def _gathered(side, place, valid, half, row_stride, HALF: tl.constexpr):
    """Loads both halves of the channels of the tokens at `place`, `[TOKENS, HALF]`."""
    column = tl.arange(0, HALF)
    seen = valid[:, None] & (column < half)[None, :]
    at = side + place.to(tl.int64)[:, None] * row_stride + column[None, :]
    return tl.load(at, mask=seen, other=0.0), tl.load(at + half, mask=seen, other=0.0)


@triton.jit
def _values(bits):
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _scores(low_query, high_query, low, high, valid, scale):
    """Returns the scores of a tile of keys, `[ROWS, TOKENS]`."""
    scores = tl.dot(low_query, tl.trans(low), input_precision="ieee")
    scores += tl.dot(high_query, tl.trans(high), input_precision="ieee")
    return tl.where(valid[None, :], scale * scores, float("-inf"))


@triton.jit
def _attended(weights, low, high, shrink, low_sum, high_sum):
    """Returns the sums of values, with those of a tile."""
    weights = weights.to(low.dtype)
    low_sum = low_sum * shrink[:, None] + tl.dot(weights, low, input_precision="ieee")
    return low_sum, high_sum * shrink[:, None] + tl.dot(weights, high, input_precision="ieee")


@triton.jit
def _store(out, lse, at, valid, peak, total, low_sum, high_sum, half, HALF: tl.constexpr):
    """Stores attention over a page, and its log-sum-exp."""
    column = tl.arange(0, HALF)
    whole = tl.where(total == 0.0, 1.0, total)
    seen = valid[:, None] & (column < half)[None, :]
    place = out + at.to(tl.int64)[:, None] * (2 * half) + column[None, :]
    kind = out.dtype.element_ty
    tl.store(place, (low_sum / whole[:, None]).to(kind), mask=seen)
    tl.store(place + half, (high_sum / whole[:, None]).to(kind), mask=seen)
    tl.store(lse + at, tl.where(total == 0.0, float("-inf"), peak + tl.log(whole)), mask=valid)


@triton.jit(do_not_specialize=VARIES, do_not_specialize_on_alignment=["mass"])
def _attend_pages(
    asking, keys, values, out, lse, mass, reference, scale, rows, heads, page_size, half,
    query_head_stride, query_row_stride, page_stride, head_stride, row_stride,
    bases_at, rows_at, words,
    period, step, offset, sampled, mass_head_stride, mass_row_stride,
    PACKED: tl.constexpr, MASS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):
    tiles = tl.cdiv(rows, ROWS)
    page, head = tl.program_id(0) // tiles, tl.program_id(1)  # tiles of one page run at a time
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    asking += head * query_head_stride
    low_query, high_query = _queries(asking, row, row < rows, half, query_row_stride, HALF)
    kind = low_query.dtype
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    low_sum, high_sum = tl.zeros([ROWS, HALF], dtype=tl.float32), tl.zeros([ROWS, HALF], dtype=tl.float32)
    if MASS:
        # Of every `period` folded queries each `step`th one, the last one among them.
        within = row % period
        is_sampled = (row < rows) & (within % step == offset)
        shift = tl.load(reference + head * rows + row, mask=row < rows, other=0.0)
        sample = row // period * sampled + (within - offset) // step
        mass += head * mass_head_stride + sample * mass_row_stride
    keys += page.to(tl.int64) * page_stride
    values += page.to(tl.int64) * page_stride
    if PACKED:
        lists = keys.to(tl.pointer_type(tl.int32), bitcast=True)
        escapes = tl.minimum(tl.load(lists), words - 1)
        key_rows = keys + rows_at + head * page_size * (3 * half)
        value_rows = key_rows + heads * page_size * (3 * half)
        first_key, second_key = _bases(keys, bases_at, head, half, HALF)
        first_value, second_value = _bases(keys, bases_at, heads + head, half, HALF)
        key_position = head * page_size * (2 * half)
        value_position = (heads + head) * page_size * (2 * half)
        key_escape = _first_escape(lists, escapes, key_position)
        value_escape = _first_escape(lists, escapes, value_position)
    else:
        keys += head.to(tl.int64) * head_stride
        values += head.to(tl.int64) * head_stride
    for start in range(0, page_size, TOKENS):
        token = start + tl.arange(0, TOKENS)
        valid = token < page_size
        if PACKED:
            low, high, key_escape = _unpacked_tile(
                key_rows, lists, escapes, key_escape, first_key, second_key, key_position, start,
                page_size, half, TOKENS, HALF,
            )
            low, high = _values(low).to(kind), _values(high).to(kind)
        else:
            low, high = _gathered(keys, token, valid, half, row_stride, HALF)
        scores = _scores(low_query, high_query, low, high, valid, scale)
        if MASS:
            weights = tl.exp(tl.minimum(scores - shift[:, None], MAX_EXPONENT))
            summed = tl.sum(tl.reshape(weights, (ROWS, TOKENS // CHUNK, CHUNK)), 2)
            chunk = start // CHUNK + tl.arange(0, TOKENS // CHUNK)
            stored = is_sampled[:, None] & (chunk * CHUNK < page_size)[None, :]
            chunk += page * (page_size // CHUNK)
            tl.store(mass[:, None] + chunk[None, :], summed, mask=stored)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink, weights = tl.exp(peak - higher), tl.exp(scores - higher[:, None])
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        if PACKED:
            low, high, value_escape = _unpacked_tile(
                value_rows, lists, escapes, value_escape, first_value, second_value, value_position, start,
                page_size, half, TOKENS, HALF,
            )
            low, high = _values(low).to(kind), _values(high).to(kind)
        else:
            low, high = _gathered(values, token, valid, half, row_stride, HALF)
        low_sum, high_sum = _attended(weights, low, high, shrink, low_sum, high_sum)
    at = (page * heads + head) * rows + row
    _store(out, lse, at, row < rows, peak, total, low_sum, high_sum, half, HALF)


@triton.jit(do_not_specialize=VARIES)
def _attend_tail(
    asking, keys, values, paths, lengths, out, lse, scale, count, group, shared, longest, heads,
    page_size, half, query_head_stride, query_row_stride, head_stride, row_stride,
    IN_ORDER: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):
    query, page, head = tl.program_id(0) % count, tl.program_id(0) // count, tl.program_id(1)
    member = tl.program_id(2) * ROWS + tl.arange(0, ROWS)  # of the query's heads
    row = member * count + query
    asking += head * query_head_stride
    low_query, high_query = _queries(asking, row, member < group, half, query_row_stride, HALF)
    peak, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], dtype=tl.float32)
    low_sum, high_sum = tl.zeros([ROWS, HALF], dtype=tl.float32), tl.zeros([ROWS, HALF], dtype=tl.float32)
    keys += head.to(tl.int64) * head_stride
    values += head.to(tl.int64) * head_stride
    seen = shared + query + 1 if IN_ORDER else tl.load(lengths + query)
    end = tl.minimum((page + 1) * page_size, seen)
    for start in range(page * page_size, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        valid = token < end
        place = token
        if not IN_ORDER:
            behind = tl.load(
                paths + query * longest + (token - shared), mask=valid & (token >= shared), other=0
            )
            place = tl.where(token < shared, token, behind)
        low, high = _gathered(keys, place, valid, half, row_stride, HALF)
        scores = _scores(low_query, high_query, low, high, valid, scale)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink, weights = tl.exp(peak - higher), tl.exp(scores - higher[:, None])
        peak, total = higher, total * shrink + tl.sum(weights, 1)
        low, high = _gathered(values, place, valid, half, row_stride, HALF)
        low_sum, high_sum = _attended(weights, low, high, shrink, low_sum, high_sum)
    at = (page * heads + head) * (count * group) + row
    _store(out, lse, at, member < group, peak, total, low_sum, high_sum, half, HALF)
# fmt: on


def attend_pages(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    mass: Tensor | None,
    reference: Tensor | None,
    period: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """See `operators.attend_pages`, for tensors that `attends`."""
    pages, _, tokens, _ = keys.shape
    kv = keys, values, (pages, tokens), keys.stride()[:3], (0, 0, 0)
    return _attend(queries, *kv, scale, mass, reference, period, step, packed=False)


def attend_packed(
    shape: PackedShape,
    queries: Tensor,
    packed: Tensor,
    scale: float,
    mass: Tensor | None,
    reference: Tensor | None,
    period: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """See `operators.attend_packed`, for tensors that `attends`."""
    strides, places = (shape.nbytes, 0, 0), (shape.bases_at, shape.rows_at, shape.words)
    kv = packed, packed, (len(packed), shape.page_size), strides, places
    return _attend(queries, *kv, scale, mass, reference, period, step, packed=True)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sizes: tuple[int, int],
    strides: tuple[int, ...],
    places: tuple[int, int, int],
    scale: float,
    mass: Tensor | None,
    reference: Tensor | None,
    period: int,
    step: int,
    *,
    packed: bool,
) -> tuple[Tensor, Tensor]:
    """Launches `_attend_pages` over as many pages of as many tokens."""
    (heads, rows, dim), (pages, tokens) = queries.shape, sizes
    out, lse, (tile, half) = *_results(queries, pages), _tile(dim)
    if pages:
        _attend_pages[(pages * triton.cdiv(rows, tile), heads)](
            *(queries, keys, values, out, lse),
            *(lse if mass is None else mass, lse if reference is None else reference),
            *(scale, rows, heads, tokens, dim // 2, *queries.stride()[:2], *strides, *places),
            *(period, step, (period - 1) % step, -(-period // step)),
            *((1, 1) if mass is None else mass.stride()[:2]),
            PACKED=packed,
            MASS=mass is not None,
            CHUNK=1 if mass is None else pages * tokens // mass.shape[2],
            ROWS=tile,
            HALF=half,
            TOKENS=TILE,
            num_warps=4,
        )
    return out, lse


def attend_tail(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    page_size: int,
    count: int,
    shared: int,
    paths: Tensor | None,
    lengths: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `operators.attend_tail`, for tensors that `attends`."""
    heads, rows, dim = queries.shape
    longest = count if paths is None else paths.shape[1]
    pages = triton.cdiv(shared + longest, page_size)
    out, lse, (tile, half) = *_results(queries, pages), _tile(dim)
    _attend_tail[(pages * count, heads, triton.cdiv(rows // count, tile))](
        *(queries, keys, values, lse if paths is None else paths, lse if lengths is None else lengths),
        *(out, lse, scale, count, rows // count, shared, longest, heads, page_size, dim // 2),
        *(*queries.stride()[:2], *keys.stride()[:2]),
        IN_ORDER=paths is None,
        ROWS=tile,
        HALF=half,
        TOKENS=TILE,
        num_warps=4,
    )
    return out, lse


def _results(queries: Tensor, pages: int) -> tuple[Tensor, Tensor]:
    """Returns memory for attention over each page, and its log-sum-exp."""
    lse = torch.empty(pages, *queries.shape[:2], dtype=torch.float32, device=queries.device)
    return queries.new_empty(pages, *queries.shape), lse


def _tile(dim: int) -> tuple[int, int]:
    """Returns the rows of a tile of queries, and half of the channels, as a program has them."""
    return tile_rows(dim), max(MIN_ROWS, triton.next_power_of_2(dim // 2))


def attends(queries: Tensor, keys: Tensor, values: Tensor, *others: Tensor | None) -> bool:
    """Returns whether the kernels support queries, plain pages, and int32 tensors beside them."""
    same = keys.stride() == values.stride() and keys.dtype == values.dtype == queries.dtype
    dense = all(one.stride(-1) == 1 for one in (queries, keys, values)) and queries.shape[-1] % 2 == 0
    ints = all(one is None or (one.dtype == torch.int32 and one.is_contiguous()) for one in others)
    return same and dense and ints and queries.dtype != torch.float64


def attends_packed(queries: Tensor, packed: Tensor) -> bool:
    """Returns whether the kernels support queries and packed pages."""
    return queries.stride(-1) == 1 and queries.dtype != torch.float64 and packed.is_contiguous()


def takes_mass(tokens: int, mass: Tensor | None, reference: Tensor | None) -> bool:
    """Returns whether `_attend_pages` over so many tokens takes this attention mass; None: there is none."""
    if mass is None or not tokens:
        return True
    fits = reference is not None and reference.dtype == torch.float32 and reference.is_contiguous()
    return fits and mass.stride(-1) == 1 and TILE % (tokens // mass.shape[2]) == 0
