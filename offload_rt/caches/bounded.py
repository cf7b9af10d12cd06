"""A cache of bounded size: verified entries, and speculative entries behind them.

Keys carry their rotation, so the order of entries does not matter to attention, and a new entry may replace
any old one. Speculative entries are kept apart at the end and become verified ones only in `settle` or
`adopt`; rolling them back never loses anything.

Verified entries may also be quantised (`KVBuffer.quantized`). The cache only attends to these: a refresh
writes them, and what is verified afterwards stays in full precision until the next one.

A pass attends to the present entries. A recorded pass (`fixed_shape_attention`) attends to the whole buffer
under a mask: its shapes then depend on the number of new tokens alone, and passes differ in a few integers on
the device, as a CUDA graph needs. Slots behind the entries are masked, and finite.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cpu_kv import KVLayout, PlainPages
from offload_rt.attention.backends import AttentionBackend, folded_mask
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.base import DerivedCache, VerifiedTokens
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.local import NO_LOCAL_STATE, LocalState
from offload_rt.caches.new_tokens import WORD_BITS, NewTokens, sees_entries
from offload_rt.caches.sizes import SPECULATIVE_ENTRIES, whole_pages
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.kernels.sizes import QuantizedSize
from offload_rt.system.device_copies import to_device

CACHE_INPUTS = 5
"""Integers of a recorded pass that describe the cache, see `BoundedCache.graph_inputs`."""

MASK_WORDS = 3
"""Words of a recorded pass's bit mask for each new token, of `WORD_BITS` bits each."""

MAX_RECORDED_SPECULATION = MASK_WORDS * WORD_BITS
"""Most speculative entries of a recorded pass, its own tokens included."""


@dataclass
class BufferAttention:
    """Attention of one pass over a buffer: the slots of its new tokens, and the slots that they see.

    Slots are counted in the buffer's `memory`.

    Attributes:
        slots: where new tokens are written.
        visible: the slots that are attended.
        mask: additive, `[count, visible]`; None: every visible slot is seen.
        quantized: number of quantised entries, which all new tokens see; on the device where it varies.
    """

    local: ClassVar[LocalState] = NO_LOCAL_STATE
    buffer: KVBuffer
    backend: AttentionBackend
    slots: slice | Tensor
    visible: slice
    mask: Tensor | None
    quantized: int | Tensor = 0
    _folded: Tensor | None = None  # the mask in the form of the backend, for all layers

    def __post_init__(self) -> None:
        # Views of all layers at once, keys and values in turn: a few operators a pass instead of a layer.
        pages = self.buffer.memory[:, :, None]
        self._visible_kv = pages[..., self.visible, :].flatten(0, 1).unbind()
        self._written = None
        if isinstance(self.slots, slice):
            self._written = self.buffer.memory[..., self.slots, :].flatten(0, 1).unbind()

    @classmethod
    def behind(
        cls,
        buffer: KVBuffer,
        backend: AttentionBackend,
        new: NewTokens,
        entries: int,
        speculative: int = 0,
        means: int = 0,
        unretrieved: int = 0,
        quantized: int = 0,
    ) -> BufferAttention:
        """Returns the attention of a pass behind `entries` verified and `speculative` speculative entries.

        Args:
            quantized: number of further verified entries, which are quantised.
            means: number of page means attended before the entries.
            unretrieved: number of tokens that these means represent, in equal shares.
        """
        start = buffer.mean_slots + entries + speculative
        mask = None
        if means or not new.sees_all(speculative):
            # Verified entries are seen by every new token.
            mask = torch.nn.functional.pad(new.mask(speculative, buffer.memory), (entries, 0))
            if means:
                mask = torch.nn.functional.pad(mask, (means, 0), value=math.log(unretrieved / means))
        stop = start + new.count
        return cls(
            buffer, backend, slice(start, stop), slice(buffer.mean_slots - means, stop), mask, quantized
        )

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention of the new tokens, shapes as in `Cache.attend`."""
        total = AttentionSum(self.backend, queries, len(keys), softmax.scale)
        total.attend(*self.put(layer, queries, keys, values))
        if self.buffer.quantized is not None:
            entries, count = self.buffer.quantized.layer(layer), self.quantized
            if isinstance(count, Tensor):
                total.attend_quantized(entries, count)
            elif count:
                total.attend_quantized(entries.first(count))
        return total.result(softmax.sinks)

    def put(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[PlainPages, Tensor | None]:
        """Writes the pass's KV to its slots; returns the page and the mask to attend."""
        if self.mask is not None and self._folded is None:
            self._folded = folded_mask(self.backend, self.mask, queries, len(keys))
        for side, new in enumerate((keys, values), 2 * layer):
            if self._written is not None:
                self._written[side].copy_(new)
            else:
                self.buffer.memory[layer, side - 2 * layer, :, self.slots] = new
        return PlainPages(*self._visible_kv[2 * layer : 2 * layer + 2]), self._folded


