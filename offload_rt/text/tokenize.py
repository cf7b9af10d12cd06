"""Token IDs from text, and text from tokens as it becomes certain, up to a stop string."""

from __future__ import annotations

import builtins
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain, product
from typing import TYPE_CHECKING, Any

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.text.pieces import PIECE, can_be_cut, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, last: int | None = None, *, special: bool = True
) -> list[int]:
    """Returns the token IDs of a prompt.

    A text that begins with the beginning-of-text tokens, as chat templates write them, gets them only once.

    Args:
        last: number of tokens to keep, the last ones; beginning-of-text tokens are kept in front of them.
        special: add the special tokens that the tokenizer puts around a text.

    Raises:
        UsageError: the text is not valid Unicode, or the tokenizer's files contradict themselves.
    """
    tokens = joined(encoded(tokenizer, text, special=special))
    return tokens if last is None else keep_last(tokens, last, tokenizer)


def encoded(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True, most: int | None = None
) -> Iterator[list[int]]:
    """Yields what `encode` returns, in pieces each of which takes a moment.

    Args:
        most: number of tokens beyond which the caller refuses the text; see `pieces`.
    """
    check_unicode(text)
    added = _added(tokenizer) if special else ([], [])
    if len(text) <= PIECE or added is None:
        tokens = _tokens(tokenizer, text, special=special)
        beginning = added[0] if added else []
        yield tokens[len(beginning) :] if tokens[: 2 * len(beginning)] == 2 * beginning else tokens
        return
    beginning, end = added
    parts = pieces(text, partial(_tokens, tokenizer), cuts=can_be_cut(tokenizer), most=most)
    for number, part in enumerate(parts):
        yield part if number or part[: len(beginning)] == beginning else [*beginning, *part]
    yield end


def joined(parts: Iterable[list[int]]) -> list[int]:
    """Returns the tokens of all pieces."""
    return list(chain.from_iterable(parts))


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = False) -> list[int]:
    """Returns the tokens of a text, with or without those that the tokenizer puts around it."""
    without = {} if special else {"add_special_tokens": False}
    try:
        tokens: list[int] = tokenizer(text, verbose=False, **without)["input_ids"]  # no warning about length
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, for files that contradict themselves
            raise
        raise UsageError(
            f"the model's tokenizer fails ({first_line(error)}): its tokenizer.json names tokens that it does"
            " not have; download it again"
        ) from None
    return tokens


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, special: bool = False) -> str:
    """Returns the text of tokens, with or without special ones; spaces stay as they are."""
    return str(
        tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    )


def check_unicode(text: str) -> None:
    """Raises UsageError for a text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"character {error.start} is half of a surrogate pair; decode the text anew"
        raise UsageError(f"prompt {briefly(text)}: {wrong}") from None


def _added(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]] | None:
    """Returns the tokens that the tokenizer puts before a text (none, `<s>`, `[gMASK]<sop>`), and behind it.

    None: it does something else to a text, too.
    """
    around = _tokens(tokenizer, "a", special=True)
    alone = _tokens(tokenizer, "a")
    sizes = range(len(around) - len(alone) + 1)
    size = next((size for size in sizes if around[size : size + len(alone)] == alone), None)
    return None if size is None else (around[:size], around[size + len(alone) :])


def beginning_tokens(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Returns with how many beginning-of-text tokens a prompt begins."""
    added = None if tokenizer is None else _added(tokenizer)
    beginning = added[0] if added else []
    if not beginning and tokenizer is not None and tokenizer.bos_token_id is not None:
        beginning = [tokenizer.bos_token_id]
    return len(beginning) if [*tokens[: len(beginning)]] == beginning else 0


