"""A CUDA device emulated on the CPU: its streams, its memory, and how late it is.

What runs on it is put into the queue of a stream, as on a card, and computed once something waits for it:
`late` at the last moment and no more than needed, `soon` at once, `random` anywhere between. Memory that has
not been computed yet, or that was given back, is NaN (or a number far out of range). `emulated_cuda` brings
torch to run on it.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

EMULATED = "EMULATED_CUDA" in os.environ
"""Whether the tests run on it; its value is one of `SCHEDULES`."""
SCHEDULES = ("late", "soon", "random")
CUDA = torch.device("cuda", 0)
Run = Callable[[], object]


class Stream:
    """What was enqueued, in order; the first `done` of `submitted` pieces are computed."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = CUDA
        self.number = next(CARD.numbers)
        self.haste = CARD.random.choice((0.0, 0.1, 1.0))
        self.submitted = self.done = 0
        self.freed: list[Run] = []
        self._work: deque[Run] = deque()
        CARD.streams.add(self)

    def put(self, run: Run) -> None:
        with CARD.lock:
            self._work.append(run)
            self.submitted += 1
        CARD.progress(self)

    def compute(self, upto: int) -> None:
        # Another thread may be in the midst of the piece that it counts as done.
        with CARD.lock, _disable_current_modes(), torch.inference_mode():  # which writes tensors of any mode
            while self.done < upto:
                self.done += 1  # before it runs: what it waits for may lie in this stream again
                self._work.popleft()()

    def wait_event(self, event: Event) -> None:
        stream, place = event.stream, event.place
        if stream is not None:
            self.put(functools.partial(stream.compute, place))

    def wait_stream(self, stream: Stream) -> None:
        self.put(functools.partial(stream.compute, stream.submitted))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        refuse_in_capture("a stream is waited for")
        self.compute(self.submitted)

    def query(self) -> bool:
        with CARD.lock:
            return self.done == self.submitted


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.stream: Stream | None = None
        self.place = 0
        self._queries = 0
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.stream.put(self._reached)
        self.place = self.stream.submitted
        self._queries = 0

    def _reached(self) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        refuse_in_capture("an event is waited for")
        if self.stream is not None:
            self.stream.compute(self.place)

    def query(self) -> bool:
        self._queries += 1
        if self._queries > 1 and self.stream is not None:  # who asks again waits for it
            self.stream.compute(self.place)
        with CARD.lock:
            return self.stream is None or self.stream.done >= self.place

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._time - self._time)


class Graph:
    """`torch.cuda.CUDAGraph`: what a capture recorded is enqueued by a replay."""

    def __init__(self) -> None:
        self.work: list[Run] = []

    def replay(self) -> None:
        current_stream().put(lambda: [run() for run in self.work])


class _Thread(threading.local):
    streams: list[Stream]
    graph: Graph | None = None

    def __init__(self) -> None:
        self.streams = []


