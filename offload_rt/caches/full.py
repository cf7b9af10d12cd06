"""The full KV cache: every committed token, paged in CPU memory by `cpu_kv`, attended in several tiers.

On a CPU attention goes over the store in place. On a GPU each layer's history lies in the tiers of `tiers.py`
and `remote.py`; partial results combine exactly. After a commit the caches derived from this one take the KV
that its pass has just computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from cpu_kv import CopyFailed, KeysValues, LayerStream, TransferEngine, head_major
from offload_rt.attention.backends import AttentionBackend, fold
from offload_rt.attention.mass import MassRange
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.base import NewTokens, Verified
from offload_rt.caches.bounded import BoundedCache, Frame
from offload_rt.caches.refill import RetrievedRefill
from offload_rt.caches.remote import RemoteAttention, Results
from offload_rt.caches.selection import AttentionScores
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.caches.tiers import ResidentTier, Tail
from offload_rt.host import to_device


class PassCancelled(RuntimeError):
    """A pass was given up because its text is."""


@dataclass(frozen=True)
class _Coverage:
    """The ranges of a pass: the resident tokens, then each remote tier's, then the streamed ones."""

    resident: int
    remote: Sequence[tuple[RemoteAttention, int, int]]
    stream: LayerStream


class FullCache:
    """Committed KV in the store; the KV of a pass is pending on the device until `commit`.

    A pass (`begin` and its `attend`s) may run in another thread than the rest, as long as only one of both
    runs at a time, and derived caches are not built meanwhile. A refill may read means of chunks in a thread
    of its own from a pass's `begin` to its last layer: nothing is written back in that time.

    Args:
        resident_tokens: of each layer, the first ones, kept on the device; 0 on a CPU.
        remote: attend the next ones, in this order.
        late_resident_tokens: those of the resident ones that are loaded after the prefill.

    Attributes:
        derived: caches of the same model, which are told of every commit.
        scores: takes the attention mass of passes; None: nobody wants it.
        held: nothing: all that is committed here is final.
        scale: the softmax scale that the model attends with, known after its first pass.
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
        self.derived: list[BoundedCache] = []
        self.scores: AttentionScores | None = None
        self.held = SpeculativeTokens()
        self.scale = layout.head_dim**-0.5
        self._read: list[tuple[int, Tensor]] = []
        self._remote = remote
        self._tail = Tail(layout, engine.link.device)
        self.device = self._tail.buffer.memory.device
        self._resident = ResidentTier(layout, resident_tokens, self.device, late_resident_tokens)
        self._new: NewTokens | None = None
        self._frame: Frame | None = None  # of the pass, over the tail
        self._coverage: _Coverage | None = None  # of the pass
        self._ahead: _Coverage | None = None  # of the next one, whose stream has begun
        self._reading: LayerStream | None = None  # of a prefill behind tokens that are there
        self._queries: list[Tensor] = []  # of the pass, layer by layer
        self._refills: list[RetrievedRefill] = []
        self._unscored: tuple[int, AttentionSum, list[MassRange]] | None = None  # of the newest layer
        self._cancelled = threading.Event()

    @property
    def verified_length(self) -> int:
        return self._tail.end

    @property
    def resident_bytes(self) -> int:
        """Bytes of KV that are resident on the device."""
        return self._resident.nbytes

    def begin(self, new: NewTokens) -> None:
        if self._coverage is not None:
            self.abandon()  # a pass that was begun and not committed is over
        self._coverage, self._ahead = self._ahead or self._open(), None
        self._tail.drop(self._coverage.stream.end)
        self._frame = self._tail.frame(new, self.backend)
        self._new = new
        self._queries = []
        self._refills = [refill for cache in self.derived if (refill := cache.refill()) is not None]
        # What is committed never changes: the link goes on into the next pass when this one is copied.
        self._ahead = self._open()

    def _open(self) -> _Coverage:
        """Starts a stream over the full pages of the text; the tail keeps the rest."""
        end, resident, remote = self._ranges(self.verified_length, self._resident.tokens)
        stream = self.engine.stream(end, start=remote[-1][2] if remote else resident)
        for tier, start, stop in remote:
            tier.open(start, stop)
        return _Coverage(resident, remote, stream)

    def _ranges(
        self, length: int, resident_tokens: int
    ) -> tuple[int, int, list[tuple[RemoteAttention, int, int]]]:
        """Splits `length` tokens: the end of the full pages and of the resident ones, and remote ranges."""
        page = self.layout.page_size
        end = length // page * page
        # Whole pages: no chunk lies half here and half there, where a refill would miss it.
        resident = start = min(resident_tokens, end) // page * page
        remote = []
        for tier in self._remote:
            stop = min(start + tier.tokens, end)
            if stop > start:
                remote.append((tier, start, stop))
            start = stop
        return end, resident, remote

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if self._frame is None or self._coverage is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._cancelled.is_set():
            raise PassCancelled("the text was given up")
        self.scale = scale
        self._queries.append(queries)
        chunk = None if self.scores is None else self.scores.chunk
        # Queries first: remote tiers need the longest. What is left of the layer before is done meanwhile.
        started: list[tuple[RemoteAttention, int, Future[Results]]] = []
        for tier, start, stop in self._coverage.remote:
            runs = self.sequence.views(layer, start, stop)
            started.append((tier, start, tier.start(layer, queries, runs, scale, chunk)))
        self._score()
        self._refill_remote(layer)
        total = AttentionSum(self.backend, queries, len(keys), scale, chunk)
        total.attend(*self._frame.put(layer, queries, keys, values))
        if self._refills:
            self._refill(layer, self._tail.start, [self._tail.committed(layer)])
        self._attend_own(layer, total)
        mass = total.mass
        for tier, start, one in started:
            out, lse, *units = tier.finish(one)
            total.add(out, lse)
            if chunk is not None:
                mass.append(
                    MassRange(start // chunk, chunk, units[0], fold(lse[..., None], len(keys))[..., 0])
                )
        self._unscored = layer, total, mass
        if not started or layer == self.layout.layers - 1:
            self._score()
        return total.result()

    def _attend_own(self, layer: int, total: AttentionSum) -> None:
        """Attends what is on the device, or comes to it."""
        assert self._coverage is not None
        resident, stream = self._coverage.resident, self._coverage.stream
        total.track_mass(0, resident)
        at = 0
        for segment in self._resident.views(layer, resident):
            total.attend_tracked(*segment)
            self._refill(layer, at, [segment])
            at += len(segment[0]) * self.layout.page_size
        total.track_mass(stream.start, stream.end)
        at = stream.start
        for segment in stream.segments(layer):
            total.attend_tracked(*segment)
            self._refill(layer, at, [segment])
            at += len(segment[0]) * self.layout.page_size

    def _score(self) -> None:
        """Adds the attention mass of the newest layer to the scores of its chunks."""
        if self.scores is not None and self._unscored is not None:
            layer, total, mass = self._unscored
            assert total.lse is not None
            self.scores.add(self.backend, layer, mass, total.lse, total.sample)
        self._unscored = None

    def _refill_remote(self, layer: int) -> None:
        assert self._coverage is not None
        for _, start, stop in self._coverage.remote if self._refills else ():
            mapped = self.sequence.device_views(layer, start, stop, self.device)
            runs = self.sequence.views(layer, start, stop) if mapped is None else mapped
            self._refill(layer, start, runs, over_link=mapped is None)

    def _refill(self, layer: int, start: int, runs: Sequence[KeysValues], *, over_link: bool = False) -> None:
        for refill in self._refills:
            refill.take(layer, start, runs, over_link=over_link)

    def commit(self, kept: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        new = self._new
        self._new = self._frame = self._coverage = None
        kv = self._tail.commit(kept)
        ids = [tokens.known[at] for tokens, at in map(new.token, kept)]
        queries = torch.stack(self._queries).index_select(2, to_device(kept, self.device))
        verified = Verified(ids, kv, queries, new.count - 1)
        self.engine.write_back(kv)
        for cache in self.derived:
            cache.adopt(verified)

    def finish_compute(self) -> None:
        """Blocks the host until all compute enqueued so far is done."""
        for tier in self._remote:
            tier.finish_compute()
        self.engine.finish_compute()

    def cancel(self) -> None:
        """Ends the pass under way in another thread at its next layer. No other pass may follow."""
        self._cancelled.set()

    def abandon(self) -> None:
        """Forgets a pass that was begun and closes every stream; the ring is whole again."""
        for refill in self._refills:
            refill.close()
        streams = [one.stream for one in (self._ahead, self._coverage) if one is not None]
        for stream in (*streams, *([] if self._reading is None else [self._reading])):
            stream.close()
        for tier in self._remote:
            tier.abandon()
        self._new = self._frame = self._coverage = self._ahead = self._unscored = self._reading = None
        self._refills = []

    def close(self) -> None:
        """Forgets a pass that was begun and frees the memory on the device. Idempotent."""
        # Not left to the garbage collector: the next text is planned for what is free.
        self.abandon()
        self._resident.release()
        self._tail.release()

    @property
    def last_queries(self) -> Tensor | None:
        """Queries of the last tokens, `[layers, heads, tokens, head_dim]`; None where they were not read."""
        length, queries = self._read[-1] if self._read else (0, None)
        return queries if length == self.verified_length else None

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on. Raises CopyFailed."""
        self.abandon()
        self._cancelled.clear()
        self.engine.flush()
        if length < self.sequence.length:
            self.sequence.truncate(length)
            self._resident.truncate(length)
            for tier in self._remote:
                tier.truncate(length)
        while self._read and self._read[-1][0] > length:
            self._read.pop()
        self.start_from(length)

    def start_read(self) -> None:
        """Starts a prefill behind the tokens that are there; those of the tail are written anew."""
        self.abandon()
        self.engine.flush()
        if not self.engine.link.in_place:
            self.sequence.truncate(self._tail.start)
            resident = min(self._resident.tokens, self._tail.start)
            self._reading = self.engine.stream(self._tail.start, start=resident)

    def history(self, layer: int) -> Iterator[KeysValues]:
        """The tokens of a layer before those that a prefill reads, in order; see `LayerStream.segments`."""
        if self._reading is None:
            yield from self.sequence.views(layer, 0, self.verified_length)
            return
        # On a GPU as one page: the parts of many pages would each have a result for every query.
        segments = self._resident.views(layer, self._reading.start), self._reading.segments(layer)
        for keys, values in chain(*segments, [self._tail.committed(layer)]):
            yield head_major(keys), head_major(values)

    def put_read(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes tokens that a prefill reads behind others, `[kv_heads, tokens, head_dim]`, to the store."""
        if self.engine.link.in_place:
            self.sequence.append(layer, keys, values)
            return
        tail = self._tail.committed(layer)
        both = (torch.cat([old[0], new], dim=1) for old, new in zip(tail, (keys, values), strict=True))
        self.engine.write_prompt(layer, *both)

    def finish_read(self, last_queries: Tensor) -> None:
        """Told when the store holds all tokens that were read.

        Args:
            last_queries: those of the last ones, `[layers, heads, n, head_dim]`.
        """
        self.abandon()
        self.engine.flush()
        self.start_from(self.sequence.length)
        self._read.append((self.sequence.length, last_queries))

    def give_up_read(self) -> None:
        """Returns to the tokens that were there before a prefill that failed."""
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
        """Loads what the tiers lack of their tokens, into memory that only a prefill has needed, too."""
        self._resident.load(self.engine)
        for tier, start, _ in self._ranges(self.verified_length, self._resident.tokens)[2]:
            tier.load(start)

    def start_from(self, length: int) -> None:
        """Starts over with the first `length` tokens of the store; the tail takes their last page."""
        start = length // self.layout.page_size * self.layout.page_size
        self._tail.restart(start, self.engine.read(start, length))

    def keep_resident(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Gives every tier what it keeps on a device of a layer's whole prompt, after its prefill."""
        self._resident.keep(layer, keys, values)
        for tier, start, stop in self._ranges(keys.shape[1], self._resident.capacity)[2]:
            tier.keep(layer, start, keys[:, start:stop], values[:, start:stop])

    def keep(self, entries: Sequence[int]) -> None:
        """Does nothing: there is no speculation here."""

    def settle(self) -> None:
        """Does nothing: everything committed here is final."""

    def build_derived(self) -> None:
        """Lets every derived cache fill itself, after a prefill or a truncation."""
        self.engine.flush()
        queries = self.last_queries
        if queries is None:
            raise RuntimeError("the last tokens were not read: read them anew first")
        for cache in self.derived:
            cache.build(queries)

    def catch_up(self) -> None:
        """Lets derived caches that stayed behind fill themselves now, before a pass of another thread."""
        for cache in self.derived:
            cache.catch_up()
