"""What a copy between the store and the compute device runs on: a CUDA link, a paced one, or none at all.

A link has two directions, to the device and to the host. Copies of one direction run one after another, in
the order in which they were enqueued; the directions do not wait for each other. An urgent copy overtakes
copies that have not begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(destination, source), of equal shape and contiguous: with gaps, torch would pack them first and wait."""


class CopyFailed(RuntimeError):
    """A copy could not be made; the message names it."""


class Event(Protocol):
    """A point in the work of a link or of the compute. Waiting for it raises CopyFailed where it failed."""

    def wait(self) -> None:
        """Makes compute that is enqueued from here on wait. With CUDA the host goes on, else it waits."""
        self.synchronize()

    def synchronize(self) -> None:
        """Blocks the host until the event."""

    def done(self) -> bool:
        """Returns whether the event has happened, or has failed."""


class Link(Protocol):
    """Copies between the store's memory and ``device``.

    ``in_place``: they are the same memory. ``bytes_per_second``: rate to the device, where the link has one
    by definition.
    """

    device: torch.device
    in_place: bool

    @property
    def bytes_per_second(self) -> float | None: ...

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        """Copies (destination, source) pairs asynchronously, not before ``after``.

        ``urgent``: overtakes copies that were enqueued ahead of their use. Raises nothing itself: a failure
        is raised by the event that it returns.
        """

    def record_event(self) -> Event:
        """Returns the event at the end of all compute that has been enqueued so far."""

    def close(self) -> None:
        """Stops the link; copies that have not ended fail. Idempotent."""


@dataclass(frozen=True)
class CopyRecord:
    """One copy that was made: the link was busy with it from ``start`` to ``end``.

    Both in seconds of ``time.perf_counter``. On a paced link they are the times at which it was due.
    """

    to_host: bool
    byte_count: int
    start: float
    end: float


@runtime_checkable
class RecordingLink(Link, Protocol):
    """A link that can report which copies it made, and when."""

    def record(self) -> None:
        """Starts recording every copy."""

    def recorded(self) -> list[CopyRecord]:
        """Returns the copies made since the last call, each direction in its order.

        With CUDA the host waits for copies under way. Raises CopyFailed where one failed.
        """


def pair_bytes(pairs: Pairs) -> int:
    """Returns the bytes that a copy of ``pairs`` moves."""
    return sum(source.nbytes for _, source in pairs)


def describe(shapes: Sequence[Sequence[int]], byte_count: int, to_host: bool) -> str:
    """Describes a copy of sources of these shapes, for messages."""
    direction = "to the host" if to_host else "to the device"
    return f"copy {direction} of {byte_count:,} bytes (shapes {', '.join(str(list(one)) for one in shapes)})"


class PastEvent(Event):
    """An event that has happened already, or a copy that failed when it was enqueued."""

    def __init__(self, error: CopyFailed | None = None):
        self._error = error

    def synchronize(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


@dataclass(frozen=True)
class FutureEvent(Event):
    """An event that another thread signals."""

    future: Future[None]

    def synchronize(self) -> None:
        self.future.result()

    def done(self) -> bool:
        return self.future.done()


class CpuLink:
    """No link at all: the compute reads the store's memory in place. ``copy`` copies at once."""

    device = torch.device("cpu")
    in_place = True
    bytes_per_second = None

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        try:
            if after is not None:
                after.synchronize()
            for destination, source in pairs:
                destination.copy_(source)
        except RuntimeError as error:
            return PastEvent(failure(pairs, to_host, error))
        return PastEvent()

    def record_event(self) -> Event:
        return PastEvent()

    def close(self) -> None:
        pass


def failure(pairs: Pairs, to_host: bool, error: BaseException) -> CopyFailed:
    """Returns the error of a copy that could not be made."""
    shapes = [source.shape for _, source in pairs]
    failed = CopyFailed(f"{describe(shapes, pair_bytes(pairs), to_host)} failed: {error}")
    failed.__cause__ = error
    return failed
