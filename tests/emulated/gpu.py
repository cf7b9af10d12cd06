"""Two CUDA devices emulated on the CPU: their streams, copy engines and memory, and how late they are.

Work is put into the queue of a stream, as on a GPU, and computed once something waits for it: `late` at the
last moment and no more than needed, `soon` at once, `random` anywhere between. `engine` runs it in the order
of a virtual clock, with one copy engine for each direction of a device, which ignores priorities: it goes on
with the stream that it serves as long as that stream's next copy is ready. Memory that has not been computed
yet, or that was given back, is NaN (or a number far out of range). `emulated.cuda` brings torch to run on it.
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
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from emulated.allocator import Block, CachingAllocator

EMULATED = "EMULATED_CUDA" in os.environ
"""Whether the tests run on it; its value is one of `SCHEDULES`."""
SCHEDULES = ("late", "soon", "random", "engine")
MEMORY = 24 * 2**30
"""Bytes of each device."""
DEVICES = int(os.environ.get("EMULATED_GPUS", "2"))
CUDA = torch.device("cuda", 0)
Run = Callable[[], object]


@dataclass
class Engine:
    """The copy engine of one direction of a device, under the schedule `engine`.

    Attributes:
        free_at: virtual time at which its newest copy ends.
        serves: the stream of that copy.
    """

    free_at: float = 0.0
    serves: Stream | None = None


@dataclass(frozen=True)
class Copy:
    """A copy that a copy engine has made, in seconds of virtual time."""

    device: int
    to_host: bool
    byte_count: int
    submitted: float
    start: float
    end: float


@dataclass
class Piece:
    """A piece of work in a stream.

    Attributes:
        awaits: a stream, and how many of its pieces have to be done before.
        engines: those that a copy of `byte_count` bytes needs.
        submitted: virtual time.
    """

    run: Run
    awaits: tuple[Stream, int] | None = None
    engines: tuple[tuple[Device, bool], ...] = ()
    byte_count: int = 0
    kernel: bool = False
    submitted: float = 0.0


class Stream:
    """What was enqueued, in order; the first `done` of `submitted` pieces are computed."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.priority = priority
        self.number = next(GPUS.numbers)
        self.haste = GPUS.random.choice((0.0, 0.1, 1.0))
        self.submitted = self.done = 0
        self.ends: list[float] = []  # virtual times of what is done
        self.freed: list[tuple[Tensor, list[tuple[Stream, int]]]] = []
        self.work: deque[Piece] = deque()
        GPUS.streams.add(self)

    def put(self, piece: Piece) -> None:
        with GPUS.lock:
            GPUS.now += LAUNCH_S
            piece.submitted = GPUS.now
            self.work.append(piece)
            self.submitted += 1
            GPUS.busy.add(self)
        GPUS.progress(self)

    def compute(self, upto: int) -> None:
        with GPUS.lock, _disable_current_modes(), torch.inference_mode():  # which writes tensors of any mode
            if GPUS.schedule == "engine":
                GPUS.simulate(lambda: self.done >= upto)
                return
            # Another thread may be in the midst of the piece that it counts as done.
            while self.done < upto:
                self.done += 1  # before it runs: what it waits for may lie in this stream again
                piece = self.work.popleft()
                self.ends.append(time.perf_counter())
                if piece.awaits is not None:
                    stream, place = piece.awaits
                    stream.compute(place)
                piece.run()

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.put(Piece(_nothing, awaits=(event.stream, event.place)))

    def wait_stream(self, stream: Stream) -> None:
        self.put(Piece(_nothing, awaits=(stream, stream.submitted)))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        refuse_in_capture("a stream is waited for")
        self.compute(self.submitted)

    def query(self) -> bool:
        with GPUS.lock:
            return self.done == self.submitted

    @property
    def clock(self) -> float:
        """Virtual time at which what is done has ended."""
        return self.ends[-1] if self.ends else 0.0


