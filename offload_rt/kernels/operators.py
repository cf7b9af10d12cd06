"""Operators around attention, registered as `torch.ops.offload_rt`: merging partial results, attention mass.

The functions of this module are their plain form: the reference for the Triton kernels, and the
implementation for CPUs and for GPUs without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape, PageCodec
from offload_rt.kernels.quantized import QuantizedLayer, bytes_of, codes_of, encoded
from offload_rt.kernels.sizes import GROUP

MAX_EXPONENT = 80.0
"""Largest exponent of a mass relative to its reference: a little more overflows float32."""


VALUES_AT_A_TIME = 2**21
"""Values that are quantised or unpacked at a time."""


def clamped_exp(difference: Tensor) -> Tensor:
    """Returns exp of a score relative to a reference, finite for every score."""
    return difference.clamp(max=MAX_EXPONENT).exp()


def sampled_rows(tensor: Tensor, period: int, step: int) -> Tensor:
    """Returns rows of `[kv_heads, folded_query, …]`: each `step`th of `period`, back from the last."""
    apart: Tensor = tensor.unflatten(1, (-1, period))
    return apart[:, :, (period - 1) % step :: step].flatten(1, 2)


def combine(
    parts: Tensor, lses: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint segments, and an earlier sum, into attention over their union.

    A segment in which a query sees no key has the log-sum-exp -inf and does not count.

    Args:
        parts: attention over each segment, `[segments, kv_heads, folded_query, head_dim]`.
        lses: its log-sum-exp, `[segments, kv_heads, folded_query]`.
        out, lse: the sum so far, `[kv_heads, folded_query, head_dim]` and `[kv_heads, folded_query]`.

    Returns:
        The new sum and its log-sum-exp, in float32 or wider.
    """
    dtype = torch.promote_types(parts.dtype, torch.float32) if out is None else out.dtype
    if len(parts) == 1:
        summed, total = parts[0].to(dtype), lses[0]
    else:
        total = lses.logsumexp(0)
        weights = (lses - total).nan_to_num(nan=0.0).exp().to(dtype)[..., None]
        summed = (parts.to(dtype) * weights).sum(0)
    if out is None or lse is None:
        return summed, total
    share = torch.sigmoid(total - lse).nan_to_num(nan=0.0)[..., None]
    return torch.lerp(out, summed, share.to(out.dtype)), torch.logaddexp(lse, total)


def chunk_mass_(
    mass: Tensor,
    queries: Tensor,
    keys: Tensor,
    reference: Tensor,
    scale: float,
    period: int,
    step: int,
) -> None:
    """Writes the attention mass of sampled queries on each chunk of a segment, relative to `reference`.

    Args:
        mass: output, `[kv_heads, sampled_query, chunks]` float32; its rows may have gaps between them.
        queries: `[kv_heads, folded_query, head_dim]`.
        keys: `[pages, kv_heads, tokens, head_dim]`; a chunk lies within a page.
        reference: log-sum-exp of each query, `[kv_heads, folded_query]`.
        period, step: which queries are sampled, see `mass.Sample`.
    """
    # Scaled before the product, whose sums may be more than float16 holds.
    sampled = scale * sampled_rows(queries, period, step)
    shift = sampled_rows(reference, period, step)[..., None]
    chunks = mass.shape[2] // len(keys)
    # Page by page: a product with all of them at once would first copy the keys, which lie between values.
    for page, out in zip(keys, mass.split(chunks, dim=2), strict=True):
        scores = (sampled @ page.mT).to(shift.dtype) - shift
        torch.sum(clamped_exp(scores).unflatten(-1, (chunks, -1)).float(), -1, out=out)


def add_mass_(
    scores: Tensor,
    mass: Tensor,
    reference: Tensor,
    lse: Tensor,
    decay: float,
    period: int,
    step: int,
) -> None:
    """Computes `scores = decay * scores + mass`, with the mass summed over all sampled queries.

    Args:
        scores: updated in place, `[kv_heads, chunks]` float32; its rows may have gaps between them.
        mass: `[kv_heads, sampled_query, chunks]` relative to `reference`, or `[kv_heads, 1, chunks]` if
            already summed over the queries.
        reference: `[kv_heads, folded_query]`.
        lse: log-sum-exp over all keys that the queries attended to, `[kv_heads, folded_query]`.
    """
    weights = clamped_exp(sampled_rows(reference - lse, period, step)).float()[:, None]
    if mass.shape[1] == 1:
        weights = weights.mean(-1, keepdim=True)  # the share of each query is no longer known
    scores.mul_(decay).add_((weights @ mass)[:, 0])


