"""Moves KV between a sequence and the compute: streams layers ahead of use, writes back, reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cpu_kv.layout import KeysValues, cut_alike, parts_of_pages
from cpu_kv.link import CopyFailed, Event, Link, Pairs, pair_bytes
from cpu_kv.staging import HostBuffers, StagingRing, StagingSlot
from cpu_kv.store import SequenceKV


@dataclass
class TransferCounters:
    """What crossed the link, in bytes and copies, and how long the host waited for it, in ms.

    ``bytes_abandoned``: the part of ``bytes_to_device`` that belongs to streams which were closed before
    it was read. ``copies``: transfers, each of contiguous memory. Over CUDA the compute waits instead of the
    host, and ``wait_ms`` stays near 0.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    bytes_abandoned: int = 0
    copies: int = 0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class _WriteBack:
    """A write-back under way. It holds its source, which may not be freed before.

    ``arrived``: where it arrives, ``[layers, 2, kv_heads, tokens, head_dim]``, before it is put into pages;
    None: in the pages themselves.
    """

    layers: range
    tokens: int
    source: Tensor
    written: Event
    arrived: Tensor | None = None


@dataclass(frozen=True)
class PendingCopy:
    """A copy from host memory to ``there``, on the device, which has it once ``arrived``."""

    there: Tensor
    arrived: Event


