"""Moves KV between a stored sequence and the compute device: streams it, and writes it back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.gathering import Gatherer
from cpu_kv.link import CopyFailed, Event, Link
from cpu_kv.sizes import PROMPT_WRITES
from cpu_kv.staging import HostBuffers, StagingRing, StagingSlot
from cpu_kv.store import SequenceKV
from cpu_kv.views import KVPages, PlainPages, cut_alike


@dataclass(frozen=True)
class _WriteBack:
    """A pending write-back. It keeps what is copied alive until the copy has ended.

    Attributes:
        start: the position of its first token.
        source: the KV as it is.
        packed: its full pages, where these are copied.
        arrived: the host buffer that it is copied to, `[layers, 2, kv_heads, tokens, head_dim]`, and moved to
            pages from; None: it is copied to its pages directly.
    """

    layers: range
    start: int
    tokens: int
    source: Tensor
    written: Event
    packed: Tensor | None = None
    arrived: Tensor | None = None


class TransferEngine(Gatherer):
    """Moves the KV of one sequence over a link, packed where it is stored so. Must be used from one thread.

    Over a link that is `in_place` there is no ring, and the compute is given views of the store. Several
    transfers may share a link; none of them closes it.

    Args:
        segment_tokens: tokens of a slot of the staging ring, rounded up to whole pages.
        ring_buffers: slots of the ring, which is how many segments the link may run ahead, into the next
            stream too.
    """

    # Committed KV never changes, so the link may prefetch it at any time, before anything is decided. KV that
    # is being written back is committed only when its copy has ended: then the sequence advances. Both sides
    # of every copy are contiguous, so it is one transfer whatever the number of heads.

    def __init__(
        self, sequence: SequenceKV, link: Link, *, segment_tokens: int = 4096, ring_buffers: int = 3
    ):
        super().__init__(sequence, link, range(sequence.layout.layers))
        self._ring: StagingRing | None = None
        if not link.in_place:
            self._ring = StagingRing(link, sequence.layout, segment_tokens, ring_buffers)
        self._writes: deque[_WriteBack] = deque()
        # In place: given to `write_back`, less than a page, each with the position of its first token.
        self._unwritten: list[tuple[int, Tensor]] = []
        self._streams: deque[LayerStream] = deque()  # open and not read to their end, in order
        # A segment is first planned, then copied into a part of a slot, then read.
        self._planned: deque[_Segment] = deque()
        self._copied: deque[tuple[_Segment, Tensor, StagingSlot]] = deque()
        self._incoming = HostBuffers(link, sequence.layout.dtype, count=1)

    def stream(self, end: int, *, start: int = 0) -> LayerStream:
        """Starts a stream of the tokens `start` .. `end`, whole pages, of all layers for one pass.

        Prefetching starts at once, as far as the ring has free slots, after the rest of earlier streams: so
        the link runs ahead into the next pass. Waits for write-backs only if they belong to the range.

        Raises:
            ValueError: the range is not whole pages, or not present in every layer.
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
            self._planned += (
                _Segment(stream, layer, *tokens, unpacked)
                for layer in range(self.sequence.layout.layers)
                for first, last, unpacked in self.sequence.forms(layer, start, end)
                for tokens in self._ring.segments(first, last, packed=unpacked is None)
            )
            try:
                self._prefetch(self._ring)
            except BaseException:
                stream.close()
                raise
        return stream

    def collect(self) -> None:
        """Commits the write-backs that have ended, without waiting. Raises CopyFailed if one failed."""
        while self._writes and self._writes[0].written.done():
            self._finish_oldest_write()

    def write_back(self, kv: Tensor) -> None:
        """Appends tokens to all layers, asynchronously.

        One copy moves them to the host. `collect` or, at the latest, `flush` commits them to the sequence, in
        place `flush` or the call that makes them a page; until then `kv` must not change, and others must not
        append to the sequence or truncate it. Waits for the previous write-back.

        Args:
            kv: on the link's device, `[layers, 2, kv_heads, n, head_dim]`.

        Raises:
            ValueError: shape or dtype is wrong.
            MemoryError: memory is short.
            CopyFailed: an earlier write-back failed.
        """
        self._check_open()
        layers, layout = range(self.sequence.layout.layers), self.sequence.layout
        count = layout.tokens_in(kv[0, 0], kv[0, 1])
        if not self.link.in_place:
            self.flush()
        page, unwritten = layout.page_size, sum(kv.shape[3] for _, kv in self._unwritten)
        start = self.sequence.length + unwritten
        first, end = start // page * page, layout.pages(start + count) * page
        if start == first or end > first + page or not self._unwritten:
            for layer in layers:  # MemoryError comes before any layer has the tokens
                self.sequence.memory(layer, first, end)
        if self.link.in_place:
            self._unwritten.append((start, kv.detach()))
            if unwritten + count >= page:
                self.flush()
            return
        copied = kv.detach().contiguous()
        arrived = self._incoming.take(copied.shape)
        written = self._copy([(arrived, copied)], after=self.link.record_event(), to_host=True)
        self._incoming.hold(written)
        self._writes.append(_WriteBack(layers, start, count, copied, written, arrived=arrived))

    def write_prompt(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends `[kv_heads, n, head_dim]` on the link's device to `layer`, which holds full pages only.

        Asynchronous as `write_back`, but copies to the pages directly, and overwrites all of the last page.
        """
        self._check_open()
        layout = self.sequence.layout
        count = layout.tokens_in(keys, values)
        pages = layout.pages(count)
        paged = torch.empty(layout.pages_shape(pages), dtype=layout.dtype, device=keys.device)
        places = [part.plain() for part in PlainPages.of(paged).span(0, count)]
        for place, *pieces in cut_alike(places, keys.detach(), values.detach()):
            place.write(*pieces)
        while len(self._writes) >= PROMPT_WRITES:
            self._finish_oldest_write()
        ahead = sum(write.tokens for write in self._writes if layer in write.layers)
        start = self.sequence.layer_length(layer) + ahead
        whole = count // layout.page_size if layout.packed else pages
        contents = self.sequence.codec.encode(layout.packed_shape, paged[:whole]) if layout.packed else paged
        end = start + whole * layout.page_size
        pairs = _pairs(self.sequence.memory(layer, start, end, write=True), contents)
        if whole < pages:
            pairs.append((self.sequence.open_page(layer, end), paged[whole:]))
        written = self._copy(pairs, after=self.link.record_event(), to_host=True)
        self._writes.append(_WriteBack(range(layer, layer + 1), start, count, paged, written, contents))
        self.collect()

    def abandon(self) -> None:
        """Closes every stream. All slots of the ring are free, even those that an interrupt has lost."""
        streams, self._streams = self._streams, deque()
        copied, self._copied = self._copied, deque()
        self._planned = deque()
        for stream in streams:
            stream._closed, stream._reading = True, None
        self.counters.bytes_abandoned += sum(memory.nbytes for _, memory, _ in copied)
        if self._ring is not None:
            self._ring.release_all()

    def finish_compute(self) -> None:
        """Blocks the host until all compute enqueued so far has ended."""
        self.link.record_event().synchronize()

    def load(self, layer: int, start: int, end: int, into: Tensor, *, packed: bool) -> None:
        """Copies whole pages of a layer to the link's device, synchronously. Raises CopyFailed.

        Args:
            into: output, bytes there, for `resident_pages`.
            packed: the pages are packed in the store, and stay so; otherwise none of them is afterwards.
        """
        self._check_open()
        self.flush()
        layout, codec = self.sequence.layout, self.sequence.codec
        for first, last, unpacked in self.sequence.forms(layer, start, end):
            decodes = layout.packed and unpacked is None and not packed
            # What is unpacked on the device needs memory there a second time: a segment at a time.
            segments = self._ring.segments(first, last, packed=True) if self._ring and decodes else None
            for at, stop in segments or [(first, last)]:
                pieces = self._memory(layer, at, stop, unpacked)
                size = sum(piece.nbytes for piece in pieces)
                memory = into.new_empty(size) if decodes else into[:size]
                self._copy(_pairs(pieces, memory, inward=True), after=self.link.record_event()).synchronize()
                if decodes:
                    pages = (stop - at) // layout.page_size
                    size = pages * layout.page_size * layout.layer_token_bytes
                    out = into[:size].view(layout.dtype).view(layout.pages_shape(pages))
                    codec.decode(layout.packed_shape, memory.view(pages, -1), out)
                into = into[size:]

    def resident_pages(self, memory: Tensor, *, packed: bool) -> KVPages:
        """Returns the pages that `load` copied."""
        assert self._ring is not None, "over a link that is in place, nothing is resident"
        return self._ring.pages_in(memory, self.sequence.codec, packed)

    def _memory(self, layer: int, start: int, end: int, unpacked: Tensor | None) -> list[Tensor]:
        """Returns the memory of pages of one of the sequence's `forms`."""
        return self.sequence.memory(layer, start, end) if unpacked is None else [unpacked.view(-1)]

    def flush(self) -> None:
        """Waits for all write-backs and commits them.

        Raises:
            CopyFailed: one failed; that one and all later ones are dropped.
        """
        while self._writes:
            self._finish_oldest_write()
        if self._unwritten:
            try:
                # An interrupt may have come between the append and the end of this call: then it is done.
                if self.sequence.length == self._unwritten[0][0]:
                    self.sequence.append_layers(torch.cat([kv for _, kv in self._unwritten], dim=3))
            except Exception:
                self._unwritten = []  # tokens that could not be stored are not committed
                raise
            self._unwritten = []

    def close(self) -> None:
        """Waits for copies and frees the ring. Raises CopyFailed if a write-back failed. Idempotent."""
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

    def _prefetch(self, ring: StagingRing) -> None:
        """Enqueues copies of the next segments into all slots that have been released.

        The link itself, not the host, waits for compute that still reads a slot. So whatever the host is
        waiting for, a copy is enqueued for every slot, and the link idles only while all slots are full.
        """
        while self._planned and ring.room:
            slot, segment = ring.acquire(), self._planned.popleft()
            pieces = self._memory(segment.layer, segment.start, segment.end, segment.unpacked)
            memory = slot.memory[: sum(piece.nbytes for piece in pieces)]
            slot.ready = self._copy(_pairs(pieces, memory, inward=True), after=slot.free)
            self._copied.append((segment, memory, slot))

    def _finish_oldest_write(self) -> None:
        write = self._writes[0]
        start = time.perf_counter()
        try:
            write.written.synchronize()
        except CopyFailed:
            # Later ones would leave a gap. Wait for them, too: their pages may be reused afterwards.
            dropped, self._writes = self._writes, deque()
            for later in dropped:
                with suppress(CopyFailed):
                    later.written.synchronize()
            raise
        self.counters.wait_ms += 1e3 * (time.perf_counter() - start)
        try:
            self._commit(write)
        except Exception:
            self._writes.popleft()  # tokens that could not be stored are not committed
            raise
        self._writes.popleft()  # an interrupt before this leaves it to be committed, or found committed

    def _commit(self, write: _WriteBack) -> None:
        """Counts the tokens of a write-back that has ended, unless they are counted already."""
        if write.arrived is not None:
            if self.sequence.length == write.start:
                self.sequence.append_layers(write.arrived)
            return
        for layer in write.layers:
            if self.sequence.layer_length(layer) == write.start:
                self._replace_overflowing(layer, write)
                self.sequence.advance(layer, write.tokens)

    def _replace_overflowing(self, layer: int, write: _WriteBack) -> None:
        """Copies those pages of a prompt that cannot be packed to the host as they are."""
        page, start = self.sequence.layout.page_size, self.sequence.layer_length(layer)
        whole = start + write.tokens // page * page
        for at in self.sequence.overflowing(layer, start, whole):
            number = (at - start) // page
            pair = self.sequence.open_page(layer, at), write.source[number : number + 1]
            self._copy([pair], to_host=True).synchronize()


@dataclass(frozen=True)
class _Segment:
    """Tokens `start` .. `end` of a layer that a stream brings to a slot.

    Attributes:
        unpacked: see `SequenceKV.forms`.
    """

    stream: LayerStream
    layer: int
    start: int
    end: int
    unpacked: Tensor | None


def _pairs(memory: Sequence[Tensor], whole: Tensor, *, inward: bool = False) -> list[tuple[Tensor, Tensor]]:
    """Returns pairs for a copy of a contiguous tensor to pieces of memory.

    Args:
        inward: the copy is from them to the tensor.
    """
    parts = whole.view(-1).view(torch.uint8).split([piece.nbytes for piece in memory])
    pieces = [part.view(piece.dtype) for part, piece in zip(parts, memory, strict=True)]
    return list(zip(pieces, memory, strict=True)) if inward else list(zip(memory, pieces, strict=True))


class LayerStream:
    """The tokens `start` .. `end` of all layers, for one pass. Created by `TransferEngine.stream`.

    Layers must be read in order, and the streams of a transfer one after another.
    """

    def __init__(self, transfer: TransferEngine, start: int, end: int):
        self.start = start
        self.end = end
        self._transfer = transfer
        self._layer = 0  # the next one to be read
        self._reading: StagingSlot | None = None
        self._closed = False

    def segments(self, layer: int) -> Iterator[KVPages]:
        """Yields whole pages of `layer` in order, on the device.

        Each segment is valid until the next one is requested.

        Raises:
            RuntimeError: layers or streams are read out of order.
            CopyFailed: a copy failed.
        """
        transfer = self._transfer
        if self._closed or layer != self._layer or self._reading is not None:
            raise RuntimeError(f"cannot read layer {layer}: the next layer of this stream is {self._layer}")
        if transfer._streams[0] is not self:
            raise RuntimeError("cannot read this stream: close the stream before it, or read it to its end")
        if transfer._ring is None:
            segments: Iterator[KVPages] = iter(transfer.sequence.views(layer, self.start, self.end))
        else:
            segments = self._through(transfer._ring)
        for pages in segments:
            yield pages
            if self._closed:
                raise RuntimeError("the stream was closed while its segments were being read")
        self._layer += 1
        if self._layer == transfer.sequence.layout.layers:
            transfer._streams.popleft()

    def _through(self, ring: StagingRing) -> Iterator[KVPages]:
        transfer, at = self._transfer, self.start
        packs = transfer.sequence.layout.packed
        while at < self.end:
            segment, memory, self._reading = transfer._copied.popleft()
            # Keeps the host from enqueuing compute further ahead than the ring is deep: once a device's queue
            # is full, the launches of all threads block. The copy into the slot has waited for the event too.
            self._reading.free.synchronize()
            transfer._wait(self._reading.ready)
            yield ring.pages_in(memory, transfer.sequence.codec, packs and segment.unpacked is None)
            at = segment.end
            ring.release(self._reading)
            self._reading = None
            transfer._prefetch(ring)

    def close(self) -> None:
        """Abandons the segments that were not read and releases their slots. Idempotent."""
        # Copies into released slots may still be pending: the next copy into a slot runs after them.
        transfer, ring = self._transfer, self._transfer._ring
        self._closed = True
        if self in transfer._streams:
            transfer._streams.remove(self)
        if ring is None:
            return
        copied = [copy for copy in transfer._copied if copy[0].stream is self]
        transfer._copied = deque(copy for copy in transfer._copied if copy[0].stream is not self)
        transfer._planned = deque(segment for segment in transfer._planned if segment.stream is not self)
        for _, memory, slot in copied:
            ring.release(slot)
            transfer.counters.bytes_abandoned += memory.nbytes
        if self._reading is not None:
            ring.release(self._reading)
            self._reading = None
        if not transfer._closed:
            transfer._prefetch(ring)
