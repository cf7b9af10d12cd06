"""The layout of a KV cache in memory, and views of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape, PackedSide
from cpu_kv.sizes import KVSizes

KeysValues = tuple[Tensor, Tensor]


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
        """Returns the number of tokens of keys and values ``[kv_heads, n, head_dim]``.

        Raises ValueError if their shape or dtype differs from the layout's: nothing is converted.
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
    """Returns views of the tokens ``start`` .. ``end`` of pages (``KVLayout.pages_shape``).

    See ``parts_of_sides``.
    """
    return parts_of_sides(memory[:, 0], memory[:, 1], start, end)


def parts_of_sides(keys: Tensor, values: Tensor, start: int, end: int) -> list[KeysValues]:
    """Returns views of the tokens ``start`` .. ``end`` of pages ``[pages, kv_heads, page_size, head_dim]``.

    Each view is a pair of keys and values ``[pages, kv_heads, tokens, head_dim]``. Whole pages share one
    view; a partial first or last page has its own.
    """
    page = keys.shape[2]
    found: list[KeysValues] = []
    while start < end:
        first, offset = divmod(start, page)
        if offset == 0 and end - start >= page:
            part = keys[first : end // page], values[first : end // page]
        else:
            cut = slice(offset, offset + end - start)
            part = keys[first : first + 1, :, cut], values[first : first + 1, :, cut]
        found.append(part)
        start += part[0].shape[0] * part[0].shape[2]
    return found


def cut_alike(parts: Sequence[KeysValues], keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Splits ``keys`` and ``values`` ``[kv_heads, n, head_dim]`` into pieces of the same shapes as ``parts``.

    ``parts`` hold n tokens together. Returns pairs of a part, ``[pages, kv_heads, tokens, head_dim]``, and
    the piece of the keys or values that belongs there.
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
    """Returns ``[pages, kv_heads, tokens, head_dim]`` as ``[kv_heads, all tokens, head_dim]``."""
    return part[0] if len(part) == 1 else part.transpose(0, 1).flatten(1, 2)


def part_of(part: Tensor, start: int, end: int) -> Tensor:
    """Returns the tokens ``start`` .. ``end`` of pages, in the shape that ``head_major`` returns."""
    tokens = part.shape[2]
    first, last = start // tokens, -(-end // tokens)
    pages = part.unpacked(first, last) if isinstance(part, PackedSide) else part[first:last]
    return head_major(pages)[:, start - first * tokens : end - first * tokens]