def fixed_shape_attention(
    buffer: KVBuffer, backend: AttentionBackend, count: int, inputs: Tensor
) -> BufferAttention:
    """Returns the attention of any pass of `count` tokens, with the same shapes and addresses every time.

    Args:
        inputs: `BoundedCache.graph_inputs` of the pass, int64 on the device.
    """
    device = buffer.memory.device
    entries, end, means, unretrieved, quantized = inputs[:CACHE_INPUTS]
    words = inputs[CACHE_INPUTS:].view(count, MASK_WORDS)
    slot = torch.arange(-buffer.mean_slots, buffer.capacity, device=device)
    behind = slot - entries
    visible = (slot >= -means) & ((behind < 0) | sees_entries(words, behind))
    wide = torch.promote_types(buffer.memory.dtype, torch.float32)
    weight = torch.where(slot < 0, (unretrieved.to(wide) / means.clamp(min=1)).log(), 0.0)
    mask = weight.expand(visible.shape).masked_fill(~visible, -torch.inf)
    slots = buffer.mean_slots + end + torch.arange(count, device=device)
    return BufferAttention(buffer, backend, slots, slice(None), mask, quantized)


class BoundedCache(DerivedCache):
    """Verified entries `[0, entries)` and speculative ones behind them, in one buffer for all layers.

    Args:
        room: most verified entries that are not quantised.
        pool: where its buffers come from, and return to in `release`.
        mean_slots: slots for means of pages, which represent tokens that it does not have.
        local: of the layers that do not attend to the whole sequence; None: there are none.
        quantized: size of the memory for quantised entries; None: there are none.

    Attributes:
        recordable: its passes read its buffer alone, so that they can be recorded as CUDA graphs.
        buffer: in use.
        entries: number of verified entries; the same for every layer and head.
        quantized: number of further verified entries, which are quantised.
        speculative: tokens of the speculative entries.
        verified_length: number of verified tokens of the sequence.
        unretrieved: number of tokens represented by the means in `buffer`; 0: means are not attended.
    """

    recordable = True

    def __init__(
        self,
        layout: KVLayout,
        device: torch.device,
        room: int,
        backend: AttentionBackend,
        pool: BufferPool | None = None,
        mean_slots: int = 0,
        local: LocalState | None = None,
        quantized: QuantizedSize | None = None,
    ) -> None:
        self.local = local or NO_LOCAL_STATE
        # Of windows and recurrent states, neither shapes nor addresses stay the same.
        self.recordable = self.recordable and not self.local.layers.kinds.local
        self.room = room
        self.backend = backend
        self.entries = self.quantized = 0
        self.speculative = SpeculativeTokens()
        self.verified_length = 0
        self.unretrieved = 0
        self._layout = layout
        self._device = device
        self._pool = pool or BufferPool()
        self._mean_slots = mean_slots
        self._quantized_size = quantized
        self._new_tokens: NewTokens | None = None
        self._attention: BufferAttention | None = None
        self.buffer = self._take_buffer()

    def _take_buffer(self) -> KVBuffer:
        capacity = whole_pages(self._mean_slots + self.room + SPECULATIVE_ENTRIES) - self._mean_slots
        return self._pool.take(self._layout, capacity, self._device, self._mean_slots, self._quantized_size)

    @property
    def buffers(self) -> list[KVBuffer]:
        """All buffers that it owns."""
        return [self.buffer]

    def release(self) -> None:
        """Returns its memory to the pool. The cache must not be used afterwards."""
        for buffer in self.buffers:
            self._pool.give_back(buffer)
        self._attention = None
        del self.buffer  # so that the pool can free it while something still refers to this cache

    @property
    def kv(self) -> Tensor:
        """Keys and values of the entries, `[layers, 2, kv_heads, capacity, head_dim]`."""
        return self.buffer.kv

    @property
    def end(self) -> int:
        """Number of entries, speculative ones included: the slot of a pass's first token."""
        return self.entries + len(self.speculative)

    def begin(self, new: NewTokens) -> None:
        self.local.begin(new, len(self.speculative))
        self._new_tokens = new
        self._attention = None
        self.buffer = self.buffer.with_capacity(self.end + new.count)

    def graph_inputs(self, new: NewTokens) -> list[int]:
        """Returns the integers in which passes of as many new tokens differ, for `fixed_shape_attention`."""
        counts = [self.entries, self.end, self._means, self.unretrieved, self.quantized]
        return counts + new.words(MASK_WORDS)

    @property
    def _means(self) -> int:
        """Number of means that are attended."""
        return self.buffer.means if self.unretrieved else 0

    @property
    def attention(self) -> BufferAttention:
        """The attention of the pass that was begun."""
        if self._new_tokens is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._attention is None:
            self._attention = BufferAttention.behind(
                self.buffer,
                self.backend,
                self._new_tokens,
                self.entries,
                len(self.speculative),
                self._means,
                self.unretrieved,
                self.quantized,
            )
        return self._attention

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        return self.attention.attend(layer, queries, keys, values, softmax)

    def commit(self, indices: Sequence[int]) -> None:
        if self._new_tokens is None:
            raise RuntimeError("commit without a pass")
        new, self._new_tokens = self._new_tokens, None
        self.local.commit(indices)
        end = self.end
        self._move([end + index for index in indices], end)
        new.commit_to(self.speculative, indices)

    def keep(self, entries: Sequence[int]) -> None:
        self.local.keep(entries)
        self._move([self.entries + entry for entry in entries], self.entries)
        self.speculative.keep(entries)

    def _move(self, slots: Sequence[int], start: int) -> None:
        """Moves the entries in `slots` to consecutive slots from `start` on."""
        if list(slots) == list(range(start, start + len(slots))):
            return
        moved = to_device(slots, self._device)
        self.kv[:, :, :, start : start + len(slots)] = self.kv[:, :, :, moved]

    def settle(self) -> None:
        self.local.settle()
        start, count = self.entries, len(self.speculative)
        self.speculative.clear()
        if count:
            # Cloned, as the verified entries may grow into the slots of the speculative ones.
            self.append_verified(self.kv[:, :, :, start : start + count].clone())

    def adopt(self, verified: VerifiedTokens) -> None:
        """Takes the KV of verified tokens in place of the speculation for them.

        Speculation below the last of them is still right and stays.
        """
        entries = self._keep_descendants(verified.tokens)
        self.append_verified(verified.kv)
        self._put_behind(entries)

    def _keep_descendants(self, tokens: Sequence[int]) -> Tensor:
        """Forgets all speculative entries but those that descend from `tokens`, which are verified now.

        Returns a copy of their KV, for `_put_behind`.
        """
        path = self.speculative.match(tokens)
        entries = self.speculative.below(path[-1]) if path and len(path) == len(tokens) else []
        self.keep(entries)
        return self.kv[:, :, :, self.entries : self.end].clone()

    def _put_behind(self, kv: Tensor) -> None:
        """Puts the speculative entries behind the verified ones, whose number has grown."""
        self.buffer = self.buffer.with_capacity(self.end)
        self.kv[:, :, :, self.entries : self.end] = kv

    def append_verified(self, kv: Tensor) -> None:
        """Appends verified tokens, `[layers, 2, kv_heads, tokens, head_dim]`."""
        count = kv.shape[3]
        if count > self.room:
            raise ValueError(f"{count} tokens at once do not fit a cache of {self.room} entries")
        appended = min(count, self.room - self.entries)
        slots = list(range(self.entries, self.entries + appended))
        self.entries += appended
        slots += self.victims(count - appended)
        if slots == list(range(slots[0], slots[0] + count)):
            self.kv[:, :, :, slots[0] : slots[0] + count] = kv
        else:
            self.kv[:, :, :, to_device(slots, self._device)] = kv
        self.verified_length += count

    @abstractmethod
    def victims(self, count: int) -> list[int]:
        """Returns the slots of `count` verified entries to overwrite, in the order of the new tokens."""