def _nothing() -> None:
    pass


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: object) -> None:
        self.stream: Stream | None = None
        self.place = 0
        self._queries = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.stream.put(Piece(_nothing))
        self.place = self.stream.submitted
        self._queries = 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        refuse_in_capture("an event is waited for")
        if self.stream is not None:
            self.stream.compute(self.place)
            GPUS.now = max(GPUS.now, self.time)

    def query(self) -> bool:
        self._queries += 1
        if GPUS.schedule == "engine":
            GPUS.catch_up()
        elif self._queries > 1 and self.stream is not None:  # who asks again waits for it
            self.stream.compute(self.place)
        with GPUS.lock:
            return self.stream is None or self.stream.done >= self.place

    @property
    def time(self) -> float:
        """When it was passed, in seconds of virtual time."""
        assert self.stream is not None
        return self.stream.ends[self.place - 1]

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.time - self.time)


class Graph:
    """`torch.cuda.CUDAGraph`: what a capture recorded is enqueued by a replay."""

    def __init__(self) -> None:
        self.work: list[Run] = []
        self.valid = True

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        if current_stream() is default_stream():
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        _thread.graph = self
        self._pool = current_device(), pool
        GPUS.open_pools.add(self._pool)
        GPUS.captures[self] = current_device()

    def capture_end(self) -> None:
        if _thread.graph is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        _thread.graph = None
        del GPUS.captures[self]
        if not self.valid:  # torch raises here, and leaves the memory pool open
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture\nCUDA kernel errors"
            )
        GPUS.open_pools.discard(self._pool)

    def replay(self) -> None:
        GPUS.counters.graphs += 1
        current_stream().put(Piece(lambda: [run() for run in self.work], kernel=True))


class _Thread(threading.local):
    device: int = 0
    graph: Graph | None = None

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}  # the current one of each device


@dataclass
class Device:
    """Memory and copy engines of one GPU."""

    number: int
    allocated: int = 0
    peak: int = 0
    fraction: float = 1.0
    allocator: CachingAllocator = field(default_factory=lambda: CachingAllocator(MEMORY))
    engines: dict[bool, Engine] = field(default_factory=lambda: {False: Engine(), True: Engine()})


@dataclass
class Counters:
    """What was launched: kernels (a graph is one), graphs among them, and copies by engines."""

    kernels: int = 0
    graphs: int = 0
    copies_to_device: int = 0
    copies_to_host: int = 0


LAUNCH_S = 5e-6
"""Virtual time that the host takes for a launch, and a kernel to run."""


