"""What a copy between the store and the compute device runs on: a CUDA link, a paced one, or none at all.

A link has two directions, to the device and to the host. Copies of one direction run one after another, in
the order asked; the directions do not wait for each other. An urgent copy does not wait for those that have
not begun: it goes before them, or, with CUDA, takes turns with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(destination, source), of equal shape and contiguous: with gaps, torch would pack them first and wait."""


class CopyFailed(RuntimeError):
    """A copy could not be made; the message names it."""


class TransferStalled(RuntimeError):
    """A copy was not done after the link's timeout."""

    def __init__(self, byte_count: int, seconds: float):
        super().__init__(
            f"a copy of {byte_count:,} bytes was not done after {seconds:g} s; "
            "the link is stalled, or its timeout is too short for what is queued on it"
        )


class Ticket(Protocol):
    """A point in the work of a link or of the compute. Waiting raises CopyFailed or TransferStalled."""

    def wait(self) -> None:
        """Let the compute enqueued from here on wait. With CUDA the host goes on, else it waits itself."""
        self.synchronize()

    def synchronize(self) -> None:
        """Let the host wait."""

    def done(self) -> bool:
        """Whether the point is passed (also by failing)."""


class Link(Protocol):
    """Copies between the store's memory and ``device``. ``in_place``: they are the same memory.

    ``bytes_per_second``: to the device, where the link knows it by itself.
    """

    device: torch.device
    in_place: bool

    @property
    def bytes_per_second(self) -> float | None: ...

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        """Copy (destination, source) pairs, asynchronously, not before ``after``.

        ``urgent``: it overtakes what the link carries ahead of its use. Raises nothing itself: a failure
        shows when the ticket is waited for.
        """

    def mark(self) -> Ticket:
        """All compute enqueued so far."""

    def close(self) -> None:
        """Stop; copies that have not ended fail. Idempotent."""


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
    """A link that can tell what it carried when."""

    def record(self) -> None:
        """From now on, note every copy."""

    def recorded(self) -> list[CopyRecord]:
        """The copies made since they were last asked for, each direction in its order.

        With CUDA the host waits for what is under way. Raises CopyFailed where that fails.
        """


def pair_bytes(pairs: Pairs) -> int:
    """Bytes that a copy of ``pairs`` moves."""
    return sum(source.nbytes for _, source in pairs)


def describe(shapes: Sequence[Sequence[int]], byte_count: int, to_host: bool) -> str:
    """A copy of sources of these shapes, for messages."""
    direction = "to the host" if to_host else "to the device"
    return f"copy {direction} of {byte_count:,} bytes (shapes {', '.join(str(list(one)) for one in shapes)})"


class PassedTicket(Ticket):
    """A point that is passed already, or a copy that failed when it was asked for."""

    def __init__(self, error: CopyFailed | None = None):
        self._error = error

    def synchronize(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


@dataclass(frozen=True)
class FutureTicket(Ticket):
    """A point that another thread passes; if not in time, a copy of ``byte_count`` bytes has stalled."""

    future: Future[None]
    byte_count: int = 0
    timeout: float = TIMEOUT_MAX

    def synchronize(self) -> None:
        try:
            self.future.result(self.timeout)
        except TimeoutError:
            raise TransferStalled(self.byte_count, self.timeout) from None

    def done(self) -> bool:
        return self.future.done()


class CpuLink:
    """No link at all: the compute reads the store's memory in place. ``copy`` copies at once."""

    device = torch.device("cpu")
    in_place = True
    bytes_per_second = None

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        try:
            if after is not None:
                after.synchronize()
            for destination, source in pairs:
                destination.copy_(source)
        except RuntimeError as error:
            return PassedTicket(failure(pairs, to_host, error))
        return PassedTicket()

    def mark(self) -> Ticket:
        return PassedTicket()

    def close(self) -> None:
        pass


def failure(pairs: Pairs, to_host: bool, error: BaseException) -> CopyFailed:
    """Why a copy could not be made."""
    shapes = [source.shape for _, source in pairs]
    failed = CopyFailed(f"{describe(shapes, pair_bytes(pairs), to_host)} failed: {error}")
    failed.__cause__ = error
    return failed
