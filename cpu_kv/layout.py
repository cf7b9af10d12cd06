"""The shape of a KV cache in memory. Every byte count in this package comes from here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVLayout:
    """Layers, heads, element type and page size of the KV of one model.

    ``page_size`` is in tokens. Raises ValueError, naming the field and its value, for a size that is not
    a positive integer or a dtype that is not floating point.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 256

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "page_size"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"KVLayout.{field} must be a positive integer, not {value!r}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"KVLayout.dtype must be a floating-point torch.dtype, not {self.dtype!r}")

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return self.layers * self.layer_token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of one page of one layer."""
        return self.page_size * self.layer_token_bytes

    def pages(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens, rounded up."""
        return -(-tokens // self.page_size)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens in all layers."""
        return tokens * self.token_bytes

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes of the whole pages that hold ``tokens`` tokens, in all layers."""
        return self.layers * self.pages(tokens) * self.page_bytes

    def slab_shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Shape of a buffer of one layer: keys then values, ``[2, kv_heads, tokens, head_dim]``."""
        return (2, self.kv_heads, tokens, self.head_dim)

    def tokens_in(self, keys: Tensor, values: Tensor) -> int:
        """Number of tokens in a pair ``[kv_heads, n, head_dim]``.

        Raises ValueError where shape or dtype is not this layout's: nothing is ever converted.
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
