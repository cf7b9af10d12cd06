"""What a copy between the store and the compute device runs on: CUDA streams, a plain CPU, or a paced link.

A link has two directions, to the device and to the host. Copies of one direction run one after another, in
the order asked; the directions do not wait for each other. An urgent copy does not wait for those that have
not begun: it goes before them, or, with CUDA, takes turns with them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]  # (destination, source), of equal shape

_POLL_S = 20e-6


class CopyFailed(RuntimeError):
    """A copy could not be made; the message names it."""


class TransferStalled(RuntimeError):
    """A copy was not done after the link's timeout."""

    def __init__(self, byte_count: int, seconds: float):
        super().__init__(
            f"a copy of {byte_count:,} bytes was not done after {seconds:g} s; "
            "the link is stalled, or its timeout is too short for what is queued on it"
        )
        self.byte_count = byte_count
        self.seconds = seconds


class Ticket(Protocol):
    """A point in the work of a link or of the compute. Waiting raises CopyFailed or TransferStalled."""

    def wait(self) -> None:
        """Let the compute enqueued from here on wait. With CUDA the host goes on, else it waits itself."""

    def synchronize(self) -> None:
        """Let the host wait."""

    def done(self) -> bool:
        """Whether the point is passed (also by failing)."""


class Link(Protocol):
    """Copies between the store's memory and ``device``. ``in_place``: they are the same memory."""

    @property
    def device(self) -> torch.device: ...

    @property
    def in_place(self) -> bool: ...

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


def _describe(pairs: Pairs, to_host: bool) -> str:
    direction = "to the host" if to_host else "to the device"
    shapes = ", ".join(str(list(source.shape)) for _, source in pairs)
    return f"copy {direction} of {pair_bytes(pairs):,} bytes (shapes {shapes})"


class PassedTicket:
    """A point that is passed already, or a copy that failed when it was asked for."""

    def __init__(self, error: CopyFailed | None = None):
        self._error = error

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


class CpuLink:
    """No link at all: the compute reads the store's memory in place. ``copy`` copies at once."""

    device = torch.device("cpu")
    in_place = True

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        try:
            if after is not None:
                after.synchronize()
            for destination, source in pairs:
                destination.copy_(source)
        except RuntimeError as error:
            return PassedTicket(_failure(pairs, to_host, error))
        return PassedTicket()

    def mark(self) -> Ticket:
        return PassedTicket()

    def close(self) -> None:
        pass


class PacedLink:
    """A link between CPU tensors that takes its time, for machines without a GPU.

    A copy takes at least ``latency_s`` + bytes / ``bytes_per_second``, counted from when its direction was
    free; what it wrote shows only at the end. ``timeout``: seconds that a wait may take. Raises ValueError
    unless ``bytes_per_second`` and ``timeout`` are positive and ``latency_s`` is not negative.
    """

    device = torch.device("cpu")
    in_place = False

    def __init__(self, bytes_per_second: float, latency_s: float = 0.0, timeout: float = 60.0):
        if bytes_per_second <= 0 or latency_s < 0 or timeout <= 0:
            raise ValueError(
                "bytes_per_second and timeout must be positive and latency_s not negative, "
                f"not {bytes_per_second}, {timeout} and {latency_s}"
            )
        self.bytes_per_second = bytes_per_second
        self._latency_s = latency_s
        self._timeout = timeout
        self._closing = threading.Event()
        self._records: list[CopyRecord] | None = None
        self._lanes = {to_host: _Lane(to_host) for to_host in (False, True)}

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        lane, asked = self._lanes[to_host], _Asked(list(pairs), after, time.perf_counter())
        lane.waiting[urgent].append(asked)
        try:
            lane.thread.submit(self._serve, lane)
        except RuntimeError as error:  # closed
            return PassedTicket(_failure(pairs, to_host, error))
        return _PacedTicket(asked.done, pairs, to_host, self._timeout)

    def mark(self) -> Ticket:
        return PassedTicket()

    def close(self) -> None:
        self._closing.set()
        for lane in self._lanes.values():
            lane.thread.shutdown(wait=True, cancel_futures=True)
            for asked in (*lane.waiting[True], *lane.waiting[False]):
                asked.done.cancel()

    def record(self) -> None:
        self._records = []

    def recorded(self) -> list[CopyRecord]:
        records = self._records or []
        return [records.pop(0) for _ in range(len(records))]  # the lanes append meanwhile

    def move(self, pairs: Pairs) -> None:
        """Make the copy itself, in the worker's thread. Tests override it to delay and to fail."""
        for destination, source in pairs:
            destination.copy_(source)

    def _serve(self, lane: _Lane) -> None:
        """Makes one of the copies that were asked for: there is one for each time this is called."""
        asked = (lane.waiting[True] or lane.waiting[False]).popleft()
        try:
            self._run(lane, asked.pairs, asked.after, asked.at)
        except BaseException as error:
            asked.done.set_exception(error)
        else:
            asked.done.set_result(None)

    def _run(self, lane: _Lane, pairs: Pairs, after: Ticket | None, asked_at: float) -> None:
        start = max(asked_at, lane.free_at)
        if after is not None and not after.done():
            after.synchronize()
            start = max(start, time.perf_counter())
        end = start + self._latency_s + pair_bytes(pairs) / self.bytes_per_second
        if self._closing.wait(max(0.0, end - time.perf_counter())):
            raise RuntimeError("the link was closed")
        # The pace is kept over many copies: what this thread overslept, or took to move, is made up for.
        lane.free_at = end
        # The mode of a thread: without it, tensors made in inference mode could not be written to here.
        with torch.inference_mode():
            self.move(pairs)
        if self._records is not None:
            self._records.append(CopyRecord(lane.to_host, pair_bytes(pairs), start, end))


