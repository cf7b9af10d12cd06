"""The full KV cache: every committed token, paged in CPU memory by `cpu_kv`.

Attention goes over the store in segments (in place on a CPU, through the staging ring on a GPU) and over
the new tokens under their mask, and merges them exactly. After a commit the caches derived from this one
take the KV that its pass has just computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv import KVLayout, LayerStream, SequenceKV, TransferEngine
from offload_rt.attention import AttentionBackend, attend, merge
from offload_rt.caches.base import DerivedCache, NewTokens, Verified

LAST_QUERIES = 8  # how many of the newest tokens' queries choose what the retrieved cache keeps


class FullCache:
    """Committed KV in the store; the KV of a pass is pending on the device until `commit`.

    Attributes:
        derived: caches of the same model to tell of every commit.
        scale: the softmax scale that the model attends with, known after its first pass.
    """

    def __init__(
        self,
        sequence: SequenceKV,
        engine: TransferEngine,
        layout: KVLayout,
        heads: int,
        device: torch.device,
        backend: AttentionBackend,
    ) -> None:
        self.sequence = sequence
        self.engine = engine
        self.layout = layout
        self.heads = heads
        self.device = device
        self.backend = backend
        self.derived: list[DerivedCache] = []
        self.scale = layout.head_dim**-0.5
        self.last_queries = torch.empty(0)  # of the newest tokens, [layers, heads, tokens, head_dim]
        self._new: NewTokens | None = None
        self._stream: LayerStream | None = None
        self._keys = self._values = self._queries = torch.empty(0)

    @property
    def length(self) -> int:
        self.engine.flush()  # the sequence counts a token only once its write-back is done
        return self.sequence.length

    @property
    def verified_length(self) -> int:
        return self.length

    def begin(self, new: NewTokens) -> None:
        self.abandon()
        self._new = new
        shape = (self.layout.layers, self.layout.kv_heads, new.count, self.layout.head_dim)
        self._keys = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        self._values = torch.empty_like(self._keys)
        self._queries = self._keys.new_empty(self.layout.layers, self.heads, new.count, self.layout.head_dim)
        self.engine.flush()  # what was committed must have reached the store before it is read
        self._stream = self.engine.stream(self.length)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if self._new is None or self._stream is None:
            raise RuntimeError("attend without a pass: call begin first")
        self.scale = scale
        self._keys[layer] = keys
        self._values[layer] = values
        self._queries[layer] = queries
        parts = [
            attend(self.backend, queries, segment_keys, segment_values, scale)
            for segment_keys, segment_values in self._stream.segments(layer)
        ]
        parts.append(attend(self.backend, queries, keys, values, scale, self._new.mask))
        return merge(parts)[0]

    def commit(self, path: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        proposed = self._new.count - 1
        self.abandon()
        chosen = torch.tensor(path, device=self.device)
        verified = Verified(
            self._keys.index_select(2, chosen),
            self._values.index_select(2, chosen),
            self._queries.index_select(2, chosen),
            proposed,
        )
        for layer in range(self.layout.layers):
            self.engine.write_back(layer, verified.keys[layer], verified.values[layer])
        self.last_queries = verified.queries[:, :, -LAST_QUERIES:]
        for cache in self.derived:
            cache.adopt(verified)

    def abandon(self) -> None:
        """Forgets a pass that was begun; the ring is whole again."""
        self._new = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def truncate(self, length: int) -> None:
        self.abandon()
        self.engine.flush()
        self.sequence.truncate(length)

    def settle(self) -> None:
        """Nothing to do: everything committed here is final."""

    def build_derived(self) -> None:
        """Lets every derived cache fill itself, after a prefill or a truncation."""
        self.engine.flush()
        for cache in self.derived:
            cache.build(self.last_queries)

    def summaries(self, layer: int) -> Tensor:
        """Mean keys of the layer's full chunks, `[kv_heads, chunks, head_dim]`, on the device."""
        if self.sequence.summaries is None:
            raise ValueError("this sequence keeps no chunk summaries")
        return self.sequence.summaries.keys(layer).to(self.device)

    def read(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Copies of the KV of tokens `start` to `end`: `[layers, kv_heads, tokens, head_dim]` each."""
        self.engine.flush()
        shape = (self.layout.layers, self.layout.kv_heads, end - start, self.layout.head_dim)
        keys = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        values = torch.empty_like(keys)
        for layer in range(self.layout.layers):
            at = 0
            for run_keys, run_values in self.sequence.views(layer, start, end):
                stop = at + run_keys.shape[1]
                keys[layer, :, at:stop] = run_keys
                values[layer, :, at:stop] = run_values
                at = stop
        return keys, values


class LayerPrefill:
    """One layer of a prefill: queries come chunk by chunk, keys stay where they can be attended.

    On a CPU that is the store itself. On a GPU the layer's KV is kept on the device while the layer is
    computed and written back to the store meanwhile; it crosses the link once and is never read back.

    Args:
        tokens: length of the whole prompt.
        kv_alone: the layer's output is not needed, so nothing is attended.
    """

    def __init__(self, cache: FullCache, layer: int, tokens: int, *, kv_alone: bool = False) -> None:
        self._cache = cache
        self._kv_alone = kv_alone
        self._done = 0
        self._resident: tuple[Tensor, Tensor] | None = None
        if not cache.engine.link.in_place:
            shape = (cache.layout.kv_heads, tokens, cache.layout.head_dim)
            keys = torch.empty(shape, dtype=cache.layout.dtype, device=cache.device)
            self._resident = (keys, torch.empty_like(keys))
        self.last_queries = torch.empty(0)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        cache, start = self._cache, self._done
        count = keys.shape[1]
        self._done += count
        cache.scale = scale
        newest = queries if start == 0 else torch.cat([self.last_queries, queries[:, -LAST_QUERIES:]], dim=1)
        # Copied: a view would keep the whole chunk's projections alive.
        self.last_queries = newest[:, -LAST_QUERIES:].clone()
        if self._resident is not None:
            self._resident[0][:, start : self._done] = keys
            self._resident[1][:, start : self._done] = values
            history = [(self._resident[0][:, :start], self._resident[1][:, :start])] if start else []
            written = [half[:, start : self._done] for half in self._resident]
            cache.engine.write_back(layer, written[0], written[1])
        else:
            history = cache.sequence.views(layer, 0, start)
            cache.sequence.append(layer, keys, values)
        if self._kv_alone:
            return torch.zeros_like(queries)
        parts = [attend(cache.backend, queries, *segment, scale) for segment in history]
        parts.append(cache.backend.causal(queries, keys, values, scale))
        return merge(parts)[0]
