"""The layout of a KV cache in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape
from cpu_kv.sizes import KVSizes


@dataclass(frozen=True)
class KVLayout(KVSizes):
    """The sizes of the KV of one model, with the dtype and the shapes of its tensors."""

    dtype: torch.dtype

    @property
    def packed_shape(self) -> PackedShape:
        """The shape of a page, and of the parts of its packed form."""
        return PackedShape(self.kv_heads, self.page_size, self.head_dim)

    def slab_shape(self, pages: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and dtype of the memory of pages of one layer."""
        if self.packed:
            return (pages, self.page_bytes), torch.uint8
        return self.pages_shape(pages), self.dtype

    def tokens_in(self, keys: Tensor, values: Tensor) -> int:
        """Returns the number of tokens of keys and values `[kv_heads, n, head_dim]`.

        Raises:
            ValueError: their shape or dtype differs from the layout's; nothing is converted.
        """
        for name, tensor in (("keys", keys), ("values", values)):
            if tensor.dtype != self.dtype:
                raise ValueError(f"{name} are {tensor.dtype}, but the KV is {self.dtype}; convert them first")
            if tensor.dim() != 3 or (tensor.shape[0], tensor.shape[2]) != (self.kv_heads, self.head_dim):
                raise ValueError(
                    f"{name} have shape {list(tensor.shape)}, expected [{self.kv_heads}, n, {self.head_dim}]"
                )
        if keys.shape != values.shape:
            raise ValueError(f"keys have {keys.shape[1]} tokens, but values have {values.shape[1]}")
        return keys.shape[1]