def attend_quantized(
    queries: Tensor,
    key_codes: Tensor,
    key_ranges: Tensor,
    value_codes: Tensor,
    value_ranges: Tensor,
    count: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Computes attention over the first tokens of a `QuantizedLayer`, in parts for `combine` to merge.

    Args:
        queries: `[kv_heads, folded_query, head_dim]`.
        count: number of tokens that are seen, an int64 on the device; None: all.

    Returns:
        As `AttentionBackend.parts`: where no token is seen, zeros and the log-sum-exp -inf.
    """
    layer = QuantizedLayer(key_codes, key_ranges, value_codes, value_ranges)
    keys, values = layer.dequantized(queries.dtype)
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = ((scale * queries) @ keys.mT).to(wide)
    if count is not None:
        scores = scores.masked_fill(torch.arange(keys.shape[1], device=keys.device) >= count, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(nan=0.0)
    return (weights.to(values.dtype) @ values)[None], lse[None]


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
    """Computes attention over pages, each by itself, in parts for `combine` to merge.

    Args:
        queries: `[kv_heads, folded_query, head_dim]`.
        keys, values: `[pages, kv_heads, tokens, head_dim]`.
        mass, reference, period, step: see `chunk_mass_`; without a mass the others do not count.

    Returns:
        `[pages, kv_heads, folded_query, head_dim]` in the dtype of the queries, and their log-sum-exp
        `[pages, kv_heads, folded_query]`. The kernel gives a query the same bits whatever the others are.
    """
    if mass is not None and reference is not None:
        chunk_mass_(mass, queries, keys, reference, scale, period, step)
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores = scale * (queries.to(wide) @ keys.to(wide).mT)
    return (scores.softmax(-1) @ values.to(wide)).to(queries.dtype), scores.logsumexp(-1)


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
    """Does `attend_pages` over packed pages.

    Args:
        packed: uint8 `[pages, nbytes]`, see `cpu_kv.packed`.
        page_size: in tokens.
    """
    heads, rows, dim = queries.shape
    shape = PackedShape(heads, page_size, dim)
    wide = torch.promote_types(queries.dtype, torch.float32)
    out = queries.new_empty(len(packed), heads, rows, dim)
    lse = queries.new_empty(len(packed), heads, rows, dtype=wide)
    chunks = 0 if mass is None else mass.shape[2] // max(1, len(packed))
    most = max(1, VALUES_AT_A_TIME // shape.values)
    for first in range(0, len(packed), most):
        some = packed[first : first + most]
        pages = queries.new_empty(len(some), 2, heads, page_size, dim, dtype=torch.bfloat16)
        PageCodec().decode(shape, some, pages)
        keys, values = pages.to(wide).transpose(0, 1)
        part = None if mass is None else mass[:, :, first * chunks : (first + len(some)) * chunks]
        found = attend_pages(queries.to(wide), keys, values, scale, part, reference, period, step)
        out[first : first + most], lse[first : first + most] = found
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
    """Computes attention over a tail, page by page as if each query's tokens were next to each other.

    Args:
        queries: `[kv_heads, folded_query, head_dim]`.
        keys, values: `[kv_heads, tokens, head_dim]`.
        page_size: in tokens.
        count: number of queries before folding.
        shared, paths, lengths: see `TailView`; `paths` and `lengths` on the device.

    Returns:
        As `attend_pages`: where a query sees no token of a page, zeros and the log-sum-exp -inf.
    """
    if paths is None or lengths is None:
        tokens = torch.arange(shared + count, device=keys.device)
        places, seen = tokens.expand(count, -1), tokens < shared + 1 + tokens[:count, None]
    else:
        first = torch.arange(shared, dtype=paths.dtype, device=paths.device).expand(count, -1)
        places = torch.cat([first, paths], 1)
        seen = torch.arange(places.shape[1], device=lengths.device) < lengths[:, None]
    wide = torch.promote_types(queries.dtype, torch.float32)
    pages = -(-places.shape[1] // page_size)
    padding = pages * page_size - places.shape[1]
    # A gap behind the last token, in which nothing is seen.
    places, seen = (torch.nn.functional.pad(one, (0, padding)) for one in (places, seen))
    own_keys, own_values = (side[:, places.long()].to(wide) for side in (keys, values))
    asking = queries.to(wide).unflatten(1, (-1, count)).transpose(1, 2)  # [kv_heads, count, group, head_dim]
    scores = (scale * (asking @ own_keys.mT)).masked_fill(~seen[None, :, None], -torch.inf)
    scores = scores.unflatten(-1, (pages, page_size)).movedim(3, 0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(nan=0.0)
    out = weights @ own_values.unflatten(2, (pages, page_size)).movedim(2, 0)
    folded = out.transpose(2, 3).flatten(2, 3).to(queries.dtype)
    return folded, lse.transpose(2, 3).flatten(2, 3).contiguous()


def quantize_(
    keys: Tensor,
    values: Tensor,
    key_codes: Tensor,
    key_ranges: Tensor,
    value_codes: Tensor,
    value_ranges: Tensor,
) -> None:
    """Writes keys and values `[kv_heads, tokens, head_dim]`, whole groups, to a `QuantizedLayer` of so many.

    Head by head: what it needs besides takes ten times the memory of a head.
    """
    for x, y, *into in zip(keys, values, key_codes, key_ranges, value_codes, value_ranges, strict=True):
        layer = QuantizedLayer(*into)
        codes, zero, step = encoded(x.unflatten(0, (-1, GROUP)), 1, layer.bits)
        layer.key_codes.copy_(bytes_of(codes.flatten(0, 1), layer.bits))
        layer.key_ranges.copy_(torch.cat([zero, step], 1))
        codes, zero, step = encoded(y, 1, layer.bits)
        layer.value_codes.copy_(bytes_of(codes, layer.bits))
        layer.value_ranges.copy_(torch.cat([zero, step], 1))


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
    """Writes chunks `[n, chunk, head_dim]` to slots of a `QuantizedLayer`, keys by the ranges that it has.

    Some at a time: what that needs besides takes thirteen bytes for each of their values.

    Args:
        heads, slots: of each chunk, `[n]` int64.
    """
    count, chunk, dim = keys.shape
    layer = QuantizedLayer(key_codes, key_ranges, value_codes, value_ranges)
    in_slots = [one.unflatten(1, (-1, chunk)) for one in (key_codes, value_codes, value_ranges)]
    most = max(1, VALUES_AT_A_TIME // (chunk * dim))
    for some in (slice(at, at + most) for at in range(0, count, most)):
        places, ranges = (heads[some], slots[some]), key_ranges[heads[some], 0, :, None]
        in_slots[0][places] = bytes_of(
            codes_of(keys[some], ranges[:, 0], ranges[:, 1], layer.bits), layer.bits
        )
        codes, zero, step = encoded(values[some], 2, layer.bits)
        in_slots[1][places] = bytes_of(codes, layer.bits)
        in_slots[2][places] = torch.cat([zero, step], 2)


_SCHEMAS: dict[Callable[..., Any], str] = {
    combine: "(Tensor parts, Tensor lses, Tensor? out, Tensor? lse) -> (Tensor, Tensor)",
    chunk_mass_: "(Tensor(a!) mass, Tensor queries, Tensor keys, Tensor reference, float scale,"
    " int period, int step) -> ()",
    attend_quantized: "(Tensor queries, Tensor key_codes, Tensor key_ranges, Tensor value_codes,"
    " Tensor value_ranges, Tensor? count, float scale) -> (Tensor, Tensor)",
    attend_pages: "(Tensor queries, Tensor keys, Tensor values, float scale, Tensor(a!)? mass,"
    " Tensor? reference, int period, int step) -> (Tensor, Tensor)",
    attend_tail: "(Tensor queries, Tensor keys, Tensor values, int page_size, int count, int shared,"
    " Tensor? paths, Tensor? lengths, float scale) -> (Tensor, Tensor)",
    attend_packed: "(Tensor queries, Tensor packed, int page_size, float scale, Tensor(a!)? mass,"
    " Tensor? reference, int period, int step) -> (Tensor, Tensor)",
    quantize_: "(Tensor keys, Tensor values, Tensor(a!) key_codes, Tensor(b!) key_ranges,"
    " Tensor(c!) value_codes, Tensor(d!) value_ranges) -> ()",
    quantize_chunks_: "(Tensor keys, Tensor values, Tensor heads, Tensor slots, Tensor(a!) key_codes,"
    " Tensor key_ranges, Tensor(b!) value_codes, Tensor(c!) value_ranges) -> ()",
    add_mass_: "(Tensor(a!) scores, Tensor mass, Tensor reference, Tensor lse, float decay, int period,"
    " int step) -> ()",
}
NAMES = [operator.__name__ for operator in _SCHEMAS]
LIBRARY = torch.library.Library("offload_rt", "DEF")
for _operator, _schema in _SCHEMAS.items():
    LIBRARY.define(_operator.__name__ + _schema)
    LIBRARY.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")
