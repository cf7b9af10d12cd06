"""Text from tokens as it becomes certain, up to a stop string."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from offload_rt.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, last: int | None = None, *, special: bool = True
) -> list[int]:
    """Token ids of a prompt.

    Args:
        last: keep the last so many tokens; a beginning-of-text token is kept in front of them.
        special: with the special tokens that the tokenizer puts around a text.

    Raises:
        UsageError: the text is no Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        said = f"character {error.start} is half of a surrogate pair; decode the text anew"
        raise UsageError(f"prompt {reprlib.repr(text)}: {said}") from None
    without = {} if special else {"add_special_tokens": False}
    tokens: list[int] = tokenizer(text, verbose=False, **without)[
        "input_ids"
    ]  # no warning about long prompts
    return tokens if last is None else keep_last(tokens, last, tokenizer.bos_token_id)


def keep_last(tokens: list[int], last: int, beginning: int | None) -> list[int]:
    """The last so many tokens of a prompt, its beginning-of-text token in front of them."""
    if len(tokens) <= last:
        return tokens
    if last > 1 and tokens[0] == beginning:
        return [tokens[0], *tokens[len(tokens) - last + 1 :]]
    return tokens[len(tokens) - last :]


REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers write for bytes that are no character, or not yet one."""

MAX_OPEN_TOKENS = 8
"""No character takes more bytes, so none takes more tokens: older bytes will never become one."""

CHARACTER_TOKENS = 4
"""Tokens that a UTF-8 character spans at most: one a byte."""


class TextStream:
    """Turns token ids into text as it becomes certain.

    Nothing is returned that a later token may change: neither half a character nor text that may turn out
    to be a stop string. All returned pieces joined are `tokenizer.decode` of all tokens, without special
    tokens, up to the first stop string. First means the one that is complete first; of several that end
    with the same character, the longest.

    Attributes:
        text: all text returned so far.
        stopped: a stop string has occurred; the text before it has been returned.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] = ()) -> None:
        """Without a tokenizer the text is always empty, and stop strings are a UsageError."""
        if stop and tokenizer is None:
            raise UsageError(f"stop string {stop[0]!r}: the model has no tokenizer, so it writes no text")
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._held = ""
        # A short window of tokens is decoded again and again. Those before `_open_start` are context: how a
        # token is written may depend on the one before it (a leading space, the rest of a character).
        self._window: list[int] = []
        self._open_start = 0
        self._released_characters = 0

    def push(self, token: int) -> str:
        """Adds a token; returns the text that has become certain, often nothing."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._window.append(token)
        written = self._decode(self._window)
        open_tokens = len(self._window) - self._open_start
        certain = len(written.rstrip(REPLACEMENT))
        if certain < len(written) and open_tokens > MAX_OPEN_TOKENS:
            certain = len(written) - 1
        new = written[self._released_characters : certain]
        # Some tokenizers write bytes that turn out to be a character shorter than they did before.
        self._released_characters = min(self._released_characters + len(new), len(written))
        if certain == len(written) and new:
            self._keep(open_tokens, open_start=open_tokens, open_characters=0)
        elif certain == len(written) and open_tokens > MAX_OPEN_TOKENS:
            del self._window[self._open_start :]  # tokens without text
        elif open_tokens > MAX_OPEN_TOKENS:
            self._keep(CHARACTER_TOKENS, open_start=0, open_characters=1)
        return self._release(new)

    def finish(self) -> str:
        """Returns what was held back, now that no token follows; nothing if a stop string has occurred."""
        if self._tokenizer is None or self.stopped:
            return ""
        released = self._release(self._decode(self._window)[self._released_characters :])
        if self.stopped:
            return released
        held, self._held = self._held, ""
        self.text += held
        return released + held

    def _keep(self, tokens: int, open_start: int, open_characters: int) -> None:
        """Shortens the window to its last `tokens`, all but `open_characters` of their text released."""
        self._window = self._window[-tokens:]
        self._open_start = open_start
        self._released_characters = max(len(self._decode(self._window)) - open_characters, 0)

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        # Cleaning up would change text that has been returned already.
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _release(self, new: str) -> str:
        """The part of the held text and `new` that no stop string can reach any more."""
        text = self._held + new
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.stopped = True
            final = min(ends)[1]
            self._held = ""
        else:
            final = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
            self._held = text[final:]
        self.text += text[:final]
        return text[:final]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins but is not complete."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
