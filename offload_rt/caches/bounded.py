"""A cache of bounded size: verified entries, and behind them the speculative ones.

Keys carry their rotation, so the order of entries means nothing to attention: a new entry may stand
where an old one stood. Speculative entries are kept apart at the end and become verified entries only in
`settle` or `adopt`; taking them back never loses anything.

A pass attends to as many entries as there are. A recorded one (`fixed_frame`) attends to the whole buffer
under a mask: then its shapes depend on nothing but the number of new tokens, and what differs from pass to
pass is a few numbers on the device, as a CUDA graph needs it. What lies behind the entries is hidden, and
finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.backends import AttentionBackend, folded_mask
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import WORD_BITS, NewTokens, Verified, seen
from offload_rt.caches.buffers import BufferPool, KVBuffer, whole_pages
from offload_rt.caches.refill import RetrievedRefill
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.host import to_device

SPECULATIVE_ENTRIES = 128
"""Room behind the verified entries: for the longest draft, and another one that is drafted ahead of it."""

NUMBERS = 4
"""That tell of the cache in a pass: entries, where new ones go, means of pages, tokens of the rest."""

WORDS = 3
"""Numbers that tell what a new token sees of the speculative entries and of its pass, `WORD_BITS` each."""

FIXED_SPECULATION = WORDS * WORD_BITS
"""Speculative entries, those of the pass included, that these numbers tell of."""


@dataclass
class Frame:
    """Where a pass's new tokens go in a buffer, and what they see; its attention in every layer.

    Places are counted in the buffer's memory.

    Attributes:
        slots: where new tokens go.
        seen: what is attended to.
        mask: additive `[count, seen]`; None: everything is seen.
    """

    buffer: KVBuffer
    backend: AttentionBackend
    slots: slice | Tensor
    seen: slice
    mask: Tensor | None
    _folded: Tensor | None = None  # the mask, as it is in every layer

    @classmethod
    def behind(
        cls,
        buffer: KVBuffer,
        backend: AttentionBackend,
        new: NewTokens,
        entries: int,
        held: int = 0,
        pages: int = 0,
        rest: int = 0,
    ) -> Frame:
        """Of a pass behind `entries` verified entries and `held` speculative ones.

        Args:
            pages: means that are seen before the entries, with the weight of `rest` tokens together.
        """
        start = buffer.room + entries + held
        mask = None
        if pages or not new.sees_all(held):
            # Verified entries are seen by every new token: a mask over all of them, one for all layers.
            mask = torch.nn.functional.pad(new.mask(held, buffer.memory), (entries, 0))
            if pages:
                mask = torch.nn.functional.pad(mask, (pages, 0), value=math.log(rest / pages))
        stop = start + new.count
        return cls(buffer, backend, slice(start, stop), slice(buffer.room - pages, stop), mask)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        total = AttentionSum(self.backend, queries, len(keys), scale)
        total.attend(*self.put(layer, queries, keys, values))
        return total.result()

    def put(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Puts the pass's KV in its place; returns the keys, values and mask to attend to."""
        if self.mask is not None and self._folded is None:
            self._folded = folded_mask(self.backend, self.mask, queries, len(keys))
        all_keys, all_values = self.buffer.memory[layer]
        all_keys[:, self.slots] = keys
        all_values[:, self.slots] = values
        return all_keys[:, self.seen], all_values[:, self.seen], self._folded


def fixed_frame(buffer: KVBuffer, backend: AttentionBackend, count: int, numbers: Tensor) -> Frame:
    """The frame of any pass of `count` tokens: another pass differs in `numbers` alone.

    Args:
        numbers: int64 on the device, those of `BoundedCache.numbers`.
    """
    device = buffer.memory.device
    entries, end, pages, rest = numbers[:NUMBERS]
    words = numbers[NUMBERS:].view(count, WORDS)
    place = torch.arange(-buffer.room, buffer.capacity, device=device)
    behind = place - entries
    visible = (place >= -pages) & ((behind < 0) | seen(words, behind))
    wide = torch.promote_types(buffer.memory.dtype, torch.float32)
    weight = torch.where(place < 0, (rest.to(wide) / pages.clamp(min=1)).log(), 0.0)
    mask = weight.expand(visible.shape).masked_fill(~visible, -torch.inf)
    slots = buffer.room + end + torch.arange(count, device=device)
    return Frame(buffer, backend, slots, slice(None), mask)


