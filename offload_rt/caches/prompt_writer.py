"""Writes the KV of a prompt to the store, layer by layer, behind the tokens that are present."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor

from cpu_kv import CopyFailed, KVPages, LayerStream, PlainPages
from offload_rt.caches.full import FullCache
from offload_rt.kernels.tail import TailView


class PromptWriter:
    """Writes tokens to a full cache: all of one layer, then all of the next.

    On a CPU they go to the store itself. On a GPU those of one layer are on the device while the layer is
    computed, behind the tokens of the tail, and their pages are written to the store as they fill: so their
    KV crosses the link once, and that of the earlier tokens once, too.

    `start` comes first, and `finish` last. Where one of them or anything between them fails, `give_up` takes
    back what was written.

    Args:
        tokens: how many are written.
    """

    def __init__(self, cache: FullCache, tokens: int) -> None:
        self._cache = cache
        self._tokens = tokens
        self._tail_start, self._start = cache.tail.start, cache.tail.end  # of the tail; of the new tokens
        self._end = self._start + tokens
        self._earlier: LayerStream | None = None  # of the tokens before the tail
        self._kv = torch.empty(2, 0)  # of the layer, from the tail on
        # Of the layer: its number, and the positions to which its KV is computed and written.
        self._layer, self._computed_end, self._written_end = -1, 0, 0

    def start(self) -> None:
        """Starts to write. Raises CopyFailed."""
        cache, layout = self._cache, self._cache.layout
        cache.abandon()
        cache.local.start_prefill()
        cache.transfer.flush()
        if cache.transfer.link.in_place:
            return
        if self._start:
            cache.sequence.truncate(self._tail_start)  # the tail is written again
            resident = min(cache.resident.tokens, self._tail_start)
            self._earlier = cache.transfer.stream(self._tail_start, start=resident)
        shape = 2, layout.kv_heads, self._end - self._tail_start, layout.head_dim
        self._kv = torch.empty(shape, dtype=layout.dtype, device=cache.device)

    def put(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Iterable[KVPages], PlainPages, TailView]:
        """Writes the next tokens of a layer, `[kv_heads, tokens, head_dim]`.

        Returns:
            Full pages of the layer before them, in order; then the tokens behind these, new ones last, and
            how the new ones see them. Each segment of pages is valid until the next one. Behind tokens that
            were present on a GPU, a layer is put at once, as its stream passes by once.
        """
        if layer != self._layer:
            self._layer, self._computed_end, self._written_end = layer, self._start, self._tail_start
        cache, start, page = self._cache, self._computed_end, self._cache.layout.page_size
        self._computed_end += keys.shape[1]
        if cache.transfer.link.in_place:
            paged = start // page * page
            earlier = cache.sequence.views(layer, 0, paged)
            tail = PlainPages.one(keys, values)
            for begun in cache.sequence.views(layer, paged, start):  # one page at most
                tail = tail.behind(begun.plain())
            cache.sequence.append(layer, keys, values)
            return earlier, tail, TailView(page, keys.shape[1], start - paged)
        if start == self._start:
            cache.tail.committed(layer).copy_to(*self._kv[:, :, : start - self._tail_start])
        new = self._kv[:, :, start - self._tail_start : self._computed_end - self._tail_start]
        new[0], new[1] = keys, values
        self._write(layer)
        tail = PlainPages.one(*self._kv[:, :, : self._computed_end - self._tail_start])
        view = TailView(page, keys.shape[1], start - self._tail_start)
        if self._earlier is None:
            return (), tail, view
        resident = cache.resident.segments(layer, 0, self._earlier.start)
        return chain(resident, self._earlier.segments(layer)), tail, view

    def _write(self, layer: int) -> None:
        """Writes the pages that are full, and with the layer's last token the one that is not."""
        page = self._cache.layout.page_size
        end = self._computed_end if self._computed_end == self._end else self._computed_end // page * page
        if end > self._written_end:
            self._cache.transfer.write_prompt(
                layer, *self._kv[:, :, self._written_end - self._tail_start : end - self._tail_start]
            )
            self._written_end = end

    def finish(self, last_queries: Sequence[Tensor]) -> None:
        """Ends it: the store has all tokens. Raises CopyFailed.

        Args:
            last_queries: queries of the last tokens, `[heads, n, head_dim]` of each full-attention layer.
        """
        cache = self._cache
        if not cache.paged:  # the store has a layer that counts the tokens
            counted = cache.tail.buffer.kv.new_zeros(1, self._tokens, 1)
            self.put(0, counted, counted)
        cache.abandon()
        cache.transfer.flush()
        cache.local.finish_prefill(self._tokens)
        cache.start_from(cache.sequence.length)
        cache.add_point(torch.stack(list(last_queries)) if last_queries else None)

    def give_up(self) -> None:
        """Returns to the tokens before it."""
        cache = self._cache
        length = cache.verified_length
        cache.abandon()
        cache.local.give_up_prefill()
        with suppress(CopyFailed):
            cache.transfer.flush()
        if cache.sequence.length >= length:
            cache.sequence.truncate(length)
        elif cache.sequence.length >= cache.tail.start:  # over a link, those of the tail were taken back
            cache.sequence.truncate(cache.tail.start)
            cache.transfer.write_back(cache.tail.buffer.kv[:, :, :, : cache.tail.tokens].clone())
