"""A datastore of texts in which the end of a text is looked up (REST, arXiv 2311.08252).

One safetensors file: all tokens, and the order of all suffixes, so that the occurrences of any sequence are
neighbours. It is mapped into memory, not read; what a look-up touches is a few pages.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offload_rt.config import LONGEST_MATCH
from offload_rt.drafting.base import TokenView
from offload_rt.drafting.sources import Source
from offload_rt.errors import UsageError
from offload_rt.tensor_files import read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = "offload-rt datastore 1"
END = -1
"""A token between two texts: no match and no continuation crosses it."""


class Datastore(Source):
    """Looks up the longest end of a text that occurs in the store.

    Args:
        longest: tokens of the end that are compared, at most `LONGEST_MATCH`.
        occurrences: how many are looked at, spread evenly over all of the longest end.

    Raises:
        UsageError: the file is not there, torn, or no datastore.
    """

    name = "datastore"

    def __init__(self, path: Path, longest: int, occurrences: int) -> None:
        super().__init__()
        self.path = path
        self._longest, self._occurrences = longest, occurrences
        stored, about = read_tensors(path, "datastore", KIND, f"build one: {BUILD}")
        self._tokens, self._order = stored["tokens"], stored["order"]
        self._fingerprint: str = about["fingerprint"]
        self._largest = int(about["largest"])  # id; not looked for in all tokens whenever a store is opened

    def check(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None = None) -> None:
        """Raises UsageError where its ids are not those of a model's tokenizer, or beyond its vocabulary."""
        if tokenizer is None:
            raise UsageError(f"datastore {self.path}: needs the model's tokenizer, and there is none")
        wrong = ""
        if fingerprint(tokenizer) != self._fingerprint:
            wrong = "was built with another tokenizer than the model's"
        elif vocabulary is not None and self._largest >= vocabulary:
            wrong = f"holds ids beyond the model's vocabulary of {vocabulary}"
        if wrong:
            raise UsageError(f"datastore {self.path}: {wrong}; build it again: {BUILD}")

    def extend(self, view: TokenView) -> None:
        """Nothing depends on the text."""

    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        """Returns continuations of the longest end of `view` that something follows."""
        asked = view.part(max(0, len(view) - self._longest))
        # What occurs with more tokens in front occurs with fewer.
        sizes = range(1, len(asked) + 1)
        longest = bisect_left(sizes, True, key=lambda size: not self._span(asked[-size:]))
        for size in range(longest, 0, -1):
            span = self._span(asked[-size:])
            count = min(self._occurrences, len(span))
            places = [span[at * len(span) // count] for at in range(count)]
            starts = (self._order[places] + size).tolist()
            if found := [one for start in starts if (one := self._text(start, depth))]:
                return found
        return []

    def _text(self, start: int, count: int) -> list[int]:
        tokens: list[int] = self._tokens[start : start + count].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _span(self, asked: list[int]) -> range:
        """Returns the range of suffixes, in their order, that begin with `asked`."""

        def begins(at: int) -> list[int]:
            start = int(self._order[at])
            tokens: list[int] = self._tokens[start : start + len(asked)].tolist()
            return tokens

        suffixes = range(len(self._order))
        first = bisect_left(suffixes, asked, key=begins)
        return range(first, bisect_right(suffixes, asked, first, key=begins))


BUILD = "offload-rt datastore build FOLDER"


def build(texts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase, path: Path) -> int:
    """Writes a datastore of tokenized texts, as a whole or not at all; returns its tokens.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    tokens = torch.tensor([token for text in texts for token in (*text, END)], dtype=torch.int32)
    stored = {"tokens": tokens, "order": suffix_order(tokens)}
    largest = max((max(text, default=END) for text in texts), default=END)
    about = {"kind": KIND, "fingerprint": fingerprint(tokenizer), "largest": str(largest)}
    write_tensors(path, stored, about)
    return len(tokens) - len(texts)


def suffix_order(tokens: Tensor) -> Tensor:
    """Starts of all suffixes of `tokens` `[n]` in rising order, by `LONGEST_MATCH` tokens at least.

    By doubling (Manber and Myers 1990): ranks by so many tokens are keys for twice as many.
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
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:32]
