"""Triton kernels for products with weights in two planes (`planes.py`).

A program of `_plane_product` computes some outputs of all rows, and expands its weights in registers, a block
of columns at a time. The two halves of a block are taken apart, as they share bytes of the rest plane. Listed
weights, which it has taken for zero, are added at the end. More rows than `MOST_ROWS` are multiplied with
weights that `_expand` has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offload_rt.kernels.planes import BLOCK, WeightPlanes
from offload_rt.kernels.triton_kernels import MIN_ROWS
from offload_rt.kernels.triton_operators import close

OUTPUTS = 32
MOST_ROWS = 128
HALF: Any = tl.constexpr(BLOCK // 2)


# fmt: off
@triton.jit
def _weights(code, rest, low, DRAFT: tl.constexpr):
    """Returns weights of which `code` is in the draft plane and `rest` in the rest plane."""
    code = code.to(tl.int32)
    sign, number = (code & 128) << 8, (code & 127) << 4
    if DRAFT:
        bits = sign | (number + low + 8)
    else:
        number |= rest
        bits = sign | tl.where(number != 0, number + low, 0)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _rests(rests, output, block, ins, within, DRAFT: tl.constexpr):
    """Loads the rests of a block of columns, `[OUTPUTS, HALF]`."""
    if DRAFT:
        return tl.zeros([output.shape[0], HALF], tl.int32)
    at = rests + output[:, None].to(tl.int64) * (ins // 2) + block * HALF + tl.arange(0, HALF)[None, :]
    return tl.load(at, mask=within[:, None], other=0).to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def _plane_product(
    inputs, codes, rests, lows, starts, columns, listed, bias, out,
    rows, outs, ins,
    DRAFT: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    within, seen = output < outs, row < rows
    low = tl.load(lows + output, mask=within, other=0).to(tl.int32)[:, None]
    column = tl.arange(0, HALF)
    code_at = codes + output[:, None].to(tl.int64) * ins + column[None, :]
    input_at = inputs + row[:, None].to(tl.int64) * ins + column[None, :]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in range(ins // (2 * HALF)):
        rest = _rests(rests, output, block, ins, within, DRAFT)
        first = tl.load(code_at, mask=within[:, None], other=0)
        second = tl.load(code_at + HALF, mask=within[:, None], other=0)
        given = tl.load(input_at, mask=seen[:, None], other=0.0)
        total = tl.dot(given, tl.trans(_weights(first, rest & 15, low, DRAFT)), total)
        given = tl.load(input_at + HALF, mask=seen[:, None], other=0.0)
        total = tl.dot(given, tl.trans(_weights(second, rest >> 4, low, DRAFT)), total)
        code_at += 2 * HALF
        input_at += 2 * HALF
    if not DRAFT:
        start = tl.load(starts + output, mask=within, other=0)
        end = tl.load(starts + output + 1, mask=within, other=0)
        for number in range(tl.max(end - start)):
            there = start + number < end
            place = tl.load(columns + start + number, mask=there, other=0)
            weight = tl.load(listed + start + number, mask=there, other=0.0).to(tl.float32)
            mask = seen[:, None] & there[None, :]
            given = tl.load(inputs + row[:, None].to(tl.int64) * ins + place[None, :], mask=mask, other=0.0)
            total += given.to(tl.float32) * weight[None, :]
    if BIASED:
        total += tl.load(bias + output, mask=within, other=0.0).to(tl.float32)[None, :]
    result_at = out + row[:, None].to(tl.int64) * outs + output[None, :]
    tl.store(result_at, total.to(tl.bfloat16), mask=seen[:, None] & within[None, :])


@triton.jit
def _expand(codes, rests, lows, out, outs, ins, DRAFT: tl.constexpr, OUTPUTS: tl.constexpr):
    output, block = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.program_id(1)
    within = output < outs
    low = tl.load(lows + output, mask=within, other=0).to(tl.int32)[:, None]
    place = output[:, None].to(tl.int64) * ins + block * 2 * HALF + tl.arange(0, HALF)[None, :]
    rest = _rests(rests, output, block, ins, within, DRAFT)
    first = tl.load(codes + place, mask=within[:, None], other=0)
    second = tl.load(codes + place + HALF, mask=within[:, None], other=0)
    tl.store(out + place, _weights(first, rest & 15, low, DRAFT), mask=within[:, None])
    tl.store(out + place + HALF, _weights(second, rest >> 4, low, DRAFT), mask=within[:, None])


@triton.jit
def _put_listed(starts, columns, listed, out, outs, ins, OUTPUTS: tl.constexpr):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    within = output < outs
    start = tl.load(starts + output, mask=within, other=0)
    end = tl.load(starts + output + 1, mask=within, other=0)
    for number in range(tl.max(end - start)):
        there = start + number < end
        place = tl.load(columns + start + number, mask=there, other=0)
        weight = tl.load(listed + start + number, mask=there, other=0.0)
        tl.store(out + output.to(tl.int64) * ins + place, weight, mask=there)
# fmt: on


def plane_product(inputs: Tensor, planes: Sequence[Tensor], bias: Tensor | None, draft: bool) -> Tensor:
    """See `plane_products.plane_product`."""
    weights, rows = WeightPlanes(*planes), inputs.reshape(-1, inputs.shape[-1]).contiguous()
    # Triton launches on the current device, which need not be the tensor's; its interpreter needs none.
    with torch.cuda.device(inputs.device) if inputs.is_cuda else nullcontext():
        if inputs.dtype != torch.bfloat16 or len(rows) > MOST_ROWS:
            result = torch.nn.functional.linear(rows, expanded(weights, draft).to(inputs.dtype), bias)
        else:
            result = _product(rows, weights, bias, draft)
    return result.view(*inputs.shape[:-1], -1)


def _product(rows: Tensor, weights: WeightPlanes, bias: Tensor | None, draft: bool) -> Tensor:
    (count, ins), outs = rows.shape, len(weights.codes)
    out = rows.new_empty(count, outs)
    _plane_product[(triton.cdiv(outs, OUTPUTS),)](
        *(rows, *weights.parts, weights.listed if bias is None else bias, out, count, outs, ins),
        DRAFT=draft,
        BIASED=bias is not None,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(count)),
        OUTPUTS=OUTPUTS,
    )
    return out


def expanded(weights: WeightPlanes, draft: bool) -> Tensor:
    """Does `WeightPlanes.expanded`."""
    outs, ins = weights.shape
    out = torch.empty(outs, ins, dtype=torch.bfloat16, device=weights.codes.device)
    programs, read = triton.cdiv(outs, OUTPUTS), (weights.codes, weights.rests, weights.lows)
    _expand[(programs, ins // BLOCK)](*read, out, outs, ins, DRAFT=draft, OUTPUTS=OUTPUTS)
    if not draft:
        lists = weights.starts, weights.columns, weights.listed
        _put_listed[(programs,)](*lists, out, outs, ins, OUTPUTS=OUTPUTS)
    return out


def check(device: str) -> None:
    """Compares the kernels with their plain form, weights bit by bit.

    Raises:
        RuntimeError: a kernel computes something else. Triton's own errors pass through where it cannot
            compile.
    """
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(80, 256, generator=generator, device=device)
    weight[::7, ::50] *= 2.0**-24  # to be listed
    planes = WeightPlanes.split(weight.to(torch.bfloat16))
    assert planes is not None
    for draft in (False, True):
        plain = planes.expanded(draft=draft)
        if not torch.equal(expanded(planes, draft), plain):
            raise RuntimeError("a kernel expands weights in two planes to others")
        for count in (2, MOST_ROWS):
            rows = torch.randn(count, 256, generator=generator, device=device).to(torch.bfloat16)
            bias = torch.randn(80, generator=generator, device=device).to(torch.bfloat16)
            for added in (None, bias):
                found = plane_product(rows, planes.parts, added, draft)
                exact = rows.double() @ plain.double().T + (0.0 if added is None else added.double())
                close([found.double()], [exact])
