"""Memory of bounded caches, kept from one text to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.backends import MASKED_PAGE


@dataclass(eq=False)
class KVBuffer:
    """Keys and values of a bounded cache: means of pages, then entries; one attention sees both.

    A recorded graph is bound to its addresses, and goes with it.

    Attributes:
        memory: `[layers, 2, kv_heads, room + capacity, head_dim]`, keys and values.
        room: for means of pages. They end where the entries begin.
        pages: means that it holds.
    """

    memory: Tensor
    room: int = 0
    pages: int = 0

    @property
    def kv(self) -> Tensor:
        """Of the entries, `[layers, 2, kv_heads, capacity, head_dim]`."""
        return self.memory[:, :, :, self.room :]

    @property
    def capacity(self) -> int:
        """Of entries."""
        return self.memory.shape[3] - self.room

    @property
    def kind(self) -> tuple[int, tuple[int, ...], torch.dtype, torch.device]:
        """Buffers of one kind can take each other's place."""
        return self.room, self.memory.shape, self.memory.dtype, self.memory.device

    def clear(self) -> None:
        """Zeros: what lies behind the entries is multiplied by zero, so it has to be finite."""
        self.memory.zero_()
        self.pages = 0

    def add_pages(self, means: Tensor) -> None:
        """Means of the pages that follow those held, `[layers, 2, kv_heads, pages, head_dim]` on any device.

        The first page stands right before the entries, the next one before it: all that is attended to is
        one piece.
        """
        end = self.room - self.pages
        start = end - means.shape[3]
        self.memory[:, :, :, start:end].copy_(means.flip(3), non_blocking=True)
        self.pages += means.shape[3]

    def take_pages(self, other: KVBuffer) -> None:
        """The means of pages that another buffer of the same room holds, in place of its own."""
        rest = slice(self.room - other.pages, self.room)
        self.memory[:, :, :, rest] = other.memory[:, :, :, rest]
        self.pages = other.pages

    def with_room(self, entries: int) -> KVBuffer:
        """Itself, or a copy with room for so many entries, and for some more."""
        missing = entries - self.capacity
        if missing <= 0:
            return self
        if self.memory.is_cuda:
            # Copied on the stream of a pass, perhaps; nobody may be given its memory before.
            self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
        entries = self.memory.shape[3] + max(missing, self.capacity // 4)
        pad = (0, 0, 0, whole_pages(entries) - self.memory.shape[3])
        with torch.inference_mode(False):  # as in `take`
            return KVBuffer(torch.nn.functional.pad(self.memory, pad), self.room, self.pages)


@dataclass
class BufferPool:
    """Buffers that a text has given back, for the next one: what was recorded over them stays right."""

    _free: list[KVBuffer] = field(default_factory=list)

    def take(self, layout: KVLayout, capacity: int, device: torch.device, room: int = 0) -> KVBuffer:
        """A buffer of zeros."""
        shape = (layout.layers, 2, layout.kv_heads, room + capacity, layout.head_dim)
        asked = (room, shape, layout.dtype, device)
        found = next((one for one in self._free if one.kind == asked), None)
        if found is None:
            self.drop_free()  # of other sizes: there need not be room for both
            with torch.inference_mode(False):  # else it were writable in that mode alone
                found = KVBuffer(torch.empty(shape, dtype=layout.dtype, device=device), room)
        else:
            self._free.remove(found)
        found.clear()  # which touches it, too: later that would hold up a round
        return found

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that no text uses."""
        return sum(one.memory.nbytes for one in self._free)

    def give_back(self, buffer: KVBuffer) -> None:
        """Nothing that uses it may be enqueued any more but in the order of its next use."""
        self._free.append(buffer)

    def drop_free(self) -> None:
        """Lets go of what no text uses."""
        self._free.clear()


def whole_pages(entries: int) -> int:
    """Returns the size of a buffer for so many entries, which masked attention on a GPU splits into pages.

    The plan's reserve covers the difference, less than a page.
    """
    return -(-entries // MASKED_PAGE) * MASKED_PAGE


def room_for_means(pages: int) -> int:
    """Room for the means of so many pages: the same for texts of nearly one length, which share a buffer."""
    step = max(16, 1 << max(0, pages.bit_length() - 4))
    return -(-pages // step) * step
