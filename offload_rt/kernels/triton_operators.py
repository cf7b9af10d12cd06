"""The operators of `operators.py` by Triton kernels, for CUDA devices.

Each falls back to the plain form for shapes, strides and dtypes that its kernel does not take. Importing this
module raises ImportError where Triton is not installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from cpu_kv import KVLayout
from cpu_kv.packed import PackedShape, PageCodec
from offload_rt.kernels import operators, triton_packing, triton_pages
from offload_rt.kernels.quantized import SPARE_RANGE, QuantizedKV, QuantizedLayer
from offload_rt.kernels.sizes import GROUP, TILE
from offload_rt.kernels.triton_kernels import (
    MIN_ROWS,
    _add_mass,
    _chunk_mass,
    _combine,
    _quantize,
    _quantize_chunks,
    _quantized,
)

TOKENS_AT_A_TIME = 64
CHUNKS_AT_A_TIME = 1024
GROUPS_AT_A_TIME = 8
MOST_ROWS = 64
MOST_QUERY_BYTES = 16 * 1024  # of the queries of one program: more spill registers


def combine(
    parts: Tensor, lses: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `operators.combine`. Adds them one after the other: their grouping in calls changes no bit."""
    if parts.stride(-1) != 1 or lses.dtype != torch.float32:
        return operators.combine(parts, lses, out, lse)
    pages, heads, queries, dim = parts.shape
    new_out = torch.empty(heads, queries, dim, dtype=torch.float32, device=parts.device)
    new_lse = torch.empty(heads, queries, dtype=torch.float32, device=parts.device)
    before = (new_out, new_lse) if out is None or lse is None else (out.contiguous(), lse.contiguous())
    with _on_device_of(parts):
        _combine[(heads * queries,)](
            *(parts, lses.contiguous(), *before, new_out, new_lse),
            *(pages, queries, heads * queries, dim, *parts.stride()[:3]),
            HAS_SUM=out is not None,
            DIM=triton.next_power_of_2(dim),
        )
    return new_out, new_lse


