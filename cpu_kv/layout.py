"""The shape of a KV cache in memory. Every byte count in this package comes from here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KVLayout:
    """Layers, heads, element type and page size of the KV of one model.

    ``page_size`` is in tokens.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 256

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

    def reserved_bytes(self, tokens: int) -> int:
        """Bytes of the whole pages that hold ``tokens`` tokens, in all layers."""
        return self.layers * self.pages(tokens) * self.page_bytes

    def means_bytes(self, tokens: int, chunk_size: int | None, page_means: bool) -> int:
        """Bytes of the means kept of ``tokens`` tokens; see ``PagedKVStore.new_sequence``."""
        chunks = 0 if chunk_size is None else tokens // chunk_size
        return (chunks + (2 * (tokens // self.page_size) if page_means else 0)) * self.token_bytes // 2

    def pages_shape(self, pages: int) -> tuple[int, int, int, int, int]:
        """Shape of pages of one layer, keys then values: ``[pages, 2, kv_heads, page_size, head_dim]``.

        Consecutive pages are one piece of memory.
        """
        return (pages, 2, self.kv_heads, self.page_size, self.head_dim)

    def segment_tokens(self, byte_count: int, tokens: int) -> int:
        """Returns the tokens of a segment of at most ``byte_count`` bytes of one layer, in whole pages.

        Of a layer of ``tokens`` tokens it is a quarter at most, so that compute and copies overlap in a short
        text too. At least one page.
        """
        most = min(byte_count // self.layer_token_bytes, tokens // 4)
        return max(1, most // self.page_size) * self.page_size

    def check_whole(self, start: int, end: int) -> None:
        """Raises ValueError where the tokens ``start`` .. ``end`` are not whole pages."""
        if start % self.page_size or end % self.page_size:
            raise ValueError(f"tokens {start} to {end} are not whole pages of {self.page_size}")

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


def parts_of_pages(memory: Tensor, start: int, end: int) -> list[KeysValues]:
    """Tokens ``start`` .. ``end`` of pages in memory (``KVLayout.pages_shape``), in place.

    Pairs of keys and values ``[pages, kv_heads, tokens, head_dim]``: whole pages together, and parts of a
    first and a last page.
    """
    page = memory.shape[3]
    found: list[KeysValues] = []
    while start < end:
        first, offset = divmod(start, page)
        if offset == 0 and end - start >= page:
            part = memory[first : end // page]
        else:
            part = memory[first : first + 1, :, :, offset : offset + end - start]
        found.append((part[:, 0], part[:, 1]))
        start += part.shape[0] * part.shape[3]
    return found


def cut_alike(parts: Sequence[KeysValues], keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut ``keys`` and ``values`` ``[kv_heads, n, head_dim]`` as ``parts``, n tokens together, are cut.

    Returns pairs of equal shape (a part ``[pages, kv_heads, tokens, head_dim]``, that of the keys or values).
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    start = 0
    for part in parts:
        pages, _, tokens, _ = part[0].shape
        end = start + pages * tokens
        for place, whole in zip(part, (keys, values), strict=True):
            pairs.append((place, whole[:, start:end].unflatten(1, (pages, tokens)).transpose(0, 1)))
        start = end
    return pairs


def head_major(part: Tensor) -> Tensor:
    """``[pages, kv_heads, tokens, head_dim]`` to ``[kv_heads, all tokens, head_dim]``: a copy if needed."""
    return part[0] if len(part) == 1 else part.transpose(0, 1).flatten(1, 2)


def part_of(part: Tensor, start: int, end: int) -> Tensor:
    """Tokens ``start`` .. ``end`` of ``[pages, kv_heads, tokens, head_dim]``, as ``head_major`` puts them."""
    tokens = part.shape[2]
    first = start // tokens
    return head_major(part[first : -(-end // tokens)])[:, start - first * tokens : end - first * tokens]
