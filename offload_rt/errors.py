"""The one error that is addressed to a user."""

from __future__ import annotations

import reprlib

LONGEST_MESSAGE = 1000
"""Characters of an error message that are shown."""


class UsageError(Exception):
    """A request that cannot be fulfilled; its message is what the user reads.

    The message says what is wrong, which value, and what to do about it, in one line. The command line
    prints it as `offload-rt: error: …` and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, shortened; the error's type where it has no message."""
    text = str(error).strip()
    if isinstance(error, KeyError) or not text:  # the message of a KeyError is the missing key alone
        text = f"{type(error).__name__} {text}".strip()
    return shortened(text.splitlines()[0])


def shortened(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Returns `text` without its middle where it has more than `limit` characters."""
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 3]} … {text[-end:]}"


class _Brief(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 64 else f"<a number of {x.bit_length()} bits>"


briefly = _Brief().repr
"""Writes any value in a few words, also a number that Python refuses to write because of its length."""
