"""Pages of KV memory: slabs of them, which are free, and how many sequences own each of the others."""

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
from cpu_kv.pinned import SlabAllocator, pieces


@dataclass(frozen=True, eq=False)
class Slab:
    """Memory for ``pages`` pages: for each layer a tensor of ``KVLayout.pages_shape``.

    ``mapped``: views of these tensors for kernels of a device, by layer and device.
    """

    number: int
    pages: int
    layers: list[Future[Tensor]]
    mapped: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)


def locked_pieces(slab: Tensor, first: int, last: int) -> Iterator[Tensor]:
    """Yields pages ``first`` .. ``last`` of a slab, split where its page-locked pieces meet."""
    entries, page, size = slab.view(-1), slab[0].numel(), slab.itemsize
    for piece_start, piece_end in pieces(slab.nbytes):
        start, end = max(first * page, piece_start // size), min(last * page, piece_end // size)
        if start < end:
            yield entries[start:end]


class PagePool:
    """The pages of a store, each of which one or more sequences own, or none: then it is free.

    For ``pin`` and ``on_warning`` see ``PagedKVStore``.
    """

    def __init__(self, layout: KVLayout, pin: bool, on_warning: Callable[[str], None] | None) -> None:
        self._layout = layout
        self._allocator = SlabAllocator(pin, on_warning)
        self._slabs: dict[int, Slab] = {}
        self._slabs_made = 0
        self._free: list[tuple[int, int]] = []  # heap of (slab number, page of the slab): lowest first
        self._shared: Counter[tuple[int, int]] = Counter()  # by slab number and page: owners beyond the first

    @property
    def pages(self) -> int:
        """Number of pages that are allocated or being allocated."""
        return sum(slab.pages for slab in tuple(self._slabs.values()))

    @property
    def extra_owners(self) -> int:
        """Number of owners of pages beyond the first one of each page."""
        return sum(tuple(self._shared.values()))

    def close(self) -> None:
        """Frees all memory. Idempotent."""
        self._slabs.clear()
        self._free.clear()
        self._shared.clear()
        self._allocator.close()

    def take(self, count: int, slab_pages: int) -> list[tuple[Slab, int]]:
        """Returns ``count`` pages, the lowest free ones first.

        If there are too few, a slab of at least ``slab_pages`` pages is allocated.
        """
        missing = count - len(self._free)
        if missing > 0:
            self._add_slab(max(missing, slab_pages))
        taken = (heapq.heappop(self._free) for _ in range(count))
        return [(self._slabs[number], page) for number, page in taken]

    def give_back(self, slab: Slab, page: int) -> None:
        """Takes a page from one of its owners; the last one's is free again."""
        others = self._shared.get((slab.number, page), 0)
        if others > 1:
            self._shared[slab.number, page] = others - 1
        elif others:
            del self._shared[slab.number, page]
        elif slab.number in self._slabs:
            heapq.heappush(self._free, (slab.number, page))

    def share(self, slab: Slab, first: int, last: int) -> None:
        """Gives pages ``first`` .. ``last`` of a slab one more owner each."""
        self._shared.update((slab.number, page) for page in range(first, last))

    def is_shared(self, slab: Slab, page: int) -> bool:
        return (slab.number, page) in self._shared

    def _add_slab(self, pages: int) -> None:
        # Layers are allocated in the background in this order: later ones while earlier ones are filled.
        shape = self._layout.pages_shape(pages)
        futures = [self._allocator.allocate(shape, self._layout.dtype) for _ in range(self._layout.layers)]
        slab = Slab(self._slabs_made, pages, futures)
        self._slabs_made += 1
        self._slabs[slab.number] = slab
        for page in range(pages):
            heapq.heappush(self._free, (slab.number, page))

    def memory(self, slab: Slab, layer: int) -> Tensor:
        """Returns one layer of a slab once it is allocated. If that fails, the whole slab is dropped."""
        try:
            return slab.layers[layer].result()
        except (MemoryError, CancelledError) as error:
            self._drop_slab(slab)
            tokens = slab.pages * self._layout.page_size
            raise MemoryError(f"no memory for {tokens} more tokens of KV: {error}") from error

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
        self._free = [entry for entry in self._free if entry[0] != slab.number]
        heapq.heapify(self._free)
        for future in slab.layers:
            if not future.cancel() and future.exception() is None:
                self._allocator.release(future.result())
