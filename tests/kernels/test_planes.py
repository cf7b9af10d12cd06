"""Weights in two planes: bit by bit what was split, and products in the native library that read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from offload_rt.kernels import planes
from offload_rt.kernels.dense import LayerWeights, Linear, NativeLayer, NativeProduct, RmsNorm
from offload_rt.kernels.planes import BLOCK, PlaneLinear, WeightPlanes, draft_plane_alone

INPUTS = 448


def weights(outs: int, ins: int, seed: int) -> Tensor:
    """Normal weights, of which some are zero, or too far below the largest of their row."""
    generator = torch.Generator().manual_seed(seed)
    matrix, rare = (torch.randn(outs, ins, generator=generator) for _ in range(2))
    matrix = torch.where(rare > 2.8, matrix * 2.0**-20, matrix)
    return torch.where(rare < -1.5, matrix * 0.0, matrix).to(torch.bfloat16)  # zeros of both signs


def in_planes(matrix: Tensor, bias: nn.Parameter | None = None) -> PlaneLinear:
    split = WeightPlanes.split(matrix)
    assert split is not None
    return PlaneLinear(split, bias)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    outs=st.integers(1, 300), blocks=st.integers(1, 3), seed=st.integers(0, 2**32), scale=st.integers(-80, 80)
)
def test_both_planes_are_the_weights(outs: int, blocks: int, seed: int, scale: int) -> None:
    matrix = (weights(outs, BLOCK * blocks, seed).float() * 2.0**scale).to(torch.bfloat16)
    split = WeightPlanes.split(matrix)
    if split is None:  # by chance, of small matrices
        assert matrix.numel() < 2**14
        return
    assert torch.equal(bits(split.expanded(draft=False)), bits(matrix))
    draft, exact = split.expanded(draft=True).double(), matrix.double()
    least = 2.0**-15 * exact.abs().amax(dim=1, keepdim=True)
    # The middle of 16 numbers, which are 2**-7 of each other apart at most; below `least` anything as small.
    assert bool(((draft - exact).abs() <= exact.abs() / 16 + least).all())
    assert split.nbytes < 1.65 * matrix.numel() + 12 * outs + 64
    assert split.draft_bytes == matrix.numel() + 2 * outs


@pytest.mark.parametrize("outs", [1, 700])
def test_the_library_splits_as_torch_does(outs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if planes._native_split() is None:
        pytest.skip("no C++ compiler here")
    matrix = weights(outs, 2048, outs)
    native = WeightPlanes.split(matrix)
    monkeypatch.setattr(planes, "_native_split", lambda: None)
    reference = WeightPlanes.split(matrix)
    assert native is not None and reference is not None and len(native.listed)
    for name, part in vars(reference).items():
        assert torch.equal(getattr(native, name), part), name


def test_what_is_not_split() -> None:
    assert WeightPlanes.split(torch.ones(4, 64)) is None  # float32
    assert WeightPlanes.split(torch.ones(4, 96, dtype=torch.bfloat16)) is None
    outlier = torch.full((4, 64), 1e-9, dtype=torch.bfloat16)
    outlier[:, 0] = 1.0  # beside which everything else would be listed
    assert WeightPlanes.split(outlier) is None


def plain(matrix: Tensor, bias: nn.Parameter | None) -> nn.Linear:
    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, dtype=matrix.dtype)
    linear.weight.data = matrix
    if bias is not None:
        linear.bias = bias
    return linear


@torch.inference_mode()
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("outs", [1, 15, 33, 100])
def test_products_have_the_bits_of_those_with_plain_weights(outs: int) -> None:
    matrix, norm = weights(outs, INPUTS, outs), RmsNorm(torch.rand(INPUTS).to(torch.bfloat16), 1e-6)
    bias = nn.Parameter(torch.randn(outs).to(torch.bfloat16)) if outs == 33 else None
    split = in_planes(matrix, bias)
    product = NativeProduct(split, norm)
    rounded = split.planes.expanded(draft=True)
    for rows in (1, 2, 3, 5, 8, 32, 70):
        inputs = torch.randn(rows, INPUTS).to(torch.bfloat16)
        exact = NativeProduct(plain(matrix, bias), norm)(inputs)
        assert torch.equal(product(inputs), exact)
        with draft_plane_alone():
            found = product(inputs)
        assert torch.equal(found, NativeProduct(plain(rounded, bias), norm)(inputs))
        assert outs < 15 or not torch.equal(found, exact)


@torch.inference_mode()
@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("draft", [False, True], ids=["exact", "draft"])
def test_a_layer_has_the_bits_of_one_with_plain_weights(draft: bool) -> None:
    hidden_size, heads, kv_heads, dim, wide, rows = 192, 4, 2, 32, 320, 5
    shapes = [(heads * dim, hidden_size), *2 * [(kv_heads * dim, hidden_size)], (hidden_size, heads * dim)]
    shapes += [*2 * [(wide, hidden_size)], (hidden_size, wide)]
    split = [in_planes(weights(*shape, seed)) for seed, shape in enumerate(shapes)]
    norms = [RmsNorm(torch.rand(hidden_size).to(torch.bfloat16), 1e-6) for _ in range(2)]
    hidden = torch.randn(1, rows, hidden_size).to(torch.bfloat16)
    rotation = torch.randn(2, 1, rows, dim).to(torch.bfloat16).unbind()

    def outputs(linears: list[Linear]) -> tuple[Tensor, ...]:
        parts: Any = (norms[0], norms[1], None, None, *linears, dim)
        layer = NativeLayer(LayerWeights(*parts))
        inputs = layer.attention_inputs(hidden, *rotation)
        return *inputs, layer.after_attention(hidden, inputs[0])

    expected = outputs([plain(one.planes.expanded(draft=draft), None) for one in split])
    with draft_plane_alone(draft):
        found = outputs([*split])
        by_itself = NativeProduct(plain(split[0].planes.expanded(draft=draft), None), None)
        assert torch.equal(split[0](hidden)[0], by_itself(hidden[0]))
    assert all(map(torch.equal, found, expected))
