"""A cache for drafts over the target's whole KV, as in Draft & Verify (arXiv 2309.08168)."""

from __future__ import annotations

from torch import Tensor

from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.base import CacheSource
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.remote import CpuAttention
from offload_rt.caches.sizes import SHARED_PORTION


class SharedCache(BoundedCache):
    """The whole sequence, and speculation behind it; exact if the draft has all of the target's layers.

    Full pages are attended in place in the store, by the CPU, so that a pass of the full cache may run
    meanwhile. The entries are the tokens behind them. Layers that the draft skips are not read.

    Args:
        source: the full cache of the same model.
    """

    recordable = False
    PORTION = SHARED_PORTION

    def __init__(self, source: CacheSource, pool: BufferPool | None = None) -> None:
        entries = source.layout.page_size + self.PORTION
        super().__init__(
            source.layout, source.device, entries, source.backend, pool, local=source.local.derived()
        )
        self._source = source
        self._cpu = None if source.device.type == "cpu" else CpuAttention(0, source.device)

    @property
    def _paged(self) -> int:
        """Number of tokens in full pages."""
        return self.verified_length - self.entries

    def release(self) -> None:
        if self._cpu is not None:
            self._cpu.close()
        super().release()

    def build(self, queries: Tensor) -> None:
        """Fetches the tokens behind the full pages from the store; `queries` are not needed."""
        self.speculative.clear()
        length, page = self._source.verified_length, self._layout.page_size
        self.entries, self.verified_length = 0, length // page * page
        if length > self.verified_length:
            self.append_verified(self._source.transfer.read(self.verified_length, length))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if not self._paged:
            return super().attend(layer, queries, keys, values, softmax)
        runs = self._source.sequence.views(layer, 0, self._paged)
        total = AttentionSum(self.backend, queries, len(keys), softmax.scale)
        future = None if self._cpu is None else self._cpu.start(layer, queries, runs, softmax.scale)
        total.attend(*self.attention.put(layer, queries, keys, values))
        if self._cpu is None or future is None:
            for pages in runs:
                total.attend(pages)
        else:
            total.add(*self._cpu.finish(future))
        return total.result(softmax.sinks)

    def append_verified(self, kv: Tensor) -> None:
        for portion in kv.split(self.PORTION, dim=3):
            self._drop_full_pages()
            super().append_verified(portion)

    def _drop_full_pages(self) -> None:
        page = self._layout.page_size
        dropped = self.entries // page * page
        if dropped:
            self._move(range(dropped, self.entries), 0)
            self.entries -= dropped
            if self._source.sequence.length < self._paged:
                self._source.transfer.flush()

    def victims(self, count: int) -> list[int]:
        return []  # `append_verified` has made room for all
