"""Memory of bounded caches, reused from one sequence to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_kv import KVLayout


@dataclass(eq=False)
class KVBuffer:
    """Keys and values of a bounded cache: means of pages, then entries, attended together.

    A recorded CUDA graph is bound to the buffer's addresses and lives as long as the buffer.

    Attributes:
        memory: keys and values, `[layers, 2, kv_heads, mean_slots + capacity, head_dim]`.
        mean_slots: slots for means of pages, which are filled backwards from the first entry.
        means: number of means present.
    """

    memory: Tensor
    mean_slots: int = 0
    means: int = 0

    @property
    def kv(self) -> Tensor:
        """The entries, `[layers, 2, kv_heads, capacity, head_dim]`."""
        return self.memory[:, :, :, self.mean_slots :]

    @property
    def capacity(self) -> int:
        """Number of slots for entries."""
        return self.memory.shape[3] - self.mean_slots

    @property
    def kind(self) -> tuple[int, tuple[int, ...], torch.dtype, torch.device]:
        """Key of buffers that can replace each other."""
        return self.mean_slots, self.memory.shape, self.memory.dtype, self.memory.device

    def clear(self) -> None:
        """Zeroes the memory: slots behind the entries are multiplied by zero and so must be finite."""
        self.memory.zero_()
        self.means = 0

    def add_means(self, means: Tensor) -> None:
        """Adds the means of the next pages, `[layers, 2, kv_heads, pages, head_dim]` on any device.

        The first page stands right before the entries and later pages before it, so that everything that is
        attended is contiguous.
        """
        end = self.mean_slots - self.means
        start = end - means.shape[3]
        self.memory[:, :, :, start:end].copy_(means.flip(3), non_blocking=True)
        self.means += means.shape[3]

    def copy_means(self, other: KVBuffer) -> None:
        """Replaces the means by those of another buffer with as many slots."""
        slots = slice(self.mean_slots - other.means, self.mean_slots)
        self.memory[:, :, :, slots] = other.memory[:, :, :, slots]
        self.means = other.means

    def with_capacity(self, entries: int) -> KVBuffer:
        """Returns the buffer, or a larger copy if it has fewer than `entries` slots."""
        missing = entries - self.capacity
        if missing <= 0:
            return self
        if self.memory.is_cuda:
            # It may be copied on the stream of a pass: its memory must not be reused before.
            self.memory.record_stream(torch.cuda.current_stream(self.memory.device))
        pad = (0, 0, 0, max(missing, self.capacity // 4))
        with torch.inference_mode(False):  # as in `take`
            return KVBuffer(torch.nn.functional.pad(self.memory, pad), self.mean_slots, self.means)


@dataclass
class BufferPool:
    """Buffers returned by closed sequences, for the next ones: graphs recorded over them stay valid."""

    _free: list[KVBuffer] = field(default_factory=list)

    def take(self, layout: KVLayout, capacity: int, device: torch.device, mean_slots: int = 0) -> KVBuffer:
        """Returns a buffer of zeros."""
        shape = (layout.layers, 2, layout.kv_heads, mean_slots + capacity, layout.head_dim)
        wanted = (mean_slots, shape, layout.dtype, device)
        found = next((one for one in self._free if one.kind == wanted), None)
        if found is None:
            self.drop_free()  # there may not be enough memory for both sizes
            with torch.inference_mode(False):  # otherwise it would be writable in that mode alone
                found = KVBuffer(torch.empty(shape, dtype=layout.dtype, device=device), mean_slots)
        else:
            self._free.remove(found)
        found.clear()  # which also touches its pages now, not in a decode step
        return found

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that no sequence uses."""
        return sum(one.memory.nbytes for one in self._free)

    def give_back(self, buffer: KVBuffer) -> None:
        """Returns a buffer. Enqueued work may use it only in stream order before its next use."""
        self._free.append(buffer)

    def drop_free(self) -> None:
        """Frees the buffers that no sequence uses."""
        self._free.clear()


def mean_slots_for(pages: int) -> int:
    """Returns slots for the means of `pages` pages, rounded up so that similar lengths share a buffer."""
    step = max(16, 1 << max(0, pages.bit_length() - 4))
    return -(-pages // step) * step
