"""The full KV cache in CPU memory: pages of committed keys and values, grouped into slabs.

A page holds the keys, then the values of its tokens for all heads, so that consecutive pages are one piece of
memory and cross a link as one copy.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_kv.chunks import ChunkMeans
from cpu_kv.layout import KeysValues, KVLayout, cut_alike, parts_of_pages
from cpu_kv.mapped import device_view, kernels_use_host_pointers
from cpu_kv.pinned import SlabAllocator, pieces


@dataclass(frozen=True, eq=False)
class _Slab:
    """Room for ``pages`` pages: a tensor of ``KVLayout.pages_shape`` a layer.

    ``mapped``: the tensor of a layer as kernels of a device see it.
    """

    number: int
    pages: int
    layers: list[Future[Tensor]]
    mapped: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)


@dataclass
class _Run:
    """Consecutive pages of a slab that are consecutive in a sequence too."""

    slab: _Slab
    first: int  # page of the slab at which the run begins
    start: int  # page of the sequence at which it begins
    pages: int


def _locked_pieces(slab: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Pages ``first`` .. ``last`` of a slab, cut where the slab's page-locked pieces meet."""
    entries, page, size = slab.view(-1), slab[0].numel(), slab.itemsize
    for piece_start, piece_end in pieces(slab.nbytes):
        start, end = max(first * page, piece_start // size), min(last * page, piece_end // size)
        if start < end:
            yield entries[start:end]


class PagedKVStore:
    """Pages of KV for any number of sequences, which share nothing.

    ``pin``: page-locked memory, which a GPU copies from at full rate. ``slab_tokens``: tokens that a
    sequence grows by where it has not reserved. ``on_warning`` hears once if page-locking is refused.
    A store and its sequences are used from one thread; memory is allocated in another one. What is committed
    may be read in others while nothing is appended or truncated.
    Raises RuntimeError for use after ``close``.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        pin: bool = False,
        slab_tokens: int = 4096,
        on_warning: Callable[[str], None] | None = None,
    ):
        self.layout = layout
        self._slab_pages = layout.pages(slab_tokens)
        self._allocator = SlabAllocator(pin, on_warning)
        self._slabs: dict[int, _Slab] = {}
        self._slabs_made = 0
        self._free: list[tuple[int, int]] = []  # heap of (slab number, page of the slab): lowest first
        self._sequences: set[SequenceKV] = set()
        self._closed = False

    def new_sequence(self, chunk_size: int | None = None, page_means: bool = False) -> SequenceKV:
        """An empty sequence, which may keep means too, as its tokens come.

        ``chunk_size`` (in tokens): of each chunk's keys, in ``summaries``. ``page_means``: of pages' keys,
        and of their values.
        """
        self._check_open()
        sequence = SequenceKV(self, chunk_size, page_means)
        self._sequences.add(sequence)
        return sequence

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs that are allocated or asked for."""
        pages = sum(slab.pages for slab in self._slabs.values())
        return pages * self.layout.layers * self.layout.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values in all sequences."""
        tokens = sum(sum(sequence._lengths) for sequence in self._sequences)
        return tokens * self.layout.layer_token_bytes

    def close(self) -> None:
        """Close every sequence and give all memory back. Idempotent. No copy may be under way."""
        self._closed = True
        for sequence in list(self._sequences):
            sequence.close()
        self._slabs.clear()
        self._free.clear()
        self._allocator.close()

    def __enter__(self) -> PagedKVStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What sequences use.

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the KV store is closed")

    def _take_pages(self, count: int, slab_pages: int) -> list[tuple[_Slab, int]]:
        """Take ``count`` pages, the lowest free ones first; what is missing comes from a slab of its own.

        That slab has at least ``slab_pages`` pages.
        """
        missing = count - len(self._free)
        if missing > 0:
            self._add_slab(max(missing, slab_pages))
        taken = (heapq.heappop(self._free) for _ in range(count))
        return [(self._slabs[number], page) for number, page in taken]

    def _give_back(self, slab: _Slab, page: int) -> None:
        if slab.number in self._slabs:
            heapq.heappush(self._free, (slab.number, page))

    def _add_slab(self, pages: int) -> None:
        # All layers are asked for at once, in order: later layers are allocated while earlier ones fill.
        shape = self.layout.pages_shape(pages)
        futures = [self._allocator.allocate(shape, self.layout.dtype) for _ in range(self.layout.layers)]
        slab = _Slab(self._slabs_made, pages, futures)
        self._slabs_made += 1
        self._slabs[slab.number] = slab
        for page in range(pages):
            heapq.heappush(self._free, (slab.number, page))

    def _memory(self, slab: _Slab, layer: int) -> Tensor:
        """The tensor of one layer of a slab; waits for it. A slab that cannot be had is given up whole."""
        try:
            return slab.layers[layer].result()
        except (MemoryError, CancelledError) as error:
            self._drop_slab(slab)
            tokens = slab.pages * self.layout.page_size
            raise MemoryError(f"no memory for {tokens} more tokens of KV: {error}") from error

    def _mapped(self, slab: _Slab, layer: int, device: torch.device) -> Tensor | None:
        """One layer of a slab as kernels of a CUDA device see it; None where it is not all page-locked."""
        memory = self._memory(slab, layer)
        if (layer, device) not in slab.mapped and self._may_be_mapped(memory, device):
            slab.mapped[layer, device] = device_view(memory, device)
        return slab.mapped.get((layer, device))

    def _may_be_mapped(self, memory: Tensor, device: torch.device) -> bool:
        return self._allocator.is_locked(memory) and kernels_use_host_pointers(device)

    def _drop_slab(self, slab: _Slab) -> None:
        # Its pages never come back to the free ones, so that a smaller request can still succeed.
        if self._slabs.pop(slab.number, None) is None:
            return
        self._free = [entry for entry in self._free if entry[0] != slab.number]
        heapq.heapify(self._free)
        for future in slab.layers:
            if not future.cancel() and future.exception() is None:
                self._allocator.release(future.result())


class SequenceKV:
    """Committed keys and values of one sequence, layer by layer. Made by ``PagedKVStore.new_sequence``.

    Layers fill one after another; each has a length of its own until the pass is through. Views stay valid
    until the tokens they show are truncated or the sequence is closed. Raises RuntimeError for use after
    the sequence or its store is closed, ValueError for a layer that does not exist.
    """

    def __init__(self, store: PagedKVStore, chunk_size: int | None, page_means: bool):
        self.layout = layout = store.layout
        self.summaries = None if chunk_size is None else ChunkMeans(layout, chunk_size)
        self.page_means = ChunkMeans(layout, layout.page_size, values=True) if page_means else None
        self._means = [means for means in (self.summaries, self.page_means) if means is not None]
        self._store = store
        self._runs: list[_Run] = []
        self._lengths = [0] * layout.layers
        self._closed = False

    @property
    def length(self) -> int:
        """Number of tokens that are present in every layer."""
        return min(self._lengths)

    @property
    def reserved_tokens(self) -> int:
        """Number of tokens that there is room for."""
        return self._pages * self.layout.page_size

    def layer_length(self, layer: int) -> int:
        """Number of tokens that are present in ``layer``."""
        self._check(layer)
        return self._lengths[layer]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in all: free pages, then one slab for what is missing.

        Returns at once, memory is allocated in the background. A lack of memory raises MemoryError where
        the room is first used.
        """
        self._check()
        self._grow(tokens, slab_pages=1)
        for means in self._means:
            means.reserve(tokens)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Copy ``[kv_heads, n, head_dim]`` keys and values, on any device, to the end of ``layer``, and wait.

        Raises ValueError where shape or dtype is not the layout's, MemoryError where room cannot be had.
        """
        self._check(layer)
        count, start = self.layout.tokens_in(keys, values), self._lengths[layer]
        self._grow(start + count, slab_pages=self._store._slab_pages)
        places = self._span(layer, start, start + count)
        for place, piece in cut_alike(places, keys.detach(), values.detach()):
            place.copy_(piece)
        self.advance(layer, count)

    def advance(self, layer: int, count: int) -> None:
        """Count ``count`` tokens that were written to ``memory`` as present.

        Raises ValueError where there is no room for them.
        """
        self._check(layer)
        length = self._lengths[layer] + count
        room = self._pages * self.layout.page_size
        if count < 0 or length > room:
            raise ValueError(f"cannot advance by {count} from {self._lengths[layer]}: room for {room}")
        self._lengths[layer] = length
        for means in self._means:
            start, end = means.missing(layer, length)
            for part in self._span(layer, start, end) if start < end else ():
                means.extend(layer, part)

    def truncate(self, length: int) -> None:
        """Roll every layer back to ``length`` tokens and give the pages past it back to the store.

        Room reserved past it goes back too. Raises ValueError where ``length`` tokens are not present.
        """
        self._check()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}: {self.length} tokens are present")
        self._lengths = [length] * self.layout.layers
        for means in self._means:
            means.truncate(length)
        self._keep_pages(self.layout.pages(length))

    def views(self, layer: int, start: int = 0, end: int | None = None) -> list[KeysValues]:
        """Tokens ``start`` .. ``end`` (default: all present) of ``layer``, in place, without a copy.

        As few pieces ``[pages, kv_heads, tokens, head_dim]`` as the pages allow, in token order: runs of
        whole pages, and parts of the others. Raises ValueError for a range that is not present.
        """
        present = self.layer_length(layer)
        end = present if end is None else end
        if not 0 <= start <= end <= present:
            raise ValueError(f"tokens {start} to {end} of layer {layer}: {present} are present")
        return self._span(layer, start, end)

    def device_views(self, layer: int, start: int, end: int, device: torch.device) -> list[KeysValues] | None:
        """Returns ``views`` as tensors of a CUDA device, whose kernels read them over the link.

        None for another device, and where the memory could not be page-locked. Not for ``copy_``, see
        ``mapped.device_view``. The memory may not be given back while a kernel reads it.
        """
        self.views(layer, start, end)  # refuses what is not present
        if device.type != "cuda":
            return None
        page, found = self.layout.page_size, list[KeysValues]()
        for run, _, _ in self._runs_of(start // page, -(-end // page)):
            mapped = self._store._mapped(run.slab, layer, device)
            if mapped is None:
                return None
            found += parts_of_pages(mapped, *self._in_slab(run, start, end))
        return found

    def memory(self, layer: int, start: int, end: int) -> list[Tensor]:
        """The pages of tokens ``start`` .. ``end``, present or not, as they lie: one-dimensional, in order.

        Each piece is contiguous and page-locked as a whole or not at all. Raises ValueError where a page is
        cut, MemoryError where room cannot be had.
        """
        self._check(layer)
        self.layout.check_whole(start, end)
        self._grow(end, slab_pages=self._store._slab_pages)
        found: list[Tensor] = []
        page = self.layout.page_size
        for run, first, last in self._runs_of(start // page, end // page):
            memory = self._store._memory(run.slab, layer)
            found += _locked_pieces(memory, first, last)
        return found

    def close(self) -> None:
        """Give all pages back to the store. Idempotent."""
        if not self._closed:
            self._keep_pages(0)
            self._lengths = [0] * self.layout.layers
            self._store._sequences.discard(self)
            self._closed = True

    def _check(self, layer: int = 0) -> None:
        self._store._check_open()
        if self._closed:
            raise RuntimeError("the KV sequence is closed")
        if not 0 <= layer < self.layout.layers:
            raise ValueError(f"layer {layer}: the KV has layers 0 to {self.layout.layers - 1}")

    @property
    def _pages(self) -> int:
        return self._runs[-1].start + self._runs[-1].pages if self._runs else 0

    def _grow(self, tokens: int, slab_pages: int) -> None:
        missing = self.layout.pages(tokens) - self._pages
        if missing <= 0:
            return
        for slab, page in self._store._take_pages(missing, slab_pages):
            last = self._runs[-1] if self._runs else None
            if last is not None and last.slab is slab and last.first + last.pages == page:
                last.pages += 1
            else:
                self._runs.append(_Run(slab, page, self._pages, 1))

    def _keep_pages(self, count: int) -> None:
        while self._pages > count:
            last = self._runs[-1]
            last.pages -= 1
            self._store._give_back(last.slab, last.first + last.pages)
            if last.pages == 0:
                self._runs.pop()

    def _runs_of(self, start: int, end: int) -> Iterator[tuple[_Run, int, int]]:
        """The runs of pages ``start`` .. ``end``, and which pages of their slabs that are."""
        number = bisect_right(self._runs, start, key=lambda run: run.start) - 1
        while start < end:
            run = self._runs[number]
            stop = min(end, run.start + run.pages)
            yield run, run.first + start - run.start, run.first + stop - run.start
            start = stop
            number += 1

    def _span(self, layer: int, start: int, end: int) -> list[KeysValues]:
        """Views of tokens ``start`` .. ``end`` of the pages held, present or not."""
        page = self.layout.page_size
        found: list[KeysValues] = []
        for run, _, _ in self._runs_of(start // page, -(-end // page)):
            found += parts_of_pages(self._store._memory(run.slab, layer), *self._in_slab(run, start, end))
        return found

    def _in_slab(self, run: _Run, start: int, end: int) -> tuple[int, int]:
        """Where those of the tokens ``start`` .. ``end`` that a run holds lie in its slab."""
        page = self.layout.page_size
        behind = (run.first - run.start) * page
        return behind + max(start, run.start * page), behind + min(end, (run.start + run.pages) * page)
