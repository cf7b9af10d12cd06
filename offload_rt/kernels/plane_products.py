"""Products with weights in two planes, registered as `torch.ops.offload_rt.plane_product`.

Its plain form serves GPUs without Triton, the native library CPUs, and `triton_planes.py` other GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from offload_rt.kernels.dense import NativeProduct, supports
from offload_rt.kernels.operators import LIBRARY
from offload_rt.kernels.planes import PlaneLinear, WeightPlanes, draft_plane_alone

_NAME = "plane_product"


def plane_product(inputs: Tensor, planes: Sequence[Tensor], bias: Tensor | None, draft: bool) -> Tensor:
    """Multiplies inputs `[…, in]` with weights in two planes; returns `[…, out]`.

    Args:
        planes: the parts of `WeightPlanes`.
        bias: `[out]`.
        draft: by the draft plane alone.
    """
    return nn.functional.linear(inputs, WeightPlanes(*planes).expanded(draft=draft), bias)


def _native(inputs: Tensor, planes: Sequence[Tensor], bias: Tensor | None, draft: bool) -> Tensor:
    parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
    linear = PlaneLinear(WeightPlanes(*planes), parameter)
    if not supports(linear, inputs.dtype):
        return plane_product(inputs, planes, bias, draft)
    rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
    with draft_plane_alone(draft):
        return NativeProduct(linear, None)(rows).view(*inputs.shape[:-1], -1)


def _on_meta(inputs: Tensor, planes: Sequence[Tensor], bias: Tensor | None, draft: bool) -> Tensor:
    return inputs.new_empty(*inputs.shape[:-1], len(planes[0]))  # how many are listed depends on values


LIBRARY.define(f"{_NAME}(Tensor inputs, Tensor[] planes, Tensor? bias, bool draft) -> Tensor")
for _form, _key in ((plane_product, "CompositeExplicitAutograd"), (_native, "CPU"), (_on_meta, "Meta")):
    LIBRARY.impl(_NAME, _form, _key)


OPERATOR: Any = torch.ops.offload_rt.plane_product


@cache
def use_triton() -> str | None:
    """Registers the Triton kernels for CUDA devices; returns the reason if that fails.

    They are first compiled, and compared with the plain form on the current device.
    """
    try:
        from offload_rt.kernels import triton_planes

        triton_planes.check("cuda")
    except Exception as error:  # Triton raises errors of many kinds, and some of the C compiler's
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    LIBRARY.impl(_NAME, triton_planes.plane_product, "CUDA")
    return None
