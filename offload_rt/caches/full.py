"""The full KV cache: every committed token, paged in CPU memory by `cpu_kv`, attended in several places.

On a CPU attention goes over the store in place. On a GPU each layer's history lies in the places of
`places.py`; partial results merge exactly. After a commit the caches derived from this one take the KV
that its pass has just computed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from cpu_kv import KeysValues, LayerStream, TransferEngine
from offload_rt.attention import AttentionBackend, attend, attend_weighed, merge
from offload_rt.caches.base import AttentionCount, NewTokens, Refill, Verified
from offload_rt.caches.bounded import BoundedCache, Frame
from offload_rt.caches.held import HeldTokens
from offload_rt.caches.places import OtherPlace, ResidentShare, Tail
from offload_rt.host import to_device

LAST_QUERIES = 8  # how many of the newest tokens' queries choose what the retrieved cache keeps


class PassCancelled(RuntimeError):
    """A pass was given up because its text is."""


@dataclass(frozen=True)
class _Coverage:
    """A stream, and where the tokens before it are: 0 .. resident, then each place's start .. stop."""

    resident: int
    others: Sequence[tuple[OtherPlace, int, int]]
    stream: LayerStream


class FullCache:
    """Committed KV in the store; the KV of a pass is pending on the device until `commit`.

    A pass (`begin` and its `attend`s) may run in another thread than the rest, as long as only one of both
    runs at a time, and derived caches are not built meanwhile. A refill may read means of chunks in a thread
    of its own from a pass's `begin` to its last layer: nothing is written back in that time.

    Args:
        resident_tokens: of each layer, the first ones, kept on the device; 0 on a CPU.
        others: attend the next ones, in this order.

    Attributes:
        derived: caches of the same model to tell of every commit.
        attended: counts what passes attend to, where somebody wants to know.
        held: nothing: all that is committed here is final.
        scale: the softmax scale that the model attends with, known after its first pass.
        last_queries: of the prompt's newest tokens, `[layers, heads, tokens, head_dim]`.
    """

    def __init__(
        self,
        engine: TransferEngine,
        backend: AttentionBackend,
        resident_tokens: int = 0,
        others: Sequence[OtherPlace] = (),
    ) -> None:
        self.engine = engine
        self.sequence = engine.sequence
        self.layout = layout = engine.sequence.layout
        self.backend = backend
        self.derived: list[BoundedCache] = []
        self.attended: AttentionCount | None = None
        self.held = HeldTokens()
        self.scale = layout.head_dim**-0.5
        self.last_queries = torch.empty(0)
        self._prompt_tokens = 0
        self._others = others
        self._tail = Tail(layout, engine.link.device)
        self.device = self._tail.buffer.memory.device
        self._resident = ResidentShare(layout, resident_tokens, self.device)
        self._new: NewTokens | None = None
        self._frame: Frame | None = None  # of the pass, over the tail
        self._coverage: _Coverage | None = None  # of the pass
        self._ahead: _Coverage | None = None  # of the next one, whose stream has begun
        self._queries: list[Tensor] = []  # of the pass, layer by layer
        self._refills: list[Refill] = []
        self._cancelled = threading.Event()

    @property
    def verified_length(self) -> int:
        return self._tail.end

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
        end, resident, others = self._ranges(self.verified_length)
        stream = self.engine.stream(end, start=others[-1][2] if others else resident)
        for place, start, stop in others:
            place.open(start, stop)
        return _Coverage(resident, others, stream)

    def _ranges(self, length: int) -> tuple[int, int, list[tuple[OtherPlace, int, int]]]:
        """Of so long a text: the end of its full pages, the resident ones', and what other places attend."""
        page = self.layout.page_size
        end = length // page * page
        # Whole pages: no chunk lies half here and half there, where a refill would miss it.
        resident = start = min(self._resident.tokens, end) // page * page
        others = []
        for place in self._others:
            stop = min(start + place.tokens, end)
            if stop > start:
                others.append((place, start, stop))
            start = stop
        return end, resident, others

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if self._frame is None or self._coverage is None:
            raise RuntimeError("attend without a pass: call begin first")
        if self._cancelled.is_set():
            raise PassCancelled("the text was given up")
        self.scale = scale
        self._queries.append(queries)
        resident, stream = self._coverage.resident, self._coverage.stream
        chunk = None if self.attended is None else self.attended.chunk
        begun: list[tuple[OtherPlace, int, list[KeysValues], Future[list[Tensor]]]] = []
        for place, at, stop in self._coverage.others:
            runs = self.sequence.views(layer, at, stop)
            begun.append((place, at, runs, place.start(layer, queries, runs, scale, chunk)))
        for _, at, runs, _ in begun:
            self._refill(layer, at, runs, over_link=True)
        # The device's own tokens first: the link gains time.
        parts = [self._frame.attend_part(layer, queries, keys, values, scale)]
        if self._refills:
            self._refill(layer, self._tail.start, [self._tail.committed(layer)])
        if resident:
            share = self._resident.views(layer, resident)
            parts.append(self._attend(0, queries, *share, scale))
            self._refill(layer, 0, [share])
        at = stream.start
        for segment in stream.segments(layer):
            parts.append(self._attend(at, queries, *segment, scale))
            self._refill(layer, at, [segment])
            at += len(segment[0]) * self.layout.page_size
        if begun:
            # The others first: the device merges them while the other places work.
            parts = [merge(parts)]
        for place, at, _, started in begun:
            out, lse, *chunks = place.finish(started)
            parts.append((out, lse))
            if self.attended is not None:
                self.attended.add(at, lse, *chunks)
        out, lse = merge(parts)
        if self.attended is not None:
            self.attended.end_layer(layer, lse)
        return out

    def _attend(
        self, start: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention over whole pages of the text from token `start` on."""
        if self.attended is None:
            return attend(self.backend, queries, keys, values, scale)
        chunk = self.attended.chunk
        out, lse, units = attend_weighed(self.backend, queries, keys, values, scale, chunk)
        self.attended.add(start, lse, units)
        return out, lse

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
        """Lets the host wait for all compute enqueued so far.

        Raises TransferStalled, for the copy that the compute waits for.
        """
        for place in self._others:
            place.finish_compute()
        self.engine.finish_compute()

    def cancel(self) -> None:
        """Ends the pass under way in another thread, at its next layer; there is no other one afterwards."""
        self._cancelled.set()

    def abandon(self) -> None:
        """Forgets a pass that was begun and closes every stream; the ring is whole again."""
        for refill in self._refills:
            refill.close()
        for coverage in (self._ahead, self._coverage):
            if coverage is not None:
                coverage.stream.close()
        for place in self._others:
            place.abandon()
        self._new = self._frame = self._coverage = self._ahead = None
        self._refills = []
        if self.attended is not None:
            self.attended.drop_layer()

    def close(self) -> None:
        """Forgets a pass that was begun and lets the memory on the device go. Idempotent."""
        # Not left to the garbage collector: the next text is planned for what is free.
        self.abandon()
        self._resident.release()
        self._tail.release()

    def rewind(self) -> None:
        """Back to the end of the prompt: forgets all that came after its prefill."""
        self.abandon()
        self._cancelled.clear()
        self.engine.flush()
        self.sequence.truncate(self._prompt_tokens)
        self.start_from(self._prompt_tokens)

    def finish_prefill(self, tokens: int, last_queries: Tensor) -> None:
        """The store holds a prompt of `tokens` tokens.

        Args:
            last_queries: those of its last tokens, `[layers, heads, n, head_dim]`.
        """
        self.engine.flush()
        self.start_from(tokens)
        self._prompt_tokens = tokens
        self.last_queries = last_queries

    def start_from(self, length: int) -> None:
        """The store holds a text of `length` tokens, for a pass to follow; the tail takes its last page."""
        start = length // self.layout.page_size * self.layout.page_size
        self._tail.restart(start, self.engine.read(start, length))

    def keep_resident(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Takes to its place what stays on a device of a layer's whole prompt, after its prefill."""
        self._resident.keep(layer, keys, values)
        for place, start, stop in self._ranges(keys.shape[1])[2]:
            place.keep(layer, keys[:, start:stop], values[:, start:stop])

    def keep(self, entries: Sequence[int]) -> None:
        """Nothing to do: there is no speculation here."""

    def settle(self) -> None:
        """Nothing to do: everything committed here is final."""

    def build_derived(self) -> None:
        """Lets every derived cache fill itself, after a prefill or a truncation."""
        self.engine.flush()
        for cache in self.derived:
            cache.build(self.last_queries)

    def catch_up(self) -> None:
        """Lets derived caches that stayed behind fill themselves now, before a pass of another thread."""
        for cache in self.derived:
            cache.catch_up()
