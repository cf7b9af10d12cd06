"""An emulated link of a given bandwidth between CPU tensors, for machines without a GPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cpu_kv.link import CopyRecord, Event, FutureEvent, Pairs, PastEvent, failure, pair_bytes


class PacedLink:
    """Emulates a link of a given bandwidth between CPU tensors.

    A copy takes at least `latency_s` + bytes / `bytes_per_second` from when its direction was free, and
    writes its destination only then.

    Raises:
        ValueError: `bytes_per_second` is not positive, or `latency_s` is negative.
    """

    device = torch.device("cpu")
    in_place = False

    def __init__(self, bytes_per_second: float, latency_s: float = 0.0):
        if bytes_per_second <= 0 or latency_s < 0:
            raise ValueError(
                "bytes_per_second must be positive and latency_s not negative, "
                f"got {bytes_per_second} and {latency_s}"
            )
        self.bytes_per_second: float = bytes_per_second
        self._latency_s = latency_s
        self._closing = threading.Event()
        self._records: list[CopyRecord] | None = None
        self._directions = {to_host: _Direction(to_host) for to_host in (False, True)}

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        direction, request = self._directions[to_host], _Request(list(pairs), after, time.perf_counter())
        direction.waiting[urgent].append(request)
        try:
            direction.thread.submit(self._serve, direction)
        except RuntimeError as error:  # closed
            return PastEvent(failure(pairs, to_host, error))
        return FutureEvent(request.done)

    def record_event(self) -> Event:
        return PastEvent()

    def close(self) -> None:
        self._closing.set()
        for direction in self._directions.values():
            direction.thread.shutdown(wait=True, cancel_futures=True)
            while waiting := direction.waiting[True] or direction.waiting[False]:
                _fail(waiting.popleft(), direction, RuntimeError("the link was closed"))

    def record(self) -> None:
        self._records = []

    def recorded(self) -> list[CopyRecord]:
        records = self._records or []
        return [records.pop(0) for _ in range(len(records))]  # the copying threads append meanwhile

    def move(self, pairs: Pairs) -> None:
        """Makes the copy, in the thread of its direction. Tests override it to delay it or to fail."""
        for destination, source in pairs:
            destination.copy_(source)

    def _serve(self, direction: _Direction) -> None:
        """Makes all requested copies: usually one, or more if an interrupt kept `copy` from submitting."""
        while waiting := direction.waiting[True] or direction.waiting[False]:
            request = waiting.popleft()
            try:
                self._run(direction, request)
            except BaseException as error:
                _fail(request, direction, error)
            else:
                request.done.set_result(None)

    def _run(self, direction: _Direction, request: _Request) -> None:
        start, byte_count = max(request.at, direction.free_at), pair_bytes(request.pairs)
        if request.after is not None and not request.after.done():
            request.after.synchronize()
            start = max(start, time.perf_counter())
        end = start + self._latency_s + byte_count / self.bytes_per_second
        if self._closing.wait(max(0.0, end - time.perf_counter())):
            raise RuntimeError("the link was closed")
        # Not the time now: what this thread overslept, or spent on the copy, does not slow down the link.
        direction.free_at = end
        # Inference mode belongs to a thread, and tensors made in it are read-only outside of it.
        with torch.inference_mode():
            self.move(request.pairs)
        if self._records is not None:
            self._records.append(CopyRecord(direction.to_host, byte_count, start, end))


@dataclass(frozen=True)
class _Request:
    """A requested copy, the time of the request, and the future of its end."""

    pairs: Pairs
    after: Event | None
    at: float
    done: Future[None] = field(default_factory=Future)


class _Direction:
    """One direction of a paced link: its thread, waiting copies, and the scheduled end of the last copy."""

    def __init__(self, to_host: bool):
        self.to_host = to_host
        # Whether they are urgent: the copies that wait.
        self.waiting: dict[bool, deque[_Request]] = {True: deque(), False: deque()}
        name = "to-host" if to_host else "to-device"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"cpu_kv-paced-{name}")
        self.free_at = 0.0


def _fail(request: _Request, direction: _Direction, error: BaseException) -> None:
    request.done.set_exception(failure(request.pairs, direction.to_host, error))