def keep_last(tokens: list[int], last: int, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Returns the last tokens of a prompt, `last` of them, with its beginning-of-text tokens in front."""
    if len(tokens) <= last:
        return tokens
    first_tokens = beginning_tokens(tokens, tokenizer)
    first_tokens = first_tokens if first_tokens < last else 0
    return [*tokens[:first_tokens], *tokens[len(tokens) - last + first_tokens :]]


def common_beginning(first: Sequence[object], second: Sequence[object]) -> int:
    """Returns the number of tokens, or of characters of texts, with which both begin."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is faster than comparing token by token
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Written by tokenizers for bytes that are no character, or not yet one."""

MAX_OPEN_TOKENS = 8
"""Tokens after which bytes that are not yet a character never become one: no character takes as many."""

PROMPT_TOKENS = 16
"""Tokens of the prompt that are looked at for the text before the first token."""

CHARACTER_TOKENS = 4
"""Most tokens that a UTF-8 character spans: one per byte."""


class TextStream:
    """Turns token IDs into text as it becomes certain.

    It never returns text that a later token may change: neither half a character nor the beginning of a
    possible stop string. All returned pieces joined equal what the tokens add to `tokenizer.decode` of the
    prompt, without special tokens, up to the first stop string: the one that is complete first, and of
    several that end with the same character the longest.

    Args:
        tokenizer: None: the text stays empty.
        stop: stop strings.
        prompt: the tokens before the first one, of which the last ones are decoded with it: a tokenizer may
            write the first word of a text without its space. Empty: the tokens are a text of their own.
        special_texts: texts of special tokens that are not left out.

    Attributes:
        text: all text returned so far.
        stopped_by: the stop string that has occurred; the text before it has been returned. None: none has.

    Raises:
        UsageError: there are stop strings, and no tokenizer.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        special_texts: Mapping[int, str] = {},
    ) -> None:
        if stop and tokenizer is None:
            raise UsageError(f"stop string {stop[0]!r}: the model has no tokenizer, so it writes no text")
        self.text = ""
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._special_texts = special_texts
        self._open_text = ""
        # A short window of tokens is decoded at every push. Tokens before `_open_start` are context: the text
        # of a token may depend on the one before it (a leading space, the rest of a character).
        self._window: list[int] = []
        self._open_start = 0
        self._released_characters = 0
        self._after_prompt = bool(prompt)  # the window begins with tokens of the prompt
        self._prompt_texts: list[str] = []  # of these, whole and less a character that is only begun
        if tokenizer is not None and prompt:
            special = set(tokenizer.all_special_ids)
            self._window = [token for token in prompt[-PROMPT_TOKENS:] if token not in special]
            self._window = self._window[self._broken(self._window) :]
            self._open_start = len(self._window)
            ends = range(min(CHARACTER_TOKENS, len(self._window)))
            self._prompt_texts = [self._decode(self._window[: self._open_start - end]) for end in ends]

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self.stopped_by is not None

    def push(self, token: int) -> str:
        """Adds a token; returns the text that has become certain, often an empty string."""
        if self._tokenizer is None or self.stopped:
            return ""
        if token in self._special_texts:  # the text behind it begins anew
            new = self._written()[self._released_characters :] + self._special_texts[token]
            self._window, self._open_start, self._released_characters = [], 0, 0
            self._after_prompt, self._prompt_texts = False, []
            return self._release(new)
        self._window.append(token)
        written = self._written()
        open_tokens = len(self._window) - self._open_start
        certain = len(written.rstrip(REPLACEMENT))
        if certain < len(written) and open_tokens > MAX_OPEN_TOKENS:
            certain = len(written) - 1
        new = written[self._released_characters : certain]
        if new:
            self._prompt_texts = []
        # Some tokenizers write a complete character shorter than its bytes before it was complete.
        self._released_characters = min(self._released_characters + len(new), len(written))
        if certain == len(written) and new:
            # The first token may have ended a character of the prompt, without which it is none.
            window = len(self._window) if self._after_prompt else open_tokens
            self._keep(window, open_start=window, open_characters=0)
        elif certain == len(written) and open_tokens > MAX_OPEN_TOKENS:
            del self._window[self._open_start :]  # tokens without text
        elif open_tokens > MAX_OPEN_TOKENS:
            self._keep(CHARACTER_TOKENS, open_start=0, open_characters=1)
        return self._release(new)

    def finish(self) -> str:
        """Returns the text that was held back, as no token follows; nothing if a stop string has occurred."""
        if self._tokenizer is None or self.stopped:
            return ""
        released = self._release(self._written()[self._released_characters :])
        if self.stopped:
            return released
        rest, self._open_text = self._open_text, ""
        self.text += rest
        return released + rest

    def _keep(self, tokens: int, open_start: int, open_characters: int) -> None:
        """Shortens the window to its last `tokens`; all but `open_characters` of their text is released."""
        self._window = self._window[-tokens:]
        self._after_prompt, self._prompt_texts = False, []
        self._open_start = open_start
        self._released_characters = max(len(self._decode(self._window)) - open_characters, 0)

    def _broken(self, tokens: list[int]) -> int:
        """Returns the number of tokens at the beginning that are the rest of a character.

        Ends are tried as well, as some decoders replace all bytes of a run where one at its end is wrong.
        """
        for start, end in product(range(CHARACTER_TOKENS), repeat=2):
            if not self._decode(tokens[start : len(tokens) - end]).startswith(REPLACEMENT):
                return start
        return 0

    def _written(self) -> str:
        """Returns the text of the window; a character that the prompt has only begun counts as new."""
        written = self._decode(self._window)
        if self._prompt_texts:
            self._released_characters = max(common_beginning(text, written) for text in self._prompt_texts)
        return written

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        # Cleaning up would change text that has been returned already.
        return decode(self._tokenizer, tokens)

    def _release(self, new: str) -> str:
        """Returns the part of the held text and `new` that cannot belong to a stop string any more."""
        text = self._open_text + new
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            end, final = min(ends)
            self.stopped_by = text[final:end]
            self._open_text = ""
        else:
            final = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
            self._open_text = text[final:]
        self.text += text[:final]
        return text[:final]


