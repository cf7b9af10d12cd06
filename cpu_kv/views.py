"""Views of the pages of one layer's KV, wherever they are stored: plain tensors, or packed pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Self, TypeVar

import torch
from torch import Tensor

from cpu_kv.packed import PackedShape, PageCodec

Pages = TypeVar("Pages", bound="KVPages")


class KVPages(ABC):
    """Consecutive tokens of one layer in pages of equal length: `PlainPages` or `PackedPages`.

    `len` is the number of pages, and `pages[2:5]` are some of them, without a copy.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, pages: slice) -> Self: ...

    @property
    @abstractmethod
    def kv_heads(self) -> int: ...

    @property
    @abstractmethod
    def page_tokens(self) -> int:
        """Number of tokens in a page."""

    @property
    def tokens(self) -> int:
        """Number of tokens in all pages."""
        return len(self) * self.page_tokens

    @abstractmethod
    def side(self, number: int) -> Tensor:
        """Returns the keys (0) or the values (1), `[pages, kv_heads, page_tokens, head_dim]`."""

    @abstractmethod
    def plain(self) -> PlainPages:
        """Returns the pages as plain tensors: themselves, or unpacked to new memory."""

    @abstractmethod
    def portions(self) -> Iterator[PlainPages]:
        """Yields the pages as plain tensors, as many at a time as there is memory for, and at least once.

        Each portion is valid until the next one.
        """

    @abstractmethod
    def take_chunks(self, chunk: int, page: Tensor, head: Tensor, number: Tensor, out: Tensor) -> None:
        """Copies chunks of `chunk` tokens.

        Args:
            page, head, number: of each chunk, int64; chunks are numbered within their page.
            out: contiguous, `[2, chunks, chunk, head_dim]`.
        """

    def span(self, start: int, end: int) -> list[KVPages]:
        """Returns views of the tokens `start` .. `end`.

        Whole pages share one view; a partial first or last page has its own, which is plain.
        """
        page, parts = self.page_tokens, list[KVPages]()
        while start < end:
            first, offset = divmod(start, page)
            if offset == 0 and end - start >= page:
                parts.append(self[first : end // page])
            else:
                parts.append(self[first : first + 1].plain().cut(offset, offset + end - start))
            start += parts[-1].tokens
        return parts

    def head_major(self, start: int = 0, end: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns keys and values of the tokens `start` .. `end` (default: all), `[kv_heads, n, head_dim]`.

        They are views only where the tokens are in one plain page.
        """
        page, end = max(1, self.page_tokens), self.tokens if end is None else end  # a tail may be empty
        first = start // page
        plain = self[first : -(-end // page)].plain()
        tokens = slice(start - first * page, end - first * page)
        return head_major(plain.keys)[:, tokens], head_major(plain.values)[:, tokens]

    def copy_to(self, keys: Tensor, values: Tensor) -> None:
        """Copies all tokens to `[kv_heads, tokens, head_dim]`."""
        for number, out in enumerate((keys, values)):
            self._paged(out).copy_(self.side(number))

    def _paged(self, side: Tensor) -> Tensor:
        """Returns a view of `[kv_heads, tokens, head_dim]` in the shape of these pages."""
        paged: Tensor = side.unflatten(1, (len(self), self.page_tokens))
        return paged.transpose(0, 1)


@dataclass(frozen=True, eq=False)
class PlainPages(KVPages):
    """Pages of plain tensors.

    Attributes:
        keys, values: `[pages, kv_heads, page_tokens, head_dim]`.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, memory: Tensor) -> Self:
        """Returns a view of `[pages, 2, kv_heads, page_tokens, head_dim]`."""
        return cls(memory[:, 0], memory[:, 1])

    @classmethod
    def one(cls, keys: Tensor, values: Tensor) -> Self:
        """Returns a view of keys and values `[kv_heads, tokens, head_dim]` as one page."""
        return cls(keys[None], values[None])

    def __len__(self) -> int:
        return self.keys.shape[0]  # torch's own `len` is ten times slower

    def __getitem__(self, pages: slice) -> Self:
        return type(self)(self.keys[pages], self.values[pages])

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def page_tokens(self) -> int:
        return self.keys.shape[2]

    def side(self, number: int) -> Tensor:
        return (self.keys, self.values)[number]

    def plain(self) -> PlainPages:
        return self

    def portions(self) -> Iterator[PlainPages]:
        yield self

    def take_chunks(self, chunk: int, page: Tensor, head: Tensor, number: Tensor, out: Tensor) -> None:
        # Whole rows are picked faster than single elements, which indexing by page, head and chunk would do.
        pages, heads, tokens, dim = self.keys.shape
        page_stride, head_stride = (stride // dim for stride in self.keys.stride()[:2])  # in tokens
        row = gcd(chunk, page_stride, head_stride)  # tokens
        count = ((pages - 1) * page_stride + (heads - 1) * head_stride + tokens) // row
        first = (page * page_stride + head * head_stride + number * chunk) // row
        rows = (first[:, None] + torch.arange(chunk // row, device=first.device)).flatten()
        for side, destination in zip((self.keys, self.values), out, strict=True):
            memory = side.as_strided((count, row * dim), (row * dim, 1))
            torch.index_select(memory, 0, rows, out=destination.view(len(rows), -1))

    def cut(self, start: int, end: int) -> PlainPages:
        """Returns a view of the tokens `start` .. `end` of every page."""
        return PlainPages(self.keys[:, :, start:end], self.values[:, :, start:end])

    def behind(self, earlier: PlainPages) -> PlainPages:
        """Returns one page of the tokens of another page, and these, one page, behind them."""
        return PlainPages(
            torch.cat([earlier.keys, self.keys], dim=2), torch.cat([earlier.values, self.values], dim=2)
        )

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Overwrites all tokens, by `[kv_heads, tokens, head_dim]` on any device."""
        self.keys.copy_(self._paged(keys))
        self.values.copy_(self._paged(values))


@dataclass(frozen=True, eq=False)
class PackedPages(KVPages):
    """Packed pages, which must not be written to.

    Attributes:
        data: uint8 `[pages, shape.nbytes]`.
        shape: of a page.
        codec: unpacks them.
        buffer: memory for `portions`, of `KVLayout.pages_shape`; None: new memory.
    """

    data: Tensor
    shape: PackedShape
    codec: PageCodec
    buffer: Tensor | None = None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, pages: slice) -> Self:
        return replace(self, data=self.data[pages])

    @property
    def kv_heads(self) -> int:
        return self.shape.kv_heads

    @property
    def page_tokens(self) -> int:
        return self.shape.page_size

    def side(self, number: int) -> Tensor:
        out = self._memory(sides=1)
        self.codec.decode(self.shape, self.data, out, number)
        return out[:, 0]

    def plain(self) -> PlainPages:
        return self._unpacked(self._memory(sides=2))

    def portions(self) -> Iterator[PlainPages]:
        buffer = self._memory(sides=2) if self.buffer is None else self.buffer
        for data in self.data.split(max(1, len(buffer))):
            yield replace(self, data=data)._unpacked(buffer[: len(data)])

    def _memory(self, sides: int) -> Tensor:
        sizes = len(self), sides, self.shape.kv_heads, self.shape.page_size, self.shape.head_dim
        return self.data.new_empty(sizes, dtype=torch.bfloat16)

    def _unpacked(self, memory: Tensor) -> PlainPages:
        self.codec.decode(self.shape, self.data, memory)
        return PlainPages.of(memory)

    def take_chunks(self, chunk: int, page: Tensor, head: Tensor, number: Tensor, out: Tensor) -> None:
        for side, destination in enumerate(out):
            self.codec.take(self.shape, self.data, side, page, head, number * chunk, destination)


def head_major(side: Tensor) -> Tensor:
    """Returns `[pages, kv_heads, tokens, head_dim]` as `[kv_heads, all tokens, head_dim]`."""
    return side[0] if len(side) == 1 else side.transpose(0, 1).flatten(1, 2)


def cut_alike(parts: Iterable[Pages], keys: Tensor, values: Tensor) -> Iterator[tuple[Pages, Tensor, Tensor]]:
    """Yields `parts` with the keys and values of as many tokens, from the beginning of these tensors on.

    Args:
        keys, values: `[kv_heads, n, head_dim]`, where n is the number of tokens of all parts.
    """
    start = 0
    for part in parts:
        tokens = slice(start, start + part.tokens)
        yield part, keys[:, tokens], values[:, tokens]
        start = tokens.stop
