"""The retrieved cache (TriForce, section 4.1): the chunks that the newest queries attend to most."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from cpu_kv import chunk_scores, retrieval
from offload_rt.attention import AttentionBackend, fold
from offload_rt.caches.base import NewTokens, Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import LAST_QUERIES, FullCache
from offload_rt.config import RefreshPolicy


class RetrievedCache(BoundedCache):
    """First chunk, best chunks and recent window: `budget` entries for each layer and KV head.

    Layout of the verified entries after a refresh: first chunk, chosen chunks in falling score, recent
    window. Newly verified tokens overwrite the chosen chunks from the least important entry on; when none
    is left, the cache is refreshed whatever the policy says.

    Args:
        source: the full cache of the same model, with chunk summaries of `chunk` tokens.
        recent: entries of the recent window, at least.
        refresh: when to choose again: every verification, every N tokens, or below an acceptance rate.
    """

    ROLLING_ROUNDS = 8  # the acceptance policy looks at this many rounds

    def __init__(
        self,
        source: FullCache,
        *,
        budget: int,
        chunk: int,
        recent: int,
        refresh: RefreshPolicy,
        backend: AttentionBackend,
    ) -> None:
        layout = source.layout
        super().__init__(
            layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, source.device, budget, backend
        )
        self.chunk = chunk
        self.recent = recent
        self.refreshes = 0
        self._source = source
        self._policy = refresh
        self._next_victim = 0
        self._due: Tensor | None = None  # queries to choose by before the next pass
        self._tokens_since_refresh = 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=self.ROLLING_ROUNDS)

    def build(self, queries: Tensor) -> None:
        self._speculative = 0
        self._due = None
        self._tokens_since_refresh = 0
        self._rounds.clear()
        self.refreshes += 1
        length = self._source.length
        if length <= self.budget:
            self._hold_everything(length)
        else:
            self._choose(length, queries[:, :, -LAST_QUERIES:])
        self.verified_length = length

    def _hold_everything(self, length: int) -> None:
        keys, values = self._source.read(0, length)
        self.keys[:, :, :length] = keys
        self.values[:, :, :length] = values
        self.entries = length
        self._next_victim = 0

    def _choose(self, length: int, queries: Tensor) -> None:
        chunk, source = self.chunk, self._source
        # Whole chunks, unless the budget holds no more than the first chunk and the recent window.
        recent_start = max((length - self.recent) // chunk * chunk, length - (self.budget - chunk))
        count = (self.budget - chunk - (length - recent_start)) // chunk
        chosen_end = chunk * (1 + count)
        self.entries = chosen_end + length - recent_start
        for layer in range(source.layout.layers):
            summaries = source.summaries(layer)
            scores = chunk_scores(fold(queries[layer], source.layout.kv_heads), summaries, source.scale)
            trailing = summaries.shape[1] - recent_start // chunk
            best = retrieval(scores, count, first=1, last=trailing)
            chunks = torch.cat([best.new_zeros(len(best), 1), best], dim=1)
            out = (self.keys[layer, :, :chosen_end], self.values[layer, :, :chosen_end])
            source.engine.gather_chunks(layer, chunks, chunk, out)
        keys, values = source.read(recent_start, length)
        self.keys[:, :, chosen_end : self.entries] = keys
        self.values[:, :, chosen_end : self.entries] = values
        self._next_victim = chosen_end - 1

    def adopt(self, verified: Verified) -> None:
        count = verified.keys.shape[2]
        self._tokens_since_refresh += count
        self._rounds.append((count - 1, verified.proposed))
        free = self.budget - self.entries + max(0, self._next_victim + 1 - self.chunk)
        behind = self._due is not None
        if behind or count > free or (self._source.length > self.budget and self._is_due()):
            # Chosen anew when it is next read, not now: while decoding is plain nobody reads it.
            self._due = verified.queries
            self._speculative = 0
            self.verified_length += count
            return
        self._speculative = 0
        self._take(verified.keys, verified.values)

    def begin(self, new: NewTokens) -> None:
        if self._due is not None:
            self.build(self._due)
        super().begin(new)

    def _is_due(self) -> bool:
        if self._policy.kind == "every":
            return True
        if self._policy.kind == "stride":
            return self._tokens_since_refresh >= self._policy.value
        accepted, proposed = (sum(column) for column in zip(*self._rounds, strict=True))
        full = len(self._rounds) == self.ROLLING_ROUNDS
        return full and proposed > 0 and accepted / proposed < self._policy.value

    def _victims(self, count: int) -> list[int]:
        slots = list(range(self._next_victim, self._next_victim - count, -1))
        self._next_victim -= count
        return slots
