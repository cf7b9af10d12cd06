"""The one error that is addressed to a user."""

from __future__ import annotations


class UsageError(Exception):
    """Something the user asked for cannot be done; the message is what they read.

    The message says what was wrong, which value, and what to do about it, in one line. The command line
    prints it as `offload-rt: error: …` and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
