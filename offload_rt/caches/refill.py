"""How a retrieved cache is filled: from a pass of the full one, as its entries pass by, or from the store."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from cpu_kv import KeysValues, PendingCopy, TransferEngine, part_of
from cpu_kv.mapped import computed_copy
from offload_rt.caches.buffers import KVBuffer

_Places = slice | tuple[Tensor, Tensor]
"""Entries of a layer, for every head alike; or heads and chunks."""


class ChosenChunks(NamedTuple):
    """Chunks that the KV heads of a layer keep, `[3, n]`: chunk (rising), head, and slot within the head."""

    host: Tensor
    device: Tensor | None
    """None: still to be sent."""

    @classmethod
    def of(cls, host: Tensor, device: torch.device) -> ChosenChunks:
        """Chosen on the host, for a device: page-locked, so that sending them holds up nothing."""
        on_gpu = device.type == "cuda"
        return cls(host.pin_memory() if on_gpu else host, None if on_gpu else host)


@dataclass(frozen=True)
class Extent:
    """How a text of `length` tokens fills the entries: chunks `[0, chosen_end)`, then the recent window.

    What was not chosen before that window is the rest: the means of the first `pages` pages stand for it.
    """

    length: int
    recent_start: int
    chosen_end: int
    pages: int
    rest: int  # tokens

    @property
    def entries(self) -> int:
        return self.chosen_end + self.length - self.recent_start


class ChunkRows:
    """Memory of `[pages, heads, tokens, dim]` as rows, of which chunks are made.

    A row is picked as a whole, where indexing by page, head and chunk picks an element at a time.
    """

    def __init__(self, part: Tensor, chunk: int) -> None:
        pages, heads, tokens, dim = part.shape
        self._chunk = chunk
        self._page, self._head = (stride // dim for stride in part.stride()[:2])  # tokens between two
        self._tokens = gcd(chunk, self._page, self._head)  # of a row
        end = (pages - 1) * self._page + (heads - 1) * self._head + tokens
        width = self._tokens * dim
        self.memory = part.as_strided((end // self._tokens, width), (width, 1))

    def of(self, page: Tensor, head: Tensor, at: Tensor) -> Tensor:
        """Numbers of the rows of chunks: the page of each, its head, and its place there."""
        first = (page * self._page + head * self._head + at * self._chunk) // self._tokens
        each = torch.arange(self._chunk // self._tokens, device=first.device)
        return (first[:, None] + each).flatten()


class RetrievedRefill:
    """Entries chosen anew, taken into a buffer from a pass of the full cache, or from the store at once.

    Chunks are chosen layer by layer in another thread, ahead of the pass, for which nothing here waits for
    the device.

    Args:
        engine: over the store and its link.
        chunk: tokens of a chunk.
        choose: returns the chunks of a layer, in that thread.
        choosing: has that thread. It may be shut down after `close`.

    Attributes:
        extent: how the entries lie in `buffer`.
    """

    def __init__(
        self,
        engine: TransferEngine,
        chunk: int,
        extent: Extent,
        choose: Callable[[int], ChosenChunks],
        buffer: KVBuffer,
        choosing: Executor,
    ) -> None:
        self.extent = extent
        self.buffer = buffer
        self._engine = engine
        self._chunk = chunk
        self._layers = range(engine.sequence.layout.layers)

        def chosen(layer: int) -> tuple[list[int], ChosenChunks]:
            chunks = choose(layer)
            return chunks.host[0].tolist(), chunks

        self._chosen = [choosing.submit(chosen, layer) for layer in self._layers]
        self._layer = -1
        self._chunks = self._there = torch.empty(3, 0, dtype=torch.long)  # as chosen
        self._numbers: list[int] = []
        self._missing = len(self._layers) * engine.sequence.layout.kv_heads * extent.entries
        self._under_way: deque[tuple[int, _Places, PendingCopy]] = deque()

    @property
    def complete(self) -> bool:
        """Whether every entry has passed by."""
        return self._missing == 0

    def finish(self) -> None:
        """Puts what was sent meanwhile in its place; what is still under way is waited for."""
        self._put_sent(len(self._layers))

    def close(self) -> None:
        """Stops choosing, for a pass that is given up. Idempotent."""
        for future in [one for one in self._chosen if not one.cancel()]:
            future.exception()  # waits for the layer that is being chosen

    def _put_sent(self, end: int) -> None:
        """Puts what was sent of the layers before `end` in its place, and lets go what it came in."""
        while self._under_way and self._under_way[0][0] < end:
            layer, places, sent = self._under_way.popleft()
            self._put(self._engine.await_copy(sent), layer, places)

    def _put(self, kv: Tensor, layer: int, places: _Places) -> None:
        """Keys and values on the device, `[2, …]`, to the entries at `places`."""
        entries = self.buffer.kv[layer]
        if isinstance(places, slice):
            entries[:, :, places] = kv
        else:
            chosen = entries[:, :, : self.extent.chosen_end]
            chosen.unflatten(2, (-1, self._chunk))[:, *places] = kv

    def take_from_store(self) -> None:
        """Takes every entry now, from where it lies. Raises CopyFailed."""
        sequence, link, length = self._engine.sequence, self._engine.link, self.extent.length
        with closing(self):
            for layer in self._layers:
                mapped = None if link.in_place else sequence.device_views(layer, 0, length, link.device)
                runs = sequence.views(layer, 0, length) if mapped is None else mapped
                self.take(layer, 0, runs, over_link=mapped is None and not link.in_place)
            self.finish()

    def take(self, layer: int, start: int, runs: Sequence[KeysValues], *, over_link: bool = False) -> None:
        """Takes what it wants of the text's tokens from `start` on, which lie in no chunk across two pages.

        Args:
            runs: `[pages, kv_heads, tokens, head_dim]`, on the device or where its kernels can read them.
            over_link: they are in host memory that kernels cannot read, and what is taken must be sent.
        """
        if layer != self._layer:
            self._turn_to(layer)
        for keys, values in runs:
            self._take_chunks(layer, start, keys, values, over_link)
            self._take_recent(layer, start, keys, values, over_link)
            start += len(keys) * keys.shape[2]

    def _turn_to(self, layer: int) -> None:
        # Two layers' are on their way at most: the pass waits for none, and they take little memory.
        self._put_sent(layer - 1)
        self._layer = layer
        self._numbers, (self._chunks, there) = self._chosen[layer].result()
        device = self.buffer.memory.device
        self._there = self._chunks.to(device, non_blocking=True) if there is None else there

    def _take_chunks(self, layer: int, start: int, keys: Tensor, values: Tensor, over_link: bool) -> None:
        chunk, (pages, _, tokens, dim) = self._chunk, keys.shape
        first, per_page = start // chunk, tokens // chunk
        low = bisect_left(self._numbers, first)
        high = bisect_left(self._numbers, first + pages * per_page)
        if low == high:
            return
        # What lies in host memory is picked by what was chosen there: the device need not be asked.
        numbers, heads, _ = (self._chunks if over_link else self._there)[:, low:high]
        page, at = (numbers - first) // per_page, (numbers - first) % per_page
        sides = [ChunkRows(part, chunk) for part in (keys, values)]
        rows = sides[0].of(page, heads, at)
        self._missing -= (high - low) * chunk
        _, *places = self._there[:, low:high]  # heads and chunks

        def pick(packed: Tensor) -> None:
            for side, out in zip(sides, packed, strict=True):
                torch.index_select(side.memory, 0, rows, out=out.view(len(rows), -1))

        self._bring((2, high - low, chunk, dim), pick, layer, tuple(places), over_link)

    def _take_recent(self, layer: int, start: int, keys: Tensor, values: Tensor, over_link: bool) -> None:
        extent = self.extent
        first = max(start, extent.recent_start)
        last = min(start + len(keys) * keys.shape[2], extent.length)
        if first >= last:
            return
        behind = extent.chosen_end - extent.recent_start  # from places in the text to entries
        parts = [part_of(part, first - start, last - start) for part in (keys, values)]
        self._missing -= (last - first) * keys.shape[1]
        places = slice(first + behind, last + behind)
        shape = (2, *parts[0].shape)

        def copy(packed: Tensor) -> None:
            for part, out in zip(parts, packed, strict=True):
                # By a kernel: what lies in host memory is no source for a copy within the device.
                out.copy_(part) if over_link or not part.is_cuda else computed_copy(part, out=out)

        self._bring(shape, copy, layer, places, over_link)

    def _bring(
        self,
        shape: Sequence[int],
        fill: Callable[[Tensor], object],
        layer: int,
        places: _Places,
        over_link: bool,
    ) -> None:
        """What `fill` puts into memory of this shape, to the entries at `places`; no link is waited for."""
        if over_link:
            self._under_way.append((layer, places, self._engine.send(shape, fill)))
        else:
            packed = self.buffer.memory.new_empty(shape)
            fill(packed)
            self._put(packed, layer, places)
