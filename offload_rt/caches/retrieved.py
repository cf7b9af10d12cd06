"""The retrieved cache (TriForce, section 4.1): the chunks that the newest queries attend to most."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from cpu_kv import ChunkMeans
from offload_rt.caches.base import NewTokens, Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.full import FullCache
from offload_rt.caches.refill import ChosenChunks, Extent, RetrievedRefill
from offload_rt.caches.selection import AttentionScores, Selection, chosen_chunks
from offload_rt.config import RefreshPolicy
from offload_rt.host import PendingRead


class Refresh:
    """When a retrieved cache chooses its entries anew: a policy, and what it looks at.

    Attributes:
        policy: every verification, every N tokens, or below an acceptance rate.
        count: refreshes so far.
    """

    ROUNDS = 8
    """How many of the newest the acceptance rate is of."""

    def __init__(self, policy: RefreshPolicy) -> None:
        self.count = 0
        self.policy = policy
        self._tokens = 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=self.ROUNDS)

    def done(self) -> None:
        """The entries have been chosen anew."""
        self.count += 1
        self._tokens = 0
        self._rounds.clear()

    def observe(self, tokens: int, proposed: int) -> None:
        """A verification of `proposed` tokens has yielded so many."""
        self._tokens += tokens
        self._rounds.append((tokens - 1, proposed))

    @property
    def due(self) -> bool:
        """Whether it is time."""
        if self.policy.kind == "every":
            return True
        if self.policy.kind == "stride":
            return self._tokens >= self.policy.value
        accepted, proposed = (sum(column) for column in zip(*self._rounds, strict=True))
        full = len(self._rounds) == self.ROUNDS
        return full and proposed > 0 and accepted / proposed < self.policy.value


class RetrievedCache(BoundedCache):
    """First chunk, best chunks and recent window: `budget` entries for each layer and KV head.

    What is not held is not forgotten: pages stand in as their mean key and mean value, with the weight of the
    tokens that were not chosen, so that even attention comes out nearly right (RetroInfer, arXiv 2505.02922,
    estimates so what it does not retrieve). They are attended to beside the entries.

    Layout of the verified entries after a refresh: first chunk, chosen chunks in falling score, recent
    window, which reaches back to the last whole page as far as half of the budget goes. Newly verified
    tokens overwrite the chosen chunks from the least important entry on; when none is left, the cache is
    refreshed whatever the policy says.

    Args:
        source: the full cache of the same model, with the means that `selection` and `room` need.
        recent: entries of the recent window, at least.
        refresh: when to choose again.
        selection: what chunks are chosen by.
        room: pages of the text whose means there is room for; 0: what is not held is left out.
        from_stream: entries are taken from the next pass of the full cache as they pass by, into a second
            buffer; False: they are gathered before the next draft.
    """

    def __init__(
        self,
        source: FullCache,
        *,
        budget: int,
        chunk: int,
        recent: int,
        refresh: RefreshPolicy,
        selection: Selection,
        room: int = 0,
        from_stream: bool = False,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(source.layout, source.device, budget, source.backend, pool, room)
        self.chunk = chunk
        self.recent = recent
        self._source = source
        self.refresh = Refresh(refresh)
        self._selection = selection
        self._from_stream = from_stream
        self._next_victim = 0
        # Of the newest verified tokens, where entries are chosen anew
        self._due: Tensor | None = None  # before the next pass
        self._wanted: Tensor | None = None  # while the full cache's next pass runs
        self._refill: RetrievedRefill | None = None
        self._choosing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-choosing")
        self._spare: KVBuffer | None = None  # that a refill may fill
        if from_stream:
            # Before the first pass: to allocate and touch so much memory would hold up a round.
            self._spare = self._take_buffer()
        self._read = False  # since the last refresh was asked for

    def build(self, queries: Tensor) -> None:
        self.buffer.pages = 0
        source = self._source
        source.engine.flush()
        end = source.verified_length // self._layout.page_size * self._layout.page_size
        self._selection.restart(queries, source.sequence, end, source.scale)
        self.fill(queries)
        if self._spare is not None:
            # Then a refresh while decoding sends the new ones alone.
            self._spare.take_pages(self.buffer)

    def fill(self, queries: Tensor) -> None:
        """Fills itself from the full cache, by what is known of the text."""
        self.held.clear()
        self._due = self._wanted = self._refill = None
        self.verified_length = self._source.verified_length
        refill = self._chosen_anew(self.verified_length, queries, self.buffer)
        refill.take_from_store()
        self._turn_to(refill.extent)

    def _extent(self, length: int) -> Extent:
        if length <= self.budget:
            return Extent(length, recent_start=0, chosen_end=0, pages=0, rest=0)
        chunk, page = self.chunk, self._layout.page_size
        # What follows the last whole page has no mean yet, and no pass has weighed it.
        recent = max(self.recent, min(length % page, self.budget // 2))
        # Whole chunks, unless the budget holds no more than the first chunk and the recent window.
        recent_start = max((length - recent) // chunk * chunk, length - (self.budget - chunk))
        chosen_end = (self.budget - (length - recent_start)) // chunk * chunk
        pages = min(self.buffer.room, recent_start // page)
        rest = max(0, pages * page - chosen_end)
        return Extent(length, recent_start, chosen_end, pages if rest else 0, rest)

    def _chunks(self, extent: Extent, queries: Tensor) -> Callable[[int], ChosenChunks]:
        """Returns what chooses the chunks of a layer, in any thread; none of a text that the window holds."""
        selection, device = self._selection, self._device
        end, count = extent.recent_start // self.chunk, extent.chosen_end // self.chunk
        if not count:
            return lambda layer: ChosenChunks.of(torch.empty(3, 0, dtype=torch.long), device)
        if device.type == "cuda" and isinstance(selection, AttentionScores):
            # Where the scores are, for all layers at once: on the host it would take 10 ms a layer at 128K.
            there = chosen_chunks(selection.values[:, :, :end], count)
            here = PendingRead(there)
            return lambda layer: ChosenChunks(here.wait()[layer], there[layer])
        scores = selection.now(queries, self._source.scale)

        @torch.inference_mode()  # each thread has its own mode
        def choose(layer: int) -> ChosenChunks:
            return ChosenChunks.of(chosen_chunks(scores(layer)[:, :end], count), device)

        return choose

    def _take_pages(self, buffer: KVBuffer, extent: Extent) -> None:
        """Sends the buffer the means of pages that it lacks."""
        layout, means, engine = self._layout, self._source.sequence.page_means, self._source.engine
        while means is not None and buffer.pages < extent.pages:
            end = min(extent.pages, buffer.pages + engine.READ_TOKENS)  # the host memory in between is kept
            shape = (layout.layers, 2, layout.kv_heads, end - buffer.pages, layout.head_dim)
            pages = slice(buffer.pages, end)
            buffer.add_pages(engine.fetch(shape, partial(self._put_means, means, pages)))

    def _put_means(self, means: ChunkMeans, pages: slice, out: Tensor) -> None:
        torch.stack([means.means(layer)[:, :, pages] for layer in range(self._layout.layers)], out=out)

    def _chosen_anew(self, length: int, queries: Tensor, buffer: KVBuffer) -> RetrievedRefill:
        """The entries of a text of `length` tokens, for a buffer, which takes its means of pages now."""
        engine, extent = self._source.engine, self._extent(length)
        engine.flush()  # tokens are summarised when they have arrived
        chunks = self._chunks(extent, queries)
        self._take_pages(buffer, extent)
        return RetrievedRefill(engine, self.chunk, extent, chunks, buffer, self._choosing)

    def _turn_to(self, extent: Extent) -> None:
        """The entries are those of `extent`, chosen anew."""
        self.entries, self.rest = extent.entries, extent.rest
        self._next_victim = extent.chosen_end - 1
        self.refresh.done()

    def adopt(self, verified: Verified) -> None:
        count = verified.kv.shape[3]
        kept = self._still_right(verified.tokens)
        refill, self._refill = self._refill, None
        if refill is not None and refill.complete and self._due is None:
            refill.finish()
            self._use(refill)
        self.refresh.observe(count, verified.proposed)
        free = self.budget - self.entries + max(0, self._next_victim + 1 - self.chunk)
        due = self._source.verified_length > self.budget and self.refresh.due
        # While drafts are read, a refresh that waits for the next pass is no reason to stay behind.
        gathers = due and not (self._from_stream and self._read)
        if self._due is not None or count > free or gathers:
            # Chosen anew when it is next read, not now: while decoding is plain nobody reads it.
            self._due = verified.queries
            self._wanted = None
            self.held.clear()
            self.verified_length += count
            return
        if due:
            self._wanted = verified.queries
            self._read = False
        self._take(verified.kv)
        self._put_behind(kept)

    @property
    def buffers(self) -> list[KVBuffer]:
        return [self.buffer] if self._spare is None else [self.buffer, self._spare]

    def release(self) -> None:
        self._choosing.shutdown(cancel_futures=True)
        super().release()
        self._spare = self._refill = None

    def _use(self, refill: RetrievedRefill) -> None:
        self._spare, self.buffer = self.buffer, refill.buffer
        self._turn_to(refill.extent)

    def begin(self, new: NewTokens) -> None:
        self.catch_up()
        self._read = True
        super().begin(new)

    def catch_up(self) -> None:
        if self._due is not None:
            self.fill(self._due)

    def refill(self) -> RetrievedRefill | None:
        self._refill = None
        if self._wanted is not None:
            queries, self._wanted = self._wanted, None
            assert self._spare is not None
            self._refill = self._chosen_anew(self.verified_length, queries, self._spare)
        return self._refill

    def _victims(self, count: int) -> list[int]:
        slots = list(range(self._next_victim, self._next_victim - count, -1))
        self._next_victim -= count
        return slots
