"""Device buffers that segments of the KV pass through on their way to the compute."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout
from cpu_kv.link import CopyFailed, Link, PassedTicket, Ticket


@dataclass(eq=False)
class StagingSlot:
    """A device buffer for one segment: ``keys`` and ``values`` ``[kv_heads, segment_tokens, head_dim]``.

    ``free``: the compute that read the last segment; a copy into the slot goes after it. ``ready``: that
    copy; compute waits for it.
    """

    keys: Tensor
    values: Tensor
    free: Ticket
    ready: Ticket


class StagingRing:
    """``buffers`` slots, handed out in turn. Raises ValueError for sizes below 1."""

    def __init__(self, link: Link, layout: KVLayout, segment_tokens: int, buffers: int):
        if segment_tokens < 1 or buffers < 1:
            raise ValueError(
                f"segment_tokens and buffers must be at least 1, not {segment_tokens} and {buffers}"
            )
        self.segment_tokens = segment_tokens
        self._link = link
        self._slots: list[StagingSlot] = []
        for _ in range(buffers):
            memory = torch.empty(layout.slab_shape(segment_tokens), dtype=layout.dtype, device=link.device)
            # Compute enqueued before may still use what the memory held until now.
            slot = StagingSlot(memory[0], memory[1], free=link.mark(), ready=PassedTicket())
            self._slots.append(slot)
        self._idle = list(self._slots)

    @property
    def room(self) -> int:
        """Slots that can be acquired now."""
        return len(self._idle)

    def acquire(self) -> StagingSlot:
        """The slot released longest ago. Its holder copies into it after ``slot.free`` and sets ``ready``.

        Raises RuntimeError where every slot is held.
        """
        if not self._idle:
            raise RuntimeError(f"all {len(self._slots)} buffers of the staging ring are held")
        return self._idle.pop(0)

    def release(self, slot: StagingSlot) -> None:
        """Give a slot back: it is free after the compute enqueued so far.

        Raises ValueError for a slot that is not held.
        """
        if slot in self._idle or slot not in self._slots:
            raise ValueError("this slot is not held")
        slot.free = self._link.mark()
        self._idle.append(slot)

    def drain(self) -> None:
        """Wait until no copy writes to a slot and no compute reads one, so that the memory may go."""
        for slot in self._slots:
            with suppress(CopyFailed):  # a failed copy writes no longer, and whoever needed it was told
                slot.ready.synchronize()
            slot.free.synchronize()
