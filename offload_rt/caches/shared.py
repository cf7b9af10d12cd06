"""The target's full cache, lent to drafts: what Draft & Verify (arXiv 2309.08168) drafts over."""

from __future__ import annotations

from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.full import FullCache
from offload_rt.caches.remote import CpuAttention


class SharedCache(BoundedCache):
    """All of the text, and speculation behind it: exact where the draft has all of the target's layers.

    The text's full pages are attended where they lie in the store, by the CPU; the entries are the tokens
    behind them, so that a pass of the full cache may run meanwhile. Layers left out are not read.

    Args:
        source: the full cache of the same model.
    """

    recordable = False
    PORTION = 64
    """Verified tokens that it takes at once; then it leaves full pages to the store."""

    def __init__(self, source: FullCache, pool: BufferPool | None = None) -> None:
        entries = source.layout.page_size + self.PORTION
        super().__init__(source.layout, source.device, entries, source.backend, pool)
        self._source = source
        self._cpu = None if source.device.type == "cpu" else CpuAttention(0, source.device)

    @classmethod
    def nbytes_of(cls, layout: KVLayout) -> int:
        """Bytes of its buffer."""
        return cls.nbytes(layout, layout.page_size + cls.PORTION)

    @property
    def _paged(self) -> int:
        """Tokens in the full pages."""
        return self.verified_length - self.entries

    def release(self) -> None:
        if self._cpu is not None:
            self._cpu.close()
        super().release()

    def build(self, queries: Tensor) -> None:
        """Reads the end of the text from the store; `queries` are not needed."""
        self.held.clear()
        length, page = self._source.verified_length, self._layout.page_size
        self.entries, self.verified_length = 0, length // page * page
        if length > self.verified_length:
            self._take(self._source.engine.read(self.verified_length, length))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if not self._paged:
            return super().attend(layer, queries, keys, values, scale)
        runs = self._source.sequence.views(layer, 0, self._paged)
        total = AttentionSum(self.backend, queries, len(keys), scale)
        by_cpu = None if self._cpu is None else self._cpu.start(layer, queries, runs, scale)
        total.attend(*self.frame.put(layer, queries, keys, values))
        if self._cpu is None or by_cpu is None:
            for run in runs:
                total.attend(*run)
        else:
            total.add(*self._cpu.finish(by_cpu))
        return total.result()

    def _take(self, kv: Tensor) -> None:
        for portion in kv.split(self.PORTION, dim=3):
            self._leave_pages_to_the_store()
            super()._take(portion)

    def _leave_pages_to_the_store(self) -> None:
        page = self._layout.page_size
        gone = self.entries // page * page
        if gone:
            self._move(range(gone, self.entries), 0)
            self.entries -= gone
            if self._source.sequence.length < self._paged:
                self._source.engine.flush()

    def _victims(self, count: int) -> list[int]:
        return []  # `_take` has made room for all
