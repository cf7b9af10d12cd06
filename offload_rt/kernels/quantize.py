"""Quantises keys and values, by the native library where it can."""

from __future__ import annotations

import torch
from torch import Tensor

from offload_rt.kernels.native import load_kernel
from offload_rt.kernels.quantized import QuantizedLayer
from offload_rt.kernels.sizes import GROUP


def quantize(layer: QuantizedLayer, keys: Tensor, values: Tensor) -> None:
    """Quantises keys and values `[kv_heads, tokens, head_dim]`, whole groups, into a layer's first tokens."""
    if layer.shares_ranges:
        layer.share_ranges(keys)
        groups = torch.arange(keys.shape[1] // GROUP, device=keys.device)
        for head, sides in enumerate(zip(keys, values, strict=True)):
            head_keys, head_values = (side.unflatten(0, (-1, GROUP)) for side in sides)
            layer.put_chunks(head_keys, head_values, torch.full_like(groups, head), groups)
        return
    layer, kernel = layer.first(keys.shape[1]), load_kernel() if keys.device.type == "cpu" else None
    contiguous_rows = keys.stride(-1) == values.stride(-1) == 1
    if kernel is not None and contiguous_rows and kernel.supports_quantized(keys, layer):
        kernel.quantize(keys, values, layer)
    else:
        torch.ops.offload_rt.quantize_(keys, values, *layer)
