"""The full KV cache: every committed token, paged in CPU memory by `cpu_kv` and attended in several tiers.

On a CPU, attention runs over the store in place. On a GPU, each layer's tokens lie in the tiers of `tiers.py`
and `remote.py`, whose partial results combine exactly. Caches derived from this one follow its passes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor

from cpu_kv import CopyFailed, KeysValues, LayerStream, TransferEngine, head_major
from offload_rt.attention.backends import AttentionBackend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import DerivedCache, NewTokens, VerifiedTokens
from offload_rt.caches.bounded import BufferAttention
from offload_rt.caches.remote import RemoteAttention
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.caches.tiers import ResidentTier, StreamedTier, Tail, TierRange
from offload_rt.host import to_device


class PassCancelled(RuntimeError):
    """Raised in a pass that was cancelled because its sequence was."""


class FullCache:
    """Committed KV in the store; the KV of a pass is pending on the device until `commit`.

    A pass (`begin` and its `attend`s) may run in another thread than the other methods, as long as only one
    of both runs at a time and derived caches are not built meanwhile. From `begin` to the last layer derived
    caches may read means of chunks in a thread of their own: nothing is written back in that time.

    Args:
        resident_tokens: number of tokens per layer kept on the device; 0 on a CPU.
        remote: tiers that attend the next ones, in this order.
        late_resident_tokens: those of the resident tokens that are loaded after the prefill.

    Attributes:
        derived: caches of the same model that follow every pass and commit.
        speculative: always empty, as everything that is committed here is final.
        scale: the model's softmax scale, known after its first pass.
    """

    def __init__(
        self,
        engine: TransferEngine,
        backend: AttentionBackend,
        resident_tokens: int = 0,
        remote: Sequence[RemoteAttention] = (),
        late_resident_tokens: int = 0,
    ) -> None:
        self.engine = engine
        self.sequence = engine.sequence
        self.layout = layout = engine.sequence.layout
        self.backend = backend
        self.derived: list[DerivedCache] = []
        self.speculative = SpeculativeTokens()
        self.scale = layout.head_dim**-0.5
        self._read: list[tuple[int, Tensor]] = []  # length and last queries after each prefill
        self._tail = Tail(layout, engine.link.device)
        self.device = self._tail.buffer.memory.device
        self._resident = ResidentTier(engine, resident_tokens, self.device, late_resident_tokens)
        self._streamed = StreamedTier(engine)
        self._remote = remote
        self._reading: LayerStream | None = None  # of a prefill behind tokens that are present
        # Of the pass:
        self._new: NewTokens | None = None
        self._tail_attention: BufferAttention | None = None
        self._ranges: list[TierRange] | None = None
        self._next_ranges: list[TierRange] | None = None  # of the next pass, which is open too
        self._queries: list[Tensor] = []  # layer by layer
        self._followers: list[DerivedCache] = []  # derived caches that take segments
        self._mass_chunk: int | None = None
        self._unreported: tuple[int, AttentionSum] | None = None  # attention mass of the newest layer
        self._cancelled = threading.Event()

    @property
    def verified_length(self) -> int:
        return self._tail.end

    @property
    def resident_bytes(self) -> int:
        """Bytes of KV that are resident on the device."""
        return self._resident.nbytes

    def begin(self, new: NewTokens) -> None:
        if self._ranges is not None:
            self.abandon()  # the pass before was not committed
        self._ranges, self._next_ranges = self._next_ranges or self._open(), None
        self._tail.drop(max(one.stop for one in self._ranges))
        self._tail_attention = self._tail.attention(new, self.backend)
        self._new = new
        self._queries = []
        self._followers = [cache for cache in self.derived if cache.begin_pass()]
        self._mass_chunk = next((cache.mass_chunk for cache in self.derived if cache.mass_chunk), None)
        # Committed KV never changes: once this pass is copied, the link goes on with the next one.
        self._next_ranges = self._open()

    def _open(self) -> list[TierRange]:
        """Opens a pass over the full pages of the sequence; the tail has the other tokens."""
        ranges = self._split(self.verified_length, self._resident.tokens)
        for tier, start, stop in ranges:
            tier.open(start, stop)
        return ranges

    def _split(self, length: int, resident_tokens: int) -> list[TierRange]:
        """Splits the full pages of `length` tokens among the tiers, those on the device first.

        Only whole pages, so that every chunk lies in one tier.
        """
        page = self.layout.page_size
        end = length // page * page
        ranges, at = list[TierRange](), 0
        for tier in (self._resident, *self._remote):
            tokens = resident_tokens if tier is self._resident else tier.tokens
            start, at = at, min(at + tokens, end) // page * page
            if at > start:
                ranges.append(TierRange(tier, start, at))
        ranges.append(TierRange(self._streamed, at, end))
        return sorted(ranges, key=lambda one: one.tier.remote)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if self._tail_attention is None or self._ranges is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._cancelled.is_set():
            raise PassCancelled("the sequence was cancelled")
        self.scale = scale
        self._queries.append(queries)
        # Queries leave first, as remote tiers take longest; the layer before is accounted for meanwhile.
        started = []
        for tier, start, stop in self._ranges:
            runs = self.sequence.views(layer, start, stop) if tier.remote else ()
            started.append(tier.start(layer, queries, runs, scale, self._mass_chunk))
        self._report_mass()
        self._show_remote_segments(layer)
        total = AttentionSum(self.backend, queries, len(keys), scale, self._mass_chunk)
        total.attend(*self._tail_attention.put(layer, queries, keys, values))
        if self._followers:
            self._on_segment(layer, self._tail.start, [self._tail.committed(layer)])
        for (tier, start, stop), one in zip(self._ranges, started, strict=True):
            tier.add_to(total, layer, start, stop, one, self._on_segment)
        self._unreported = layer, total
        if not self._ranges[-1].tier.remote or layer == self.layout.layers - 1:
            self._report_mass()
        return total.result()

    def _report_mass(self) -> None:
        """Tells derived caches the attention mass of the newest layer."""
        if self._mass_chunk is not None and self._unreported is not None:
            for cache in self.derived:
                cache.take_mass(*self._unreported)
        self._unreported = None

    def _show_remote_segments(self, layer: int) -> None:
        """Shows derived caches the KV of the layer that does not come to the device."""
        for tier, start, stop in (self._ranges or ()) if self._followers else ():
            if tier.remote:
                mapped = self.sequence.device_views(layer, start, stop, self.device)
                runs = self.sequence.views(layer, start, stop) if mapped is None else mapped
                self._on_segment(layer, start, runs, over_link=mapped is None)

    def _on_segment(
        self, layer: int, start: int, runs: Sequence[KeysValues], *, over_link: bool = False
    ) -> None:
        for cache in self._followers:
            cache.take_segment(layer, start, runs, over_link=over_link)

    def commit(self, kept: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        new = self._new
        self._new = self._tail_attention = self._ranges = None
        kv = self._tail.commit(kept)
        ids = [tokens.known[at] for tokens, at in map(new.token, kept)]
        queries = torch.stack(self._queries).index_select(2, to_device(kept, self.device))
        verified = VerifiedTokens(ids, kv, queries, new.count - 1)
        self.engine.write_back(kv)
        for cache in self.derived:
            cache.adopt(verified)

    def finish_compute(self) -> None:
        """Blocks the host until all compute enqueued so far is done."""
        for tier in (*self._remote, self._streamed):
            tier.finish_compute()

    def cancel(self) -> None:
        """Ends the pass running in another thread at its next layer. No other pass may follow."""
        self._cancelled.set()

    def abandon(self) -> None:
        """Forgets the pass that was begun, and closes every stream; the staging ring is free again."""
        for cache in self._followers:
            cache.abandon_pass()
        for tier in (self._streamed, *self._remote):
            tier.abandon()
        if self._reading is not None:
            self._reading.close()
        self._new = self._tail_attention = self._ranges = self._next_ranges = None
        self._unreported = self._reading = None
        self._followers = []

    def close(self) -> None:
        """Forgets the pass that was begun and frees the memory on the device. Idempotent."""
        # Not left to the garbage collector: the next sequence is planned for the memory that is free.
        self.abandon()
        self._resident.release()
        self._tail.release()

    @property
    def last_queries(self) -> Tensor | None:
        """Queries of the last tokens, `[layers, heads, tokens, head_dim]`; None if no prefill read them."""
        length, queries = self._read[-1] if self._read else (0, None)
        return queries if length == self.verified_length else None

    def reads(self, length: int) -> list[tuple[int, Tensor]]:
        """Returns length and last queries, on the host, after each prefill of up to `length` tokens."""
        return [(at, queries.cpu()) for at, queries in self._read if at <= length]

    def begin_with(self, reads: Sequence[tuple[int, Tensor]]) -> None:
        """Takes over the tokens that the store has already.

        Args:
            reads: of the sequence that read them; see `reads`.
        """
        length = self.sequence.length
        self._read = [(at, queries.to(self.device)) for at, queries in reads if at <= length]
        self.start_from(length)
        self.load_resident()

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on. Raises CopyFailed."""
        self.abandon()
        self._cancelled.clear()
        self.engine.flush()
        if length < self.sequence.length:
            self.sequence.truncate(length)
            for tier in (self._resident, *self._remote):
                tier.truncate(length)
        while self._read and self._read[-1][0] > length:
            self._read.pop()
        self.start_from(length)

    def start_read(self) -> None:
        """Starts a prefill behind the tokens that are present; those of the tail are written again."""
        self.abandon()
        self.engine.flush()
        if not self.engine.link.in_place:
            self.sequence.truncate(self._tail.start)
            resident = min(self._resident.tokens, self._tail.start)
            self._reading = self.engine.stream(self._tail.start, start=resident)

    def history(self, layer: int) -> Iterator[KeysValues]:
        """Yields the tokens of a layer before those that a prefill reads, `[kv_heads, tokens, head_dim]`.

        On a CPU in pages, as they lie in the store.
        """
        if self._reading is None:
            yield from self.sequence.views(layer, 0, self.verified_length)
            return
        # As one page on a GPU: otherwise every page would have a result for every query.
        resident = self._resident.segments(layer, 0, self._reading.start)
        for keys, values in chain(resident, self._reading.segments(layer), [self._tail.committed(layer)]):
            yield head_major(keys), head_major(values)

    def put_read(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes the tokens that a prefill reads behind others, `[kv_heads, tokens, head_dim]`."""
        if self.engine.link.in_place:
            self.sequence.append(layer, keys, values)
            return
        tail = self._tail.committed(layer)
        both = (torch.cat([old[0], new], dim=1) for old, new in zip(tail, (keys, values), strict=True))
        self.engine.write_prompt(layer, *both)

    def finish_read(self, last_queries: Tensor) -> None:
        """Ends a prefill: the store has all of its tokens.

        Args:
            last_queries: queries of its last tokens, `[layers, heads, n, head_dim]`.
        """
        self.abandon()
        self.engine.flush()
        self.start_from(self.sequence.length)
        self._read.append((self.sequence.length, last_queries))

    def give_up_read(self) -> None:
        """Ends a prefill that failed: returns to the tokens before it."""
        length = self.verified_length
        self.abandon()
        with suppress(CopyFailed):
            self.engine.flush()
        if self.sequence.length >= length:
            self.sequence.truncate(length)
            return
        self.sequence.truncate(self._tail.start)
        self.engine.write_back(self._tail.buffer.kv[:, :, :, : self._tail.tokens].clone())

    def load_resident(self) -> None:
        """Loads the KV that tiers keep on a device and lack, also into memory that the prefill has used."""
        self._resident.load(0)
        for tier, start, _ in self._split(self.verified_length, self._resident.tokens):
            if tier.remote:
                tier.load(start)

    def start_from(self, length: int) -> None:
        """Starts over with the first `length` tokens of the store; the tail takes their last page."""
        start = length // self.layout.page_size * self.layout.page_size
        self._tail.restart(start, self.engine.read(start, length))

    def keep_resident(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Gives every tier the KV that it keeps on a device of a layer's prompt, after its prefill."""
        for tier, start, stop in self._split(keys.shape[1], self._resident.capacity):
            tier.keep(layer, start, keys[:, start:stop], values[:, start:stop])

    def keep(self, entries: Sequence[int]) -> None:
        """Does nothing, as there is no speculation here."""

    def settle(self) -> None:
        """Does nothing, as everything committed here is final."""

    def build_derived(self) -> None:
        """Fills every derived cache, after a prefill or a truncation."""
        self.engine.flush()
        queries = self.last_queries
        if queries is None:
            raise RuntimeError("the queries of the last tokens are unknown: read these tokens again first")
        for cache in self.derived:
            cache.build(queries)

    def catch_up(self) -> None:
        """Fills the derived caches that stayed behind, before a pass of another thread."""
        for cache in self.derived:
            cache.catch_up()
