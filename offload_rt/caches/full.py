"""The full KV cache: every committed token, paged in CPU memory by `cpu_kv` and attended in several tiers.

On a CPU, attention runs over the store in place. On a GPU, each layer's tokens lie in the tiers of `tiers.py`
and `remote.py`, whose partial results combine exactly. Caches derived from this one follow its passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv import KVPages, TransferEngine
from offload_rt.attention.backends import AttentionBackend
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.base import DerivedCache, VerifiedTokens
from offload_rt.caches.bounded import BufferAttention
from offload_rt.caches.local import NO_LOCAL_STATE, LocalState
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.remote import RemoteAttention
from offload_rt.caches.resident import ResidentTier
from offload_rt.caches.rewind_points import RewindPoint, RewindPoints
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.caches.target_states import SavedStates, TargetStates
from offload_rt.caches.tiers import StreamedTier, Tail, TierRange
from offload_rt.kernels.tail import TailView
from offload_rt.system.device_copies import to_device


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
        packed: see `Tiers`.
        local: of the layers that do not attend to the whole sequence; None: there are none.

    Attributes:
        local: sliding windows and recurrent states after the committed tokens.
        derived: caches of the same model that follow every pass and commit.
        speculative: always empty, as everything that is committed here is final.
        scale: the model's softmax scale, known after its first pass.
        paged: the model has layers whose KV is in the store; else the store only counts tokens.
        resident: the tier of the first tokens.
        remote: those of the next ones.
        tail: the newest tokens.
        states: of the verified tokens, for a draft head; None: there is none.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        backend: AttentionBackend,
        resident_tokens: int = 0,
        remote: Sequence[RemoteAttention] = (),
        local: LocalState | None = None,
        states: TargetStates | None = None,
        *,
        packed: bool = True,
    ) -> None:
        self.states = states
        self.transfer = transfer
        self.local = local or NO_LOCAL_STATE
        self.sequence = transfer.sequence
        self.layout = layout = transfer.sequence.layout
        self.layers = transfer.layers
        self.backend = backend
        self._verifying = backend.by_query(layout.dtype, layout.head_dim) or backend
        self.derived: list[DerivedCache] = []
        self.speculative = SpeculativeTokens()
        self.scale = layout.head_dim**-0.5
        kinds = self.local.layers.kinds
        self.paged = bool(kinds.full) or not kinds.local
        self.tail = Tail(layout, transfer.link.device)
        self.device = self.tail.buffer.memory.device
        self._points = RewindPoints(self.local, self.device)
        self.resident = ResidentTier(transfer, resident_tokens, packed=packed)
        self._streamed = StreamedTier(transfer)
        self.remote = remote
        # Of the pass:
        self._new: NewTokens | None = None
        self._tail_attention: BufferAttention | None = None
        self._tail_view = TailView(layout.page_size, 0)
        self._ranges: list[TierRange] | None = None
        self._next_ranges: list[TierRange] | None = None  # of the next pass, which is open too
        self._queries: list[Tensor] = []  # layer by layer
        self._followers: list[DerivedCache] = []  # derived caches that take segments
        self._mass_chunk: int | None = None
        self._unreported: tuple[int, AttentionSum] | None = None  # attention mass of the newest layer
        self._cancelled = False  # no threading.Event: an interrupt of its methods may leave it locked
        if kinds.local:
            self.local.before_layer = self._check_cancelled

    @property
    def verified_length(self) -> int:
        return self.tail.end

    @property
    def whole(self) -> bool:
        """Store and local layers have all tokens, once write-backs are flushed: no commit was interrupted."""
        local = self.local.history.length if self.local.layers.kinds.local else self.verified_length
        return self.sequence.length == local == self.verified_length

    @property
    def resident_bytes(self) -> int:
        """Bytes of KV that are resident on the device."""
        return self.resident.nbytes

    def begin(self, new: NewTokens) -> None:
        if self._ranges is not None:
            self.abandon()  # the pass before was not committed
        self._ranges, self._next_ranges = self._next_ranges or self._open(), None
        self.tail.drop(max((one.stop for one in self._ranges), default=0))
        self._tail_attention = self.tail.attention(new, self.backend)
        self._tail_view = self.tail.view(new)
        self._new = new
        self.local.begin(new, 0)
        self._queries = []
        self._followers = [cache for cache in self.derived if cache.begin_pass()]
        self._mass_chunk = next((cache.mass_chunk for cache in self.derived if cache.mass_chunk), None)
        # Committed KV never changes: once this pass is copied, the link goes on with the next one.
        self._next_ranges = self._open()

    def _open(self) -> list[TierRange]:
        """Opens a pass over the full pages of the sequence; the tail has the other tokens."""
        if not self.paged:
            return []
        ranges = self._split(self.verified_length, self.resident.tokens)
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
        for tier in (self.resident, *self.remote):
            tokens = resident_tokens if tier is self.resident else tier.tokens
            start, at = at, min(at + tokens, end) // page * page
            if at > start:
                ranges.append(TierRange(tier, start, at))
        ranges.append(TierRange(self._streamed, at, end))
        return sorted(ranges, key=lambda one: one.tier.remote)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        if self._tail_attention is None or self._ranges is None:
            raise RuntimeError("attend without a pass: call begin first")
        self._check_cancelled()
        self.scale = softmax.scale
        if self.derived:
            self._queries.append(queries)
        # Queries leave first, as remote tiers take longest; the layer before is accounted for meanwhile.
        started = []
        for tier, start, stop in self._ranges:
            runs = self.sequence.views(layer, start, stop) if tier.remote else ()
            started.append(tier.start(layer, queries, runs, softmax.scale, self._mass_chunk))
        self._report_mass()
        self._show_remote_segments(layer)
        total = AttentionSum(self._verifying, queries, len(keys), softmax.scale, self._mass_chunk)
        total.begin_tail(*self._tail_attention.put(layer, queries, keys, values), self._tail_view)
        if self._followers:
            self._on_segment(layer, self.tail.start, [self.tail.committed(layer)])
        for (tier, start, stop), one in zip(self._ranges, started, strict=True):
            tier.add_to(total, layer, start, stop, one, self._on_segment)
        total.end_tail()
        self._unreported = layer, total
        if not self._ranges[-1].tier.remote or layer == self.layout.layers - 1:
            self._report_mass()
        return total.result(softmax.sinks)

    def _check_cancelled(self) -> None:
        if self._cancelled:
            raise PassCancelled("the sequence was cancelled")

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
        self, layer: int, start: int, runs: Sequence[KVPages], *, over_link: bool = False
    ) -> None:
        for cache in self._followers:
            cache.take_segment(layer, start, runs, over_link=over_link)

    def commit(self, kept: Sequence[int]) -> None:
        if self._new is None:
            raise RuntimeError("commit without a pass")
        new = self._new
        self._new = self._tail_attention = self._ranges = None
        self.local.commit(kept)
        self.local.settle()
        kv = self.tail.commit(kept)
        self.transfer.write_back(kv)
        if self.derived:
            ids = [tokens.known[at] for tokens, at in map(new.token, kept)]
            queries = torch.stack(self._queries).index_select(2, to_device(kept, self.device))
            verified = VerifiedTokens(ids, kv, queries, new.count - 1)
            for cache in self.derived:
                cache.adopt(verified)

    def finish_compute(self) -> None:
        """Blocks the host until all compute enqueued so far is done."""
        for tier in (*self.remote, self._streamed):
            tier.finish_compute()

    def cancel(self) -> None:
        """Ends the pass running in another thread at its next layer. No other pass may follow."""
        self._cancelled = True

    def abandon(self) -> None:
        """Forgets the pass that was begun, and closes every stream; the staging ring is free again."""
        for cache in self._followers:
            cache.abandon_pass()
        for tier in (self._streamed, *self.remote):
            tier.abandon()
        self._new = self._tail_attention = self._ranges = self._next_ranges = None
        self._unreported = None
        self._followers = []

    def close(self) -> None:
        """Forgets the pass that was begun and frees the memory on the device. Idempotent."""
        # Not left to the garbage collector: the next sequence is planned for the memory that is free.
        self.abandon()
        self.resident.release()
        self.tail.release()

    @property
    def last_queries(self) -> Tensor | None:
        """Queries of the last tokens, `[layers, heads, tokens, head_dim]`; None if no prefill read them."""
        return self._points.queries(self.verified_length)

    def points(self, length: int) -> list[RewindPoint]:
        """Returns the lengths up to `length` that the sequence can return to, in host memory."""
        if self.local.layers.kinds.local and self.verified_length == length > 0:
            self.add_point(None)
        return self._points.up_to(length)

    def begin_with(self, points: Sequence[RewindPoint], states: SavedStates | None = None) -> None:
        """Takes over the tokens that the store has already.

        Args:
            points: of the sequence that read them; with local layers, the store's length is one of them.
            states: of that sequence, where it had some.
        """
        length = self.sequence.length
        self._points.take(points, length)
        if self.states is not None and states is not None:
            self.states.take(states, length)
        self._points.return_to(length)
        self.start_from(length)
        self.load_resident()

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on. Raises CopyFailed.

        Whatever was interrupted before, in the store, the tiers or the local layers, is whole afterwards. It
        may then have fewer tokens than `length`, and the others have to be read again.
        """
        self.abandon()
        self._cancelled = False
        self.transfer.flush()
        length = min(length, self.sequence.length)
        if length != self.local.history.length:
            length = self._points.return_to(length)
        elif self.local.layers.kinds.local:
            self.local.restart(self.local.history)
        if not self.sequence.ends_at(length):
            self.sequence.truncate(length)
        for tier in (self.resident, *self.remote):
            tier.truncate(length)
        self._points.drop_behind(length)
        if self.states is not None:
            self.states.truncate(length)
        self.start_from(length)

    def add_point(self, last_queries: Tensor | None) -> None:
        """Makes the present length one that the sequence can return to, see `RewindPoint`."""
        self._points.add(self.verified_length, last_queries)

    def load_resident(self) -> None:
        """Loads the KV that tiers keep on a device and lack, into memory that the prefill has used."""
        self.resident.load(0)
        for tier, start, _ in self._split(self.verified_length, self.resident.tokens):
            if tier.remote:
                tier.load(start)

    def start_from(self, length: int) -> None:
        """Starts over with the first `length` tokens of the store; the tail takes their last page."""
        start = length // self.layout.page_size * self.layout.page_size
        self.tail.restart(start, self.transfer.read(start, length))

    def keep(self, entries: Sequence[int]) -> None:
        """Does nothing, as there is no speculation here."""

    def settle(self) -> None:
        """Does nothing, as everything committed here is final."""

    def build_derived(self) -> None:
        """Fills every derived cache, after a prefill or a truncation."""
        self.transfer.flush()
        queries = self.last_queries
        if queries is None and self.derived:
            raise RuntimeError("the queries of the last tokens are unknown: read these tokens again first")
        for cache in self.derived:
            assert queries is not None
            cache.build(queries)

    def catch_up(self) -> None:
        """Fills the derived caches that stayed behind, before a pass of another thread."""
        for cache in self.derived:
            cache.catch_up()
