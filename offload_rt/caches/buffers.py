"""Memory of bounded caches, reused from one sequence to the next."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.caches.selection import NONE
from offload_rt.caches.sizes import whole_pages
from offload_rt.kernels.quantized import QuantizedKV
from offload_rt.kernels.sizes import QuantizedSize


@dataclass(eq=False)
class HeldChunks:
    """The chunks that the slots of a buffer hold, so that a refresh takes only others.

    Attributes:
        numbers: `[layers, kv_heads, slots]` int64, on the device where chunks are chosen.
        intact: how many slots, from the first one on, hold these chunks; 0 while they are written.
    """

    numbers: Tensor
    intact: int = 0

    def begin(self, slots: int) -> Tensor:
        """Returns the chunk in each of the first `slots` slots, or `NONE`, for a refresh to choose others."""
        self.numbers[..., self.intact :] = NONE
        self.intact = 0
        return self.numbers[..., :slots]


@dataclass(eq=False)
class KVBuffer:
    """Keys and values of a bounded cache: means of pages, then entries, attended together.

    Further entries may be quantised. A recorded CUDA graph is bound to the buffer's addresses and lives as
    long as the buffer.

    Attributes:
        memory: keys and values, `[layers, 2, kv_heads, mean_slots + capacity, head_dim]`.
        mean_slots: slots for means of pages, which are filled backwards from the first entry.
        means: number of means present.
        quantized: memory for quantised entries; None: there are none.
        chunks: the chunk in each slot; None: no chunk was chosen yet.
    """

    memory: Tensor
    mean_slots: int = 0
    means: int = 0
    quantized: QuantizedKV | None = None
    chunks: HeldChunks | None = None

    @property
    def kv(self) -> Tensor:
        """The entries, `[layers, 2, kv_heads, capacity, head_dim]`."""
        return self.memory[:, :, :, self.mean_slots :]

    @property
    def capacity(self) -> int:
        """Number of slots for entries."""
        return self.memory.shape[3] - self.mean_slots

    @property
    def kind(self) -> tuple[object, ...]:
        """Key of buffers that can replace each other."""
        quantized = self.quantized and self.quantized.kind
        return self.mean_slots, self.memory.shape, self.memory.dtype, self.memory.device, quantized

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes + (self.quantized.nbytes if self.quantized else 0)

    def clear(self) -> None:
        """Zeroes the memory: slots behind the entries are multiplied by zero and so must be finite."""
        self.memory.zero_()
        self.means, self.chunks = 0, None
        if self.quantized is not None:
            self.quantized.clear()

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
        entries = self.memory.shape[3] + max(missing, self.capacity // 4)
        pad = (0, 0, 0, whole_pages(entries) - self.memory.shape[3])
        with torch.inference_mode(False):  # as in `take`
            memory = torch.nn.functional.pad(self.memory, pad)
        return replace(self, memory=memory)


@dataclass
class BufferPool:
    """Buffers returned by closed sequences, for the next ones: graphs recorded over them stay valid."""

    _free_buffers: list[KVBuffer] = field(default_factory=list)

    def take(
        self,
        layout: KVLayout,
        capacity: int,
        device: torch.device,
        mean_slots: int = 0,
        quantized: QuantizedSize | None = None,
    ) -> KVBuffer:
        """Returns a buffer of zeros."""
        shape = (layout.layers, 2, layout.kv_heads, mean_slots + capacity, layout.head_dim)
        kind = quantized and quantized.shapes(layout)
        key = (mean_slots, shape, layout.dtype, device, kind)
        buffer = next((free_buffer for free_buffer in self._free_buffers if free_buffer.kind == key), None)
        if buffer is None:
            self.drop_free()  # there may not be enough memory for both sizes
            with torch.inference_mode(False):  # otherwise it would be writable in that mode alone
                memory = torch.empty(shape, dtype=layout.dtype, device=device)
                packed = quantized and QuantizedKV.empty(layout, *quantized, device)
            buffer = KVBuffer(memory, mean_slots, quantized=packed)
        else:
            self._free_buffers.remove(buffer)
        buffer.clear()  # which also touches its pages now, not in a decode step
        return buffer

    @property
    def free_bytes(self) -> int:
        """Bytes of the buffers that no sequence uses."""
        return sum(buffer.nbytes for buffer in self._free_buffers)

    def give_back(self, buffer: KVBuffer) -> None:
        """Returns a buffer. Enqueued work may use it only in stream order before its next use."""
        self._free_buffers.append(buffer)

    def drop_free(self) -> None:
        """Frees the buffers that no sequence uses."""
        self._free_buffers.clear()
