"""The error that is addressed to the user."""

from __future__ import annotations


class UsageError(Exception):
    """A request that cannot be fulfilled.

    The message is one line: what was wrong, which value, and what to do. The command line prints it as
    `offload-rt: error: …` and exits with code 2.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