class _Asked:
    """A copy that was asked for at some time, and what is known of it since."""

    def __init__(self, pairs: Pairs, after: Ticket | None, at: float):
        self.pairs = pairs
        self.after = after
        self.at = at
        self.done: Future[None] = Future()


class _Lane:
    """One direction of a paced link: its thread, and the time at which its last copy was due."""

    def __init__(self, to_host: bool):
        self.to_host = to_host
        self.waiting: dict[bool, deque[_Asked]] = {True: deque(), False: deque()}  # urgent ones, the others
        name = "to-host" if to_host else "to-device"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"cpu_kv-paced-{name}")
        self.free_at = 0.0


class _PacedTicket:
    def __init__(self, future: Future[None], pairs: Pairs, to_host: bool, timeout: float):
        self._future = future
        self._pairs = pairs
        self._to_host = to_host
        self._timeout = timeout

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        try:
            error = self._future.exception(self._timeout)
        except TimeoutError:
            raise TransferStalled(pair_bytes(self._pairs), self._timeout) from None
        except CancelledError:
            error = RuntimeError("the link was closed")
        if error is not None:
            raise _failure(self._pairs, self._to_host, error)

    def done(self) -> bool:
        return self._future.done()


class CudaLink:
    """Copies between page-locked memory and a CUDA device, on one stream for each direction.

    Urgent ones to the device have a stream of their own: the card takes turns between both, copy by copy.
    Copies from or to pageable memory work too, but block the host. ``timeout``: seconds that the host waits
    in ``synchronize``.
    """

    in_place = False

    def __init__(self, device: torch.device | str | int, timeout: float = 60.0):
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self._timeout = timeout
        self._streams = {to_host: torch.cuda.Stream(self.device) for to_host in (False, True)}
        self._urgent = torch.cuda.Stream(self.device)
        self._recording: _CudaRecording | None = None

    def copy(
        self, pairs: Pairs, after: Ticket | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Ticket:
        stream = self._urgent if urgent and not to_host else self._streams[to_host]
        try:
            with torch.cuda.stream(stream):
                if after is not None:
                    after.wait()
                recording = self._recording
                begun = None if recording is None else _recorded(stream, timed=True)
                for destination, source in pairs:
                    _copy_plainly(destination, source)
                    if not to_host:
                        # Let go before the copy is done, it must not be given to other compute meanwhile.
                        destination.record_stream(stream)
                event = _recorded(stream, timed=recording is not None)
                if recording is not None and begun is not None:
                    recording.copies.append((to_host, pair_bytes(pairs), begun, event))
        except RuntimeError as error:
            return PassedTicket(_failure(pairs, to_host, error))
        return _CudaTicket(event, self.device, pairs, to_host, self._timeout)

    def mark(self) -> Ticket:
        event = _recorded(torch.cuda.current_stream(self.device))
        return _CudaTicket(event, self.device, (), False, self._timeout)

    def record(self) -> None:
        self._recording = _CudaRecording(self.device)

    def recorded(self) -> list[CopyRecord]:
        return [] if self._recording is None else self._recording.take(self._timeout)

    def close(self) -> None:
        for stream in (*self._streams.values(), self._urgent):
            stream.synchronize()


class _CudaRecording:
    """Copies between two events each, and an event whose time on the host's clock is known."""

    def __init__(self, device: torch.device):
        self._device = device
        self.copies: list[tuple[bool, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._origin = _recorded(torch.cuda.current_stream(device), timed=True)
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def take(self, timeout: float) -> list[CopyRecord]:
        copies = [self.copies.pop(0) for _ in range(len(self.copies))]
        records = []
        for to_host, byte_count, begun, ended in copies:
            _CudaTicket(ended, self._device, (), to_host, timeout).synchronize()
            start, end = (self._origin_s + self._origin.elapsed_time(event) / 1e3 for event in (begun, ended))
            records.append(CopyRecord(to_host, byte_count, start, end))
        return records


class _CudaTicket:
    def __init__(
        self, event: torch.cuda.Event, device: torch.device, pairs: Pairs, to_host: bool, timeout: float
    ):
        self._event = event
        self._device = device
        self._byte_count = pair_bytes(pairs)
        self._description = _describe(pairs, to_host)
        self._timeout = timeout

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        # Event.synchronize would wait for ever on a stalled device.
        deadline = time.monotonic() + self._timeout
        while not self.done():
            if time.monotonic() > deadline:
                raise TransferStalled(self._byte_count, self._timeout)
            time.sleep(_POLL_S)

    def done(self) -> bool:
        try:
            return bool(self._event.query())
        except RuntimeError as error:
            raise CopyFailed(f"{self._description} failed: {error}") from error


def _recorded(stream: torch.cuda.Stream, *, timed: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=timed)
    event.record(stream)
    return event


def _copy_plainly(destination: Tensor, source: Tensor) -> None:
    # Where a side has gaps, torch would first pack it into pageable memory and wait. Head by head there are
    # none, and each copy is one transfer.
    if source.dim() > 1 and not (destination.is_contiguous() and source.is_contiguous()):
        for destination_part, source_part in zip(destination, source, strict=True):
            _copy_plainly(destination_part, source_part)
    else:
        destination.copy_(source, non_blocking=True)


def _failure(pairs: Pairs, to_host: bool, error: BaseException) -> CopyFailed:
    failure = CopyFailed(f"{_describe(pairs, to_host)} failed: {error}")
    failure.__cause__ = error
    return failure
