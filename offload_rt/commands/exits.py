"""How a program ends: its exit codes, and the signals that end it early."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from offload_rt.commands.console import wrapped
from offload_rt.errors import UsageError, shortened

REFUSED = 2
INTERRUPTED = 130
READER_GONE = 141
TERMINATED = 143
LEAST_ADDRESS_SPACE = 2**30
"""Bytes of address space below which importing torch fails, or aborts the process."""


def run_program(name: str, work: Callable[[], int]) -> int:
    """Runs a program and returns its exit code; a request that cannot be fulfilled is one line on stderr."""
    if sys.stderr is None:  # closed: print would send what is meant for it to stdout
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        with handled_signals():
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
        message = str(error)
    except OSError as error:
        drop_stdout()
        message = str(error) if error.filename else unwritable(error)
    except KeyboardInterrupt as interrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return status_of(interrupt)
    line = f"{name}: error: {shortened(' '.join(message.splitlines()))}"
    print(wrapped(line, indent=0), file=sys.stderr)
    return REFUSED


def check_address_space() -> None:
    """Raises UsageError where the process may not have the address space that torch needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        raise UsageError(
            f"the shell limits this process to {limit // 2**20} MiB of address space, but torch itself needs"
            f" {LEAST_ADDRESS_SPACE // 2**20} MiB; raise the limit with ulimit -v"
        )


def unwritable(error: OSError) -> str:
    """Returns why stdout cannot be written, and what to do."""
    return f"stdout: cannot be written ({error.strerror}); send it elsewhere"


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, so that it keeps what Ctrl-C keeps."""


def status_of(interrupt: KeyboardInterrupt) -> int:
    """Returns the exit code after an interrupt."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def drop_stdout() -> None:
    """Sends what Python writes to stdout at exit nowhere, as its reader is gone."""
    if sys.stdout is not None:  # None: closed from the beginning
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def handled_signals() -> Iterator[None]:
    """Lets SIGTERM raise `Terminated` and SIGINT KeyboardInterrupt; handlers of the caller are kept."""
    handlers = {signal.SIGTERM: _terminate, signal.SIGINT: signal.default_int_handler}
    in_main_thread = threading.current_thread() is threading.main_thread()
    ours = [number for number in handlers if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in ours:
            signal.signal(number, handlers[number])
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
