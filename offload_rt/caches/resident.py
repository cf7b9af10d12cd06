"""The resident tier: tokens of each layer that stay on a device, in pages as in the store or unpacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cpu_kv import KVPages, TransferEngine
from offload_rt.caches.tiers import DeviceTier


@dataclass(frozen=True)
class _Run:
    """Consecutive pages of a layer in one form: their tokens, and at which byte of its memory they begin."""

    start: int
    stop: int
    offset: int
    packed: bool

    def until(self, stop: int) -> _Run:
        return replace(self, stop=min(self.stop, stop))


class ResidentTier(DeviceTier):
    """Tokens of each layer that stay on a device, loaded from the store.

    Packed pages are unpacked whenever they are attended. Of pages that cannot be packed fewer have room.

    Args:
        transfer: over the store and the link to the device.
        capacity: most tokens per layer, in whole pages.
        packed: keep pages as the store has them, else all unpacked.

    Attributes:
        tokens: number of tokens that every layer has now.
        first: position of the first one in the sequence.
    """

    def __init__(self, transfer: TransferEngine, capacity: int, *, packed: bool = True) -> None:
        self._layout = layout = transfer.sequence.layout
        layout.check_whole(0, capacity)
        self.tokens = 0
        self.first = 0
        self._transfer = transfer
        self._capacity = capacity
        self._packed = packed and layout.packed
        self._runs: list[list[_Run]] = [[] for _ in range(layout.layers)]
        self._memory = torch.empty(layout.layers, 0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of memory allocated now."""
        return self._memory.nbytes

    def load(self, start: int) -> None:
        if start != self.first:
            self.truncate(self.first)
            self.first = start
        self.truncate(self.first + self.tokens)  # some layers may have more, of a load that was interrupted
        page, length = self._layout.page_size, self._transfer.sequence.length
        begin, stop = start + self.tokens, min(start + self._capacity, length // page * page)
        if begin >= stop:
            return
        added = [list(self._fitting_runs(layer, begin, stop)) for layer in range(self._layout.layers)]
        # The ranges are the same in every layer, so the one with least room for them decides.
        stop = min(runs[-1].stop if runs else begin for runs in added)
        added = [_cut(runs, stop) for runs in added]
        self._make_room(max(map(self._end, added)))
        for layer, runs in enumerate(added):
            for run in runs:
                memory = self._memory_of(layer, run)
                self._transfer.load(layer, run.start, run.stop, memory, packed=run.packed)
        for mine, runs in zip(self._runs, added, strict=True):
            mine += runs
        self.tokens = stop - start

    def _fitting_runs(self, layer: int, start: int, stop: int) -> Iterator[_Run]:
        """Yields the runs of so many pages behind those that the layer has, as far as there is room."""
        layout = self._layout
        room = self._capacity // layout.page_size * self._page_bytes(self._packed)
        at = self._end(self._runs[layer])
        for first, last, unpacked in self._transfer.sequence.forms(layer, start, stop):
            packed = self._packed and unpacked is None
            fitting = (room - at) // self._page_bytes(packed) * layout.page_size
            run = _Run(first, min(last, first + fitting), at, packed)
            if run.start < run.stop:
                yield run
            if run.stop < last:
                return
            at = self._end([run])

    def _page_bytes(self, packed: bool) -> int:
        layout = self._layout
        return layout.page_bytes if packed else layout.page_size * layout.layer_token_bytes

    def _end(self, runs: Sequence[_Run]) -> int:
        """Returns the byte at which runs of a layer end."""
        if not runs:
            return 0
        last = runs[-1]
        return last.offset + (last.stop - last.start) // self._layout.page_size * self._page_bytes(
            last.packed
        )

    def _make_room(self, size: int) -> None:
        """Makes room for so many bytes of each layer; what is there stays."""
        if size > self._memory.shape[1]:
            old = self._memory
            with torch.inference_mode(False):  # it may be made in that mode and written to outside of it
                memory = torch.empty(len(old), size, dtype=torch.uint8, device=self._transfer.link.device)
            if old.shape[1]:
                memory[:, : old.shape[1]] = old
            self._memory = memory

    def _memory_of(self, layer: int, run: _Run) -> Tensor:
        return self._memory[layer, run.offset : self._end([run])]

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on, in whole pages.

        The memory stays allocated, unless none is left: then the next prefill writes into it.
        """
        page = self._layout.page_size
        self.tokens = max(0, min(self.tokens, (length - self.first) // page * page))
        self._runs = [_cut(runs, self.first + self.tokens) for runs in self._runs]
        if not self.tokens:
            self._memory = self._memory.new_empty(len(self._memory), 0)

    def segments(self, layer: int, start: int, stop: int) -> Iterator[KVPages]:
        for run in _cut(self._runs[layer], stop):
            yield self._transfer.resident_pages(self._memory_of(layer, run), packed=run.packed)

    def release(self) -> None:
        """Frees the memory."""
        self.truncate(self.first)


def _cut(runs: Sequence[_Run], stop: int) -> list[_Run]:
    """Returns the runs up to token `stop`."""
    return [run.until(stop) for run in runs if run.start < stop]
