"""The full KV cache in CPU memory: pages of committed keys and values, grouped into slabs.

A page holds the keys of its tokens for all heads, then their values. Consecutive pages are therefore
contiguous in memory and cross a link as one copy.
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
    """Memory for ``pages`` pages: for each layer a tensor of ``KVLayout.pages_shape``.

    ``mapped``: views of these tensors for kernels of a device, by layer and device.
    """

    number: int
    pages: int
    layers: list[Future[Tensor]]
    mapped: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)


@dataclass
class _Run:
    """Pages that are consecutive both in a slab and in a sequence."""

    slab: _Slab
    first: int  # number of its first page in the slab
    start: int  # number of its first page in the sequence
    pages: int


def _locked_pieces(slab: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Yields pages ``first`` .. ``last`` of a slab, split where its page-locked pieces meet."""
    entries, page, size = slab.view(-1), slab[0].numel(), slab.itemsize
    for piece_start, piece_end in pieces(slab.nbytes):
        start, end = max(first * page, piece_start // size), min(last * page, piece_end // size)
        if start < end:
            yield entries[start:end]


class PagedKVStore:
    """Stores the KV of any number of sequences in pages. Sequences share no pages.

    ``pin``: whether to page-lock the memory, so that a GPU copies from it at full rate. ``slab_tokens``: by
    how many tokens a sequence grows beyond what it has reserved. ``on_warning``: called once if page-locking
    is refused. A store and its sequences must be used from one thread, but other threads may read committed
    tokens while nothing is appended or truncated. Raises RuntimeError if used after ``close``.
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
        """Returns an empty sequence, which on request keeps means of its tokens as they are appended.

        ``chunk_size``: tokens of the chunks whose mean keys are kept in ``summaries``; None: none are kept.
        ``page_means``: whether to keep the mean keys and values of pages.
        """
        self._check_open()
        sequence = SequenceKV(self, chunk_size, page_means)
        self._sequences.add(sequence)
        return sequence

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs that are allocated or being allocated."""
        pages = sum(slab.pages for slab in self._slabs.values())
        return pages * self.layout.layers * self.layout.page_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values in all sequences."""
        tokens = sum(sum(sequence._lengths) for sequence in self._sequences)
        return tokens * self.layout.layer_token_bytes

    def close(self) -> None:
        """Closes every sequence and frees all memory. No copy may be pending. Idempotent."""
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

    # For sequences:

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the KV store is closed")

    def _take_pages(self, count: int, slab_pages: int) -> list[tuple[_Slab, int]]:
        """Returns ``count`` pages, the lowest free ones first.

        If there are too few, a slab of at least ``slab_pages`` pages is allocated.
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
        # Layers are allocated in the background in this order: later ones while earlier ones are filled.
        shape = self.layout.pages_shape(pages)
        futures = [self._allocator.allocate(shape, self.layout.dtype) for _ in range(self.layout.layers)]
        slab = _Slab(self._slabs_made, pages, futures)
        self._slabs_made += 1
        self._slabs[slab.number] = slab
        for page in range(pages):
            heapq.heappush(self._free, (slab.number, page))

    def _memory(self, slab: _Slab, layer: int) -> Tensor:
        """Returns one layer of a slab once it is allocated. If that fails, the whole slab is dropped."""
        try:
            return slab.layers[layer].result()
        except (MemoryError, CancelledError) as error:
            self._drop_slab(slab)
            tokens = slab.pages * self.layout.page_size
            raise MemoryError(f"no memory for {tokens} more tokens of KV: {error}") from error

    def _mapped(self, slab: _Slab, layer: int, device: torch.device) -> Tensor | None:
        """Returns one layer of a slab as a tensor of a CUDA device; None if kernels cannot read all of it."""
        memory = self._memory(slab, layer)
        if (layer, device) not in slab.mapped and self._may_be_mapped(memory, device):
            slab.mapped[layer, device] = device_view(memory, device)
        return slab.mapped.get((layer, device))

    def _may_be_mapped(self, memory: Tensor, device: torch.device) -> bool:
        return self._allocator.is_locked(memory) and kernels_use_host_pointers(device)

    def _drop_slab(self, slab: _Slab) -> None:
        # Its pages are not free any more, so a smaller request can still succeed.
        if self._slabs.pop(slab.number, None) is None:
            return
        self._free = [entry for entry in self._free if entry[0] != slab.number]
        heapq.heapify(self._free)
        for future in slab.layers:
            if not future.cancel() and future.exception() is None:
                self._allocator.release(future.result())


class SequenceKV:
    """Committed keys and values of one sequence. Created by ``PagedKVStore.new_sequence``.

    A pass appends to one layer after another, so that the lengths of layers differ meanwhile. Views stay
    valid until their tokens are truncated or the sequence is closed. Raises RuntimeError if used after the
    sequence or its store was closed, and ValueError for a layer that does not exist.
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
        """Number of tokens for which there are pages."""
        return self._pages * self.layout.page_size

    def layer_length(self, layer: int) -> int:
        """Number of tokens that are present in ``layer``."""
        self._check(layer)
        return self._lengths[layer]

    def reserve(self, tokens: int) -> None:
        """Reserves pages for ``tokens`` tokens in total: free ones, and one new slab for the others.

        Returns at once; memory is allocated in the background. If memory is short, MemoryError is raised when
        the pages are first used.
        """
        self._check()
        self._grow(tokens, slab_pages=1)
        for means in self._means:
            means.reserve(tokens)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends keys and values ``[kv_heads, n, head_dim]``, on any device, to ``layer``, synchronously.

        Raises ValueError if shape or dtype differs from the layout's, MemoryError if memory is short.
        """
        self._check(layer)
        count, start = self.layout.tokens_in(keys, values), self._lengths[layer]
        self._grow(start + count, slab_pages=self._store._slab_pages)
        places = self._span(layer, start, start + count)
        for place, piece in cut_alike(places, keys.detach(), values.detach()):
            place.copy_(piece)
        self.advance(layer, count)

    def advance(self, layer: int, count: int) -> None:
        """Appends ``count`` tokens whose keys and values were already written to ``memory``.

        Raises ValueError if their pages were not reserved.
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
        """Truncates every layer to ``length`` tokens and frees all pages behind them, reserved ones too.

        Raises ValueError if fewer than ``length`` tokens are present.
        """
        self._check()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}: {self.length} tokens are present")
        self._lengths = [length] * self.layout.layers
        for means in self._means:
            means.truncate(length)
        self._keep_pages(self.layout.pages(length))

    def views(self, layer: int, start: int = 0, end: int | None = None) -> list[KeysValues]:
        """Returns views of the tokens ``start`` .. ``end`` (default: all) of ``layer``, in order.

        Each is a pair of keys and values ``[pages, kv_heads, tokens, head_dim]``: of consecutive whole pages,
        or of a part of one page. Raises ValueError if the range is not present.
        """
        present = self.layer_length(layer)
        end = present if end is None else end
        if not 0 <= start <= end <= present:
            raise ValueError(f"tokens {start} to {end} of layer {layer}: {present} are present")
        return self._span(layer, start, end)

    def device_views(self, layer: int, start: int, end: int, device: torch.device) -> list[KeysValues] | None:
        """Returns ``views`` as tensors of a CUDA device, whose kernels read them over the link.

        Returns None for other devices, and if the memory is not page-locked. Not for ``copy_``, see
        ``mapped.device_view``. The tokens must not be truncated while a kernel reads them.
        """
        self.views(layer, start, end)  # raises ValueError if the range is not present
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
        """Returns the memory of the pages of tokens ``start`` .. ``end``, present or not, for copies.

        One-dimensional, contiguous tensors, in order; each is page-locked as a whole or not at all. Reserves
        pages if needed. Raises ValueError if the range is not whole pages, MemoryError if memory is short.
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
        """Returns all pages to the store. Idempotent."""
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
        """Yields the runs that contain pages ``start`` .. ``end``, with the range of pages in their slabs."""
        number = bisect_right(self._runs, start, key=lambda run: run.start) - 1
        while start < end:
            run = self._runs[number]
            stop = min(end, run.start + run.pages)
            yield run, run.first + start - run.start, run.first + stop - run.start
            start = stop
            number += 1

    def _span(self, layer: int, start: int, end: int) -> list[KeysValues]:
        """Returns views of the tokens ``start`` .. ``end``, present or not."""
        page = self.layout.page_size
        found: list[KeysValues] = []
        for run, _, _ in self._runs_of(start // page, -(-end // page)):
            found += parts_of_pages(self._store._memory(run.slab, layer), *self._in_slab(run, start, end))
        return found

    def _in_slab(self, run: _Run, start: int, end: int) -> tuple[int, int]:
        """Returns the range in a run's slab of those of the tokens ``start`` .. ``end`` that it holds."""
        page = self.layout.page_size
        behind = (run.first - run.start) * page
        return behind + max(start, run.start * page), behind + min(end, (run.start + run.pages) * page)
