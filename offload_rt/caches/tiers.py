"""Where the KV of a text lies: how many tokens of each layer every tier has, and the tiers on the device.

Each layer's first tokens are resident on the device, the next ones are attended by the CPU where they lie and
by other GPUs, and the rest is streamed to the device. A tail of the newest tokens is on the device too, until
a stream covers it. The same ranges hold for every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KeysValues, KVLayout, TransferEngine, cut_alike, parts_of_pages
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import Frame
from offload_rt.caches.buffers import KVBuffer
from offload_rt.host import to_device


@dataclass(frozen=True)
class GpuTier:
    """How many tokens of a layer another GPU attends.

    Attributes:
        resident_tokens: the first ones, kept there.
        streamed_tokens: the next ones, which cross its link for every pass.
    """

    resident_tokens: int = 0
    streamed_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.resident_tokens + self.streamed_tokens


@dataclass(frozen=True)
class Tiers:
    """How many of a layer's first tokens are not streamed to the device; all multiples of the store's page.

    Attributes:
        resident_tokens: kept on the device.
        late_resident_tokens: those of them that are taken there only when the prompt is read, into memory
            that the prefill has needed.
        cpu_tokens: attended by the CPU, after the resident ones.
        gpus: what other GPUs attend, one after the other, after those.
    """

    resident_tokens: int = 0
    cpu_tokens: int = 0
    gpus: tuple[GpuTier, ...] = ()
    late_resident_tokens: int = 0


EVERYTHING_STREAMED = Tiers()


class ResidentTier:
    """The first `capacity` tokens of each layer on a device, in pages as in the store.

    Args:
        capacity, late: tokens in whole pages; the last `late` of them are loaded after the prefill.

    Attributes:
        tokens: present in every layer.
    """

    def __init__(self, layout: KVLayout, capacity: int, device: torch.device, late: int = 0) -> None:
        layout.check_whole(capacity - late, capacity)
        self.capacity = capacity
        self.tokens = 0
        self._late = late
        self._layout = layout
        self._device = device
        self._blocks: list[Tensor] = []  # `[layers, pages, 2, kv_heads, page_size, head_dim]`

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it has now."""
        return sum(block.nbytes for block in self._blocks)

    def _allocate(self, tokens: int) -> Tensor:
        shape = (self._layout.layers, *self._layout.pages_shape(tokens // self._layout.page_size))
        self._blocks.append(torch.empty(shape, dtype=self._layout.dtype, device=self._device))
        return self._blocks[-1]

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes the beginning of a layer's KV, `[kv_heads, tokens, head_dim]`, on any device."""
        page = self._layout.page_size
        tokens = min(self.capacity - self._late, keys.shape[1] // page * page)
        if layer == 0:
            self.tokens = tokens
            self._allocate(tokens)
        pages = self._blocks[0][layer, : tokens // page]
        # To another GPU in one piece: torch would make temporary copies of what has gaps, on both.
        near = pages if keys.device == pages.device else torch.empty_like(pages, device=keys.device)
        for place, part in cut_alike(parts_of_pages(near, 0, tokens), keys[:, :tokens], values[:, :tokens]):
            place.copy_(part)
        if near is not pages:
            pages.copy_(near, non_blocking=True)

    def load(self, engine: TransferEngine, first: int = 0) -> None:
        """Loads the tokens that it lacks from the store, up to its capacity. Raises CopyFailed.

        Args:
            first: position of its first token in the text.
        """
        page = self._layout.page_size
        end = min(self.capacity, engine.sequence.length // page * page - first)
        held = page * sum(block.shape[1] for block in self._blocks)
        if end > held:
            self._allocate(end - held)
        start, block_end = self.tokens, 0
        for block in self._blocks:
            block_start, block_end = block_end, block_end + block.shape[1] * page
            stop = min(end, block_end)
            if start < stop:
                pages = block[:, (start - block_start) // page : (stop - block_start) // page]
                engine.load(pages, first + start)
                start = self.tokens = stop

    def truncate(self, tokens: int) -> None:
        """Forgets what follows the first `tokens` tokens, but for whole pages; the memory stays."""
        self.tokens = max(0, min(self.tokens, tokens // self._layout.page_size * self._layout.page_size))

    def views(self, layer: int, tokens: int) -> list[KeysValues]:
        """The first `tokens` tokens, `[pages, kv_heads, page_size, head_dim]`, in few pieces."""
        found, pages = [], tokens // self._layout.page_size
        for block in self._blocks:
            part = block[layer, :pages]
            pages -= len(part)
            if len(part):
                found.append((part[:, 0], part[:, 1]))
        return found

    def release(self) -> None:
        """Frees the memory."""
        self.tokens = 0
        self._blocks.clear()


class Tail:
    """The newest tokens of the text on the device, and the pending ones of a pass behind them.

    Attributes:
        start: position of the first token in the text.
        tokens: number of committed ones, the first entries of `buffer`.
    """

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self.start = 0
        self.tokens = 0
        # A page at most waits to be covered, and a round's tokens come behind it.
        shape = (layout.layers, 2, layout.kv_heads, layout.page_size + 64, layout.head_dim)
        with torch.inference_mode(False):  # a text may be read in that mode, and decoded again outside of it
            self.buffer = KVBuffer(torch.empty(shape, dtype=layout.dtype, device=device))

    @staticmethod
    def nbytes(layout: KVLayout, heads: int, queries: int) -> int:
        """Bytes for a page of committed tokens and a pass of so many, whose queries are kept too."""
        kept = queries * layout.layers * heads * layout.head_dim * layout.dtype.itemsize
        return (layout.page_size + queries) * layout.token_bytes + kept

    @property
    def end(self) -> int:
        """Length of the text."""
        return self.start + self.tokens

    def frame(self, new: NewTokens, backend: AttentionBackend) -> Frame:
        """Returns the frame of a pass, whose pending tokens go behind the committed ones."""
        self.buffer = self.buffer.with_room(self.tokens + new.count)
        return Frame.behind(self.buffer, backend, new, self.tokens)

    def committed(self, layer: int) -> KeysValues:
        """Returns a view of the committed tokens of a layer, as one page."""
        pages = self.buffer.kv[layer, :, None, :, : self.tokens]
        return pages[0], pages[1]

    def restart(self, start: int, kv: Tensor) -> None:
        """Begins at another position, with the committed tokens `[layers, 2, kv_heads, n, head_dim]`."""
        self.start, self.tokens = start, kv.shape[3]
        self.buffer = self.buffer.with_room(self.tokens)
        self.buffer.kv[:, :, :, : self.tokens] = kv

    def drop(self, start: int) -> None:
        """Forgets the tokens before `start`."""
        gone = start - self.start
        if gone > 0:
            # Cloned where they overlap: what stays moves to the front.
            self.restart(start, self.buffer.kv[:, :, :, gone : self.tokens].clone())

    def commit(self, path: Sequence[int]) -> Tensor:
        """Keeps these pending tokens, in this order; returns a copy `[layers, 2, kv_heads, n, head_dim]`."""
        chosen = to_device([self.tokens + place for place in path], self.buffer.memory.device)
        kv = self.buffer.kv.index_select(3, chosen)
        stop = self.tokens + len(path)
        self.buffer.kv[:, :, :, self.tokens : stop] = kv
        self.tokens = stop
        return kv

    def release(self) -> None:
        """Frees the memory."""
        self.buffer = KVBuffer(torch.empty(0))
