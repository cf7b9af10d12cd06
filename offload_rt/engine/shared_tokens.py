"""Token IDs of many prefixes that begin alike, each page of which exists once."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload
from weakref import WeakValueDictionary

from offload_rt.text.tokenize import common_beginning

PAGE = 256
"""Tokens of a page."""
IDS = "i"
"""Type of the IDs in a page: four bytes each, where a list takes eight and an object for most of them."""


class SharedTokens(Sequence[int]):
    """Token IDs in pages, those of equal contents being one object. Made by `TokenPages`."""

    def __init__(self, pages: tuple[array[int], ...], length: int) -> None:
        self._pages = pages
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._length)
            if step != 1:
                return list(self)[at]
            first = start // PAGE
            pages = chain.from_iterable(self._pages[first : -(-stop // PAGE)])
            return list(pages)[start - first * PAGE : max(start, stop) - first * PAGE]
        at = range(self._length)[at]
        return self._pages[at // PAGE][at % PAGE]

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._pages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == self._length and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def common_beginning(self, other: SharedTokens) -> int:
        """Returns the number of tokens with which both begin."""
        same = 0
        for own, others in zip(self._pages, other._pages, strict=False):
            if own is not others:
                return same * PAGE + common_beginning(own, others)
            same += 1
        return min(same * PAGE, self._length, other._length)


class TokenPages:
    """The pages of all `SharedTokens` that it has made, as long as one of these needs them."""

    def __init__(self) -> None:
        self._pages: WeakValueDictionary[bytes, array[int]] = WeakValueDictionary()

    def share(self, tokens: Sequence[int]) -> SharedTokens:
        """Returns token IDs in pages that equal earlier ones where their contents do."""
        if isinstance(tokens, SharedTokens):
            return tokens
        starts = range(0, len(tokens), PAGE)
        return SharedTokens(
            tuple(self._page(array(IDS, tokens[start : start + PAGE])) for start in starts), len(tokens)
        )

    def _page(self, page: array[int]) -> array[int]:
        return self._pages.setdefault(page.tobytes(), page)

    def __len__(self) -> int:
        """Number of pages."""
        return len(self._pages)