def mark_token(tokenizer: PreTrainedTokenizerBase, mark: str) -> int | None:
    """Returns the token that a mark is; None: it is several, or none."""
    token = tokenizer.convert_tokens_to_ids(mark)
    return token if isinstance(token, int) and token != tokenizer.unk_token_id else None


def mark_tokens(tokenizer: PreTrainedTokenizerBase, marks: str) -> list[int]:
    """Returns the tokens of marks in a row."""
    if (token := mark_token(tokenizer, marks)) is not None:
        return [token]  # a tokenizer may put a blank before the first word
    return list(tokenizer(marks, add_special_tokens=False)["input_ids"])


def overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of `text` that is an incomplete beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class TokenTexts:
    r"""Texts of single tokens as they are within a text, and the bytes that they add to it.

    The bytes of tokens joined are the text that `tokenizer.decode` writes of them, except at its beginning:
    sentencepiece drops the space of a text's first word, so that `▁Hello` is `Hello` there and ` Hello`
    elsewhere. A token may be a part of a character: its bytes are no text, and its text has U+FFFD for them.
    `split` returns the texts of a sequence, which join to what is decoded.

    Tokens of byte-level vocabularies and of byte fallback (`<0xE2>`) have their own bytes, special tokens
    their names, and others what they add to a decoded word.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {*tokenizer.all_special_ids, *(token for token, added in added if added.special)}
        self._byte_of = _byte_level_alphabet(tokenizer)
        self._bytes: dict[int, builtins.bytes] = {}

    def __getitem__(self, token: int) -> str:
        """Returns the text of a token within a text."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> builtins.bytes:
        """Returns the UTF-8 bytes that a token adds within a text; none for an ID that has no token."""
        if (known := self._bytes.get(token)) is None:
            known = self._bytes[token] = self._bytes_of(token)
        return known

    def is_special(self, token: int) -> bool:
        """Returns whether a token is special: texts leave it out."""
        return token in self._special

    def split(self, tokens: Sequence[int]) -> list[str]:
        """Splits what `decode` writes of tokens into the text that each adds.

        Special tokens add none. A character of several tokens is the text of the one that completes it.
        """
        decoder = getincrementaldecoder("utf-8")("replace")
        texts, begun = list[str](), False
        for token in tokens:
            added = b"" if token in self._special else self.bytes(token)
            if added and not begun:
                begun, added = True, self._first(token)
            texts.append(decoder.decode(added))
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def names(self, tokens: Iterable[int]) -> list[str]:
        r"""Returns distinct names of different tokens, such as keys of OpenAI's `top_logprobs`.

        A token is named by its text, or `bytes:\xe2\x80` where that is no whole character. One without a
        text, or whose name a token before it has, is `token_id:5`: give the likeliest first.
        """
        names = dict[str, None]()
        for token in tokens:
            name = self._name(token)
            names[name if name and name not in names else f"token_id:{token}"] = None
        return list(names)

    def _name(self, token: int) -> str:
        try:
            return self.bytes(token).decode()
        except UnicodeDecodeError:
            return f"bytes:{str(self.bytes(token))[2:-1]}"

    def _bytes_of(self, token: int) -> builtins.bytes:
        piece: Any = self._tokenizer.convert_ids_to_tokens(token)  # a str, but bytes in Qwen's first one
        if piece is None or isinstance(piece, bytes):
            return piece or b""
        if token in self._special:
            return bytes(piece, "utf-8")
        if self._byte_of:  # an added token may have other characters, and is written as it is then
            try:
                return bytes(self._byte_of[character] for character in piece)
            except KeyError:
                return bytes(piece, "utf-8")
        text = self._decode([*self._word, token])[len(self._decode(self._word)) :]
        if (byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)) and text != piece:
            return bytes([int(byte[1], 16)])
        return text.encode()

    def _first(self, token: int) -> builtins.bytes:
        """Returns the bytes that a token adds at the beginning of a text."""
        within, first = self.bytes(token), self._decode([token]).encode()
        return first if within.endswith(first) else within

    @cached_property
    def _word(self) -> list[int]:
        """A token that is a word: behind it, others are written as they are within a text."""
        letters: Any = self._tokenizer.convert_tokens_to_ids(["a", "▁a"])
        for token in chain(letters, range(len(self._tokenizer))):
            if token not in (None, *self._special) and self._decode([token]).isalnum():
                return [token]
        return []

    def _decode(self, tokens: list[int]) -> str:
        return decode(self._tokenizer, tokens, special=True)


def _byte_level_alphabet(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for; empty for another kind."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # tokenizers in Python may have the alphabet itself
        return dict(getattr(tokenizer, "byte_decoder", {}))
    if backend.decoder is None:
        return {}
    state = json.loads(backend.decoder.__getstate__())
    if {part["type"] for part in state.get("decoders", [state])} != {"ByteLevel"}:
        return {}
    return {character: byte for byte, character in bytes_to_unicode().items()}