class BoundedCache(ABC):
    """Verified entries `[0, entries)`, speculative ones behind; one buffer for all layers.

    Args:
        pool: where its memory comes from, and goes to in `release`.
        room: for means of pages, which stand for what it does not hold.

    Attributes:
        recordable: it attends to nothing but its buffer, so that its passes can be recorded.
        buffer: in use.
        entries: how many verified entries there are; the same for every layer and head.
        held: tokens of the speculative entries.
        verified_length: how many tokens of the text are verified.
        rest: tokens that the means of `buffer.pages` pages stand for: each has its share of their weight; 0:
            none is seen.
    """

    recordable = True

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        budget: int,
        backend: AttentionBackend,
        pool: BufferPool | None = None,
        room: int = 0,
    ) -> None:
        self.budget = budget
        self.backend = backend
        self.entries = 0
        self.held = SpeculativeTokens()
        self.verified_length = 0
        self.rest = 0
        self._layout = layout
        self._device = device
        self._pool = pool or BufferPool()
        self._room = room
        self._new: NewTokens | None = None
        self._frame: Frame | None = None
        self.buffer = self._take_buffer()

    def _take_buffer(self) -> KVBuffer:
        capacity = whole_pages(self._room + self.budget + SPECULATIVE_ENTRIES) - self._room
        return self._pool.take(self._layout, capacity, self._device, self._room)

    @property
    def buffers(self) -> list[KVBuffer]:
        """All that it owns."""
        return [self.buffer]

    def release(self) -> None:
        """Gives its memory back; nothing may be asked of it afterwards."""
        for buffer in self.buffers:
            self._pool.give_back(buffer)
        self._frame = None
        del self.buffer  # the pool may let it go while something still refers to this cache

    @property
    def kv(self) -> Tensor:
        """Keys and values of the entries, `[layers, 2, kv_heads, capacity, head_dim]`."""
        return self.buffer.kv

    @property
    def end(self) -> int:
        """How many entries there are, speculative ones included: where a pass's new tokens go."""
        return self.entries + len(self.held)

    def begin(self, new: NewTokens) -> None:
        self._new = new
        self._frame = None
        self.buffer = self.buffer.with_room(self.end + new.count)

    def numbers(self, new: NewTokens) -> list[int]:
        """What differs between passes of as many new tokens, for `fixed_frame`."""
        return [self.entries, self.end, self._pages, self.rest, *new.words(WORDS)]

    @property
    def _pages(self) -> int:
        """Means of pages that are seen."""
        return self.buffer.pages if self.rest else 0

    @property
    def frame(self) -> Frame:
        """Of the pass that has begun."""
        if self._new is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._frame is None:
            counts = (self.entries, len(self.held), self._pages, self.rest)
            self._frame = Frame.behind(self.buffer, self.backend, self._new, *counts)
        return self._frame

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        return self.frame.attend(layer, queries, keys, values, scale)

    def commit(self, kept: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        new, self._new = self._new, None
        held = len(self.held)
        self._move([self.entries + held + index for index in kept], self.entries + held)
        new.hold(self.held, kept)

    def keep(self, entries: Sequence[int]) -> None:
        self._move([self.entries + entry for entry in entries], self.entries)
        self.held.keep(entries)

    def _move(self, slots: Sequence[int], start: int) -> None:
        """Brings the entries in `slots` to `start` and behind it."""
        if list(slots) == list(range(start, start + len(slots))):
            return
        moved = to_device(slots, self._device)
        self.kv[:, :, :, start : start + len(slots)] = self.kv[:, :, :, moved]

    def settle(self) -> None:
        start, count = self.entries, len(self.held)
        self.held.clear()
        if count:
            # Cloned: the verified region that takes them may grow into where they stand.
            self._take(self.kv[:, :, :, start : start + count].clone())

    @abstractmethod
    def build(self, queries: Tensor) -> None:
        """Fills itself from the full cache of the same model, which holds the whole text so far.

        Args:
            queries: `[layers, heads, tokens, head_dim]`, those of the text's last tokens.
        """

    def adopt(self, verified: Verified) -> None:
        """Takes the KV of tokens that the full cache has verified, in place of what was speculated for them.

        Speculation below the last of them stays: it is still right.
        """
        kept = self._still_right(verified.tokens)
        self._take(verified.kv)
        self._put_behind(kept)

    def catch_up(self) -> None:  # noqa: B027
        """Fills itself from the full cache, if it must before it is read."""

    def refill(self) -> RetrievedRefill | None:
        """What to take from the full cache's pass that begins; it is used from the next `adopt` on."""
        return None

    def _still_right(self, tokens: Sequence[int]) -> Tensor:
        """Takes out the speculative entries that descend from `tokens`, now verified; the others go.

        Returns a copy of their KV, for `_put_behind`.
        """
        path = self.held.match(tokens)
        kept = self.held.below(path[-1]) if path and len(path) == len(tokens) else []
        self.keep(kept)
        return self.kv[:, :, :, self.entries : self.end].clone()

    def _put_behind(self, kv: Tensor) -> None:
        """Puts the speculative entries behind the verified ones, which have become more."""
        self.buffer = self.buffer.with_room(self.end)
        self.kv[:, :, :, self.entries : self.end] = kv

    def _take(self, kv: Tensor) -> None:
        """Adds verified tokens `[layers, 2, kv_heads, tokens, head_dim]` that follow the verified ones."""
        count = kv.shape[3]
        if count > self.budget:
            raise ValueError(f"{count} tokens at once do not fit a cache of {self.budget} entries")
        appended = min(count, self.budget - self.entries)
        slots = list(range(self.entries, self.entries + appended))
        self.entries += appended
        slots += self._victims(count - appended)
        if slots == list(range(slots[0], slots[0] + count)):
            self.kv[:, :, :, slots[0] : slots[0] + count] = kv
        else:
            self.kv[:, :, :, to_device(slots, self._device)] = kv
        self.verified_length += count

    @abstractmethod
    def _victims(self, count: int) -> list[int]:
        """Slots of verified entries to overwrite, in the order of their new tokens."""
