"""Keys and values in 8 or 4 bits, for drafts: what they are read from need not be exact.

As in KIVI (arXiv 2402.02750), keys are quantised by channel, in groups of `GROUP` tokens, and values by
token: a few channels of keys are far larger than the others, and no channel of values is. A code c stands for
`zero + step * c`; both are in bfloat16, and codes are chosen for them as they were rounded.

8 bits are fine enough for all groups of a head to share the ranges of its keys, a little wider than the first
keys need. Then any chunk of tokens can be replaced without reading the others again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.kernels.sizes import GROUP, QuantizedSize

SLACK = 2.0**-8
"""Share by which a range is widened, so that it holds all values when its ends are rounded to bfloat16."""


SPARE_RANGE = 1 / 16
"""Share of a range by which shared ranges are wider on both sides, for keys that come later. What is still
farther away gets the nearest code."""
SHARED_RANGES_BITS = 8


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

    @property
    def shares_ranges(self) -> bool:
        """The groups of a head share the ranges of its keys."""
        return self.bits == SHARED_RANGES_BITS

    def share_ranges(self, keys: Tensor) -> None:
        """Sets the ranges of all groups of a head by keys `[kv_heads, tokens, head_dim]`."""
        low, high = torch.aminmax(keys, dim=1, keepdim=True)
        spare = SPARE_RANGE * (high.float() - low.float())
        self.key_ranges.copy_(torch.stack(range_of(low - spare, high + spare, self.bits), 2))

    def put_chunks(self, keys: Tensor, values: Tensor, heads: Tensor, slots: Tensor) -> None:
        """Quantises chunks `[n, chunk, head_dim]` into slots of their heads, where ranges are shared.

        Args:
            heads, slots: of each chunk, `[n]` int64 on the device; a slot is as long as a chunk.
        """
        assert self.shares_ranges, "chunks of a group share its ranges with others"
        torch.ops.offload_rt.quantize_chunks_(keys, values, heads, slots, *self)

    def dequantized(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns keys and values, `[kv_heads, tokens, head_dim]`."""
        keys, values = (codes_in(codes, self.bits).float() for codes in (self.key_codes, self.value_codes))
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

    @property
    def shares_ranges(self) -> bool:
        """See `QuantizedLayer`."""
        return self.tensors.shares_ranges

    def layer(self, number: int) -> QuantizedLayer:
        return QuantizedLayer(*(tensor[number] for tensor in self.tensors))

    def clear(self) -> None:
        """Zeroes the memory: what is not present is multiplied by zero and so must be finite."""
        for tensor in self.tensors:
            tensor.zero_()


def encoded(x: Tensor, axis: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises along an axis; returns codes, and zeros and steps in bfloat16 with that axis of size 1."""
    zero, step = range_of(*torch.aminmax(x, dim=axis, keepdim=True), bits)
    return codes_of(x, zero, step, bits), zero, step


def range_of(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Returns zero and step, in bfloat16, of codes for values from `low` to `high`."""
    low, high = low.float(), high.float()
    zero = (low - low.abs() * SLACK).bfloat16()
    return zero, ((high - zero.float()) * ((1 + 2 * SLACK) / (2**bits - 1))).bfloat16()


def codes_of(x: Tensor, zero: Tensor, step: Tensor, bits: int) -> Tensor:
    """Returns the nearest codes, uint8."""
    codes = (x.float() - zero.float()) / step.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    return codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def bytes_of(codes: Tensor, bits: int) -> Tensor:
    """Packs codes `[…, head_dim]` into bytes."""
    if bits == 8:
        return codes
    low, high = codes.chunk(2, -1)
    return low | high << 4


def codes_in(codes: Tensor, bits: int) -> Tensor:
    """Undoes `bytes_of`."""
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], -1)
