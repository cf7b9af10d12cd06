"""Buffers that KV is copied through: the staging ring on the device, and page-locked ones on the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout
from cpu_kv.link import CopyFailed, Event, Link, PastEvent
from cpu_kv.packed import PageCodec
from cpu_kv.views import KVPages, PackedPages, PlainPages


@dataclass(eq=False)
class StagingSlot:
    """A device buffer for one segment, and its two events.

    Attributes:
        memory: bytes.
        free: end of the compute that read the previous segment; the copy of the next one waits for it.
        ready: end of that copy; the compute that reads the segment waits for it.
    """

    memory: Tensor
    free: Event
    ready: Event


class StagingRing:
    """A ring of slots for segments.

    On a GPU, one more buffer has room for the unpacked pages of a segment, for compute that does not read
    packed ones.

    Args:
        segment_tokens: tokens of a segment, rounded up to whole pages.
        buffers: number of slots.
    """

    def __init__(self, link: Link, layout: KVLayout, segment_tokens: int, buffers: int):
        pages = layout.pages(segment_tokens)
        self.segment_tokens = pages * layout.page_size
        self._link = link
        self._layout = layout
        self._unpacked: Tensor | None = None
        if layout.packed and link.device.type != "cpu":
            self._unpacked = torch.empty(layout.pages_shape(pages), dtype=layout.dtype, device=link.device)
        size = max(pages * layout.page_bytes, layout.page_size * layout.layer_token_bytes)
        self._slots: list[StagingSlot] = []
        for _ in range(buffers):
            memory = torch.empty(size, dtype=torch.uint8, device=link.device)
            # Compute that was enqueued earlier may still use the previous owner's data.
            self._slots.append(StagingSlot(memory, free=link.record_event(), ready=PastEvent()))
        self._idle = deque(self._slots)

    @property
    def room(self) -> int:
        """Number of slots that are not acquired."""
        return len(self._idle)

    def acquire(self) -> StagingSlot:
        """Returns the least recently released slot. The caller copies after `free` and sets `ready`."""
        return self._idle.popleft()

    def release(self, slot: StagingSlot) -> None:
        """Returns a slot to the ring. It is free at the end of the compute enqueued so far."""
        slot.free = self._link.record_event()
        self._idle.append(slot)

    def release_all(self) -> None:
        """Returns all slots to the ring, whoever has them. No compute may be enqueued that reads them."""
        free = self._link.record_event()
        for slot in self._slots:
            slot.free = free
        self._idle = deque(self._slots)

    def segments(self, start: int, end: int, packed: bool) -> Iterator[tuple[int, int]]:
        """Yields the ranges of tokens, whole pages, that go into one slot each."""
        step, page = self.segment_tokens, self._layout.page_size
        if self._layout.packed and not packed:
            step = self._slots[0].memory.numel() // (page * self._layout.layer_token_bytes) * page
        return ((at, min(at + step, end)) for at in range(start, end, step))

    def pages_in(self, memory: Tensor, codec: PageCodec, packed: bool) -> KVPages:
        """Returns the pages that device memory holds."""
        layout = self._layout
        if not packed:
            return PlainPages.of(memory.view(layout.dtype).view(layout.pages_shape(-1)))
        data = memory.view(-1, layout.page_bytes)
        return PackedPages(data, layout.packed_shape, codec, self._unpacked)

    def drain(self) -> None:
        """Waits for all copies into slots and all compute that reads them; then they may be freed."""
        for slot in self._slots:
            _wait(slot.ready)
            slot.free.synchronize()


class HostBuffers:
    """Buffers in host memory for copies within a decode step, used in turn; page-locked for CUDA.

    They are reused: torch's allocator of page-locked memory might call the driver during a decode step.
    """

    def __init__(self, link: Link, dtype: torch.dtype, count: int = 2):
        self._pin = link.device.type == "cuda"
        empty = torch.empty(0, dtype=dtype)
        self._turns: deque[tuple[Tensor, Event]] = deque((empty, PastEvent()) for _ in range(count))

    def take(self, shape: Sequence[int]) -> Tensor:
        """Returns the next buffer, uninitialised, as soon as the copy that last used it has ended."""
        buffer, busy = self._turns[0]
        _wait(busy)
        entries = math.prod(shape)
        if entries > buffer.numel():
            with torch.inference_mode(False):  # a tensor made in inference mode is read-only outside of it
                buffer = torch.empty(entries, dtype=buffer.dtype, pin_memory=self._pin)
        self._turns[0] = buffer, PastEvent()
        self._turns.rotate(-1)
        return buffer[:entries].view(tuple(shape))

    def hold(self, event: Event) -> None:
        """Reserves the buffer that was taken last until `event`."""
        self._turns[-1] = (self._turns[-1][0], event)

    def drain(self) -> None:
        """Waits until no buffer is reserved."""
        for _, busy in self._turns:
            _wait(busy)


def _wait(event: Event) -> None:
    with suppress(
        CopyFailed
    ):  # a failed copy no longer writes, and its error is raised where its data is needed
        event.synchronize()
