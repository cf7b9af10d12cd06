"""Operators around attention that take one kernel each on a GPU: merging parts, and attention mass.

Each is registered with torch, as `torch.ops.offload_rt`. The functions of this file are the plain form: the
reference of the kernels, and what runs on CPUs and on GPUs without Triton. `use_triton` registers the kernels
of `triton_kernels.py` for CUDA devices.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

HIGHEST = 80.0
"""Largest exponent of a mass relative to its reference: a little more overflows float32."""


def shifted_exp(difference: Tensor) -> Tensor:
    """exp of a score relative to a reference, finite whatever the score."""
    return difference.clamp(max=HIGHEST).exp()


def combine(
    parts: Tensor, lses: Tensor, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint segments, and of what was summed before.

    A segment that a query does not attend to at all has the log-sum-exp -inf, and counts for nothing.

    Args:
        parts: `[segments, kv_heads, folded_query, head_dim]`, attention over each.
        lses: `[segments, kv_heads, folded_query]`, its log-sum-exp.
        out, lse: `[kv_heads, folded_query, head_dim]` and `[kv_heads, folded_query]`, the sum so far.

    Returns:
        The new sum, in float32 or wider.
    """
    dtype = lses.dtype
    if len(parts) == 1:
        summed, total = parts[0].to(dtype), lses[0]
    else:
        total = lses.logsumexp(0)
        weights = (lses - total).nan_to_num(nan=0.0).exp()[..., None]
        summed = (parts.to(dtype) * weights).sum(0)
    if out is None or lse is None:
        return summed, total
    return torch.lerp(
        out, summed, torch.sigmoid(total - lse).nan_to_num(nan=0.0)[..., None]
    ), torch.logaddexp(lse, total)


def chunk_mass_(
    units: Tensor,
    queries: Tensor,
    keys: Tensor,
    reference: Tensor,
    scale: float,
    period: int,
    step: int,
) -> None:
    """Writes how much sampled queries attend to each chunk of a segment, relative to `reference`.

    Args:
        units: `[kv_heads, sampled_query, chunks]` float32, to be written; may have gaps between its rows.
        queries: `[kv_heads, folded_query, head_dim]`.
        keys: `[pages, kv_heads, tokens, head_dim]`, read where they lie; a chunk is a part of a page.
        reference: `[kv_heads, folded_query]`, log-sum-exp of each query.
        period, step: which queries are sampled, see `mass.Sample`.
    """
    offset = (period - 1) % step
    # Scaled before the product, whose sums may be more than float16 holds.
    asking = scale * queries.unflatten(1, (-1, period))[:, :, offset::step].flatten(1, 2)
    asked = reference.unflatten(1, (-1, period))[:, :, offset::step].flatten(1, 2)[..., None]
    chunks = units.shape[2] // len(keys)
    # Page by page: a product with all of them at once would first copy the keys, which lie between values.
    for page, out in zip(keys, units.split(chunks, dim=2), strict=True):
        scores = (asking @ page.mT).to(asked.dtype) - asked
        torch.sum(shifted_exp(scores).unflatten(-1, (chunks, -1)).float(), -1, out=out)


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
    """`combine` and `chunk_mass_` of one segment, which need nothing of each other, by one kernel."""
    chunk_mass_(units, queries, keys, reference, scale, period, step)
    return combine(parts, lses, out, lse)


def add_mass_(
    scores: Tensor,
    units: Tensor,
    reference: Tensor,
    lse: Tensor,
    decay: float,
    period: int,
    step: int,
) -> None:
    """scores = decay * scores + the mass of all sampled queries.

    Args:
        scores: `[kv_heads, chunks]` float32, to be written; may have gaps between its rows.
        units: `[kv_heads, sampled_query, chunks]` relative to `reference`, of which there may be only one,
            the sum of all.
        reference, lse: `[kv_heads, folded_query]`, the latter of all that the queries attended to.
    """
    offset = (period - 1) % step
    shift = (reference - lse).unflatten(1, (-1, period))[:, :, offset::step].flatten(1, 2)
    weights = shifted_exp(shift).float()[:, None]
    if units.shape[1] == 1:
        weights = weights.mean(-1, keepdim=True)  # whose mass was whose is not known any more
    scores.mul_(decay).add_((weights @ units)[:, 0])


_SCHEMAS = {
    "combine": "(Tensor parts, Tensor lses, Tensor? out, Tensor? lse) -> (Tensor, Tensor)",
    "chunk_mass_": "(Tensor(a!) units, Tensor queries, Tensor keys, Tensor reference, float scale,"
    " int period, int step) -> ()",
    "combine_with_mass_": "(Tensor(a!) units, Tensor parts, Tensor lses, Tensor out, Tensor lse,"
    " Tensor queries, Tensor keys, Tensor reference, float scale, int period, int step) -> (Tensor, Tensor)",
    "add_mass_": "(Tensor(a!) scores, Tensor units, Tensor reference, Tensor lse, float decay, int period,"
    " int step) -> ()",
}
_PLAIN = {
    "combine": combine,
    "chunk_mass_": chunk_mass_,
    "combine_with_mass_": combine_with_mass_,
    "add_mass_": add_mass_,
}

_library = torch.library.Library("offload_rt", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema)
    _library.impl(_name, _PLAIN[_name], "CompositeExplicitAutograd")


@functools.cache
def use_triton() -> str | None:
    """Lets the operators be Triton kernels on CUDA devices; returns why they are not, None where they are.

    The kernels are compiled and compared with the plain form on the current device first: a compiler or a
    driver that is too old must not cost a generation.
    """
    try:
        from offload_rt.attention import triton_kernels

        triton_kernels.check()
    except Exception as error:  # Triton raises errors of many kinds, and some of the C compiler's
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    for name in _SCHEMAS:
        _library.impl(name, getattr(triton_kernels, name), "CUDA")
    return None