class Gpus:
    """The devices: streams, memory, and how late they are.

    Attributes:
        now: virtual time of the host.
        bytes_per_second: of each copy engine.
        copies: those made under the schedule `engine`, in order.
        open_pools: memory pools that captures allocate to; of a failed one until it is ended.
        captures: captures under way in any thread, and the device of each.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.numbers = itertools.count()
        self.busy: set[Stream] = set()  # those that have work, and perhaps others
        self.schedule = "late"
        self.random = random.Random(0)
        self.sync_debug = "default"
        self.devices = [Device(number) for number in range(DEVICES)]
        # Of memory, by its address: another's by now; or its own from that point of its stream on.
        self.reused: set[int] = set()
        self.begins: dict[int, tuple[Stream, int]] = {}
        self.open_pools: set[object] = set()
        self.captures: dict[Graph, int] = {}
        self.counters = Counters()
        self.now = 0.0
        self.bytes_per_second = 25e9
        self.copies: list[Copy] = []

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
        self.refuse_beside_captures(index_of(device), "the device is waited for")
        for stream in self._in_order():
            if stream.device.index == index_of(device):
                stream.compute(stream.submitted)

    def refuse_beside_captures(self, device: int, what: str) -> None:
        """Raises RuntimeError, and invalidates the captures, if a stream of the device captures."""
        captures = [graph for graph, captured in list(self.captures.items()) if captured == device]
        for graph in captures:
            graph.valid = False
        if captures:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")

    def _in_order(self) -> list[Stream]:
        """Their streams, the default ones first: the same in every run."""
        return sorted(self.streams, key=lambda one: one.number)

    # The schedule `engine`.

    def simulate(self, reached: Callable[[], bool]) -> None:
        """Runs pieces in the order of virtual time until `reached`."""
        while not reached():
            first = min(self._startable(), key=lambda one: one[:3], default=None)
            if first is None:
                raise RuntimeError("deadlock: streams wait for what was never enqueued")
            self._execute(first[3], first[0])

    def catch_up(self) -> None:
        """Runs what has begun by the host's time."""
        with self.lock, _disable_current_modes(), torch.inference_mode():
            self.now += LAUNCH_S
            while True:
                first = min(self._startable(), key=lambda one: one[:3], default=None)
                if first is None or first[0] > self.now:
                    return
                self._execute(first[3], first[0])

    def _startable(self) -> Iterator[tuple[float, float, int, Stream]]:
        """When the next piece of each stream may start, when it is ready, its stream's number, and stream."""
        for stream in self.busy:
            ready = self._ready(stream)
            if ready is None:
                continue
            start = ready
            for device, to_host in stream.work[0].engines:
                engine = device.engines[to_host]
                if self._goes_on(engine, stream, (device, to_host)):
                    break
                start = max(start, engine.free_at)
            else:
                yield start, ready, stream.number, stream

    def _ready(self, stream: Stream) -> float | None:
        if not stream.work:
            return None
        piece = stream.work[0]
        ready = max(stream.clock, piece.submitted)
        if piece.awaits is not None:
            other, place = piece.awaits
            if other.done < place:
                return None
            ready = max(ready, other.ends[place - 1] if place else 0.0)
        return ready

    def _goes_on(self, engine: Engine, stream: Stream, which: tuple[Device, bool]) -> bool:
        """Whether an engine goes on with a copy of the stream that it serves, and not of `stream`."""
        served = engine.serves
        if served is None or served is stream or not served.work or which not in served.work[0].engines:
            return False
        ready = self._ready(served)
        return ready is not None and ready <= engine.free_at

    def _execute(self, stream: Stream, start: float) -> None:
        piece = stream.work.popleft()
        if not stream.work:
            self.busy.discard(stream)
        piece.run()
        end = start + (LAUNCH_S if piece.kernel else 0.0)
        if piece.engines:
            end = start + piece.byte_count / self.bytes_per_second
            for device, to_host in piece.engines:
                engine = device.engines[to_host]
                engine.free_at, engine.serves = end, stream
                self.copies.append(
                    Copy(device.number, to_host, piece.byte_count, piece.submitted, start, end)
                )
        stream.done += 1
        stream.ends.append(end)


GPUS = Gpus()
_thread = _Thread()


def index_of(device: object) -> int:
    """The number of a device given as torch takes it: None and `cuda` are the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index  # type: ignore[call-overload]
    return current_device() if index is None else index


def current_device() -> int:
    return _thread.device


def set_device(device: object) -> None:
    _thread.device = index_of(device)


@contextmanager
def on_device(device: object) -> Iterator[None]:
    """`torch.cuda.device`."""
    before = _thread.device
    _thread.device = index_of(device)
    try:
        yield
    finally:
        _thread.device = before


DEFAULT_STREAMS = [Stream(number) for number in range(DEVICES)]


def default_stream(device: object = None) -> Stream:
    return DEFAULT_STREAMS[index_of(device)]


def current_stream(device: object = None) -> Stream:
    index = index_of(device)
    return _thread.streams.get(index, DEFAULT_STREAMS[index])


def set_stream(stream: Stream) -> None:
    """`torch.cuda.set_stream`, which makes the stream's device the current one."""
    _thread.device = stream.device.index
    _thread.streams[stream.device.index] = stream


@contextmanager
def in_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before, replaced = current_stream(), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(replaced)
        set_stream(before)


@contextmanager
def captured(graph: Graph, pool: object = None, stream: Stream | None = None, **_: object) -> Iterator[None]:
    """`torch.cuda.graph`, which does not leave the stream where `capture_end` fails."""
    GPUS.synchronize()
    before = current_stream()
    set_stream(stream or Stream())
    graph.capture_begin(pool)
    try:
        yield
    finally:
        graph.capture_end()
        set_stream(before)


def end_allocate_to_pool(device: int, mempool_id: tuple[int, int]) -> None:
    """`torch._C._cuda_endAllocateToPool`."""
    GPUS.open_pools.discard((device, mempool_id))


def capturing() -> bool:
    return _thread.graph is not None


