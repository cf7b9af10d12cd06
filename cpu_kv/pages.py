"""Pages of KV memory: slabs of them, which are free, and how many sequences own each of the others.

Where pages are packed, slabs have room for packed ones. A page of a layer that is not full yet, or that has
too many escapes, is kept as it is beside its slab.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cpu_kv.layout import KVLayout
from cpu_kv.mapped import device_view, kernels_use_host_pointers
from cpu_kv.packed import PageCodec
from cpu_kv.pinned import SlabAllocator, pieces
from cpu_kv.views import KVPages, PackedPages, PlainPages


@dataclass(frozen=True, eq=False)
class Slab:
    """Memory for many pages.

    Attributes:
        pages: their number.
        layers: for each layer a tensor of `KVLayout.slab_shape`.
        unpacked: of each layer, pages of a packed store that are kept as they are, by their numbers.
        written: numbers of the pages that were ever written.
        mapped: views of the slab's tensors for kernels of a device, by layer and device.
    """

    number: int
    pages: int
    layers: list[Future[Tensor]]
    unpacked: list[dict[int, Tensor]]
    written: set[int] = field(default_factory=set)
    mapped: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)


def locked_pieces(slab: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Yields pages `first` .. `last` of a slab, split where its page-locked pieces meet."""
    entries, page, size = slab.view(-1), slab[0].numel(), slab.itemsize
    for piece_start, piece_end in pieces(slab.nbytes):
        start, end = max(first * page, piece_start // size), min(last * page, piece_end // size)
        if start < end:
            yield entries[start:end]


class PagePool:
    """The pages of a store, each of which one or more sequences own, or none: then it is free.

    Args:
        pin, on_warning, codec: see `PagedKVStore`.
    """

    def __init__(
        self, layout: KVLayout, pin: bool, on_warning: Callable[[str], None] | None, codec: PageCodec
    ) -> None:
        self._layout = layout
        self._codec = codec
        self._pin = pin and torch.cuda.is_available()
        self._allocator = SlabAllocator(pin, on_warning)
        self._slabs: dict[int, Slab] = {}
        self._slabs_made = 0
        self._free_pages: list[tuple[int, int]] = []  # heap of (slab number, page of the slab): lowest first
        # Owners beyond the first one, by slab number and page.
        self._extra_owners: Counter[tuple[int, int]] = Counter()

    @property
    def pages(self) -> int:
        """Number of pages that are allocated or being allocated."""
        return sum(slab.pages for slab in tuple(self._slabs.values()))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the pages that are allocated or being allocated."""
        slabs = tuple(self._slabs.values())
        unpacked = sum(
            page.nbytes for slab in slabs for pages in slab.unpacked for page in tuple(pages.values())
        )
        return self.pages * self._layout.layers * self._layout.page_bytes + unpacked

    @property
    def spare_bytes(self) -> int:
        """Bytes that the system has given, less those of the pages that sequences own."""
        slabs, locks = tuple(self._slabs.values()), self._allocator.locks
        given = sum(slab.pages if locks else len(slab.written) for slab in slabs)
        owned = self.pages - len(self._free_pages)
        return (given - owned) * self._layout.layers * self._layout.page_bytes

    @property
    def extra_owners(self) -> int:
        """Number of owners of pages beyond the first one of each page."""
        return sum(tuple(self._extra_owners.values()))

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self._slabs.clear()
        self._free_pages.clear()
        self._extra_owners.clear()
        self._allocator.close()

    def take(self, count: int, slab_pages: int) -> list[tuple[Slab, int]]:
        """Returns `count` pages, the lowest free ones first.

        If there are too few, a slab of at least `slab_pages` pages is allocated.
        """
        missing = count - len(self._free_pages)
        if missing > 0:
            self._add_slab(max(missing, slab_pages))
        numbers = (heapq.heappop(self._free_pages) for _ in range(count))
        return [(self._slabs[number], page) for number, page in numbers]

    def give_back(self, slab: Slab, page: int) -> None:
        """Takes a page from one of its owners; the last one's is free again."""
        sharers = self._extra_owners.get((slab.number, page), 0)
        if sharers > 1:
            self._extra_owners[slab.number, page] = sharers - 1
        elif sharers:
            del self._extra_owners[slab.number, page]
        elif slab.number in self._slabs:
            for unpacked in slab.unpacked:
                unpacked.pop(page, None)
            heapq.heappush(self._free_pages, (slab.number, page))

    def share(self, slab: Slab, first: int, last: int) -> None:
        """Gives pages `first` .. `last` of a slab one more owner each."""
        self._extra_owners.update((slab.number, page) for page in range(first, last))

    def is_shared(self, slab: Slab, page: int) -> bool:
        return (slab.number, page) in self._extra_owners

    def _add_slab(self, pages: int) -> None:
        # Layers are allocated in the background in this order: later ones while earlier ones are filled.
        layers = range(self._layout.layers)
        futures = [self._allocator.allocate(*self._layout.slab_shape(pages)) for _ in layers]
        slab = Slab(self._slabs_made, pages, futures, [{} for _ in layers])
        self._slabs_made += 1
        self._slabs[slab.number] = slab
        for page in range(pages):
            heapq.heappush(self._free_pages, (slab.number, page))

    def memory(self, slab: Slab, layer: int) -> Tensor:
        """Returns one layer of a slab once it is allocated. If that fails, the whole slab is dropped."""
        try:
            return slab.layers[layer].result()
        except (MemoryError, CancelledError) as error:
            self._drop_slab(slab)
            tokens = slab.pages * self._layout.page_size
            raise MemoryError(f"no memory for {tokens} more tokens of KV: {error}") from error

    def forms(
        self, slab: Slab, layer: int, first: int, last: int
    ) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yields the ranges of pages `first` .. `last` that lie in the slab, and between them the others.

        Of these, each comes with its memory (`KVLayout.pages_shape`).
        """
        unpacked = slab.unpacked[layer]
        for page in sorted(page for page in tuple(unpacked) if first <= page < last):
            if first < page:
                yield first, page, None
            yield page, page + 1, unpacked[page]
            first = page + 1
        if first < last:
            yield first, last, None

    def views(self, slab: Slab, layer: int, start: int, end: int) -> list[KVPages]:
        """Returns views of the tokens `start` .. `end` of a slab, see `KVPages.span`."""
        memory, page, views = self.memory(slab, layer), self._layout.page_size, list[KVPages]()
        if not self._layout.packed:
            return PlainPages.of(memory).span(start, end)
        for first, last, unpacked in self.forms(slab, layer, start // page, -(-end // page)):
            pages: KVPages
            if unpacked is None:
                pages = PackedPages(memory[first:last], self._layout.packed_shape, self._codec)
            else:
                pages = PlainPages.of(unpacked)
            before = first * page
            views += pages.span(max(start - before, 0), min(end, last * page) - before)
        return views

    def open(self, slab: Slab, layer: int, page: int, *, keep: bool = False) -> Tensor:
        """Returns the memory of a page that tokens may be written to, of `KVLayout.pages_shape`.

        Args:
            keep: whether to unpack the tokens that it has.
        """
        memory, unpacked = self.memory(slab, layer)[page : page + 1], slab.unpacked[layer]
        if not self._layout.packed:
            return memory
        if page not in unpacked:
            with torch.inference_mode(False):  # a tensor made in inference mode is read-only outside of it
                values = torch.empty(
                    self._layout.pages_shape(1), dtype=self._layout.dtype, pin_memory=self._pin
                )
            if keep:
                self._codec.decode(self._layout.packed_shape, memory, values)
            unpacked[page] = values
        return unpacked[page]

    def pack(self, slab: Slab, layer: int, first: int, last: int) -> None:
        """Packs those of the pages `first` .. `last`, all full, that are not packed and can be."""
        shape, unpacked = self._layout.packed_shape, slab.unpacked[layer]
        for page, _, values in list(self.forms(slab, layer, first, last)):
            if values is None:
                continue
            packed, destination = self._codec.encode(shape, values), self.memory(slab, layer)[page]
            if shape.overflows(packed).item():
                destination.zero_()  # it may be saved
            else:
                destination.copy_(packed[0])
                del unpacked[page]

    def mapped(self, slab: Slab, layer: int, device: torch.device) -> Tensor | None:
        """Returns one layer of a slab as a tensor of a CUDA device; None if kernels cannot read all of it."""
        memory = self.memory(slab, layer)
        if (layer, device) not in slab.mapped and self._may_be_mapped(memory, device):
            slab.mapped[layer, device] = device_view(memory, device)
        return slab.mapped.get((layer, device))

    def _may_be_mapped(self, memory: Tensor, device: torch.device) -> bool:
        return self._allocator.is_locked(memory) and kernels_use_host_pointers(device)

    def _drop_slab(self, slab: Slab) -> None:
        # Its pages are not free any more, so a smaller request can still succeed.
        if self._slabs.pop(slab.number, None) is None:
            return
        self._free_pages = [entry for entry in self._free_pages if entry[0] != slab.number]
        heapq.heapify(self._free_pages)
        for future in slab.layers:
            if not future.cancel() and future.exception() is None:
                self._allocator.release(future.result())
