"""The full KV cache in CPU memory: pages of committed keys and values, grouped into slabs.

A page holds the keys of its tokens for all heads, then their values. Consecutive pages are therefore
contiguous in memory and cross a link as one copy. Where the layout says so, a page of a layer is packed as
soon as it is full (`packed`), and unpacked again if the sequence is cut within it and goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv.chunks import ChunkMeans
from cpu_kv.layout import KVLayout
from cpu_kv.packed import PageCodec
from cpu_kv.pages import PagePool, Slab, locked_pieces
from cpu_kv.views import KVPages, PlainPages, cut_alike


@dataclass
class _Run:
    """Pages that are consecutive both in a slab and in a sequence."""

    slab: Slab
    first: int  # number of its first page in the slab
    start: int  # number of its first page in the sequence
    pages: int


class PagedKVStore:
    """Stores the KV of any number of sequences in pages, which sequences with one beginning may share.

    A store and its sequences must be used from one thread, but other threads may read committed tokens of a
    sequence that is not appended to, truncated or closed meanwhile. Raises RuntimeError after `close`.

    Args:
        pin: whether to page-lock the memory, so that a GPU copies from it at full rate.
        slab_tokens: by how many tokens a sequence grows beyond what it has reserved.
        on_warning: called once if page-locking is refused.
        codec: packs and unpacks pages, if the layout says so.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        pin: bool = False,
        slab_tokens: int = 4096,
        on_warning: Callable[[str], None] | None = None,
        codec: PageCodec | None = None,
    ):
        self.layout = layout
        self.codec = codec or PageCodec()
        self._slab_pages = layout.pages(slab_tokens)
        self._pool = PagePool(layout, pin, on_warning, self.codec)
        self._sequences: set[SequenceKV] = set()
        self._closed = False

    def new_sequence(self, chunk_size: int | None = None, page_means: bool = False) -> SequenceKV:
        """Returns an empty sequence, which on request keeps means of its tokens as they are appended.

        Args:
            chunk_size: tokens of the chunks whose mean keys are kept in `summaries`; None: none are kept.
            page_means: whether to keep the mean keys and values of pages.
        """
        self._check_open()
        sequence = SequenceKV(self, chunk_size, page_means)
        self._sequences.add(sequence)
        return sequence

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the slabs that are allocated or being allocated, and of pages beside them."""
        return self._pool.reserved_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of new pages that take no memory of the system, which has given them before.

        Negative where sequences have reserved pages for which the system is still to give the memory.
        """
        return self._pool.spare_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the keys and values in all sequences; those that sequences share count once."""
        lengths = [length for sequence in tuple(self._sequences) for length in sequence._lengths]
        # A page that is shared is full in every layer of each of its owners.
        again = self._pool.extra_owners * self.layout.layers * self.layout.page_bytes
        return sum(map(self.layout.layer_bytes, lengths)) - again

    def close(self) -> None:
        """Closes every sequence and frees all memory. No copy may be pending. Idempotent."""
        self._closed = True
        for sequence in list(self._sequences):
            sequence.close()
        self._pool.close()

    def __enter__(self) -> PagedKVStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # For sequences:

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the KV store is closed")


class SequenceKV:
    """Committed keys and values of one sequence. Created by `PagedKVStore.new_sequence`.

    A pass appends to one layer after another, so that the lengths of layers differ meanwhile. Views stay
    valid until their tokens are truncated or the sequence is closed. Raises RuntimeError if used after the
    sequence or its store was closed, and ValueError for a layer that does not exist.
    """

    # A page with several owners is never written: `fork` shares full pages alone, writes go behind the tokens
    # that are present, and `truncate` leaves no shared page that is not full.

    def __init__(self, store: PagedKVStore, chunk_size: int | None, page_means: bool):
        self.layout = layout = store.layout
        self.summaries = None if chunk_size is None else ChunkMeans(layout, chunk_size)
        self.page_means = ChunkMeans(layout, layout.page_size, values=True) if page_means else None
        self._means = [means for means in (self.summaries, self.page_means) if means is not None]
        self.codec = store.codec
        self._store = store
        self._pool = store._pool
        self._runs: list[_Run] = []
        self._lengths = [0] * layout.layers
        self._whole: dict[int, tuple[int, int, list[KVPages]]] = {}  # newest views of full pages, by layer
        self._closed = False

    @property
    def length(self) -> int:
        """Number of tokens that are present in every layer."""
        return min(self._lengths)

    @property
    def reserved_tokens(self) -> int:
        """Number of tokens for which there are pages."""
        return self._pages * self.layout.page_size

    def room_after(self, length: int) -> int:
        """Returns for how many tokens there are pages once the sequence is truncated to `length`.

        Pages behind it that others share are not free then, and one that it cuts has to be copied.
        """
        behind = self._runs_of(length // self.layout.page_size, self._pages)
        shared_pages = sum(
            self._pool.is_shared(run.slab, page) for run, *ends in behind for page in range(*ends)
        )
        return (self._pages - shared_pages) * self.layout.page_size

    def layer_length(self, layer: int) -> int:
        """Number of tokens that are present in `layer`."""
        self._check(layer)
        return self._lengths[layer]

    def reserve(self, tokens: int) -> None:
        """Reserves pages for `tokens` tokens in total: free ones, and one new slab for the others.

        Returns at once; memory is allocated in the background. If memory is short, MemoryError is raised when
        the pages are first used.
        """
        self._check()
        self._grow(tokens, slab_pages=1)
        for means in self._means:
            means.reserve(tokens)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Appends keys and values `[kv_heads, n, head_dim]`, on any device, to `layer`, synchronously.

        Raises:
            ValueError: shape or dtype differs from the layout's.
            MemoryError: memory is short.
        """
        self._check(layer)
        self._append((layer,), self._lengths[layer], [(keys, values)])

    def append_layers(self, kv: Tensor) -> None:
        """Appends keys and values `[layers, 2, kv_heads, n, head_dim]` to all layers, or to none.

        Where an exception ends it, an interrupt too, every layer has its tokens or none has. Raises the
        errors of `append`.
        """
        self._check()
        self._append(range(self.layout.layers), self.length, [(keys, values) for keys, values in kv])

    def _append(self, layers: Sequence[int], start: int, kv: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Writes keys and values of these layers behind their first `start` tokens, and counts them."""
        count = self.layout.tokens_in(*kv[0])
        self._grow(start + count, slab_pages=self._store._slab_pages)
        for layer, (keys, values) in zip(layers, kv, strict=True):
            places = self._places(layer, start, start + count)
            for place, *pieces in cut_alike(places, keys.detach(), values.detach()):
                place.write(*pieces)
        self._advance(layers, start, count)

    def advance(self, layer: int, count: int) -> None:
        """Appends `count` tokens whose KV was already written to `memory`, or to `open_page`.

        Raises:
            ValueError: their pages were not reserved.
        """
        self._check(layer)
        self._advance((layer,), self._lengths[layer], count)

    def _advance(self, layers: Sequence[int], start: int, count: int) -> None:
        """Counts `count` tokens that were written behind the first `start` ones of these layers."""
        length, room = start + count, self._pages * self.layout.page_size
        if count < 0 or length > room:
            raise ValueError(f"cannot advance by {count} from {start}: room for {room}")
        for layer in layers:
            for means in self._means:
                means.cut(layer, start)  # an interrupt may have left more
                self._extend(means, layer, length)
        # One assignment for all of them: an interrupt before it leaves every layer as it was.
        self._lengths = [length if layer in layers else before for layer, before in enumerate(self._lengths)]
        page = self.layout.page_size
        for run, first_page, last_page in self._runs_of(start // page, self.layout.pages(length)):
            run.slab.written.update(range(first_page, last_page))
        for layer in layers:
            for run, first_page, last_page in self._runs_of(start // page, length // page):
                self._pool.pack(run.slab, layer, first_page, last_page)

    def _extend(self, means: ChunkMeans, layer: int, length: int) -> None:
        """Computes the means that are missing of a layer's first `length` tokens."""
        first, end = means.missing_range(layer, length)
        for part in self._span(layer, first, end) if first < end else ():
            means.extend(layer, part)

    def keep_means(self, chunk_size: int | None = None, page_means: bool = False) -> None:
        """Keeps further means from here on, and computes those of the tokens that are present.

        Means that the sequence keeps already stay. No other thread may append or read means meanwhile.

        Args:
            chunk_size: of `summaries` afterwards; None: those stay.
            page_means: see `PagedKVStore.new_sequence`.
        """
        self._check()
        if chunk_size is not None:
            self.summaries = self._keep(ChunkMeans(self.layout, chunk_size))
        if page_means:
            self.page_means = self._keep(ChunkMeans(self.layout, self.layout.page_size, values=True))

    def _keep(self, new: ChunkMeans) -> ChunkMeans:
        """Returns the means of the kind of `new` that the sequence keeps; keeps `new` if there is none."""
        for means in filter(new.same_kind, self._means):
            return means
        for layer, length in enumerate(self._lengths):
            self._extend(new, layer, length)
        self._means.append(new)
        return new

    def fork(self, length: int, chunk_size: int | None = None, page_means: bool = False) -> SequenceKV:
        """Returns a new sequence of the store that begins with the first `length` tokens of this one.

        Both share the whole pages, and each gives them up on its own; the page that `length` cuts is
        copied. Means that this sequence keeps are copied, others are computed.

        Args:
            chunk_size, page_means: see `PagedKVStore.new_sequence`.

        Raises:
            ValueError: fewer than `length` tokens are present in every layer.
            MemoryError: memory is short.
        """
        self._check()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot fork {length} tokens: {self.length} are present")
        fork = self._store.new_sequence(chunk_size, page_means)
        try:
            fork._begin_with(self, length)
        except BaseException:
            fork.close()
            raise
        return fork

    def _begin_with(self, source: SequenceKV, length: int) -> None:
        """Takes the first `length` tokens of another sequence. This one is empty."""
        whole = length // self.layout.page_size
        for run, first, last in source._runs_of(0, whole):
            self._pool.share(run.slab, first, last)
            self._runs.append(_Run(run.slab, first, self._pages, last - first))
        if whole < self.layout.pages(length):
            self._add_page(*source._copied_page(length))
        for mine in self._means:
            for theirs in filter(mine.same_kind, source._means):
                mine.begin_with(theirs, length)
        for layer in range(self.layout.layers):
            self.advance(layer, length)

    def _copied_page(self, length: int) -> tuple[Slab, int]:
        """Returns a new page with the tokens of the page that `length` cuts, in every layer."""
        start = length // self.layout.page_size * self.layout.page_size
        ((slab, number),) = self._pool.take(1, slab_pages=1)
        try:
            for layer in range(self.layout.layers):
                place = PlainPages.of(self._pool.open(slab, layer, number)).cut(0, length - start)
                (cut,) = self._span(layer, start, length)
                place.write(*cut.head_major())
        except BaseException:
            self._pool.give_back(slab, number)
            raise
        return slab, number

    def truncate(self, length: int) -> None:
        """Truncates every layer to `length` tokens and frees all pages behind them, reserved ones too.

        A shared page that `length` cuts is copied, as what is appended would be written to it.

        Raises:
            ValueError: fewer than `length` tokens are present.
            MemoryError: there is none for that copy.
        """
        self._check()
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}: {self.length} tokens are present")
        copied = self._copied_page(length) if self._cuts_shared_page(length) else None
        self._whole.clear()
        self._lengths = [length] * self.layout.layers
        for means in self._means:
            means.truncate(length)
        if copied is not None:
            self._replace_last_page(length // self.layout.page_size, *copied)
        self._keep_pages(self.layout.pages(length))

    def ends_at(self, length: int) -> bool:
        """True if every layer has `length` tokens, and more can be appended, without `truncate`.

        False after an exception that ended an append to one layer after another, or a `truncate`.
        """
        return {*self._lengths} == {length} and not self._cuts_shared_page(length)

    def _cuts_shared_page(self, length: int) -> bool:
        ends = length // self.layout.page_size, self.layout.pages(length)
        return any(self._pool.is_shared(run.slab, page) for run, page, _ in self._runs_of(*ends))

    def _replace_last_page(self, whole: int, slab: Slab, page: int) -> None:
        """Puts a page in the place of all those behind the first `whole` ones."""
        kept_runs = [
            _Run(run.slab, first, run.start, last - first) for run, first, last in self._runs_of(0, whole)
        ]
        dropped = [
            (run.slab, number) for run, *ends in self._runs_of(whole, self._pages) for number in range(*ends)
        ]
        self._runs = [*kept_runs, _Run(slab, page, whole, 1)]
        for run_slab, number in dropped:
            self._pool.give_back(run_slab, number)

    def views(self, layer: int, start: int = 0, end: int | None = None) -> list[KVPages]:
        """Returns views of the tokens `start` .. `end` (default: all) of `layer`, in order.

        Each is of consecutive whole pages, which may be packed, or of a part of one page, see `KVPages.span`.

        Raises:
            ValueError: the range is not present.
        """
        present = self.layer_length(layer)
        end = present if end is None else end
        if not 0 <= start <= end <= present:
            raise ValueError(f"tokens {start} to {end} of layer {layer}: {present} are present")
        if end % self.layout.page_size:
            return self._span(layer, start, end)
        # Full pages change only where the sequence is truncated, and passes ask for the same ones.
        cached = self._whole.get(layer)
        if cached is None or cached[:2] != (start, end):
            cached = self._whole[layer] = (start, end, self._span(layer, start, end))
        return cached[2]

    def device_views(self, layer: int, start: int, end: int, device: torch.device) -> list[KVPages] | None:
        """Returns `views` as tensors of a CUDA device, whose kernels read them over the link.

        Not for `copy_`, see `mapped.device_view`. The tokens must not be truncated while a kernel reads them.

        Returns:
            The views; None for other devices, and if the memory is packed or not page-locked.
        """
        self.views(layer, start, end)  # raises ValueError if the range is not present
        if device.type != "cuda" or self.layout.packed:
            return None
        page, views = self.layout.page_size, list[KVPages]()
        for run, _, _ in self._runs_of(start // page, -(-end // page)):
            mapped = self._pool.mapped(run.slab, layer, device)
            if mapped is None:
                return None
            views += PlainPages.of(mapped).span(*self._in_slab(run, start, end))
        return views

    def memory(self, layer: int, start: int, end: int, *, write: bool = False) -> list[Tensor]:
        """Returns the memory of the pages of tokens `start` .. `end`, present or not, for copies.

        Reserves pages if needed.

        Args:
            write: the pages will be written as a whole; only those behind all full ones may be, as others
                may be shared.

        Returns:
            One-dimensional, contiguous tensors of the pages as they are stored, in order; each is page-locked
            as a whole or not at all.

        Raises:
            ValueError: the range is not whole pages.
            MemoryError: memory is short.
        """
        self._check(layer)
        self.layout.check_whole(start, end)
        self._grow(end, slab_pages=self._store._slab_pages)
        pieces: list[Tensor] = []
        page = self.layout.page_size
        for run, first, last in self._runs_of(start // page, end // page):
            memory = self._pool.memory(run.slab, layer)
            pieces += locked_pieces(memory, first, last)
            for number in range(first, last) if write else ():
                run.slab.unpacked[layer].pop(number, None)
        return pieces

    def open_page(self, layer: int, start: int) -> Tensor:
        """Returns the memory of the page that begins with token `start`, for tokens that are not packed.

        Its shape is `KVLayout.pages_shape`. The copy of this page in `memory` is stale.
        """
        self.memory(layer, start, start + self.layout.page_size)
        ((run, page, _),) = self._runs_of(start // self.layout.page_size, start // self.layout.page_size + 1)
        return self._pool.open(run.slab, layer, page)

    def forms(self, layer: int, start: int, end: int) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yields ranges of the tokens `start` .. `end`, whole pages, by where their pages are.

        Those of `memory` come with None, each other page with its own memory, see `open_page`.
        """
        self.layout.check_whole(start, end)
        page, begun = self.layout.page_size, start
        for run, first, last in self._runs_of(start // page, end // page):
            for low, high, unpacked in self._pool.forms(run.slab, layer, first, last):
                at, stop = ((number - run.first + run.start) * page for number in (low, high))
                if unpacked is not None:
                    if begun < at:
                        yield begun, at, None
                    yield at, stop, unpacked
                    begun = stop
        if begun < end:
            yield begun, end, None

    def overflowing(self, layer: int, start: int, end: int) -> list[int]:
        """Returns the first tokens of those pages that were written to `memory` and cannot be packed."""
        page, starts = self.layout.page_size, list[int]()
        for run, first, last in self._runs_of(start // page, end // page) if self.layout.packed else ():
            packed = self._pool.memory(run.slab, layer)[first:last]
            numbers = self.layout.packed_shape.overflows(packed).nonzero()[:, 0].tolist()
            starts += [(number + first - run.first + run.start) * page for number in numbers]
        return starts

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
        for slab, page in self._pool.take(missing, slab_pages):
            self._add_page(slab, page)

    def _add_page(self, slab: Slab, page: int) -> None:
        last = self._runs[-1] if self._runs else None
        if last is not None and last.slab is slab and last.first + last.pages == page:
            last.pages += 1
        else:
            self._runs.append(_Run(slab, page, self._pages, 1))

    def _keep_pages(self, count: int) -> None:
        self._whole.clear()
        while self._pages > count:
            last = self._runs[-1]
            page = last.first + last.pages - 1
            # Given up before it is given back: an interrupt may lose a page, but never gives one to two.
            if last.pages == 1:
                self._runs.pop()
            else:
                last.pages -= 1
            self._pool.give_back(last.slab, page)

    def _runs_of(self, start: int, end: int) -> Iterator[tuple[_Run, int, int]]:
        """Yields the runs that contain pages `start` .. `end`, with the range of pages in their slabs."""
        number = bisect_right(self._runs, start, key=lambda run: run.start) - 1
        while start < end:
            run = self._runs[number]
            stop = min(end, run.start + run.pages)
            yield run, run.first + start - run.start, run.first + stop - run.start
            start = stop
            number += 1

    def _span(self, layer: int, start: int, end: int) -> list[KVPages]:
        """Returns views of the tokens `start` .. `end`, present or not."""
        page, views = self.layout.page_size, list[KVPages]()
        for run, _, _ in self._runs_of(start // page, -(-end // page)):
            views += self._pool.views(run.slab, layer, *self._in_slab(run, start, end))
        return views

    def _places(self, layer: int, start: int, end: int) -> list[PlainPages]:
        """Returns views of the tokens `start` .. `end`, which will be written."""
        page = self.layout.page_size
        for run, first, last in self._runs_of(start // page, -(-end // page)) if self.layout.packed else ():
            for number in range(first, last):
                begins = self._in_slab(run, start, end)[0]
                self._pool.open(run.slab, layer, number, keep=number * page < begins)
        return [part.plain() for part in self._span(layer, start, end)]

    def _in_slab(self, run: _Run, start: int, end: int) -> tuple[int, int]:
        """Returns the range in a run's slab of those of the tokens `start` .. `end` that it holds."""
        page = self.layout.page_size
        behind = (run.first - run.start) * page
        return behind + max(start, run.start * page), behind + min(end, (run.start + run.pages) * page)
