"""Buffers that KV passes through: on the device for the compute, and page-locked ones in host memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout
from cpu_kv.link import CopyFailed, Event, Link, PastEvent


@dataclass(eq=False)
class StagingSlot:
    """A device buffer for one segment: ``memory`` of ``KVLayout.pages_shape``.

    ``free``: the end of the compute that read the last segment; a copy into the slot waits for it.
    ``ready``: the end of that copy; compute waits for it.
    """

    memory: Tensor
    free: Event
    ready: Event


class StagingRing:
    """``buffers`` slots of ``segment_tokens`` tokens, whole pages, handed out in turn."""

    def __init__(self, link: Link, layout: KVLayout, segment_tokens: int, buffers: int):
        pages = layout.pages(segment_tokens)
        self.segment_tokens = pages * layout.page_size
        self._link = link
        self._slots: list[StagingSlot] = []
        for _ in range(buffers):
            memory = torch.empty(layout.pages_shape(pages), dtype=layout.dtype, device=link.device)
            # Compute enqueued before may still use what the memory held until now.
            self._slots.append(StagingSlot(memory, free=link.record_event(), ready=PastEvent()))
        self._idle = deque(self._slots)

    @property
    def room(self) -> int:
        """Number of slots that can be acquired."""
        return len(self._idle)

    def acquire(self) -> StagingSlot:
        """Returns the slot released longest ago. The caller copies after ``free`` and sets ``ready``."""
        return self._idle.popleft()

    def release(self, slot: StagingSlot) -> None:
        """Gives a slot back: it is free after the compute enqueued so far."""
        slot.free = self._link.record_event()
        self._idle.append(slot)

    def drain(self) -> None:
        """Waits until no copy writes to a slot and no compute reads one, so that the memory may be freed."""
        for slot in self._slots:
            _wait(slot.ready)
            slot.free.synchronize()


class HostBuffers:
    """Buffers in host memory for what crosses the link in a round, used in turn; page-locked for CUDA.

    They are kept: torch's allocator of page-locked memory would ask the driver in the middle of a round.
    """

    def __init__(self, link: Link, dtype: torch.dtype, count: int = 2):
        self._pin = link.device.type == "cuda"
        empty = torch.empty(0, dtype=dtype)
        self._turns: deque[tuple[Tensor, Event]] = deque((empty, PastEvent()) for _ in range(count))

    def take(self, shape: Sequence[int]) -> Tensor:
        """The buffer whose turn it is, after the copy that it was last held for; its content is undefined."""
        buffer, busy = self._turns[0]
        _wait(busy)
        entries = math.prod(shape)
        if entries > buffer.numel():
            with torch.inference_mode(False):  # else it were writable in that mode alone
                buffer = torch.empty(entries, dtype=buffer.dtype, pin_memory=self._pin)
        self._turns.popleft()
        self._turns.append((buffer, PastEvent()))
        return buffer[:entries].view(tuple(shape))

    def hold(self, event: Event) -> None:
        """Keep the buffer that was taken last until then."""
        self._turns[-1] = (self._turns[-1][0], event)

    def drain(self) -> None:
        """Wait until every buffer may go."""
        for _, busy in self._turns:
            _wait(busy)


def _wait(event: Event) -> None:
    with suppress(CopyFailed):  # a failed copy writes no longer, and whoever needed it was told
        event.synchronize()
