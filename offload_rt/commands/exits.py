"""How a command ends: its exit codes, and the signals that end it early."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REFUSED = 2
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. What Ctrl-C keeps is kept."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code after an interrupt."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def drop_stdout() -> None:
    """Lets what Python writes to stdout at exit go nowhere: its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` within, as SIGINT raises KeyboardInterrupt; a handler that is set stays."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
