"""Links: the protocol of copies between host memory and the compute device, and the trivial link of a CPU.

A link copies in two directions, to the device and to the host, independently of each other. Copies of one
direction run one at a time, in the order in which they were enqueued. An urgent copy overtakes copies that
have not started.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Pairs (destination, source), equal in shape and contiguous (torch would pack others first)."""


class CopyFailed(RuntimeError):
    """A copy has failed; the message gives its direction, size and shapes."""


class Event(Protocol):
    """A point in the work of a link or of the compute. Waiting for a copy that failed raises CopyFailed."""

    def wait(self) -> None:
        """Makes compute that is enqueued later wait for the event. Without CUDA, the host waits."""
        self.synchronize()

    def synchronize(self) -> None:
        """Blocks the host until the event."""

    def done(self) -> bool:
        """Returns whether the event has happened or its copy has failed."""


class Link(Protocol):
    """Copies between the store's memory and a device.

    Attributes:
        device: the one that computes.
        in_place: it computes on the store's memory, and nothing needs to be copied.
        bytes_per_second: the rate to the device if it is fixed, otherwise None.
    """

    device: torch.device
    in_place: bool

    @property
    def bytes_per_second(self) -> float | None: ...

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        """Copies (destination, source) pairs asynchronously.

        The call itself raises nothing; waiting for the returned event raises CopyFailed if the copy failed.

        Args:
            after: the copy does not begin before it.
            to_host: its direction; else to the device.
            urgent: the copy overtakes prefetches.
        """

    def record_event(self) -> Event:
        """Returns an event at the end of all compute enqueued so far."""

    def close(self) -> None:
        """Closes the link; a paced link fails copies that have not ended, a CUDA link waits. Idempotent."""


@dataclass(frozen=True)
class CopyRecord:
    """A copy that was made, and when.

    Attributes:
        start, end: in seconds of `time.perf_counter`; on a paced link, the scheduled times.
    """

    to_host: bool
    byte_count: int
    start: float
    end: float


@runtime_checkable
class RecordingLink(Link, Protocol):
    """A link that reports the copies it has made, for benchmarks."""

    def record(self) -> None:
        """Starts recording every copy."""

    def recorded(self) -> list[CopyRecord]:
        """Returns the copies made since the last call, in order within each direction.

        With CUDA the host waits for pending copies. Raises CopyFailed if one failed.
        """


def pair_bytes(pairs: Pairs) -> int:
    """Returns the bytes that a copy of `pairs` moves."""
    return sum(source.nbytes for _, source in pairs)


def describe(shapes: Sequence[Sequence[int]], byte_count: int, to_host: bool) -> str:
    """Returns a description of a copy of sources with these shapes, for error messages."""
    direction = "to the host" if to_host else "to the device"
    sizes = ", ".join(str(list(shape)) for shape in shapes)
    return f"copy {direction} of {byte_count:,} bytes (shapes {sizes})"


class PastEvent(Event):
    """An event that has already happened, or that of a copy that could not be enqueued."""

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
    """The link of a CPU, which computes on the store's memory in place. `copy` copies synchronously."""

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
    """Returns the CopyFailed of a copy, caused by `error`."""
    shapes = [source.shape for _, source in pairs]
    failed = CopyFailed(f"{describe(shapes, pair_bytes(pairs), to_host)} failed: {error}")
    failed.__cause__ = error
    return failed
