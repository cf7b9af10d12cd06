"""The retrieved cache (TriForce, section 4.1): the chunks that get most attention, for each KV head."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from cpu_kv import ChunkMeans, KVPages
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import CacheSource, VerifiedTokens
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool, HeldChunks, KVBuffer
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.refresh import ChosenChunks, EntryLayout, RetrievalRefresh
from offload_rt.caches.selection import (
    PREFERENCE,
    AttentionScores,
    Selection,
    choose_chunks,
    choose_of_layers,
)
from offload_rt.caches.sizes import VERIFIED_ROOM, RetrievedSize
from offload_rt.config.schema import RefreshPolicy
from offload_rt.errors import first_line
from offload_rt.system.device_copies import PendingRead


class RefreshSchedule:
    """Decides when a retrieved cache chooses its entries again.

    Args:
        policy: after every verification, after N tokens, or below an acceptance rate.

    Attributes:
        count: number of refreshes so far.
    """

    WINDOW = 8
    """Number of newest verifications that the acceptance rate is taken over."""

    def __init__(self, policy: RefreshPolicy) -> None:
        self.count = 0
        self.policy = policy
        self._tokens = 0
        self._verifications: deque[tuple[int, int]] = deque(maxlen=self.WINDOW)

    def refreshed(self) -> None:
        """Notes that the entries were chosen again."""
        self.count += 1
        self.postpone()

    def postpone(self) -> None:
        """Notes that they could not be chosen again, although that was due."""
        self._tokens = 0
        self._verifications.clear()

    def observe(self, tokens: int, proposed: int) -> None:
        """Notes a verification of `proposed` tokens that yielded `tokens`."""
        self._tokens += tokens
        self._verifications.append((tokens - 1, proposed))

    @property
    def due(self) -> bool:
        """True if the entries should be chosen again."""
        if self.policy.kind == "every":
            return True
        if self.policy.kind == "stride":
            return self._tokens >= self.policy.value
        accepted, proposed = (sum(column) for column in zip(*self._verifications, strict=True))
        full = len(self._verifications) == self.WINDOW
        return full and proposed > 0 and accepted / proposed < self.policy.value


class RetrievedCache(BoundedCache):
    """First chunk, chunks with the highest scores, and recent window: `budget` entries per layer and KV head.

    Unretrieved tokens are approximated by the mean key and mean value of their pages, weighted by their
    number, as RetroInfer (arXiv 2505.02922) does. The means are attended together with the entries.

    Layout of the verified entries after a refresh: first chunk, chosen chunks, recent window, which reaches
    back to the last whole page or, if that is more, over half of the budget. A chunk that is chosen again
    stays where it is, and only others are taken; they come in falling score. Newly verified tokens overwrite
    the chosen chunks from the last one on; when none is left, the cache is refreshed whatever its policy.

    Where the device lacks memory for a refresh, the entries stay as they are: drafts are worse, and verified
    all the same.

    With fewer than 16 bits, the chosen chunks are quantised (`kernels/quantized.py`), in whole groups, so
    that there may be a few more. The recent window and what is verified after a refresh stay in full
    precision, and the cache is refreshed when `VERIFIED_ROOM` tokens were verified, whatever its policy.

    Args:
        source: the full cache of the same model, whose store keeps the means that `selection` and
            `mean_slots` need.
        recent: least number of entries in the recent window.
        refresh: when to choose again.
        selection: scores the chunks.
        mean_slots: most pages whose means are attended; 0: unretrieved tokens are left out.
        from_stream: entries are taken from the segments of the next pass, into a second buffer; False: they
            are gathered before the next draft.
        bits: of an entry of a chosen chunk: 16 (those of the full cache), 8 or 4.
    """

    def __init__(
        self,
        source: CacheSource,
        *,
        budget: int,
        chunk: int,
        recent: int,
        refresh: RefreshPolicy,
        selection: Selection,
        mean_slots: int = 0,
        from_stream: bool = False,
        pool: BufferPool | None = None,
        bits: int = 16,
    ) -> None:
        size = RetrievedSize.of(source.layout, budget, chunk, recent, bits)
        super().__init__(
            source.layout,
            source.device,
            size.room,
            source.backend,
            pool,
            mean_slots,
            source.local.derived(),
            size.quantized,
        )
        self.budget = budget
        self.chunk = chunk
        self.recent = recent
        self._unit = size.unit
        self._staging = None if size.quantized is None else self._staging_for(size.quantized.entries)
        self._source = source
        self.refresh = RefreshSchedule(refresh)
        self.selection = selection
        self.mass_chunk = selection.mass_chunk
        self._from_stream = from_stream
        self._next_victim = 0
        # Queries of the newest verified tokens, if entries are to be chosen again
        self._due_queries: Tensor | None = None  # before the next draft
        self._next_pass_queries: Tensor | None = None  # from the next pass of the full cache
        self._running: RetrievalRefresh | None = None
        self._choosing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-choosing")
        self._spare: KVBuffer | None = None  # filled by a refresh from a pass
        if from_stream:
            # Before the first pass: allocating and touching so much memory would hold up a decode step.
            self._spare = self._take_buffer()
        self._drafted = False  # since the last refresh was wanted

    def _staging_for(self, entries: int) -> Tensor:
        """Returns memory for chosen chunks that are quantised next, see `RetrievalRefresh`."""
        kv = self._layout
        with torch.inference_mode(False):
            shape = 2, 2, kv.kv_heads, entries, kv.head_dim
            return torch.empty(shape, dtype=kv.dtype, device=self._device)

    def build(self, queries: Tensor) -> None:
        for buffer in self.buffers:
            buffer.chunks = None  # of tokens that may have been taken back
        self.buffer.means = 0
        source = self._source
        source.transfer.flush()
        end = source.verified_length // self._layout.page_size * self._layout.page_size
        self.selection.reset(queries, source, end)
        self.fill(queries)
        if self._spare is not None:
            # So that a refresh while decoding sends only new means.
            self._spare.copy_means(self.buffer)

    def fill(self, queries: Tensor) -> None:
        """Chooses entries by the scores so far, and gathers them from the store now."""
        self.speculative.clear()
        self.abandon_pass()
        self._due_queries = self._next_pass_queries = self._running = None
        self.verified_length = self._source.verified_length
        with self._spared_from_lack_of_memory():
            refresh = self._start_refresh(self.verified_length, queries, self.buffer)
            refresh.take_from_store()
            self._apply(refresh.layout)

    @contextmanager
    def _spared_from_lack_of_memory(self) -> Iterator[None]:
        """Gives a refresh up for which the device has not enough memory."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.abandon_pass()
            self._running = None
            self.refresh.postpone()
            warnings.warn(
                f"too little memory to refresh the retrieved cache, so drafts are worse: {first_line(error)}",
                stacklevel=4,
            )

    def _entry_layout(self, length: int) -> EntryLayout:
        quantizes, chunk, page = self.buffer.quantized is not None, self.chunk, self._layout.page_size
        if length <= (self.room - VERIFIED_ROOM if quantizes else self.budget):
            return EntryLayout(length, recent_start=0, chosen_end=0, means=0, unretrieved=0)
        # Tokens behind the last whole page have no mean yet and no score.
        recent = max(self.recent, min(length % page, self.budget // 2))
        # Whole chunks, unless the budget holds no more than the first chunk and the recent window.
        recent_start = max((length - recent) // chunk * chunk, length - (self.budget - chunk))
        entries = self.budget - (length - recent_start)
        chosen_end = -(-entries // self._unit) * self._unit if quantizes else entries // chunk * chunk
        if chosen_end >= recent_start:  # everything is held, and what is no whole unit joins the window
            recent_start = chosen_end = recent_start // self._unit * self._unit
        means = min(self.buffer.mean_slots, recent_start // page)
        unretrieved = max(0, means * page - chosen_end)
        return EntryLayout(
            length, recent_start, chosen_end, means if unretrieved else 0, unretrieved, quantizes
        )

    def _chooser(
        self, layout: EntryLayout, queries: Tensor, slot_chunks: Tensor
    ) -> Callable[[int], ChosenChunks]:
        """Returns a thread-safe function that chooses chunks of a layer for slots `[layers, kv_heads, n]`."""
        selection, device = self.selection, self._device
        end = layout.recent_start // self.chunk
        if not slot_chunks.shape[-1]:
            return lambda layer: ChosenChunks.of(torch.empty(3, 0, dtype=torch.long), device)
        if device.type == "cuda" and isinstance(selection, AttentionScores):
            # On the device, for all layers now: on the host it would take 10 ms per layer at 128K.
            on_device = choose_of_layers(selection.values[:, :, :end], slot_chunks)
            on_host, on_same_device = PendingRead(on_device), on_device.device == device
            return lambda layer: ChosenChunks(
                on_host.wait()[layer], on_device[layer] if on_same_device else None
            )
        scores = selection.scores(queries, self._source.scale)
        preference = 1.0 if self._source.transfer.link.in_place else PREFERENCE

        @torch.inference_mode()  # which is set per thread
        def choose(layer: int) -> ChosenChunks:
            return ChosenChunks.of(
                choose_chunks(scores(layer)[:, :end], slot_chunks[layer], preference), device
            )

        return choose

    def _send_means(self, buffer: KVBuffer, layout: EntryLayout) -> None:
        """Sends the buffer the means of pages that it lacks."""
        kv, means, transfer = self._layout, self._source.sequence.page_means, self._source.transfer
        while means is not None and buffer.means < layout.means:
            end = min(layout.means, buffer.means + transfer.READ_TOKENS)  # bounds the staging memory
            shape = (kv.layers, 2, kv.kv_heads, end - buffer.means, kv.head_dim)
            pages = slice(buffer.means, end)
            buffer.add_means(transfer.fetch(shape, partial(self._put_means, means, pages)))

    def _put_means(self, means: ChunkMeans, pages: slice, out: Tensor) -> None:
        torch.stack([means.means(layer)[:, :, pages] for layer in self._source.layers], out=out)

    def _start_refresh(self, length: int, queries: Tensor, buffer: KVBuffer) -> RetrievalRefresh:
        """Starts choosing the entries of a sequence of `length` tokens for a buffer, and sends its means."""
        transfer, layout = self._source.transfer, self._entry_layout(length)
        transfer.flush()  # tokens are summarised when they have arrived
        chunks = buffer.chunks = buffer.chunks or self._no_chunks()
        if buffer.quantized is not None and not buffer.quantized.shares_ranges:
            chunks.intact = 0  # no chunk can be replaced without the others of its group
        whole = not chunks.intact
        choose = self._chooser(layout, queries, chunks.begin(layout.chosen_end // self.chunk))
        self._send_means(buffer, layout)
        return RetrievalRefresh(
            transfer, self.chunk, layout, choose, buffer, self._choosing, whole, self._staging
        )

    def _no_chunks(self) -> HeldChunks:
        kv, slots = self._layout, -(-self.budget // self._unit) * self._unit // self.chunk
        with torch.inference_mode(False):
            numbers = torch.empty(
                kv.layers, kv.kv_heads, slots, dtype=torch.long, device=self.selection.device
            )
        return HeldChunks(numbers)

    def _apply(self, layout: EntryLayout) -> None:
        """Describes the entries by `layout`, after a refresh."""
        self.entries, self.quantized = layout.entries, layout.quantized
        self.unretrieved = layout.unretrieved
        # What is quantised is not overwritten.
        self._next_victim = layout.chosen_end - layout.quantized - 1
        assert self.buffer.chunks is not None
        self.buffer.chunks.intact = layout.chosen_end // self.chunk
        self.refresh.refreshed()

    def adopt(self, verified: VerifiedTokens) -> None:
        count = verified.kv.shape[3]
        entries = self._keep_descendants(verified.tokens)
        refresh, self._running = self._running, None
        if refresh is not None and refresh.complete and self._due_queries is None:
            with self._spared_from_lack_of_memory():
                refresh.finish()
                self._use(refresh)
        self.refresh.observe(count, verified.proposed)
        free_slots = self.room - self.entries + max(0, self._next_victim + 1 - self.chunk)
        due = self._source.verified_length > self.budget and self.refresh.due
        # While drafts are read, a refresh from the next pass does not have to interrupt them.
        gathers = due and not (self._from_stream and self._drafted)
        if self._due_queries is not None or count > free_slots or gathers:
            # Refreshed when it is next read, not now: during plain decoding nobody reads it.
            self._due_queries = verified.queries
            self._next_pass_queries = None
            self.speculative.clear()
            self.verified_length += count
            return
        if due:
            self._next_pass_queries = verified.queries
            self._drafted = False
        self.append_verified(verified.kv)
        self._put_behind(entries)

    @property
    def buffers(self) -> list[KVBuffer]:
        return [self.buffer] if self._spare is None else [self.buffer, self._spare]

    def release(self) -> None:
        self._choosing.shutdown(cancel_futures=True)
        super().release()
        self._spare = self._running = self._staging = None

    def _use(self, refresh: RetrievalRefresh) -> None:
        self._spare, self.buffer = self.buffer, refresh.buffer
        self._apply(refresh.layout)

    def begin(self, new: NewTokens) -> None:
        self.catch_up()
        self._drafted = True
        super().begin(new)

    def catch_up(self) -> None:
        if self._due_queries is not None:
            self.fill(self._due_queries)

    def begin_pass(self) -> bool:
        self._running = None
        if self._next_pass_queries is not None:
            queries, self._next_pass_queries = self._next_pass_queries, None
            assert self._spare is not None
            with self._spared_from_lack_of_memory():
                self._running = self._start_refresh(self.verified_length, queries, self._spare)
        return self._running is not None

    def take_segment(self, layer: int, start: int, runs: Sequence[KVPages], *, over_link: bool) -> None:
        if self._running is not None:
            with self._spared_from_lack_of_memory():
                self._running.take(layer, start, runs, over_link=over_link)

    def take_mass(self, layer: int, total: AttentionSum) -> None:
        self.selection.add(layer, total)

    def abandon_pass(self) -> None:
        if self._running is not None:
            self._running.close()

    def victims(self, count: int) -> list[int]:
        slots = list(range(self._next_victim, self._next_victim - count, -1))
        self._next_victim -= count
        if count and self.buffer.chunks is not None:
            self.buffer.chunks.intact = min(self.buffer.chunks.intact, (self._next_victim + 1) // self.chunk)
        return slots
