"""Moves KV between a sequence and the compute: streams layers ahead of use, writes back, gathers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.layout import KeysValues, cut_alike, parts_of_pages
from cpu_kv.link import CopyFailed, FutureTicket, Link, Ticket, TransferStalled, pair_bytes
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
    """A write-back under way. It holds its source, which may not be freed before."""

    layers: range
    tokens: int
    source: Tensor
    ticket: Ticket


@dataclass(frozen=True)
class Sent:
    """Something that is on its way from host memory to ``there``, on the device."""

    there: Tensor
    ticket: Ticket


class TransferEngine:
    """Moves the KV of one sequence over a link; used from one thread.

    ``segment_tokens``: tokens in a staging buffer; ``ring_buffers``: how many there are, that is, how far
    the link may run ahead, into the next stream too. A link that is ``in_place`` needs none: the compute is
    given the store's own views. The engine does not close its link, which other engines may share.
    """

    # Committed KV never changes, so the link may read it at any time, ahead of every decision. What is being
    # written back is not committed before its copy is done: only then does the sequence advance. Every copy
    # is of contiguous memory on both sides: one transfer, whatever the number of heads.

    PROMPT_WRITES = 2  # under way at a time: each holds a copy of its KV on the device

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
        self._incoming = HostBuffers(link, sequence.layout.dtype, count=1)
        self._outgoing = HostBuffers(link, sequence.layout.dtype)
        self._scattering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cpu_kv-write-back")
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
        stream = LayerStream(self, self._ring, start, end)
        self._streams.append(stream)
        self._prefetch()
        return stream

    def collect(self) -> None:
        """Count the write-backs that are done, without waiting. Raises CopyFailed where one failed."""
        while self._writes and self._writes[0].ticket.done():
            self._finish_oldest_write()

    def write_back(self, keys: Tensor, values: Tensor) -> None:
        """Append ``[layers, kv_heads, n, head_dim]`` on the link's device to every layer, asynchronously.

        They reach the host in one copy, and their pages in a thread of its own. The sequence counts the
        tokens as present once they are there: at the latest after ``flush``, before which the sequence must
        not be appended to or truncated by others. Raises ValueError for the wrong shape or dtype, CopyFailed
        where an earlier write-back failed.
        """
        self._check_open()
        layers = range(self.sequence.layout.layers)
        count = self.sequence.layout.tokens_in(keys[0], values[0])
        if self.link.in_place:
            for layer in layers:
                self.sequence.append(layer, keys[layer], values[layer])
            return
        packed = torch.stack((keys.detach(), values.detach()), dim=1)
        arrived = self._incoming.take(packed.shape)
        slots = [self.sequence.slots(layer, count, self._ahead(layer)) for layer in layers]
        copied = self._copy([(arrived, packed)], after=self.link.mark(), to_host=True)
        ticket = FutureTicket(self._scattering.submit(_scatter, copied, arrived, slots))
        self._incoming.hold(ticket)
        self._writes.append(_WriteBack(layers, count, packed, ticket))
        self.collect()

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
        start = self.sequence.layer_length(layer) + self._ahead(layer)
        places = self.sequence.memory(layer, start, start + pages * layout.page_size)
        sources = packed.view(-1).split([place.numel() for place in places])
        ticket = self._copy(list(zip(places, sources, strict=True)), after=self.link.mark(), to_host=True)
        self._writes.append(_WriteBack(range(layer, layer + 1), count, packed, ticket))
        self.collect()

    def _ahead(self, layer: int) -> int:
        """Tokens of ``layer`` that are being written back."""
        return sum(write.tokens for write in self._writes if layer in write.layers)

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
        self._prefetch()  # no buffer is being read any more

    def flush(self) -> None:
        """Wait for all write-backs.

        Raises CopyFailed where one failed; it and all later ones are dropped.
        """
        while self._writes:
            self._finish_oldest_write()

    def gather_chunks(self, layer: int, chunks: Tensor, chunk_size: int, out: KeysValues) -> None:
        """``SequenceKV.gather_chunks`` to the link's device; ``chunks`` may be on any device.

        Waits for write-backs; compute that follows may read ``out`` as it is.
        """
        chosen = chunks.cpu()
        self._fetch(lambda here: self.sequence.gather_chunks(layer, chosen, chunk_size, here), out)

    def read(self, layer: int, start: int, end: int, out: KeysValues) -> None:
        """Copy the tokens ``start`` .. ``end`` of ``layer`` to ``out`` ``[kv_heads, end - start, head_dim]``.

        ``out`` is on the link's device. Waits for write-backs; compute that follows may read it as it is.
        """

        def copy(here: KeysValues) -> None:
            for part, place in cut_alike(self.sequence.views(layer, start, end), *here):
                place.copy_(part)

        self._fetch(copy, out)

    def _fetch(self, read: Callable[[KeysValues], None], out: KeysValues) -> None:
        """Let ``read`` fill ``out``: in place, or by way of host memory."""
        self._check_open()
        self.flush()
        if self.link.in_place:
            read(out)
            return
        packed = self.outgoing(2, *out[0].shape)
        read((packed[0], packed[1]))
        for place, part in zip(out, self.await_sent(self.start_sending(packed)), strict=True):
            place.copy_(part)

    def outgoing(self, *shape: int) -> Tensor:
        """Host memory, of the layout's dtype, for what ``start_sending`` is then given."""
        return self._outgoing.take(shape)

    def start_sending(self, packed: Tensor) -> Sent:
        """Send what was put into an ``outgoing`` buffer. It overtakes what is carried ahead of its use."""
        there = torch.empty_like(packed, device=self.link.device)
        # Compute enqueued before may still use what lies at the destination.
        ticket = self._copy([(there, packed)], after=self.link.mark(), urgent=True)
        self._outgoing.hold(ticket)
        return Sent(there, ticket)

    def await_sent(self, sent: Sent) -> Tensor:
        """What was sent, for compute that follows. Raises CopyFailed and TransferStalled."""
        self._wait(sent.ticket)
        return sent.there

    def close(self) -> None:
        """Wait for every copy under way and let the ring go. Raises where a write-back failed. Idempotent."""
        self._closed = True
        with ExitStack() as closing:
            ring, self._ring = self._ring, None
            if ring is not None:
                closing.callback(ring.drain)
            closing.callback(self._outgoing.drain)
            closing.callback(self._incoming.drain)
            closing.callback(self._scattering.shutdown)
            closing.callback(self.flush)
            for stream in self._streams:
                closing.callback(stream.close)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the transfer engine is closed")

    @property
    def _copying(self) -> bool:
        """Whether a segment is on its way that nothing has asked for yet."""
        return any(stream._copying for stream in self._streams)

    def _prefetch(self) -> None:
        for stream in self._streams:
            stream._fill()
            if stream._planned:
                break  # the ring is full, and what comes first goes first

    def _copy(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        after: Ticket | None = None,
        *,
        to_host: bool = False,
        urgent: bool = False,
    ) -> Ticket:
        self.counters.copies += len(pairs)
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
        except (CopyFailed, TransferStalled):
            # The later ones would leave a hole. Their pages may go to others once nothing writes there.
            dropped, self._writes = self._writes, deque()
            for later in dropped:
                with suppress(CopyFailed, TransferStalled):
                    later.ticket.synchronize()
            raise
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)
        self._writes.popleft()
        for layer in write.layers:
            self.sequence.advance(layer, write.tokens)


