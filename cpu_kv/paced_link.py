"""A link that takes its time, for machines without a GPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from cpu_kv.link import CopyRecord, Event, FutureEvent, Pairs, PastEvent, failure, pair_bytes


class PacedLink:
    """A link between CPU tensors that takes its time, for machines without a GPU.

    A copy takes at least ``latency_s`` + bytes / ``bytes_per_second``, counted from when its direction was
    free; what it wrote shows only at the end. Raises ValueError unless ``bytes_per_second`` is positive and
    ``latency_s`` is not negative.
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
        self._lanes = {to_host: _Lane(to_host) for to_host in (False, True)}

    def copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        lane, asked = self._lanes[to_host], _Asked(list(pairs), after, time.perf_counter())
        lane.waiting[urgent].append(asked)
        try:
            lane.thread.submit(self._serve, lane)
        except RuntimeError as error:  # closed
            return PastEvent(failure(pairs, to_host, error))
        return FutureEvent(asked.done)

    def record_event(self) -> Event:
        return PastEvent()

    def close(self) -> None:
        self._closing.set()
        for lane in self._lanes.values():
            lane.thread.shutdown(wait=True, cancel_futures=True)
            while waiting := lane.waiting[True] or lane.waiting[False]:
                _fail(waiting.popleft(), lane, RuntimeError("the link was closed"))

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
        """Makes the copies that were asked for. One, where no interrupt has cut short who asked before."""
        while waiting := lane.waiting[True] or lane.waiting[False]:
            asked = waiting.popleft()
            try:
                self._run(lane, asked)
            except BaseException as error:
                _fail(asked, lane, error)
            else:
                asked.done.set_result(None)

    def _run(self, lane: _Lane, asked: _Asked) -> None:
        start, byte_count = max(asked.at, lane.free_at), pair_bytes(asked.pairs)
        if asked.after is not None and not asked.after.done():
            asked.after.synchronize()
            start = max(start, time.perf_counter())
        end = start + self._latency_s + byte_count / self.bytes_per_second
        if self._closing.wait(max(0.0, end - time.perf_counter())):
            raise RuntimeError("the link was closed")
        # The pace is kept over many copies: what this thread overslept, or took to move, is made up for.
        lane.free_at = end
        # The mode of a thread: without it, tensors made in inference mode could not be written to here.
        with torch.inference_mode():
            self.move(asked.pairs)
        if self._records is not None:
            self._records.append(CopyRecord(lane.to_host, byte_count, start, end))


@dataclass(frozen=True)
class _Asked:
    """A copy that was asked for at some time, and what is known of it since."""

    pairs: Pairs
    after: Event | None
    at: float
    done: Future[None] = field(default_factory=Future)


class _Lane:
    """One direction of a paced link: its thread, and the time at which its last copy was due."""

    def __init__(self, to_host: bool):
        self.to_host = to_host
        self.waiting: dict[bool, deque[_Asked]] = {True: deque(), False: deque()}  # urgent ones, the others
        name = "to-host" if to_host else "to-device"
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"cpu_kv-paced-{name}")
        self.free_at = 0.0


def _fail(asked: _Asked, lane: _Lane, error: BaseException) -> None:
    asked.done.set_exception(failure(asked.pairs, lane.to_host, error))
