"""A datastore of texts in which the end of a sequence is looked up (REST, arXiv 2311.08252).

One safetensors file: all tokens, and the order of all suffixes, so that the occurrences of any sequence are
neighbours. It is mapped into memory and read once, to check it; a look-up touches a few pages.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload_rt.config.schema import LONGEST_MATCH
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.sources import Source
from offload_rt.errors import UsageError
from offload_rt.system.digests import checksum, digest
from offload_rt.system.tensor_files import read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = "offload-rt datastore 2"
END = -1
"""Token between two texts: neither a match nor a continuation crosses it."""


class Datastore(Source):
    """Looks up the longest end of a sequence that occurs in the store.

    Args:
        longest: most tokens of the end that are compared, at most `LONGEST_MATCH`.
        occurrences: number of occurrences looked at, spread evenly over all of the longest end.

    Raises:
        UsageError: the file does not exist, is damaged, or is no datastore.
    """

    name = "datastore"

    def __init__(self, path: Path, longest: int, occurrences: int) -> None:
        super().__init__()
        self.path = path
        self._longest, self._occurrences = longest, occurrences
        self._tokens, self._order, self._fingerprint, self._largest = _opened(path, _version(path))

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None = None) -> None:
        """Raises UsageError where its token IDs are not those of a model's tokenizer and vocabulary."""
        if tokenizer is None:
            raise UsageError(f"datastore {self.path}: needs the model's tokenizer, and there is none")
        wrong = ""
        if fingerprint(tokenizer) != self._fingerprint:
            wrong = "was built with another tokenizer than the model's"
        elif vocabulary is not None and self._largest >= vocabulary:
            wrong = f"holds token IDs beyond the model's vocabulary of {vocabulary}"
        if wrong:
            raise UsageError(f"datastore {self.path}: {wrong}; build it again: {BUILD}")

    def extend(self, view: TokenView) -> None:
        """Does nothing: the store does not depend on the sequence."""

    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        """Returns continuations of the longest end of `view` that something follows."""
        suffix = view.part(max(0, len(view) - self._longest))
        # A longer end occurs only where the shorter ones do.
        sizes = range(1, len(suffix) + 1)
        longest = bisect_left(sizes, True, key=lambda size: not self._span(suffix[-size:]))
        for size in range(longest, 0, -1):
            span = self._span(suffix[-size:])
            count = min(self._occurrences, len(span))
            places = [span[at * len(span) // count] for at in range(count)]
            starts = (self._order[places] + size).tolist()
            if texts := [text for start in starts if (text := self._text(start, depth))]:
                return texts
        return []

    def _text(self, start: int, count: int) -> list[int]:
        tokens: list[int] = self._tokens[start : start + count].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _span(self, suffix: list[int]) -> range:
        """Returns the range of suffixes, in their order, that begin with `suffix`."""

        def begins(at: int) -> list[int]:
            start = int(self._order[at])
            tokens: list[int] = self._tokens[start : start + len(suffix)].tolist()
            return tokens

        suffixes = range(len(self._order))
        first = bisect_left(suffixes, suffix, key=begins)
        return range(first, bisect_right(suffixes, suffix, first, key=begins))


BUILD = "offload-rt datastore build FOLDER"


def _version(path: Path) -> tuple[int, ...]:
    """Returns numbers that differ when a file was replaced or changed."""
    with suppress(OSError):
        status = path.stat()
        return status.st_ino, status.st_mtime_ns, status.st_size
    return ()


@lru_cache(maxsize=2)
def _opened(path: Path, version: tuple[int, ...]) -> tuple[Tensor, Tensor, str, int]:
    """Maps a file into memory and checks it; every sequence opens it anew, so the last ones are kept.

    Returns:
        Its tokens `[n]`, the order of their suffixes `[n]`, the tokenizer's fingerprint and the largest ID.
    """
    tensors, about = read_tensors(path, "datastore", KIND, f"build one: {BUILD}")
    if set(tensors) != {"tokens", "order"} or about.get("checksum") != _checksum(tensors):
        raise UsageError(f"datastore {path}: is damaged (its checksum differs); build it again: {BUILD}")
    return tensors["tokens"], tensors["order"], about.get("fingerprint", ""), int(tensors["tokens"].max())


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Returns the checksum of tokens and order."""
    return f"{checksum(*(tensors[name].numpy().data for name in ('tokens', 'order'))):08x}"


def build(texts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    """Writes a datastore of tokenized texts, as a whole or not at all; returns the number of its tokens.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    tokens = torch.tensor([token for text in texts for token in (*text, END)], dtype=torch.int32)
    tensors = {"tokens": tokens, "order": suffix_order(tokens)}
    about = {"kind": KIND, "fingerprint": fingerprint(tokenizer), "checksum": _checksum(tensors)}
    write_tensors(path, tensors, about)
    return len(tokens) - len(texts)


def suffix_order(tokens: Tensor) -> Tensor:
    """Returns the starts of all suffixes of `tokens` `[n]`, sorted by at least `LONGEST_MATCH` tokens.

    Prefix doubling (Manber and Myers 1990): ranks by some number of tokens are keys for twice as many.
    """
    ranks = tokens.long() - tokens.min() + 1  # 0: behind the end
    width = 1
    while True:
        behind = torch.zeros_like(ranks)
        behind[: max(0, len(ranks) - width)] = ranks[width:]
        keys = ranks * (int(ranks.max()) + 1) + behind
        order = keys.argsort(stable=True)
        width *= 2
        if width >= LONGEST_MATCH or int(ranks.max()) == len(ranks):
            return order.to(torch.int32 if len(order) < 2**31 else torch.int64)
        ordered = keys[order]
        ranks = torch.empty_like(order)
        ranks[order] = 1 + torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns a digest of a tokenizer's vocabulary."""
    return digest(json.dumps(sorted(tokenizer.get_vocab().items())), digits=32)