@torch.inference_mode()  # the mode of a thread: tensors made in it could not be written to otherwise
def _scatter(copied: Ticket, arrived: Tensor, slots: Sequence[Sequence[KeysValues]]) -> None:
    """Put what has arrived ``[layers, 2, kv_heads, n, head_dim]`` into the slots of each layer."""
    copied.synchronize()
    for layer_slots, (keys, values) in zip(slots, arrived, strict=True):
        for slot, part in cut_alike(layer_slots, keys, values):
            slot.copy_(part)


class LayerStream:
    """One pass over the tokens ``start`` .. ``end`` of all layers. Made by ``TransferEngine.stream``.

    Ask for the segments of one layer after the other, and of one stream of the engine after the other.
    """

    def __init__(self, engine: TransferEngine, ring: StagingRing | None, start: int, end: int):
        self.start = start
        self.end = end
        self._engine = engine
        self._ring = ring
        self._layer = 0  # whose turn it is
        self._closed = False
        # The way of a segment: planned (layer, start, end), then being copied to pages of a slot, then read.
        self._planned: deque[tuple[int, int, int]] = deque()
        self._copying: deque[tuple[Tensor, StagingSlot]] = deque()
        self._reading: StagingSlot | None = None
        if ring is not None:
            layers, step = range(engine.sequence.layout.layers), ring.segment_tokens
            self._planned += (
                (layer, at, min(at + step, end)) for layer in layers for at in range(start, end, step)
            )

    def segments(self, layer: int) -> Iterator[KeysValues]:
        """K and V ``[pages, kv_heads, page_size, head_dim]`` of ``layer`` on the link's device, in order.

        Each pair is valid until the next one is asked for. Raises RuntimeError where it is not the layer's
        or the stream's turn, CopyFailed or TransferStalled where the link fails.
        """
        if self._closed or layer != self._layer or self._reading is not None:
            raise RuntimeError(f"it is not the turn of layer {layer}, but of {self._layer}")
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
        self._layer += 1
        if self._layer == self._engine.sequence.layout.layers:
            self._engine._streams.popleft()
            self._engine._prefetch()

    def close(self) -> None:
        """Abandon what is left. The ring is whole again at once. Idempotent."""
        # Copies under way into released slots do no harm: the next copy into a slot comes after them.
        self._closed = True
        if self._ring is not None:
            for pages, slot in self._copying:
                self._ring.release(slot)
                self._engine.counters.bytes_abandoned += pages.nbytes
            if self._reading is not None:
                self._ring.release(self._reading)
        self._planned.clear()
        self._copying.clear()
        self._reading = None
        if self in self._engine._streams:
            self._engine._streams.remove(self)
        if not self._engine._closed:
            self._engine._prefetch()

    def _through(self, ring: StagingRing) -> Iterator[KeysValues]:
        for _ in range(self.start, self.end, ring.segment_tokens):
            pages, self._reading = self._copying.popleft()
            self._engine._wait(self._reading.ready)
            yield pages[:, 0], pages[:, 1]
            ring.release(self._reading)
            self._reading = None
            self._engine._prefetch()

    def _fill(self) -> None:
        """Copy the next segments into the ring, as far as it has room.

        The host waits for a buffer that is still being read only where the link has nothing left to do.
        """
        engine, ring = self._engine, self._ring
        while self._planned and ring is not None and ring.room:
            if engine._copying and not ring.ready_to_fill:
                break
            slot, (layer, start, end) = ring.acquire(), self._planned.popleft()
            pages = slot.memory[: engine.sequence.layout.pages(end - start)]
            pieces = engine.sequence.memory(layer, start, end)
            places = pages.view(-1).split([piece.numel() for piece in pieces])
            slot.ready = engine._copy(list(zip(places, pieces, strict=True)))
            self._copying.append((pages, slot))
