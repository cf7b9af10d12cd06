"""The retrieved cache (TriForce, section 4.1): the chunks that the newest queries attend to most."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import Sent, expecting, part_of, retrieval
from offload_rt.attention import AttentionBackend
from offload_rt.caches.base import NewTokens, Verified
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool, KVBuffer
from offload_rt.caches.full import FullCache
from offload_rt.caches.selection import Scores, Selection
from offload_rt.config import RefreshPolicy

_Places = slice | tuple[Tensor, Tensor]
"""Entries of a layer, for every head alike; or heads and chunks."""


@dataclass(frozen=True)
class _OnItsWay:
    """What is on its way to a layer's entries.

    Attributes:
        sent: `[2, …]`, keys and values.
        places: where it belongs in the layer's keys `[kv_heads, capacity, head_dim]` and values.
    """

    sent: Sent
    layer: int
    places: _Places


@dataclass(frozen=True)
class _Extent:
    """How a text of `length` tokens fills the entries: chunks `[0, chosen_end)`, then the recent window.

    What was not chosen before that window is the rest: the means of the first `pages` pages stand for it.
    """

    length: int
    recent_start: int
    chunks: int  # chosen ones, without the first
    chosen_end: int
    pages: int
    rest: int  # tokens

    @property
    def entries(self) -> int:
        return self.chosen_end + self.length - self.recent_start


class RetrievedCache(BoundedCache):
    """First chunk, best chunks and recent window: `budget` entries for each layer and KV head.

    What is not held is not forgotten: pages stand in as their mean key and mean value, with the weight of the
    tokens that were not chosen, so that even attention comes out nearly right (RetroInfer, arXiv 2505.02922,
    estimates so what it does not retrieve). They are attended to beside the entries.

    Layout of the verified entries after a refresh: first chunk, chosen chunks in falling score, recent
    window. Newly verified tokens overwrite the chosen chunks from the least important entry on; when none
    is left, the cache is refreshed whatever the policy says.

    Args:
        source: the full cache of the same model, with chunk summaries of `chunk` tokens.
        recent: entries of the recent window, at least.
        refresh: when to choose again: every verification, every N tokens, or below an acceptance rate.
        selection: what chunks are chosen by.
        room: pages of the text whose means there is room for; 0: what is not held is left out.
        from_stream: entries are taken from the next pass of the full cache as they pass by, into a second
            buffer; False: they are gathered before the next draft.
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
        selection: Selection,
        room: int = 0,
        from_stream: bool = False,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(source.layout, source.device, budget, backend, pool, room)
        self.chunk = chunk
        self.recent = recent
        self.refreshes = 0
        self._source = source
        self._policy = refresh
        self._selection = selection
        self._from_stream = from_stream
        self._next_victim = 0
        # Of the newest verified tokens, where entries are chosen anew
        self._due: Tensor | None = None  # before the next pass
        self._wanted: Tensor | None = None  # while the full cache's next pass runs
        self._refill: RetrievedRefill | None = None
        self._spare: KVBuffer | None = None  # that a refill may fill
        # Both before the first pass: to allocate and touch so much memory would hold up a round.
        if from_stream:
            self._spare = self._take_buffer()
            kv_heads, on_gpu = source.layout.kv_heads, source.device.type == "cuda"
            shape = (source.layout.layers, 3 * kv_heads * (budget // chunk))
            self._choices = torch.empty(shape, dtype=torch.long, pin_memory=on_gpu)
        self._read = False  # since the last refresh was asked for
        self._tokens_since_refresh = 0
        self._rounds: deque[tuple[int, int]] = deque(maxlen=self.ROLLING_ROUNDS)

    def build(self, queries: Tensor) -> None:
        self.buffer.pages = 0
        self._selection.restart(queries)
        self.fill(queries)
        if self._spare is not None:
            # Then a refresh while decoding sends the new ones alone.
            self._spare.take_pages(self.buffer)

    def fill(self, queries: Tensor) -> None:
        """Fills itself from the full cache, by what is known of the text."""
        self.held.clear()
        self._due = self._wanted = self._refill = None
        self._restart_policy()
        length = self._source.verified_length
        if length <= self.budget:
            self._hold_everything(length)
        else:
            self._choose(length, queries)
        self.verified_length = length

    def _restart_policy(self) -> None:
        self._tokens_since_refresh = 0
        self._rounds.clear()
        self.refreshes += 1

    def _hold_everything(self, length: int) -> None:
        keys, values = self._source.read(0, length)
        self.keys[:, :, :length] = keys
        self.values[:, :, :length] = values
        self.entries = length
        self.rest = 0
        self._next_victim = 0

    def _extent(self, length: int) -> _Extent:
        # Whole chunks, unless the budget holds no more than the first chunk and the recent window.
        chunk = self.chunk
        recent_start = max((length - self.recent) // chunk * chunk, length - (self.budget - chunk))
        chunks = (self.budget - chunk - (length - recent_start)) // chunk
        chosen_end = chunk * (1 + chunks)
        page = self._source.layout.page_size
        pages = min(self.buffer.room, recent_start // page)
        rest = max(0, pages * page - chosen_end)
        return _Extent(length, recent_start, chunks, chosen_end, pages if rest else 0, rest)

    def _best_chunks(self, layer: int, extent: _Extent, scores: Scores) -> Tensor:
        """The layer's chunks `[kv_heads, 1 + chunks]` on the host, the first one first."""
        candidates = expecting(scores(layer)[:, : extent.recent_start // self.chunk])
        best = retrieval(candidates, extent.chunks, first=1)
        return torch.cat([best.new_zeros(len(best), 1), best], dim=1)

    def _take_pages(self, buffer: KVBuffer, extent: _Extent) -> None:
        """Sends the buffer the means of pages that it lacks."""
        sequence = self._source.sequence
        if extent.pages <= buffer.pages or sequence.page_means is None:
            return
        layers = range(self._source.layout.layers)
        new = slice(buffer.pages, extent.pages)
        buffer.add_pages(
            *(torch.stack([side.means(n)[:, new] for n in layers]) for side in sequence.page_means)
        )

    def _ask(self, length: int, queries: Tensor, buffer: KVBuffer) -> tuple[_Extent, Scores]:
        """How a text of `length` tokens will fill a buffer, which takes its means, and chunks' scores."""
        self._source.engine.flush()  # tokens are summarised when they have arrived
        extent, scores = self._extent(length), self._selection.asked(queries)
        self._take_pages(buffer, extent)
        return extent, scores

    def _choose(self, length: int, queries: Tensor) -> None:
        source = self._source
        extent, scores = self._ask(length, queries, self.buffer)
        end = extent.chosen_end
        self.rest = extent.rest
        for layer in range(source.layout.layers):
            chunks = self._best_chunks(layer, extent, scores)
            out = (self.keys[layer, :, :end], self.values[layer, :, :end])
            source.engine.gather_chunks(layer, chunks, self.chunk, out)
        keys, values = source.read(extent.recent_start, length)
        self.keys[:, :, end : extent.entries] = keys
        self.values[:, :, end : extent.entries] = values
        self.entries = extent.entries
        self._next_victim = end - 1

    def adopt(self, verified: Verified) -> None:
        count = verified.keys.shape[2]
        kept = self._still_right(verified.tokens)
        refill, self._refill = self._refill, None
        if refill is not None and refill.complete and self._due is None:
            refill.finish()
            self._use(refill)
        self._tokens_since_refresh += count
        self._rounds.append((count - 1, verified.proposed))
        free = self.budget - self.entries + max(0, self._next_victim + 1 - self.chunk)
        due = self._source.verified_length > self.budget and self._is_due()
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
        self._take(verified.keys, verified.values)
        self._put_behind(*kept)

    @property
    def buffers(self) -> list[KVBuffer]:
        return [self.buffer] if self._spare is None else [self.buffer, self._spare]

    def release(self) -> None:
        super().release()
        self._spare = self._refill = None

    def _use(self, refill: RetrievedRefill) -> None:
        self._spare, self.buffer = self.buffer, refill.buffer
        self.entries = refill.extent.entries
        self.rest = refill.extent.rest
        self._next_victim = refill.extent.chosen_end - 1
        self._restart_policy()

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
            extent, scores = self._ask(self.verified_length, queries, self._spare)
            self._refill = RetrievedRefill(self, self._source, extent, scores, self._spare, self._choices)
        return self._refill

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


class RetrievedRefill:
    """Entries chosen anew, taken from a pass of the full cache into buffers of their own.

    Which chunks are taken is said once a layer, by the same choice as when they are gathered, in a thread of
    its own that is ahead of the pass. Nothing here waits for the device.

    Args:
        scores: by which they are chosen.
        choices: host memory for the chosen chunks, `[layers, 3 * all]` int64.

    Attributes:
        extent: how the entries lie in `buffer`.
    """

    def __init__(
        self,
        cache: RetrievedCache,
        source: FullCache,
        extent: _Extent,
        scores: Scores,
        buffer: KVBuffer,
        choices: Tensor,
    ) -> None:
        self.extent = extent
        self._scores = scores
        self._choices = choices
        self.buffer = buffer
        self._cache = cache
        self._source = source
        self._choosing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-choosing")
        self._chosen = [self._choosing.submit(self._choose, layer) for layer in range(source.layout.layers)]
        self._choosing.shutdown(wait=False)  # it ends with the last layer
        self._layer = -1
        self._chunks = self._there = torch.empty(3, 0, dtype=torch.long)  # see `_choose`
        self._numbers: list[int] = []
        self._missing = source.layout.layers * source.layout.kv_heads * extent.entries
        self._under_way: deque[_OnItsWay] = deque()

    @property
    def complete(self) -> bool:
        """Whether every entry has passed by."""
        return self._missing == 0

    def finish(self) -> None:
        """Puts what was sent meanwhile in its place; what is still under way is waited for."""
        self._put_sent(self._source.layout.layers)

    def close(self) -> None:
        self._choosing.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()  # each thread has its own mode
    def _choose(self, layer: int) -> Tensor:
        """Chosen chunks `[3, n]` in page-locked memory: rising numbers, their heads, their places there."""
        chunks = self._cache._best_chunks(layer, self.extent, self._scores)
        numbers, order = chunks.flatten().sort(stable=True)
        places = chunks.shape[1]
        out = self._choices[layer, : 3 * len(numbers)].view(3, -1)
        return torch.stack([numbers, order // places, order % places], out=out)

    def _put_sent(self, end: int) -> None:
        """Puts what was sent of the layers before `end` in its place, and lets go what it came in."""
        while self._under_way and self._under_way[0].layer < end:
            one = self._under_way.popleft()
            self._put(self._source.engine.await_sent(one.sent), one.layer, one.places)

    def _put(self, parts: Iterable[Tensor], layer: int, places: _Places) -> None:
        """Keys and values on the device, to the entries at `places`."""
        for part, memory in zip(parts, (self.buffer.keys, self.buffer.values), strict=True):
            if isinstance(places, slice):
                memory[layer, :, places] = part
            else:
                chosen = memory[layer, :, : self.extent.chosen_end]
                chosen.unflatten(1, (-1, self._cache.chunk))[places] = part

    def take(self, layer: int, start: int, keys: Tensor, values: Tensor, *, over_link: bool = False) -> None:
        if layer != self._layer:
            self._turn_to(layer)
        self._take_chunks(layer, start, keys, values, over_link)
        self._take_recent(layer, start, keys, values, over_link)

    def _turn_to(self, layer: int) -> None:
        # Two layers' are on their way at most: the pass waits for none, and they take little memory.
        self._put_sent(layer - 1)
        self._layer = layer
        # As chosen: on the host, and on the device.
        self._chunks = self._chosen[layer].result()
        self._numbers = self._chunks[0].tolist()
        self._there = self._chunks.to(self.buffer.keys.device, non_blocking=True)

    def _take_chunks(self, layer: int, start: int, keys: Tensor, values: Tensor, over_link: bool) -> None:
        chunk, (pages, _, tokens, _) = self._cache.chunk, keys.shape
        first, per_page = start // chunk, tokens // chunk
        low = bisect_left(self._numbers, first)
        high = bisect_left(self._numbers, first + pages * per_page)
        if low == high:
            return
        # What lies in host memory is picked by what was chosen there: the device need not be asked.
        numbers, heads, _ = (self._chunks if over_link else self._there)[:, low:high]
        page, at = (numbers - first) // per_page, (numbers - first) % per_page
        parts = (part[:, :, : per_page * chunk].unflatten(2, (per_page, chunk)) for part in (keys, values))
        picked = [part[page, heads, at] for part in parts]
        self._missing -= (high - low) * chunk
        _, heads, places = self._there[:, low:high]
        (self._send if over_link else self._put)(picked, layer, (heads, places))

    def _take_recent(self, layer: int, start: int, keys: Tensor, values: Tensor, over_link: bool) -> None:
        extent = self.extent
        first = max(start, extent.recent_start)
        last = min(start + len(keys) * keys.shape[2], extent.length)
        if first >= last:
            return
        to = slice(
            extent.chosen_end + first - extent.recent_start, extent.chosen_end + last - extent.recent_start
        )
        parts = [part_of(part, first - start, last - start) for part in (keys, values)]
        self._missing -= (last - first) * keys.shape[1]
        (self._send if over_link else self._put)(parts, layer, to)

    def _send(self, parts: list[Tensor], layer: int, places: _Places) -> None:
        """Keys and values in host memory, to the entries at `places`. The pass does not wait for them."""
        engine = self._source.engine
        packed = engine.outgoing(2, *parts[0].shape)
        torch.stack(parts, out=packed)
        self._under_way.append(_OnItsWay(engine.start_sending(packed), layer, places))