class TransferEngine:
    """Moves the KV of one sequence over a link; used from one thread.

    ``segment_tokens``: tokens in a staging buffer, rounded up to whole pages; ``ring_buffers``: how many
    buffers there are, that is, how far the link may run ahead, into the next stream too. A link that is
    ``in_place`` needs none: the compute is given the store's own views. The engine does not close its link,
    which other engines may share.
    """

    # Committed KV never changes, so the link may read it at any time, ahead of every decision. What is being
    # written back is not committed before its copy is done: only then does the sequence advance. Every copy
    # is of contiguous memory on both sides: one transfer, whatever the number of heads.

    PROMPT_WRITES = 2  # under way at a time: each holds a copy of its KV on the device
    READ_TOKENS = 64  # read at a time, of all layers: the host memory that they go by way of is kept

    def __init__(
        self, sequence: SequenceKV, link: Link, *, segment_tokens: int = 4096, ring_buffers: int = 3
    ):
        self.sequence = sequence
        self.link = link
        self.counters = TransferCounters()
        self._ring: StagingRing | None = None
        if not link.in_place:
            self._ring = StagingRing(link, sequence.layout, segment_tokens, ring_buffers)
        self._writes: deque[_WriteBack] = deque()
        self._streams: deque[LayerStream] = deque()  # neither at their end nor closed, in their order
        # The way of a segment: planned (layer, start, end), then copied to pages of a slot, then read.
        self._planned: deque[tuple[LayerStream, int, int, int]] = deque()
        self._copied: deque[tuple[LayerStream, Tensor, StagingSlot]] = deque()
        self._incoming = HostBuffers(link, sequence.layout.dtype, count=1)
        self._outgoing = HostBuffers(link, sequence.layout.dtype)
        self._closed = False

    def stream(self, end: int, *, start: int = 0) -> LayerStream:
        """One pass over the tokens ``start`` .. ``end``, whole pages, of all layers.

        Prefetching starts at once, as far as the ring has room. While streams before it are not at their
        end, what is left of them goes first: so the link runs ahead into the next pass. Waits for
        write-backs only if they are part of the pass. Raises ValueError where a page is cut or a layer has
        fewer tokens.
        """
        self._check_open()
        self.sequence.layout.check_whole(start, end)
        self.collect()
        if self.sequence.length < end:
            self.flush()
        if not 0 <= start <= end <= self.sequence.length:
            raise ValueError(f"tokens {start} to {end}: {self.sequence.length} are present in every layer")
        stream = LayerStream(self, start, end)
        self._streams.append(stream)
        if self._ring is not None:
            step = self._ring.segment_tokens
            self._planned += (
                (stream, layer, at, min(at + step, end))
                for layer in range(self.sequence.layout.layers)
                for at in range(start, end, step)
            )
            try:
                self._prefetch(self._ring)
            except BaseException:
                stream.close()
                raise
        return stream

    def collect(self) -> None:
        """Count the write-backs that are done, without waiting. Raises CopyFailed where one failed."""
        while self._writes and self._writes[0].written.done():
            self._finish_oldest_write()

    def write_back(self, kv: Tensor) -> None:
        """Append ``[layers, 2, kv_heads, n, head_dim]`` on the link's device to every layer, asynchronously.

        They reach the host in one copy. The sequence has the tokens once that is collected: at the latest
        after ``flush``, before which ``kv`` must not change, and the sequence must not be appended to or
        truncated by others. Waits for the write-back before. Raises ValueError for the wrong shape or dtype,
        MemoryError where room cannot be had, CopyFailed where an earlier write-back failed.
        """
        self._check_open()
        layers = range(self.sequence.layout.layers)
        count = self.sequence.layout.tokens_in(kv[0, 0], kv[0, 1])
        if self.link.in_place:
            for layer in layers:
                self.sequence.append(layer, kv[layer, 0], kv[layer, 1])
            return
        self.flush()
        start, layout = self.sequence.length, self.sequence.layout
        page, end = layout.page_size, layout.pages(start + count) * layout.page_size
        for layer in layers:  # room is had now or not at all: tokens that some layers lack would be a hole
            self.sequence.memory(layer, start // page * page, end)
        packed = kv.detach().contiguous()
        arrived = self._incoming.take(packed.shape)
        written = self._copy([(arrived, packed)], after=self.link.record_event(), to_host=True)
        self._incoming.hold(written)
        self._writes.append(_WriteBack(layers, count, packed, written, arrived))

    def write_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append ``[kv_heads, n, head_dim]`` on the link's device to the full pages of ``layer``.

        As ``write_back``, but straight to the pages; of the last one what follows the tokens is overwritten.
        """
        self._check_open()
        layout = self.sequence.layout
        count = layout.tokens_in(keys, values)
        pages = layout.pages(count)
        packed = torch.empty(layout.pages_shape(pages), dtype=layout.dtype, device=keys.device)
        for place, part in cut_alike(parts_of_pages(packed, 0, count), keys.detach(), values.detach()):
            place.copy_(part)
        while len(self._writes) >= self.PROMPT_WRITES:
            self._finish_oldest_write()
        ahead = sum(write.tokens for write in self._writes if layer in write.layers)
        start = self.sequence.layer_length(layer) + ahead
        places = self.sequence.memory(layer, start, start + pages * layout.page_size)
        sources = packed.view(-1).split([place.numel() for place in places])
        pairs = list(zip(places, sources, strict=True))
        written = self._copy(pairs, after=self.link.record_event(), to_host=True)
        self._writes.append(_WriteBack(range(layer, layer + 1), count, packed, written))
        self.collect()

    def finish_compute(self) -> None:
        """Let the host wait for all compute enqueued so far."""
        self.link.record_event().synchronize()

    def load(self, into: Tensor, start: int) -> None:
        """Copy whole pages of every layer, from token ``start`` on, to the link's device, and wait.

        ``into`` is ``[layers, pages, 2, kv_heads, page_size, head_dim]``. Raises CopyFailed.
        """
        self._check_open()
        self.flush()
        end = start + into.shape[1] * self.sequence.layout.page_size
        copied: list[Event] = []
        for layer, pages in enumerate(into):
            pieces = self.sequence.memory(layer, start, end)
            places = pages.view(-1).split([piece.numel() for piece in pieces])
            copied.append(self._copy(list(zip(places, pieces, strict=True)), after=self.link.record_event()))
        for event in copied:
            event.synchronize()

    def flush(self) -> None:
        """Wait for all write-backs.

        Raises CopyFailed where one failed; it and all later ones are dropped.
        """
        while self._writes:
            self._finish_oldest_write()

    def read(self, start: int, end: int) -> Tensor:
        """The tokens ``start`` .. ``end``, ``[layers, 2, kv_heads, end - start, head_dim]``, as ``fetch``."""
        layout = self.sequence.layout
        shape = (layout.layers, 2, layout.kv_heads, end - start, layout.head_dim)
        out = torch.empty(shape, dtype=layout.dtype, device=self.link.device)
        portion = end - start if self.link.in_place else self.READ_TOKENS
        for part in out.split(portion, dim=3) if start < end else ():
            part.copy_(self.fetch(part.shape, partial(self._put_together, start)))
            start += part.shape[3]
        return out

    def _put_together(self, start: int, out: Tensor) -> None:
        for layer, (keys, values) in enumerate(out):
            parts = self.sequence.views(layer, start, start + keys.shape[1])
            for part, place in cut_alike(parts, keys, values):
                place.copy_(part)

    def fetch(self, shape: Sequence[int], fill: Callable[[Tensor], object]) -> Tensor:
        """What ``fill`` puts into host memory of this shape, on the link's device.

        Waits for write-backs; compute that follows may read it as it is.
        """
        self._check_open()
        self.flush()
        if not self.link.in_place:
            return self.await_copy(self.send(shape, fill))
        there = torch.empty(tuple(shape), dtype=self.sequence.layout.dtype)
        fill(there)
        return there

    def send(self, shape: Sequence[int], fill: Callable[[Tensor], object]) -> PendingCopy:
        """Send what ``fill`` puts into host memory of this shape and of the layout's dtype.

        It overtakes what is carried ahead of its use.
        """
        packed = self._outgoing.take(shape)
        fill(packed)
        there = torch.empty_like(packed, device=self.link.device)
        # Compute enqueued before may still use what lies at the destination.
        arrived = self._copy([(there, packed)], after=self.link.record_event(), urgent=True)
        self._outgoing.hold(arrived)
        return PendingCopy(there, arrived)

    def await_copy(self, copy: PendingCopy) -> Tensor:
        """Returns what was sent, for compute that follows. Raises CopyFailed."""
        self._wait(copy.arrived)
        return copy.there

    def close(self) -> None:
        """Wait for every copy under way and let the ring go. Raises where a write-back failed. Idempotent."""
        self._closed = True
        with ExitStack() as closing:
            if self._ring is not None:
                closing.callback(setattr, self, "_ring", None)
                closing.callback(self._ring.drain)
            closing.callback(self._outgoing.drain)
            closing.callback(self._incoming.drain)
            closing.callback(self.flush)
            for stream in self._streams:
                closing.callback(stream.close)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transfer engine is closed")

    def _prefetch(self, ring: StagingRing) -> None:
        """Enqueues copies of the next segments, as far as the ring has room.

        The link itself waits for compute that still reads a buffer. So all that the ring may hold is enqueued
        at any time, whatever the host waits for, and the link idles only where the ring is full.
        """
        while self._planned and ring.room:
            slot, (stream, layer, start, end) = ring.acquire(), self._planned.popleft()
            pages = slot.memory[: self.sequence.layout.pages(end - start)]
            pieces = self.sequence.memory(layer, start, end)
            places = pages.view(-1).split([piece.numel() for piece in pieces])
            slot.ready = self._copy(list(zip(places, pieces, strict=True)), after=slot.free)
            self._copied.append((stream, pages, slot))

    def _copy(
        self, pairs: Pairs, after: Event | None = None, *, to_host: bool = False, urgent: bool = False
    ) -> Event:
        self.counters.copies += len(pairs)
        if to_host:
            self.counters.bytes_to_host += pair_bytes(pairs)
        else:
            self.counters.bytes_to_device += pair_bytes(pairs)
        return self.link.copy(pairs, after, to_host=to_host, urgent=urgent)

    def _wait(self, event: Event) -> None:
        start = time.perf_counter()
        event.wait()
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)

    def _finish_oldest_write(self) -> None:
        write = self._writes[0]
        start = time.perf_counter()
        try:
            write.written.synchronize()
        except CopyFailed:
            # The later ones would leave a hole. Their pages may go to others once nothing writes there.
            dropped, self._writes = self._writes, deque()
            for later in dropped:
                with suppress(CopyFailed):
                    later.written.synchronize()
            raise
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)
        self._writes.popleft()
        for at, layer in enumerate(write.layers):
            if write.arrived is None:
                self.sequence.advance(layer, write.tokens)
            else:
                self.sequence.append(layer, *write.arrived[at])


class LayerStream:
    """One pass over the tokens ``start`` .. ``end`` of all layers. Made by ``TransferEngine.stream``.

    Ask for the segments of one layer after the other, and of one stream of the engine after the other.
    """

    def __init__(self, engine: TransferEngine, start: int, end: int):
        self.start = start
        self.end = end
        self._engine = engine
        self._layer = 0  # whose turn it is
        self._reading: StagingSlot | None = None
        self._closed = False

    def segments(self, layer: int) -> Iterator[KeysValues]:
        """K and V ``[pages, kv_heads, page_size, head_dim]`` of ``layer`` on the link's device, in order.

        Each pair is valid until the next one is asked for. Raises RuntimeError where it is not the layer's
        or the stream's turn, CopyFailed where the link fails.
        """
        engine = self._engine
        if self._closed or layer != self._layer or self._reading is not None:
            raise RuntimeError(f"it is not the turn of layer {layer}, but of {self._layer}")
        if engine._streams[0] is not self:
            raise RuntimeError("the stream before this one is neither at its end nor closed")
        if engine._ring is None:
            pairs: Iterator[KeysValues] = iter(engine.sequence.views(layer, self.start, self.end))
        else:
            pairs = self._through(engine._ring)
        for pair in pairs:
            yield pair
            if self._closed:
                raise RuntimeError("the stream was closed while its segments were read")
        self._layer += 1
        if self._layer == engine.sequence.layout.layers:
            engine._streams.popleft()

    def _through(self, ring: StagingRing) -> Iterator[KeysValues]:
        engine = self._engine
        for _ in range(self.start, self.end, ring.segment_tokens):
            _, pages, self._reading = engine._copied.popleft()
            # The host enqueues compute no further ahead of the device than the ring is deep: a device's queue
            # that is full would block the launches of every other thread. The copy has waited for this too.
            self._reading.free.synchronize()
            engine._wait(self._reading.ready)
            yield pages[:, 0], pages[:, 1]
            ring.release(self._reading)
            self._reading = None
            engine._prefetch(ring)

    def close(self) -> None:
        """Abandon what is left. The ring is whole again at once. Idempotent."""
        # Copies under way into released slots do no harm: the next copy into a slot comes after them.
        engine, ring = self._engine, self._engine._ring
        self._closed = True
        if self in engine._streams:
            engine._streams.remove(self)
        if ring is None:
            return
        copied = [one for one in engine._copied if one[0] is self]
        engine._copied = deque(one for one in engine._copied if one[0] is not self)
        engine._planned = deque(one for one in engine._planned if one[0] is not self)
        for _, pages, slot in copied:
            ring.release(slot)
            engine.counters.bytes_abandoned += pages.nbytes
        if self._reading is not None:
            ring.release(self._reading)
            self._reading = None
        if not engine._closed:
            engine._prefetch(ring)
