"""One refresh of a retrieved cache: newly chosen entries, from a pass of the full cache or from the store."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cpu_kv import Gatherer, KVPages, PendingCopy
from cpu_kv.mapped import computed_copy
from offload_rt.caches.buffers import KVBuffer
from offload_rt.caches.selection import NO_MORE
from offload_rt.caches.sizes import PENDING_BYTES, PORTION_BYTES
from offload_rt.kernels.quantize import quantize

_Places = slice | tuple[Tensor, Tensor]
"""Entries of a layer, the same for every head; or heads and chunk slots."""


class ChosenChunks(NamedTuple):
    """The chunks to take for the KV heads of a layer, `[3, n]`: chunk number (rising), head, slot.

    The last ones may be `NO_MORE`.

    Attributes:
        device: the same on the device; None: not sent yet.
    """

    host: Tensor
    device: Tensor | None

    @classmethod
    def of(cls, host: Tensor, device: torch.device) -> ChosenChunks:
        """Wraps chunks chosen on the host; for a GPU page-locked, so that sending them does not block."""
        on_gpu = device.type == "cuda"
        return cls(host.pin_memory() if on_gpu else host, None if on_gpu else host)


@dataclass(frozen=True)
class EntryLayout:
    """The layout of entries for a sequence of `length` tokens: chosen chunks, then a recent window.

    Attributes:
        length: number of tokens.
        recent_start: position of the first token of the recent window.
        chosen_end: number of entries of the chosen chunks.
        means: number of pages, from the first one on, whose means represent the unretrieved tokens.
        unretrieved: number of tokens before the recent window, in these pages, that were not chosen.
        quantizes: the chosen chunks are quantised, apart from the recent window.
    """

    length: int
    recent_start: int
    chosen_end: int
    means: int
    unretrieved: int
    quantizes: bool = False

    @property
    def quantized(self) -> int:
        """Number of quantised entries."""
        return self.chosen_end if self.quantizes else 0

    @property
    def entries(self) -> int:
        """Number of the other entries."""
        return self.chosen_end - self.quantized + self.length - self.recent_start


class RetrievalRefresh:
    """Fills a buffer with newly chosen entries, from the segments of a pass or from the store at once.

    Chunks are chosen layer by layer in another thread, ahead of the pass. No method waits for the device.

    Args:
        transfer: over the store and its link; its layers are counted from 0 here, as in `buffer`.
        chunk: tokens per chunk.
        layout: how the entries lie in `buffer`.
        choose: returns the chunks of a layer; called in `executor`.
        executor: has one thread; may be shut down after `close`.
        whole: all entries are taken; False: some chosen chunks stay where they are.
        staging: memory for the chosen chunks of two layers, `[2, 2, kv_heads, entries, head_dim]`, where all
            of them are quantised: they share ranges, and arrive one by one.
    """

    def __init__(
        self,
        transfer: Gatherer,
        chunk: int,
        layout: EntryLayout,
        choose: Callable[[int], ChosenChunks],
        buffer: KVBuffer,
        executor: Executor,
        whole: bool = True,
        staging: Tensor | None = None,
    ) -> None:
        self.layout = layout
        self.buffer = buffer
        self._whole = whole
        self._staging = staging
        self._transfer = transfer
        self._chunk = chunk
        self._layers = range(len(transfer.layers))

        def choose_layer(layer: int) -> tuple[list[int], ChosenChunks]:
            chunks = choose(layer)
            numbers = chunks.host[0].tolist()
            return numbers[: bisect_left(numbers, NO_MORE)], chunks

        self._choices = [executor.submit(choose_layer, layer) for layer in self._layers]
        self._layer = -1
        self._on_host = self._on_device = torch.empty(3, 0, dtype=torch.long)  # chunks of the layer
        self._numbers: list[int] = []
        self._recent = transfer.sequence.layout.kv_heads * (layout.length - layout.recent_start)
        self._missing_entries = 0  # entries of the layers so far
        self._pending: deque[tuple[int, _Places, PendingCopy]] = deque()
        self._pending_bytes = 0

    @property
    def complete(self) -> bool:
        """True once every entry has been taken."""
        return self._layer == self._layers[-1] and self._missing_entries == 0

    def finish(self) -> None:
        """Writes entries that are still on their way to the buffer."""
        self._write_pending(len(self._layers))
        for layer in self._layers[-2:]:
            self._quantize(layer)

    def close(self) -> None:
        """Stops choosing, after a pass that was abandoned. Idempotent."""
        for future in [future for future in self._choices if not future.cancel()]:
            future.exception()  # waits for the layer that is being chosen

    def _write_pending(self, end: int) -> None:
        """Writes the entries that were sent for layers before `end`, and frees the memory they came in."""
        while self._pending and self._pending[0][0] < end:
            self._write_oldest()

    def _write_oldest(self) -> None:
        layer, places, sent = self._pending.popleft()
        self._pending_bytes -= sent.destination.nbytes
        self._write(self._transfer.await_copy(sent), layer, places)

    def _write(self, kv: Tensor, layer: int, places: _Places) -> None:
        """Writes keys and values on the device, `[2, …]`, to entries."""
        entries = self.buffer.kv[layer]
        if isinstance(places, slice):
            entries[:, :, places] = kv
        elif self.layout.quantizes and not self._whole:
            assert self.buffer.quantized is not None
            self.buffer.quantized.layer(layer).put_chunks(kv[0], kv[1], *places)
        else:
            self._chosen_entries(layer).unflatten(2, (-1, self._chunk))[:, *places] = kv

    def _chosen_entries(self, layer: int) -> Tensor:
        """Returns where the chosen chunks of a layer are written, `[2, kv_heads, entries, head_dim]`."""
        entries = self.buffer.kv[layer]
        if self.layout.quantizes:
            assert self._staging is not None
            entries = self._staging[layer % 2]
        return entries[:, :, : self.layout.chosen_end]

    def _quantize(self, layer: int) -> None:
        """Quantises all chosen chunks of a layer, which are complete."""
        if self._whole and self.layout.quantized and layer >= 0:
            assert self.buffer.quantized is not None
            quantize(self.buffer.quantized.layer(layer), *self._chosen_entries(layer))

    def take_from_store(self) -> None:
        """Takes every entry from the store now. Raises CopyFailed."""
        sequence, link, length = self._transfer.sequence, self._transfer.link, self.layout.length
        with closing(self):
            for layer, source_layer in enumerate(self._transfer.layers):
                mapped = (
                    None if link.in_place else sequence.device_views(source_layer, 0, length, link.device)
                )
                runs = sequence.views(source_layer, 0, length) if mapped is None else mapped
                self.take(layer, 0, runs, over_link=mapped is None and not link.in_place)
            self.finish()

    def take(self, layer: int, start: int, runs: Sequence[KVPages], *, over_link: bool = False) -> None:
        """Takes the chosen entries among consecutive tokens of a layer; no chunk may cross a page.

        Args:
            start: position of the first token.
            runs: on the device or where its kernels can read them.
            over_link: `runs` are in host memory that kernels cannot read: entries must be sent.
        """
        if layer != self._layer:
            self._start_layer(layer)
        for pages in runs:
            self._take_chunks(layer, start, pages, over_link)
            self._take_recent(layer, start, pages, over_link)
            start += pages.tokens

    def _start_layer(self, layer: int) -> None:
        # At most two layers are on their way: the pass waits for neither, and they take little memory.
        self._write_pending(layer - 1)
        self._quantize(layer - 2)
        self._layer = layer
        self._numbers, (self._on_host, on_device) = self._choices[layer].result()
        self._missing_entries += self._recent + len(self._numbers) * self._chunk
        if on_device is None:
            on_device = self._on_host.to(self.buffer.memory.device, non_blocking=True)
        self._on_device = on_device

    def _take_chunks(self, layer: int, start: int, pages: KVPages, over_link: bool) -> None:
        layout, first = self._transfer.sequence.layout, start // self._chunk
        low = bisect_left(self._numbers, first)
        high = bisect_left(self._numbers, first + pages.tokens // self._chunk)
        # A chunk of one head.
        size = self._chunk * layout.layer_token_bytes // layout.kv_heads
        portion = max(1, PORTION_BYTES // size)
        for at in range(low, high, portion):
            self._take_portion(layer, first, pages, slice(at, min(at + portion, high)), over_link)

    def _take_portion(self, layer: int, first: int, pages: KVPages, chunks: slice, over_link: bool) -> None:
        """Takes some of the chosen chunks of a layer, from pages whose first chunk is `first`."""
        chunk, per_page = self._chunk, pages.page_tokens // self._chunk
        # KV in host memory is picked by the host's copy of the choice, without asking the device.
        numbers, heads, _ = (self._on_host if over_link else self._on_device)[:, chunks]
        page, number = (numbers - first) // per_page, (numbers - first) % per_page
        count = chunks.stop - chunks.start
        self._missing_entries -= count * chunk
        _, *places = self._on_device[:, chunks]  # heads and slots
        shape = 2, count, chunk, self._transfer.sequence.layout.head_dim
        take = partial(pages.take_chunks, chunk, page, heads, number)
        self._move(shape, take, layer, tuple(places), over_link)

    def _take_recent(self, layer: int, start: int, pages: KVPages, over_link: bool) -> None:
        layout = self.layout
        first = max(start, layout.recent_start)
        last = min(start + pages.tokens, layout.length)
        if first >= last:
            return
        offset = layout.chosen_end - layout.quantized - layout.recent_start  # from positions to entries
        sides = pages.head_major(first - start, last - start)
        self._missing_entries -= (last - first) * pages.kv_heads
        places = slice(first + offset, last + offset)
        shape = (2, *sides[0].shape)

        def copy(into: Tensor) -> None:
            for side, out in zip(sides, into, strict=True):
                # By a kernel, as `side` may be host memory that the device reads directly.
                out.copy_(side) if over_link or not side.is_cuda else computed_copy(side, out=out)

        self._move(shape, copy, layer, places, over_link)

    def _move(
        self,
        shape: Sequence[int],
        fill: Callable[[Tensor], object],
        layer: int,
        places: _Places,
        over_link: bool,
    ) -> None:
        """Writes what `fill` puts into memory of this shape to the entries at `places`, without waiting."""
        if over_link:
            self._pending.append((layer, places, sent := self._transfer.send(shape, fill)))
            self._pending_bytes += sent.destination.nbytes
            while self._pending_bytes > PENDING_BYTES:
                self._write_oldest()
        else:
            moved = self.buffer.memory.new_empty(shape)
            fill(moved)
            self._write(moved, layer, places)