def chunk_mass_(
    mass: Tensor, queries: Tensor, keys: Tensor, reference: Tensor, scale: float, period: int, step: int
) -> None:
    """See `operators.chunk_mass_`."""
    block = _block_tokens(mass, queries, keys, reference)
    if not block:
        return operators.chunk_mass_(mass, queries, keys, reference, scale, period, step)
    pages, heads, tokens, dim = keys.shape
    folded, sampled = queries.shape[1], -(-period // step)
    rows, blocks = folded // period * sampled, tokens // block
    with _on_device_of(mass):
        _chunk_mass[(pages * blocks, heads)](
            *(mass, queries, keys, reference, scale, dim),
            *(period, step, (period - 1) % step, sampled, rows, folded, blocks),
            *(*mass.stride()[:2], *queries.stride()[:2], *keys.stride()[:3]),
            ROWS=max(MIN_ROWS, triton.next_power_of_2(rows)),
            DIM=triton.next_power_of_2(dim),
            TOKENS=block,
            CHUNK=pages * tokens // mass.shape[2],
        )
    return None


def add_mass_(
    scores: Tensor, mass: Tensor, reference: Tensor, lse: Tensor, decay: float, period: int, step: int
) -> None:
    """See `operators.add_mass_`."""
    heads, chunks = scores.shape
    folded, sampled = lse.shape[1], -(-period // step)
    fits = scores.stride(1) == mass.stride(2) == 1 and reference.is_contiguous() and lse.is_contiguous()
    if not fits or not reference.dtype == lse.dtype == torch.float32:
        return operators.add_mass_(scores, mass, reference, lse, decay, period, step)
    with _on_device_of(scores):
        _add_mass[(triton.cdiv(chunks, CHUNKS_AT_A_TIME), heads)](
            *(scores, mass, reference, lse, decay, period, step, (period - 1) % step, sampled),
            *(folded // period * sampled, folded, chunks, scores.stride(0), *mass.stride()[:2]),
            SUMMED=mass.shape[1] == 1 and folded // period * sampled > 1,
            CHUNKS=CHUNKS_AT_A_TIME,
        )
    return None


def attend_quantized(
    queries: Tensor,
    key_codes: Tensor,
    key_ranges: Tensor,
    value_codes: Tensor,
    value_ranges: Tensor,
    count: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `operators.attend_quantized`."""
    layer = QuantizedLayer(key_codes, key_ranges, value_codes, value_ranges)
    heads, rows, dim = queries.shape
    if not (_takes(layer, queries) and key_codes.stride() == value_codes.stride()):
        return operators.attend_quantized(queries, *layer, count, scale)
    tokens = key_codes.shape[1]
    half = max(MIN_ROWS, triton.next_power_of_2(dim // 2))
    most = min(MOST_ROWS, MOST_QUERY_BYTES // (2 * half * queries.itemsize))
    padded = max(MIN_ROWS, min(most, triton.next_power_of_2(rows)))
    parts = max(1, triton.cdiv(tokens, GROUPS_AT_A_TIME * GROUP))
    out = torch.empty(parts, heads, rows, dim, dtype=queries.dtype, device=queries.device)
    lse = torch.empty(parts, heads, rows, dtype=torch.float32, device=queries.device)
    with _on_device_of(queries):
        _quantized[(parts, heads, triton.cdiv(rows, padded))](
            *(
                queries,
                *layer,
                out,
                lse,
                scale,
                key_codes if count is None else count,
                tokens,
                rows,
                dim,
                heads,
            ),
            *(GROUPS_AT_A_TIME, *queries.stride()[:2], *key_codes.stride()[:2]),
            *(key_ranges.stride(0), value_ranges.stride(0)),
            COUNTED=count is not None,
            BITS=layer.bits,
            ROWS=padded,
            HALF=half,
            GROUP=GROUP,
        )
    return out, lse


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
    """See `operators.attend_pages`."""
    given = queries, keys, values, scale, mass, reference, period, step
    tokens = len(keys) * keys.shape[2]
    if not (triton_pages.attends(*given[:3]) and triton_pages.takes_mass(tokens, mass, reference)):
        return operators.attend_pages(*given)
    with _on_device_of(queries):
        return triton_pages.attend_pages(*given)


def attend_packed(
    queries: Tensor,
    packed: Tensor,
    page_size: int,
    scale: float,
    mass: Tensor | None,
    reference: Tensor | None,
    period: int,
    step: int,
) -> tuple[Tensor, Tensor]:
    """See `operators.attend_packed`."""
    shape = PackedShape(len(queries), page_size, queries.shape[2])
    others = scale, mass, reference, period, step
    takes = triton_pages.takes_mass(len(packed) * page_size, mass, reference)
    if not (takes and triton_pages.attends_packed(queries, packed)):
        return operators.attend_packed(queries, packed, page_size, *others)
    with _on_device_of(queries):
        return triton_pages.attend_packed(shape, queries, packed, *others)


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
    """See `operators.attend_tail`."""
    given = queries, keys, values, page_size, count, shared, paths, lengths, scale
    if not triton_pages.attends(queries, keys, values, paths, lengths):
        return operators.attend_tail(*given)
    with _on_device_of(queries):
        return triton_pages.attend_tail(*given)


def quantize_(
    keys: Tensor,
    values: Tensor,
    key_codes: Tensor,
    key_ranges: Tensor,
    value_codes: Tensor,
    value_ranges: Tensor,
) -> None:
    """See `operators.quantize_`."""
    into = QuantizedLayer(key_codes, key_ranges, value_codes, value_ranges)
    heads, tokens, dim = keys.shape
    if not _takes(into, keys, values):
        return operators.quantize_(keys, values, *into)
    for x, codes, ranges in ((keys, key_codes, key_ranges), (values, value_codes, value_ranges)):
        with _on_device_of(x):
            _quantize[(tokens // GROUP, heads)](
                *(x, codes, ranges, dim, *x.stride()[:2], *codes.stride()[:2], ranges.stride(0)),
                BY_CHANNEL=x is keys,
                BITS=into.bits,
                HALF=triton.next_power_of_2(dim // 2),
                GROUP=GROUP,
            )
    return None


def quantize_chunks_(
    keys: Tensor,
    values: Tensor,
    heads: Tensor,
    slots: Tensor,
    key_codes: Tensor,
    key_ranges: Tensor,
    value_codes: Tensor,
    value_ranges: Tensor,
) -> None:
    """See `operators.quantize_chunks_`."""
    into = QuantizedLayer(key_codes, key_ranges, value_codes, value_ranges)
    count, chunk, dim = keys.shape
    numbers = heads.stride(0) == slots.stride(0) == 1
    if not (numbers and _takes(into, keys, values) and key_codes.stride() == value_codes.stride()):
        return operators.quantize_chunks_(keys, values, heads, slots, *into)
    if count:
        with _on_device_of(keys):
            _quantize_chunks[(count,)](
                *(keys, values, heads, slots, *into, chunk, dim, *keys.stride()[:2], *values.stride()[:2]),
                *(*key_codes.stride()[:2], key_ranges.stride(0), value_ranges.stride(0)),
                BITS=into.bits,
                HALF=triton.next_power_of_2(dim // 2),
                CHUNK=triton.next_power_of_2(chunk),
            )
    return None


def _takes(layer: QuantizedLayer, *rows: Tensor) -> bool:
    """Returns whether the kernels support a layer of codes, and rows `[…, head_dim]` beside them."""
    ranges = layer.key_ranges[0].is_contiguous() and layer.value_ranges[0].is_contiguous()
    within = all(one.stride(-1) == 1 for one in (*rows, layer.key_codes, layer.value_codes))
    return ranges and within and all(one.shape[-1] % 2 == 0 and one.dtype != torch.float64 for one in rows)


def _block_tokens(mass: Tensor, queries: Tensor, keys: Tensor, reference: Tensor) -> int:
    """Returns how many keys one program takes the mass of; 0 if the kernel does not support the tensors."""
    pages, _, tokens, dim = keys.shape
    chunk = pages * tokens // mass.shape[2]
    strides = mass.stride(2) == queries.stride(2) == keys.stride(3) == 1 and reference.is_contiguous()
    if chunk & (chunk - 1) or dim < 16 or reference.dtype != torch.float32 or not strides:
        return 0
    return next((n for n in (TOKENS_AT_A_TIME, 32, 16) if tokens % n == 0 and n % chunk == 0), 0)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's; its interpreter needs none."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


Attend = Callable[[Tensor, Tensor, Tensor, float, None], tuple[Tensor, Tensor]]
SMALL = KVLayout(layers=1, kv_heads=2, head_dim=64, dtype=torch.float16, page_size=64)
"""KV for a check before a model is known."""
CHECKED = (torch.float16, torch.bfloat16, torch.float32)


def check(attend: Attend, layout: KVLayout = SMALL, group: int = 2, device: str = "cuda") -> None:
    """Runs every kernel once and compares it with the plain form, packed pages bit by bit.

    Args:
        attend: `AttentionBackend.parts` of the device.
        layout: of a model's KV; the kernels are compiled for its dtype, heads and sizes.
        group: number of its query heads for each KV head.

    Raises:
        RuntimeError: a kernel computes something else. Triton's own errors pass through where it cannot
            compile.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = layout.dtype if layout.dtype in CHECKED else SMALL.dtype

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    pages, heads, dim, tokens = 3, layout.kv_heads, layout.head_dim, layout.page_size
    count, step, chunk = 5, 2, math.gcd(8, tokens)
    parts, lses = draw(pages, heads, group * count, dim, dtype=dtype), draw(pages, heads, group * count)
    close(combine(parts, lses), operators.combine(parts, lses))
    out, lse = operators.combine(parts[:1], lses[:1])
    close(combine(parts[1:], lses[1:], out, lse), operators.combine(parts[1:], lses[1:], out, lse))
    queries = draw(heads, group * count, dim, dtype=dtype)
    keys = draw(pages, 2, heads, tokens, dim, dtype=dtype)
    sampled, chunks = group * -(-count // step), pages * tokens // chunk
    found, wanted = (torch.zeros(heads, sampled, chunks, device=device) for _ in range(2))
    others = lse, dim**-0.5, count, step
    arguments = queries, keys[:, 0], *others
    chunk_mass_(found, *arguments)
    operators.chunk_mass_(wanted, queries.float(), keys[:, 0].float(), *others)
    close([found], [wanted])
    found.zero_()
    paged = keys[:, 0], keys[:, 1]
    plain = operators.attend_pages(
        queries.float(), paged[0].float(), paged[1].float(), dim**-0.5, None, None, 1, 1
    )
    merged = combine(*attend_pages(queries, *paged, dim**-0.5, found, lse, count, step))
    close([*merged, found], [*operators.combine(*plain), wanted])
    shared, *tree = _small_tree(count, tokens, device)
    tail = draw(2, heads, shared + count, dim, dtype=dtype)
    for paths, lengths in (tree, (None, None)):
        view = tokens, count, shared, paths, lengths, dim**-0.5
        merged = combine(*attend_tail(queries, tail[0], tail[1], *view))
        plain = operators.attend_tail(queries.float(), tail[0].float(), tail[1].float(), *view)
        close(merged, operators.combine(*plain))
    for mass in (wanted, wanted.sum(1, keepdim=True)):
        scores = [draw(heads, chunks + 3)] * 2
        scores = [one.clone() for one in scores]
        add_mass_(scores[0][:, 1:-2], mass, lses[0], lse, 0.5, count, step)
        operators.add_mass_(scores[1][:, 1:-2], mass, lses[0], lse, 0.5, count, step)
        close([scores[0]], [scores[1]])
    for bits in (8, 4) if dim % 2 == 0 else ():
        entries = draw(2, heads, 10 * GROUP, dim, dtype=dtype)
        one_layer = KVLayout(1, heads, dim, dtype)
        kv = QuantizedKV.empty(one_layer, 10 * GROUP, bits, torch.device(device)).layer(0)
        spare = 0.0
        if kv.shares_ranges:
            spare = SPARE_RANGE
            kv.share_ranges(entries[0])
            slots = torch.arange(10 * GROUP // chunk, device=device)
            each = torch.arange(heads, device=device).repeat_interleave(len(slots))
            new_keys, new_values = (side.unflatten(1, (-1, chunk)).flatten(0, 1) for side in entries)
            quantize_chunks_(new_keys, new_values, each, slots.repeat(heads), *kv)
        else:
            quantize_(entries[0], entries[1], *kv)
        span = (1 + 2 * spare) * float(entries.max() - entries.min())
        off = (torch.stack(kv.dequantized(torch.float32)) - entries).abs().max()
        if not off <= 0.6 * span / (2**bits - 1) + span / 128:  # half a step, and rounding of the ranges
            raise RuntimeError(f"a kernel quantises values to others, {float(off):.3g} away")
        for seen in (None, torch.tensor(9 * GROUP, device=device)):
            merged = combine(*attend_quantized(queries, *kv, seen, dim**-0.5))
            exact = operators.attend_quantized(queries.float(), *kv, seen, dim**-0.5)
            close(merged, operators.combine(*exact))
    bits16 = replace(layout, dtype=torch.bfloat16)
    if bits16.packable:
        pages16 = draw(2, 2, heads, tokens, dim, dtype=torch.bfloat16)
        _check_pages(attend, bits16.packed_shape, pages16, queries.bfloat16())


def _small_tree(count: int, page_size: int, device: str) -> tuple[int, Tensor, Tensor]:
    """Returns `shared`, `paths` and `lengths` of a `TailView`: tokens below the first one of a pass.

    What they see goes on from the first page of a tail to the second.
    """
    shared = page_size - 1
    paths = torch.full((count, 2), shared, dtype=torch.int32)
    paths[1:, 1] += torch.arange(1, count, dtype=torch.int32)
    lengths = torch.full((count,), shared + 2, dtype=torch.int32)
    lengths[0] -= 1
    return shared, paths.to(device), lengths.to(device)


def _check_pages(attend: Attend, shape: PackedShape, pages: Tensor, queries: Tensor) -> None:
    """Compares packing and unpacking with the plain form, bit by bit, and attention over it with float64.

    The first page has exponents that only its list holds; the second one has more than the list can.
    """
    codec, scale = PageCodec(), shape.head_dim**-0.5
    # Half as many as the list has room for: some random values are as small by themselves.
    pages[0].view(-1)[:: 2 * -(-shape.values // shape.capacity)] *= 2.0**-30
    pages[1, :, :, ::2] *= 2.0**-30
    packed, there = triton_packing.encode(shape, pages), torch.empty_like(pages[:1])
    triton_packing.decode(shape, packed[:1], there)
    if not (torch.equal(packed, codec.encode(shape, pages)) and torch.equal(there, pages[:1])):
        raise RuntimeError("a kernel packs or unpacks pages otherwise than its plain form")
    keys, values = there[0].double()
    scores = scale * (queries.double() @ keys.mT)
    exact = [(scores.softmax(-1) @ values).float(), scores.logsumexp(-1).float()]
    close(combine(*attend(queries, there[:, 0], there[:, 1], scale, None)), exact)
    # Mass of every query and chunk of a tile, relative to the log-sum-exp.
    heads, count, _ = queries.shape
    chunk = TILE // 2
    if shape.page_size % chunk == 0:
        mass = torch.empty(heads, count, shape.page_size // chunk, device=pages.device)
        merged = attend_packed(queries, packed[:1], shape.page_size, scale, mass, exact[1], count, 1)
        close(combine(*merged), exact)
        close([mass], [scores.softmax(-1).unflatten(2, (-1, chunk)).sum(-1).float()])
    places, some = torch.arange(heads, device=pages.device), pages.new_empty(heads, 1, shape.head_dim)
    triton_packing.take(shape, packed, 1, 0 * places, places, 0 * places + shape.page_size // 2, some)
    if not torch.equal(some, pages[0, 1, :, shape.page_size // 2, None]):
        raise RuntimeError("a kernel unpacks chosen tokens of pages otherwise than its plain form")


def queries_are_alike(dtype: torch.dtype, head_dim: int, device: str = "cuda") -> bool:
    """See `cuda_backends.queries_are_alike`; with two heads, and pages of two tiles and a half."""
    page, count, heads = 5 * TILE // 2, 3, 2
    generator = torch.Generator(device).manual_seed(0)
    kv = torch.randn(2, 2, heads, page, head_dim, generator=generator, device=device)
    queries = torch.randn(heads, 2 * count, head_dim, generator=generator, device=device).to(dtype)
    kv, scale = kv.to(torch.bfloat16), head_dim**-0.5
    none = scale, None, None, 1, 1
    keys, values = kv.to(dtype).transpose(0, 1)
    together = attend_pages(queries, keys, values, *none)
    tail = [side.transpose(0, 1).flatten(1, 2) for side in (keys, values)]
    last = queries[:, count - 1 :: count].contiguous()
    found = [attend_pages(last, keys, values, *none)]
    found.append(attend_tail(last, tail[0], tail[1], page, 1, 2 * page - 1, None, None, scale))
    alike = all(
        torch.equal(one[:, :, count - 1 :: count], other)
        for parts in found
        for one, other in zip(together, parts, strict=True)
    )
    layout = KVLayout(1, heads, head_dim, dtype, page)
    if layout.packable:
        pages = triton_packing.encode(layout.packed_shape, kv)
        alike &= all(map(torch.equal, attend_packed(queries, pages, page, *none), together))
    return alike


def close(found: Any, wanted: Any) -> None:
    """Raises RuntimeError unless the tensors agree up to the order of summation."""
    for one, other in zip(found, wanted, strict=True):
        if not torch.allclose(one, other, rtol=1e-2, atol=1e-2):
            raise RuntimeError(
                f"a kernel differs from its plain form by {float((one - other).abs().max()):.3g}"
            )
