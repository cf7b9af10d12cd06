"""Tokens of a long text, piece by piece: joined, they are exactly those of the whole text.

A text is cut between two words, in front of the blank that separates them. A tokenizer that puts a blank in
front of every text, as that of Llama 2 does, gets the part behind without its own. That is exact where three
things hold:

- Pre-tokenizers match runs of letters, and a blank ends such a run, whatever stands before and behind it.
- No token of the vocabulary has a letter and then a blank. So without a pre-tokenizer no merge of byte-pair
  encoding, and no piece of a unigram model, spans the cut: both sides are encoded independently.
- The tokenizer adds nothing else at the beginning of a text, and no added token lies across the cut. The
  words around each cut are encoded together and apart to make sure of it.

Where no such place is found, pieces become longer, up to the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PIECE = 2**16
"""Characters of a piece: a few tens of milliseconds of a tokenizer."""

_CUT = re.compile(r"[^\W\d_](?=[ \n][^\W\d_])")
_LOOK_BACK = 2**11  # characters at the end of a piece in which it may be cut
_CANDIDATES = 4  # cuts that are tried there
_AROUND = 64  # characters on each side of a cut that are encoded together and apart

_WORD_AND_BLANK = re.compile(r"[^\W\d_](?<![ĠĊĉč])(?:[ \n▁]|(?<=[A-Za-z])[ĠĊ])")
"""A letter and a blank behind it, as vocabularies write them: plain, SentencePiece's, those of bytes."""

_words_end_at_blanks: WeakKeyDictionary[PreTrainedTokenizerBase, bool] = WeakKeyDictionary()


def can_be_cut(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether no token of a tokenizer has a letter and then a blank."""
    if tokenizer not in _words_end_at_blanks:
        added = {token.content for token in tokenizer.added_tokens_decoder.values()}
        names = (name for name in tokenizer.get_vocab() if name not in added)
        _words_end_at_blanks[tokenizer] = not any(map(_WORD_AND_BLANK.search, names))
    return _words_end_at_blanks[tokenizer]


def longest_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the most characters of a text that one token can be; None: it cannot be known.

    A token of a byte-level vocabulary has a character for each byte. An unknown token may be a text of any
    length.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if model is None or (getattr(model, "unk_token", None) and not getattr(model, "byte_fallback", False)):
        return None
    if type(model).__name__ != "BPE":  # others have normalizers that shorten runs of spaces
        return None
    return max(map(len, tokenizer.get_vocab()))


def pieces(
    text: str, encode: Callable[[str], list[int]], *, cuts: bool = True, most: int | None = None
) -> Iterator[list[int]]:
    """Yields the tokens of a text in pieces, each of which takes a moment.

    Args:
        encode: returns the tokens of a text, without any that are added around it.
        cuts: see `can_be_cut`; False: all tokens are yielded at once.
        most: number of tokens beyond which the caller refuses the text. A part of it that cannot be cut and
            has twice as many ends the pieces.
    """
    start = 0
    while start < len(text):
        size = PIECE
        while start + size < len(text):
            cut = _last_cut(text, start, start + size, encode) if cuts else None
            if cut is not None:
                yield encode(text[start : cut.end])
                start = cut.start
                break
            # What is refused need not be read to its end, nor kept in memory.
            if most is not None and len(part := encode(text[start : start + size])) > 2 * most:
                yield part
                return
            size *= 2
        else:
            yield encode(text[start:])
            return


class _Cut(NamedTuple):
    """Where the part before a cut ends, and where the part behind it starts."""

    end: int
    start: int


def _last_cut(text: str, start: int, end: int, encode: Callable[[str], list[int]]) -> _Cut | None:
    """Returns the last place in a part of a text at which it can be cut; None where none is found."""
    found = [at.end() for at in _CUT.finditer(text, max(start, end - _LOOK_BACK), end)]
    for cut in reversed(found[-_CANDIDATES:]):
        before, behind = text[max(start, cut - _AROUND) : cut], text[cut : cut + _AROUND]
        together, first = encode(before + behind), encode(before)
        for left_out in (0, 1) if text[cut] == " " else (0,):
            if together == first + encode(behind[left_out:]):
                return _Cut(cut, cut + left_out)
    return None
