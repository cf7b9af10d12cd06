"""The one error that is addressed to a user."""

from __future__ import annotations


class UsageError(Exception):
    """Something the user asked for cannot be done; the message is what they read.

    The message says what was wrong, which value, and what to do about it, in one line. The command line
    prints it as `offload-rt: error: …` and exits with code 2.
    """
