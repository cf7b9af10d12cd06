"""How a program ends: its exit codes, and the signals that end it early."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from offload_rt.errors import UsageError

REFUSED = 2
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143


def run_program(name: str, work: Callable[[], int]) -> int:
    """Runs a program to its end and returns its exit code; what cannot be done is one line on stderr."""
    if sys.stderr is None:  # closed: print would send what is meant for it to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        with terminable():
            try:
                status = work()
            except SystemExit as end:  # argparse has printed its help
                if end.code:
                    raise
                status = 0
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
    except BrokenPipeError:
        drop_stdout()
        return READER_GONE
    except UsageError as error:
        said = str(error)
    except OSError as error:
        drop_stdout()
        said = str(error) if error.filename else unwritable(error)
    except KeyboardInterrupt as interrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return status_of(interrupt)
    print(f"{name}: error: {' '.join(said.splitlines())}", file=sys.stderr)
    return REFUSED


def unwritable(error: OSError) -> str:
    """Why stdout cannot be written, and what to do."""
    return f"stdout: cannot be written ({error.strerror}); send it elsewhere"


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. What Ctrl-C keeps is kept."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code after an interrupt."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def drop_stdout() -> None:
    """Lets what Python writes to stdout at exit go nowhere: its reader is gone."""
    if sys.stdout is not None:  # closed from the beginning
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