def refuse_in_capture(what: str) -> None:
    if _thread.graph is not None:
        _thread.graph.valid = False
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")


def await_stream(what: object, device: object = None) -> None:
    """The host waits for the current stream, where that is allowed."""
    if GPUS.sync_debug == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    current_stream(device).synchronize()


def enqueue(run: Run, device: object) -> None:
    """Launches a kernel in the device's current stream."""
    if _thread.graph is not None:
        _thread.graph.work.append(run)
    else:
        GPUS.counters.kernels += 1
        current_stream(device).put(Piece(run, kernel=True))


def enqueue_copy(run: Run, byte_count: int, *, to_host: bool, device: object) -> None:
    """Lets a copy engine copy between the host and a device, in the device's current stream."""
    if to_host:
        GPUS.counters.copies_to_host += 1
    else:
        GPUS.counters.copies_to_device += 1
    engines = ((GPUS.devices[index_of(device)], to_host),)
    current_stream(device).put(Piece(run, engines=engines, byte_count=byte_count))


def enqueue_peer_copy(run: Run, byte_count: int, source: object, to: object) -> None:
    """Copies from device to device: in the source's stream, which waits for the other's and is waited for.

    Without peer access both engines take part.
    """
    theirs, ours = current_stream(source), current_stream(to)
    GPUS.counters.copies_to_host += 1
    GPUS.counters.copies_to_device += 1
    engines = ((GPUS.devices[index_of(source)], True), (GPUS.devices[index_of(to)], False))
    theirs.wait_stream(ours)
    theirs.put(Piece(run, engines=engines, byte_count=byte_count))
    ours.wait_stream(theirs)


class Memory:
    """An allocation of a device. Given back, it goes to the next one that its own stream asks for."""

    def __init__(self, content: Tensor, device: object) -> None:
        self.content = content
        self.stream = current_stream(device)
        self.device = GPUS.devices[index_of(device)]
        freed, self.stream.freed = self.stream.freed, []
        for given_back, used in freed:
            for awaits in used:
                self.stream.put(Piece(_nothing, awaits=awaits))
            self.stream.put(Piece(functools.partial(_reuse, given_back)))
        self.address = content.untyped_storage().data_ptr()
        GPUS.reused.discard(self.address)
        if freed and content.nbytes:  # empty ones all lie at 0
            GPUS.begins[self.address] = self.stream, self.stream.submitted
        self.used_by: set[Stream] = set()
        self.keep = capturing()  # in the graph's own pool
        self.block = self._allocate(content.nbytes)
        self.device.allocated += content.nbytes
        self.device.peak = max(self.device.peak, self.device.allocated)

    def _allocate(self, size: int) -> Block | None:
        """Raises OutOfMemoryError."""
        allocator = self.device.allocator
        allocator.capacity = int(self.device.fraction * MEMORY)
        block = allocator.allocate(size, self.stream) if size else None
        if size and block is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes on emulated GPU {self.device.number}: "
                f"{allocator.reserved} of {allocator.capacity} are reserved"
            )
        return block

    def __del__(self) -> None:
        if not hasattr(self, "block"):
            return  # there was no memory for it
        if self.block is not None:
            self.device.allocator.free(self.block)
        self.device.allocated -= self.content.nbytes
        GPUS.begins.pop(self.address, None)
        if not self.keep:
            used = [(other, other.submitted) for other in self.used_by]
            self.stream.freed.append((self.content, used))


def _reuse(content: Tensor) -> None:
    spoil(content)
    if content.nbytes:
        GPUS.reused.add(content.untyped_storage().data_ptr())


def check_owned(content: Tensor) -> None:
    address = content.untyped_storage().data_ptr()
    if address in GPUS.reused:
        raise RuntimeError("CUDA error: memory is written that was given back, and is another's by now")
    stream, place = GPUS.begins.get(address, (DEFAULT_STREAMS[0], 0))
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

    def covers(self, address: int, size: int) -> bool:
        """Whether kernels may read it: all of it is page-locked, in however many pieces."""
        for start, end in sorted(self.pieces.items()):
            if start <= address < end:
                size -= end - address
                address = end
        return size <= 0

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
