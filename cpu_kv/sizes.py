"""Sizes of a KV cache in memory, without tensors: all byte counts of this package are computed here.

A plan needs these and no torch, which takes a second to import.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

MOST_VALUES = 2**23
"""Most values of a page that can be packed: a position and an exponent share 31 bits."""
ALIGNMENT = 64  # bytes
READ_TOKENS = 64
"""Tokens of all layers that a transfer fetches at a time: bounds its host buffers, which are kept."""
PROMPT_WRITES = 2
"""Writes of a prompt's KV that are pending at a time: each keeps a copy of it on the device."""


def page_locked_bytes(size: int) -> int:
    """Returns what a page-locked buffer of so many bytes takes: torch rounds it up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0


class Element(Protocol):
    """The type of a number in memory: an `ElementType`, or a dtype of torch."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


class ElementType(Enum):
    """The type of weights and KV by its name, as torch calls it."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(self.value[-2:]) // 8

    @classmethod
    def of(cls, dtype: object) -> ElementType:
        """Returns the type that a dtype of torch stands for. Raises ValueError for any other dtype."""
        return cls(dtype_name(dtype))

    def __str__(self) -> str:
        return self.value


def dtype_name(dtype: object) -> str:
    """Returns the name of an element type or of a dtype of torch, e.g. bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class PackedSizes:
    """Sizes of a page of one layer, and where the parts of its packed form lie, in bytes; see `packed`."""

    kv_heads: int
    page_size: int
    head_dim: int

    @property
    def values(self) -> int:
        """Number of values of a page."""
        return 2 * self.kv_heads * self.page_size * self.head_dim

    @property
    def words(self) -> int:
        """Number of int32 of the list of escapes; the first one is how many there are."""
        return max(ALIGNMENT // 4, self.values // 256)

    @property
    def capacity(self) -> int:
        """Most escapes of a page."""
        return self.words - 1

    @property
    def bases_at(self) -> int:
        return 4 * self.words

    @property
    def rows_at(self) -> int:
        return self.bases_at + 2 * self.kv_heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        return 3 * self.head_dim // 2

    @property
    def rows_end(self) -> int:
        return self.rows_at + 2 * self.kv_heads * self.page_size * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of a packed page."""
        return -(-self.rows_end // ALIGNMENT) * ALIGNMENT

    @property
    def supported(self) -> bool:
        """Whether such pages can be packed."""
        return self.head_dim % 2 == 0 and self.values <= MOST_VALUES


@dataclass(frozen=True)
class KVSizes:
    """Layers, heads, element type and page size of the KV of one model, and the bytes that follow from them.

    A plan knows the element type by name; `KVLayout` has that of tensors.

    Attributes:
        page_size: in tokens.
        packed: pages are stored in 12 bits per value once they are full; see `packed.py`.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Element
    page_size: int = 256
    packed: bool = False

    def __post_init__(self) -> None:
        if self.packed and not self.packable:
            raise ValueError(f"{self.dtype} pages of {self.pages_shape(1)} cannot be packed")

    @property
    def packed_sizes(self) -> PackedSizes:
        """Sizes of a page in its packed form."""
        return PackedSizes(self.kv_heads, self.page_size, self.head_dim)

    @property
    def packable(self) -> bool:
        """Whether full pages can be packed."""
        return dtype_name(self.dtype) == ElementType.BFLOAT16.value and self.packed_sizes.supported

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
        return self.packed_sizes.nbytes if self.packed else self.page_size * self.layer_token_bytes

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
        pages, rest = divmod(tokens, self.page_size)
        return pages * self.page_bytes + rest * self.layer_token_bytes

    def pages(self, tokens: int) -> int:
        """Returns the number of pages that hold `tokens` tokens, rounded up."""
        return -(-tokens // self.page_size)

    def reserved_bytes(self, tokens: int) -> int:
        """Returns the bytes of the pages that hold `tokens` tokens, in all layers."""
        return self.layers * self.pages(tokens) * self.page_bytes

    def means_bytes(self, tokens: int, chunk_size: int | None, page_means: bool) -> int:
        """Returns the bytes of the means of `tokens` tokens; see `PagedKVStore.new_sequence`."""
        chunks = 0 if chunk_size is None else tokens // chunk_size
        return (chunks + (2 * (tokens // self.page_size) if page_means else 0)) * self.token_bytes // 2

    def pages_shape(self, pages: int) -> tuple[int, int, int, int, int]:
        """Returns the shape of pages of one layer, `[pages, 2, kv_heads, page_size, head_dim]`.

        A page holds its keys, then its values. Consecutive pages are contiguous in memory.
        """
        return (pages, 2, self.kv_heads, self.page_size, self.head_dim)

    def segment_tokens(self, byte_count: int, tokens: int) -> int:
        """Returns the tokens of a segment, whole pages of one layer that are at most `byte_count` bytes.

        At most half of the layer's `tokens`, so that copies and compute overlap in short sequences
        too, and at least one page.
        """
        tokens = min(byte_count // self.layer_token_bytes, tokens // 2)
        return max(1, tokens // self.page_size) * self.page_size

    def check_whole(self, start: int, end: int) -> None:
        """Raises ValueError if the tokens `start` .. `end` are not whole pages."""
        if start % self.page_size or end % self.page_size:
            raise ValueError(f"tokens {start} to {end} are not whole pages of {self.page_size}")
