"""Shape and size of a KV cache in memory. All byte counts of this package are computed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class KVLayout:
    """Layers, heads, element type and page size of the KV of one model.

    ``page_size`` is in tokens. ``packed``: pages are stored in 12 bits a value once they are full; see
    `packed`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 256
    packed: bool = False

    def __post_init__(self) -> None:
        if self.packed and not self.packable:
            raise ValueError(f"{self.dtype} pages of {self.pages_shape(1)} cannot be packed")

    @property
    def packed_shape(self) -> PackedShape:
        return PackedShape(self.kv_heads, self.page_size, self.head_dim)

    @property
    def packable(self) -> bool:
        """Whether full pages can be packed."""
        return self.dtype == torch.bfloat16 and self.packed_shape.supported

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
        """Bytes of the keys and values of one full page of one layer, as it is stored."""
        return self.packed_shape.nbytes if self.packed else self.page_size * self.layer_token_bytes

    @property
    def stored_token_bytes(self) -> int:
        """Bytes of one token of full pages in all layers, as it is stored."""
        return self.layers * self.page_bytes // self.page_size

    @property
    def stored_share(self) -> float:
        """Bytes of full pages in the store as a share of those on a device, where they are not packed."""
        return self.page_bytes / (self.page_size * self.layer_token_bytes) if self.layer_token_bytes else 1.0

    def layer_bytes(self, tokens: int) -> int:
        """Returns the bytes of the keys and values of so many tokens of one layer, as they are stored."""
        pages, others = divmod(tokens, self.page_size)
        return pages * self.page_bytes + others * self.layer_token_bytes

    def pages(self, tokens: int) -> int:
        """Returns the number of pages that hold ``tokens`` tokens, rounded up."""
        return -(-tokens // self.page_size)

    def reserved_bytes(self, tokens: int) -> int:
        """Returns the bytes of the pages that hold ``tokens`` tokens, in all layers."""
        return self.layers * self.pages(tokens) * self.page_bytes

    def means_bytes(self, tokens: int, chunk_size: int | None, page_means: bool) -> int:
        """Returns the bytes of the means of ``tokens`` tokens; see ``PagedKVStore.new_sequence``."""
        chunks = 0 if chunk_size is None else tokens // chunk_size
        return (chunks + (2 * (tokens // self.page_size) if page_means else 0)) * self.token_bytes // 2

    def pages_shape(self, pages: int) -> tuple[int, int, int, int, int]:
        """Returns the shape of pages of one layer, ``[pages, 2, kv_heads, page_size, head_dim]``.

        A page holds its keys, then its values. Consecutive pages are contiguous in memory.
        """
        return (pages, 2, self.kv_heads, self.page_size, self.head_dim)

    def slab_shape(self, pages: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Returns shape and dtype of the memory of pages of one layer."""
        if self.packed:
            return (pages, self.page_bytes), torch.uint8
        return self.pages_shape(pages), self.dtype

    def segment_tokens(self, byte_count: int, tokens: int) -> int:
        """Returns the tokens of a segment, whole pages of one layer that are at most ``byte_count`` bytes.

        At most half of the layer's ``tokens``, so that copies and compute overlap in short sequences
        too, and at least one page.
        """
        most = min(byte_count // self.layer_token_bytes, tokens // 2)
        return max(1, most // self.page_size) * self.page_size

    def check_whole(self, start: int, end: int) -> None:
        """Raises ValueError if the tokens ``start`` .. ``end`` are not whole pages."""
        if start % self.page_size or end % self.page_size:
            raise ValueError(f"tokens {start} to {end} are not whole pages of {self.page_size}")

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
    first = start // tokens
    return head_major(part[first : -(-end // tokens)])[:, start - first * tokens : end - first * tokens]