class Card:
    """The device: its streams, its memory, and how late it is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.numbers = itertools.count()
        self.schedule = "late"
        self.random = random.Random(0)
        self.sync_debug = "default"
        self.allocated = self.peak = 0
        # Of memory, by its address: another's by now; or its own from that point of its stream on.
        self.reused: set[int] = set()
        self.begins: dict[int, tuple[Stream, int]] = {}
        self.fraction = 1.0

    def progress(self, stream: Stream) -> None:
        """What it computes of its own accord."""
        if self.schedule == "soon":
            stream.compute(stream.submitted)
        elif self.schedule == "random":
            with self.lock:
                for one in self._in_order():
                    if self.random.random() < one.haste:
                        one.compute(self.random.randint(one.done, one.submitted))

    def synchronize(self, device: object = None) -> None:
        refuse_in_capture("the device is waited for")
        for stream in self._in_order():
            stream.compute(stream.submitted)

    def _in_order(self) -> list[Stream]:
        """Its streams, the default one first: the same in every run."""
        return sorted(self.streams, key=lambda one: one.number)


CARD = Card()
DEFAULT_STREAM = Stream()
_thread = _Thread()


def current_stream(device: object = None) -> Stream:
    return _thread.streams[-1] if _thread.streams else DEFAULT_STREAM


@contextmanager
def in_stream(stream: Stream | None) -> Iterator[None]:
    _thread.streams.append(stream or current_stream())
    try:
        yield
    finally:
        _thread.streams.pop()


@contextmanager
def captured(graph: Graph, pool: object = None, stream: Stream | None = None, **_: object) -> Iterator[None]:
    CARD.synchronize()
    with in_stream(stream or Stream()):
        _thread.graph = graph
        try:
            yield
        finally:
            _thread.graph = None


def capturing() -> bool:
    return _thread.graph is not None


def refuse_in_capture(what: str) -> None:
    if capturing():
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def await_stream(what: object) -> None:
    """The host waits for the current stream, where that is allowed."""
    if CARD.sync_debug == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    current_stream().synchronize()


def enqueue(run: Run) -> None:
    if _thread.graph is not None:
        _thread.graph.work.append(run)
    else:
        current_stream().put(run)


class Memory:
    """An allocation of the device. Given back, it goes to the next one that its own stream asks for."""

    def __init__(self, content: Tensor) -> None:
        self.content = content
        self.stream = current_stream()
        freed, self.stream.freed = self.stream.freed, []
        for spoil in freed:
            self.stream.put(spoil)
        self.address = content.untyped_storage().data_ptr()
        CARD.reused.discard(self.address)
        if freed and content.nbytes:  # empty ones all lie at 0
            CARD.begins[self.address] = self.stream, self.stream.submitted
        self.used_by: set[Stream] = set()
        self.keep = capturing()  # in the graph's own pool
        CARD.allocated += content.nbytes
        CARD.peak = max(CARD.peak, CARD.allocated)

    def __del__(self) -> None:
        CARD.allocated -= self.content.nbytes
        CARD.begins.pop(self.address, None)
        if not self.keep:
            used = [(other, other.submitted) for other in self.used_by]
            self.stream.freed.append(functools.partial(_reuse, self.content, used))


def _reuse(content: Tensor, used: list[tuple[Stream, int]]) -> None:
    for stream, place in used:
        stream.compute(place)
    spoil(content)
    if content.nbytes:
        CARD.reused.add(content.untyped_storage().data_ptr())


def check_owned(content: Tensor) -> None:
    address = content.untyped_storage().data_ptr()
    if address in CARD.reused:
        raise RuntimeError("CUDA error: memory is written that was given back, and is another's by now")
    stream, place = CARD.begins.get(address, (DEFAULT_STREAM, 0))
    if stream.done < place:
        raise RuntimeError("CUDA error: memory is written while it may still be another's")


def spoil(content: Tensor) -> None:
    kind = content.dtype
    if content.is_floating_point():
        content.fill_(math.nan)
    elif kind == torch.bool:
        content.fill_(True)
    else:
        content.fill_(torch.iinfo(kind).max)


class _PinnedBytes(bytearray):
    """Has weak references."""


class Pinned:
    """Page-locked pieces of host memory: start and end of each."""

    def __init__(self) -> None:
        self.pieces: dict[int, int] = {}

    def register(self, address: int, size: int, flags: int = 0) -> int:
        if self.holds(address, 1):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.pieces[address] = address + size
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.pieces.pop(address, None) is not None else 713

    def holds(self, address: int, size: int) -> bool:
        """Whether the memory is page-locked. A copy that crosses pieces is refused, as CUDA does."""
        for start, end in list(self.pieces.items()):
            if start <= address < end:
                if address + size > end:
                    raise RuntimeError("CUDA error: invalid argument: a copy crosses pieces of locked memory")
                return True
        return False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = max(1, math.prod(shape) * dtype.itemsize)
        memory = _PinnedBytes(size)
        made = torch.frombuffer(memory, dtype=torch.uint8)
        self.register(made.data_ptr(), size)
        weakref.finalize(memory, self.unregister, made.data_ptr())
        there = made[: math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
        spoil(there)
        return there


PINNED = Pinned()


def is_pinned(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return PINNED.holds(tensor.data_ptr(), span * tensor.itemsize)
