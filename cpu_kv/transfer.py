"""Moves KV between a sequence and the compute: streams layers ahead of use, writes back, gathers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.link import CopyFailed, Link, Ticket, TransferStalled, pair_bytes
from cpu_kv.staging import StagingRing, StagingSlot
from cpu_kv.store import KeysValues, SequenceKV, cut_alike


@dataclass
class TransferCounters:
    """What crossed the link, in bytes and copies, and how long the host waited for it, in ms.

    ``bytes_abandoned``: the part of ``bytes_to_device`` that belongs to streams which were closed before
    it was read. Over CUDA the compute waits instead of the host, and ``wait_ms`` stays near 0.
    """

    bytes_to_device: int = 0
    bytes_to_host: int = 0
    bytes_abandoned: int = 0
    copies: int = 0
    wait_ms: float = 0.0


@dataclass(frozen=True)
class _Segment:
    """Tokens start .. end of a layer: what one staging buffer holds."""

    layer: int
    start: int
    end: int


@dataclass(frozen=True)
class _WriteBack:
    """A write-back under way. It holds its source, which may not be freed before."""

    layer: int
    tokens: int
    source: KeysValues
    ticket: Ticket


class TransferEngine:
    """Moves the KV of one sequence over a link; used from one thread.

    ``segment_tokens``: tokens in a staging buffer; ``ring_buffers``: how many there are, that is, how far
    the link may run ahead, into the next stream too. A link that is ``in_place`` needs none: the compute is
    given the store's own views. The engine does not close its link, which other engines may share.
    """

    # Committed KV never changes, so the link may read it at any time, ahead of every decision. What is being
    # written back is not committed before its copy is done: only then does the sequence advance.

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
        self._closed = False

    def stream(self, end: int, layers: Sequence[int] | None = None, *, start: int = 0) -> LayerStream:
        """One pass over the tokens ``start`` .. ``end`` of ``layers`` (default: all), in that order.

        Prefetching starts at once, as far as the ring has room. While streams before it are not at their
        end, what is left of them goes first: so the link runs ahead into the next pass. Waits for
        write-backs only if they are part of the pass. Raises ValueError where a layer has fewer tokens.
        """
        self._check_open()
        layers = range(self.sequence.layout.layers) if layers is None else layers
        if any(self.sequence.layer_length(layer) < end for layer in layers):
            self.flush()
        for layer in layers:
            self.sequence.views(layer, start, end)  # raises where they are not present
        stream = LayerStream(self, self._ring, start, end, layers)
        self._streams.append(stream)
        self._prefetch()
        return stream

    def collect(self) -> None:
        """Count the write-backs that are done, without waiting. Raises CopyFailed where one failed."""
        while self._writes and self._writes[0].ticket.done():
            self._finish_oldest_write()

    def write_back(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Append ``[kv_heads, n, head_dim]`` on the link's device to ``layer``, asynchronously.

        The sequence counts the tokens as present once they are there: at the latest after ``flush``, before
        which the sequence must not be appended to or truncated by others. Raises ValueError for the wrong
        shape or dtype, CopyFailed where an earlier write-back failed.
        """
        self._check_open()
        count = self.sequence.layout.tokens_in(keys, values)
        ahead = sum(write.tokens for write in self._writes if write.layer == layer)
        pairs = cut_alike(self.sequence.slots(layer, count, ahead), keys.detach(), values.detach())
        ticket = self._copy(pairs, after=self.link.mark(), to_host=True)
        self._writes.append(_WriteBack(layer, count, (keys, values), ticket))
        self.collect()

    def finish_compute(self) -> None:
        """Let the host wait for all compute enqueued so far.

        Raises TransferStalled, for the copy that the compute waits for.
        """
        try:
            self.link.mark().synchronize()
        except TransferStalled:
            for stream in self._streams:
                for _, slot in stream._copying:
                    slot.ready.synchronize()  # raises for the first one that is not done
            raise

    def flush(self) -> None:
        """Wait for all write-backs.

        Raises CopyFailed where one failed; it and all later ones are dropped.
        """
        while self._writes:
            self._finish_oldest_write()

    def gather_chunks(
        self, layer: int, chunks: Tensor, chunk_size: int, out: KeysValues | None = None
    ) -> KeysValues:
        """``SequenceKV.gather_chunks`` to the link's device; ``chunks`` may be on any device.

        Waits for write-backs. Compute that follows may read the result as it is.
        """
        self._check_open()
        self.flush()
        chunks = chunks.cpu()
        if self.link.in_place:
            return self.sequence.gather_chunks(layer, chunks, chunk_size, out)
        layout = self.sequence.layout
        shape = (layout.kv_heads, chunks.shape[1] * chunk_size, layout.head_dim)
        if out is None:
            memory = torch.empty(2, *shape, dtype=layout.dtype, device=self.link.device)
            out = (memory[0], memory[1])
        elif any(tensor.shape != shape or tensor.dtype != layout.dtype for tensor in out):
            raise ValueError(f"out must be two tensors {list(shape)} {layout.dtype}")
        # Only page-locked memory leaves the host free during the copy. torch's pool keeps it until the copy
        # is done.
        pin = self.link.device.type == "cuda"
        memory = torch.empty(2, *shape, dtype=layout.dtype, pin_memory=pin)
        packed = self.sequence.gather_chunks(layer, chunks, chunk_size, (memory[0], memory[1]))
        self.send([(out[0], packed[0]), (out[1], packed[1])])
        return out

    def read(self, layer: int, start: int, end: int, out: KeysValues) -> None:
        """Copy the tokens ``start`` .. ``end`` of ``layer`` to ``out`` ``[kv_heads, end - start, head_dim]``.

        ``out`` is on the link's device. Waits for write-backs; compute that follows may read it as it is.
        """
        self._check_open()
        self.flush()
        runs = self.sequence.views(layer, start, end)
        self.send([(buffer, run) for run, buffer in cut_alike(runs, *out)])

    def send(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy (destination on the device, source in host memory); compute that follows may read them."""
        self.await_sent(self.start_sending(pairs))

    def start_sending(self, pairs: list[tuple[Tensor, Tensor]]) -> Ticket:
        """The same, for compute that follows ``await_sent``."""
        # Compute enqueued before may still read what lies at the destinations. What is waited for goes before
        # what is carried ahead.
        return self._copy(pairs, after=self.link.mark(), urgent=True)

    def await_sent(self, ticket: Ticket) -> None:
        """Compute that follows may read what was sent. Raises CopyFailed and TransferStalled."""
        self._wait(ticket)

    def close(self) -> None:
        """Wait for every copy under way and let the ring go. Raises where a write-back failed. Idempotent."""
        self._closed = True
        try:
            for stream in list(reversed(self._streams)):
                stream.close()
            self.flush()
        finally:
            ring, self._ring = self._ring, None
            if ring is not None:
                ring.drain()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transfer engine is closed")

    def _prefetch(self) -> None:
        for stream in self._streams:
            stream._fill()
            if stream._planned:
                break  # the ring is full, and what comes first goes first

    def _copy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        after: Ticket,
        *,
        to_host: bool = False,
        urgent: bool = False,
    ) -> Ticket:
        if not self.link.in_place:
            self.counters.copies += 1
            if to_host:
                self.counters.bytes_to_host += pair_bytes(pairs)
            else:
                self.counters.bytes_to_device += pair_bytes(pairs)
        return self.link.copy(pairs, after, to_host=to_host, urgent=urgent)

    def _wait(self, ticket: Ticket) -> None:
        start = time.perf_counter()
        ticket.wait()
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)

    def _finish_oldest_write(self) -> None:
        write = self._writes[0]
        start = time.perf_counter()
        try:
            write.ticket.synchronize()
        except CopyFailed:
            self._writes.clear()  # the later ones would leave a hole
            raise
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)
        self._writes.popleft()
        self.sequence.advance(write.layer, write.tokens)


class LayerStream:
    """One pass over the tokens ``start`` .. ``end`` of the layers. Made by ``TransferEngine.stream``.

    Ask for the segments of the layers in the order given to it, all of one layer before the next, and all
    of one stream before the next one of the engine.
    """

    def __init__(
        self, engine: TransferEngine, ring: StagingRing | None, start: int, end: int, layers: Sequence[int]
    ):
        self.start = start
        self.end = end
        self._engine = engine
        self._ring = ring
        self._layers = deque(layers)
        self._closed = False
        # The way of a segment: planned, then being copied, then read by the compute.
        self._planned: deque[_Segment] = deque()
        self._copying: deque[tuple[_Segment, StagingSlot]] = deque()
        self._reading: StagingSlot | None = None
        if ring is not None:
            step = ring.segment_tokens
            self._planned.extend(
                _Segment(layer, at, min(at + step, end)) for layer in layers for at in range(start, end, step)
            )

    @property
    def finished(self) -> bool:
        """Whether nothing is left of the stream."""
        return not (self._layers or self._planned or self._copying or self._reading)

    def segments(self, layer: int) -> Iterator[KeysValues]:
        """K and V ``[kv_heads, n, head_dim]`` of ``layer`` on the link's device, in token order.

        Each pair is valid until the next one is asked for. Raises RuntimeError where it is not the layer's
        or the stream's turn, CopyFailed or TransferStalled where the link fails.
        """
        if not self._layers or self._layers[0] != layer or self._reading is not None:
            left = ", ".join(str(turn) for turn in self._layers) or "none"
            raise RuntimeError(f"it is not the turn of layer {layer}: the layers left are {left}")
        if self._engine._streams[0] is not self:
            raise RuntimeError("the stream before this one is neither at its end nor closed")
        pairs: Iterable[KeysValues]
        if self._ring is None:
            pairs = self._engine.sequence.views(layer, self.start, self.end)
        else:
            pairs = self._through(self._ring)
        for pair in pairs:
            yield pair
            if self._closed:
                raise RuntimeError("the stream was closed while its segments were read")
        self._layers.popleft()
        if not self._layers:
            self._engine._streams.popleft()
            self._engine._prefetch()

    def close(self) -> None:
        """Abandon what is left. The ring is whole again at once. Idempotent."""
        # Copies under way into released slots do no harm: the next copy into a slot comes after them.
        self._closed = True
        if self._ring is not None:
            for segment, slot in self._copying:
                self._ring.release(slot)
                tokens = segment.end - segment.start
                layer_bytes = self._engine.sequence.layout.layer_token_bytes
                self._engine.counters.bytes_abandoned += tokens * layer_bytes
            if self._reading is not None:
                self._ring.release(self._reading)
        self._layers.clear()
        self._planned.clear()
        self._copying.clear()
        self._reading = None
        if self in self._engine._streams:
            self._engine._streams.remove(self)
        if not self._engine._closed:
            self._engine._prefetch()

    def _through(self, ring: StagingRing) -> Iterator[KeysValues]:
        for _ in range(self.start, self.end, ring.segment_tokens):
            segment, self._reading = self._copying.popleft()
            self._engine._wait(self._reading.ready)
            count = segment.end - segment.start
            yield self._reading.keys[:, :count], self._reading.values[:, :count]
            ring.release(self._reading)
            self._reading = None
            self._engine._prefetch()

    def _fill(self) -> None:
        """Copy the next segments into the ring, as far as it has room."""
        ring = self._ring
        while self._planned and ring is not None and ring.room:
            segment, slot = self._planned.popleft(), ring.acquire()
            runs = self._engine.sequence.views(segment.layer, segment.start, segment.end)
            count = segment.end - segment.start
            pairs = cut_alike(runs, slot.keys[:, :count], slot.values[:, :count])
            slot.ready = self._engine._copy([(buffer, run) for run, buffer in pairs], after=slot.free)
            self._copying.append((segment, slot))
