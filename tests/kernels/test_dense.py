"""Products and layers in the native library, on every kind of processor: exact, and each row by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload_rt.kernels.dense import LayerWeights, NativeLayer, NativeProduct, RmsNorm, supports

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
DIM = 64
pytestmark = pytest.mark.usefixtures("processor")
MOST_ROWS = 300
"""More than are computed at a time."""


def linear(outs: int, ins: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    module = nn.Linear(ins, outs, bias=bias).to(dtype)
    assert supports(module, dtype)
    return module


def norm(width: int, dtype: torch.dtype) -> RmsNorm:
    return RmsNorm(torch.rand(width).to(dtype) + 0.5, 1e-6)


@torch.inference_mode()
@DTYPES
@pytest.mark.parametrize(("outs", "ins"), [(1, 32), (7, 64), (16, 96), (33, 480), (51, 2080)], ids=str)
def test_a_product_is_exact_and_each_row_by_itself(outs: int, ins: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outs)
    matrix, behind = linear(outs, ins, dtype, bias=outs == 33), norm(ins, dtype)
    product, inputs = NativeProduct(matrix, behind), torch.randn(MOST_ROWS, ins).to(dtype)
    exact = inputs.double()
    scaled = (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + behind.epsilon)).to(dtype)
    given = (scaled.float() * behind.weight.float()).to(dtype)
    want = given.double() @ matrix.weight.double().T
    want += 0 if matrix.bias is None else matrix.bias.double()
    # An input that the norm rounds the other way changes all outputs of a row.
    error = torch.finfo(dtype).eps * (given.double().abs() @ matrix.weight.double().abs().T + want.abs())
    found = product(inputs)
    assert bool(((found.double() - want).abs() <= error).all())
    for rows in (1, 2, 3, 4, 5, 6, 15, 16, 17, 31, 32, 33, 47, 63, 64, 100, 255):
        for start in {0, 9, MOST_ROWS - rows}:
            part = slice(start, start + rows)
            assert torch.equal(product(inputs[part]), found[part])


@torch.inference_mode()
@DTYPES
@pytest.mark.parametrize("threads", [1, 3])
def test_each_token_of_a_layer_by_itself(dtype: torch.dtype, threads: int) -> None:
    """Not a bit of it changes, wherever it is in passes of 1 to 300 tokens, with any number of threads."""
    torch.manual_seed(3)
    hidden_size, heads, kv_heads, wide = 640, 4, 2, 992
    sizes = [(count * DIM, hidden_size) for count in (heads, kv_heads, kv_heads)]
    sizes += [(hidden_size, heads * DIM), (wide, hidden_size), (wide, hidden_size), (hidden_size, wide)]
    norms = [norm(width, dtype) for width in (hidden_size, hidden_size, DIM, DIM)]
    weights: Any = (*norms, *(linear(*size, dtype) for size in sizes), DIM)
    layer = NativeLayer(LayerWeights(*weights))
    hidden = torch.randn(1, MOST_ROWS, hidden_size).to(dtype)
    cosines, sines = torch.randn(2, 1, MOST_ROWS, DIM).to(dtype).unbind()

    def compute(part: slice) -> list[Tensor]:
        given = [one[:, part].contiguous() for one in (hidden, cosines, sines)]
        queries, keys, values = layer.attention_inputs(*given)
        attended = queries + values.repeat_interleave(heads // kv_heads, 0)
        return [queries, keys, values, layer.after_attention(given[0], attended)]

    usual = torch.get_num_threads()
    whole = compute(slice(MOST_ROWS))
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 3, 5, 16, 31, 33, 64, 100, 255):
            for start in {0, 7, MOST_ROWS - rows}:
                part = slice(start, min(start + rows, MOST_ROWS))
                for one, of_all in zip(compute(part), whole, strict=True):
                    assert torch.equal(one, of_all[:, part])
    finally:
        torch.set_num_threads(usual)
