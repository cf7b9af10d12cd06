"""Keys and values in 8 or 4 bits, for drafts: what they are read from need not be exact.

As in KIVI (arXiv 2402.02750), keys are quantised by channel, in groups of `GROUP` tokens, and values by
token: a few channels of keys are far larger than the others, and no channel of values is. A code c stands for
`zero + step * c`; both are in bfloat16, and codes are chosen for them as they were rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.sizes import GROUP, QuantizedSize
from offload_rt.native import load_kernel

SLACK = 2.0**-8
"""Share by which a range is widened, so that it holds all values when its ends are rounded to bfloat16."""


class QuantizedLayer(NamedTuple):
    """Quantised keys and values of one layer.

    Attributes:
        key_codes, value_codes: `[kv_heads, tokens, head_dim * bits / 8]` uint8. Of 4 bits, a byte has the
            code of a dimension in its low half, and in the high one that of dimension `head_dim / 2` later.
        key_ranges: zero and step of each channel, `[kv_heads, tokens / GROUP, 2, head_dim]` bfloat16.
        value_ranges: zero and step of each token, `[kv_heads, tokens, 2]` bfloat16.
    """

    key_codes: Tensor
    key_ranges: Tensor
    value_codes: Tensor
    value_ranges: Tensor

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 * self.key_codes.shape[-1] // self.key_ranges.shape[-1]

    def first(self, tokens: int) -> QuantizedLayer:
        """Returns the first `tokens` tokens, whole groups."""
        return QuantizedLayer(
            self.key_codes[:, :tokens],
            self.key_ranges[:, : tokens // GROUP],
            self.value_codes[:, :tokens],
            self.value_ranges[:, :tokens],
        )

    def put(self, keys: Tensor, values: Tensor) -> None:
        """Quantises keys and values `[kv_heads, tokens, head_dim]`, whole groups, into the first tokens."""
        tokens = keys.shape[1]
        into, kernel = self.first(tokens), load_kernel() if keys.device.type == "cpu" else None
        if (
            kernel is not None
            and keys.stride(-1) == values.stride(-1) == 1
            and kernel.supports_quantized(keys, into)
        ):
            return kernel.quantize(keys, values, into)
        torch.ops.offload_rt.quantize_(keys, values, *into)
        return None

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values, `[kv_heads, tokens, head_dim]`."""
        keys, values = (unpacked(codes, self.bits).float() for codes in (self.key_codes, self.value_codes))
        zero, step = self.key_ranges.float().unbind(2)
        keys = (zero[:, :, None] + step[:, :, None] * keys.unflatten(1, (-1, GROUP))).flatten(1, 2)
        zero, step = self.value_ranges.float().unbind(2)
        return keys.to(dtype), (zero[..., None] + step[..., None] * values).to(dtype)


@dataclass(eq=False)
class QuantizedKV:
    """Memory for quantised keys and values of all layers.

    Attributes:
        tensors: as of a layer, with the layers as their first dimension.
    """

    tensors: QuantizedLayer

    @classmethod
    def empty(cls, layout: KVLayout, tokens: int, bits: int, device: torch.device) -> Self:
        """Returns memory for so many tokens, whole groups."""
        kinds = (torch.uint8, torch.bfloat16, torch.uint8, torch.bfloat16)
        shapes = zip(QuantizedSize(tokens, bits).shapes(layout), kinds, strict=True)
        return cls(
            QuantizedLayer(*(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes))
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def kind(self) -> tuple[tuple[int, ...], ...]:
        """Key of memory of the same size."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors)

    def layer(self, number: int) -> QuantizedLayer:
        return QuantizedLayer(*(tensor[number] for tensor in self.tensors))

    def clear(self) -> None:
        """Zeroes the memory: what is not present is multiplied by zero and so must be finite."""
        for tensor in self.tensors:
            tensor.zero_()


def encoded(x: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises along an axis; returns codes, and zeros and steps in bfloat16 with that axis of size 1."""
    most = 2**bits - 1
    low, high = (side.float() for side in torch.aminmax(x, dim=axis, keepdim=True))
    zero = (low - low.abs() * SLACK).bfloat16()
    step = ((high - zero.float()) * ((1 + 2 * SLACK) / most)).bfloat16()
    codes = (x.float() - zero.float()) / step.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    return codes.round_().clamp_(0, most).to(torch.uint8), zero, step


def packed(codes: Tensor, bits: int) -> Tensor:
    """Packs codes `[…, head_dim]` into bytes."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | high << 4


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Undoes `packed`."""
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], -1)
