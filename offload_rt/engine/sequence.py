"""One sequence: its tokens, KV, caches and composition."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass

import torch

from cpu_kv import Link, TransferCounters, TransferEngine
from cpu_kv.streams import release_cached_memory
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import FullCache
from offload_rt.caches.local import LocalState
from offload_rt.caches.remote import CpuAttention, GpuAttention, RemoteAttention
from offload_rt.caches.selection import LAST_QUERIES
from offload_rt.caches.split import SplitCache
from offload_rt.drafting.base import Proposal, Round, TokenView
from offload_rt.drafting.levels.base import Resources, kept_means, levels_of
from offload_rt.drafting.levels.compose import compose
from offload_rt.drafting.resources import SharedResources
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.engine.batching import run_alone
from offload_rt.engine.controller import RoundTimes, SpeculationController
from offload_rt.engine.prefill import LAST_PORTION, Outputs, Progress, prefill
from offload_rt.engine.prefix import KVPrefix
from offload_rt.errors import UsageError
from offload_rt.model.runner import CausalModel
from offload_rt.planning.sequence_planner import SequencePlan
from offload_rt.system import clock


@dataclass(frozen=True)
class Continuation:
    """Settings of one continuation of a sequence.

    Attributes:
        max_tokens: how many may be generated.
    """

    sampling: Sampling
    max_tokens: int


class TokenSequence:
    """A sequence of tokens with its KV, caches and composition, from its first token to `close`.

    Args:
        plan: where its KV is, and how it is prefilled and continued.
        target: the runner for sequences of this length.
        room: tokens for which pages are reserved.
        prefix: the sequence begins with tokens of this prefix, and their KV; None: it is empty.
        prefix_tokens: how many of the prefix.

    Attributes:
        target: the runner of the target model.
        tokens: token IDs of the prompt, and those that were generated after them.
        start: number of tokens when the newest continuation began.
        verifier: the composition; the target over its full cache.
        next_proposal: a draft that was made ahead for the sequence as it is now; None: there is none.
        rounds: times of the rounds so far.
        prefill_tokens: tokens that were prefilled since the previous continuation.
        prefill_ms: time of that prefill and of filling the caches of drafting levels.
    """

    verifier: Verifier
    controller: SpeculationController

    def __init__(
        self,
        resources: SharedResources,
        plan: SequencePlan,
        target: CausalModel,
        room: int,
        prefix: KVPrefix | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        self.plan = plan
        self.config, tiers = plan.config, plan.tiers
        self.tokens: list[int] = [] if prefix is None else list(prefix.tokens[:prefix_tokens])
        self.start = 0
        self.prefill_tokens = 0
        self.prefill_ms = 0.0
        self.timeline = resources.timeline
        self.next_proposal: Proposal | None = None
        self.rounds: list[RoundTimes] = []
        self._resources = resources
        self.target = target
        self._ended = False
        self._consumed = True  # a continuation has counted `prefill_tokens`
        self._read_from = 0  # the position at which reading the tokens appended last began
        self._outputs: Outputs | None = None  # takes what the last layer puts out for them
        self._caches: list[BoundedCache | SplitCache] = []
        if prefix is None:
            self._kv = resources.store.new_sequence(*kept_means(plan.config))
        else:
            self._kv = prefix.kv.fork(prefix.verified_length(prefix_tokens), *kept_means(plan.config))
        with ExitStack() as closing:
            closing.callback(self._release_caches)
            closing.callback(self._kv.close)
            self._kv.reserve(room)
            self.transfer = self._transfer_over(resources.link)
            closing.callback(self.transfer.close)
            remote = list[RemoteAttention]()
            if tiers.cpu_tokens:
                remote.append(CpuAttention(tiers.cpu_tokens, resources.target.device, resources.timeline))
                closing.callback(remote[-1].close)
            self._transfers = [self.transfer]
            for link, tier in zip(resources.other_links, tiers.gpus, strict=False):
                transfer = self._transfer_over(link)
                closing.callback(transfer.close)
                remote.append(
                    GpuAttention(transfer, tier, target.device, resources.timeline, packed=tiers.packed)
                )
                closing.callback(remote[-1].close)
                self._transfers.append(transfer)
            self.full = FullCache(
                self.transfer,
                resources.backend,
                tiers.resident_tokens,
                remote,
                LocalState(target.local_layers, resources.backend),
                resources.heads.states(plan.config.head),
                packed=tiers.packed,
            )
            closing.callback(self.full.close)
            if prefix is not None:
                self.full.begin_with(prefix.points, prefix.states)
            self._closing = closing.pop_all()

    def _transfer_over(self, link: Link) -> TransferEngine:
        store, layout = self.config.store, self._kv.layout
        segment_tokens = layout.segment_tokens(store.segment_bytes, self._kv.reserved_tokens)
        return TransferEngine(self._kv, link, segment_tokens=segment_tokens, ring_buffers=store.ring_buffers)

    def _compose(self, plan: SequencePlan, continuation: Continuation) -> None:
        resources, config = self._resources, plan.config
        self.config, self._continuation = config, continuation
        self._release_caches()
        self.full.derived.clear()
        level_resources = Resources(
            config,
            self.target,
            self.full,
            continuation.sampling,
            pages=resources.store.layout.pages(len(self.tokens) + continuation.max_tokens),
            shared=resources,
        )
        self._caches = level_resources.caches
        if self.full.states is None:  # a head may have been loaded since
            self.full.states = resources.heads.states(config.head)
        self.verifier = compose(level_resources)
        self.verifier.wants_states |= (
            self.full.states is not None
        )  # also without a head: a later one may want them
        resources.pool.drop_free()
        levels, costs = levels_of(config), plan.costs(len(self.tokens))
        # In place, a pass and its drafts share one processor: nothing is gained by overlapping them.
        overlaps = bool(levels) and levels[-1].guesses and not resources.link.in_place
        self.controller = SpeculationController(
            costs,
            costs.request.drafts,
            costs.request.acceptance,
            ahead=config.offload.ahead if overlaps else 0,
            step_down=config.speculation.step_down,
            # Which random numbers are drawn depends on how much is drafted, and a seed repeats its tokens.
            clock=continuation.sampling.sampler.greedy,
        )
        self.next_proposal = None
        self.rounds = []
        self._ended = False

    def _release_caches(self) -> None:
        while self._caches:
            self._caches.pop().release()  # in this order: an interrupt never gives memory to two owners

    def append(self, tokens: Sequence[int], outputs: Outputs | None = None) -> None:
        """Appends tokens, whose KV `read_piece` computes.

        Args:
            outputs: takes the output of the last layer for the tokens that are read, until all are.
        """
        before = len(self.tokens)
        # The last token is read, too, where others follow it.
        self.full.rewind(min(self.full.verified_length, before if tokens else max(0, before - 1)))
        self.tokens += tokens
        self._outputs = outputs
        if self._consumed:
            self.prefill_tokens, self.prefill_ms, self._consumed = 0, 0.0, False
        self.prefill_tokens += len(tokens)
        self._read_from = self.full.verified_length

    def read_piece(self, most: int | None = None, progress: Progress | None = None) -> bool:
        """Computes the KV of the next tokens that have none.

        The sequence's last token is not read, as it opens the next round. Where reading fails, the sequence
        is as it was.

        Args:
            most: most tokens to read; None: as many as are planned.
            progress: called with what is done, and all that is to be done for the tokens appended last.

        Returns:
            Whether all are read.
        """
        started, config = clock.now(), self.plan.config.prefill
        first, end, layers = self.full.verified_length, len(self.tokens) - 1, self.target.layers
        stop = self._end_of_piece(first, end, most)

        def report(done: int, of: int) -> None:
            if progress is not None:
                progress((first - self._read_from) * layers + done, (end - self._read_from) * layers)

        if first < stop:
            over_link = first > 0 and not self.transfer.link.in_place
            # Behind others, a piece goes through a layer as one chunk: their KV crosses the link once for it.
            # Resident KV may have taken the memory for more than the shorter chunks.
            whole = over_link and config.piece and not self.full.resident.tokens
            chunk = stop - first if whole else config.chunk
            tokens = self.tokens[first:stop]
            prefill(self.target, self.full, tokens, chunk, report, behind=end - stop, outputs=self._outputs)
            if self.target.device.type == "cuda":
                # What the prefill needed must not stay cached for its stream: others need it from here on.
                release_cached_memory()
        if stop >= end:
            self._outputs = None
            self.full.load_resident()
        self.prefill_ms += 1e3 * (clock.now() - started)
        return stop >= end

    def read_rest(self, progress: Progress | None = None) -> None:
        """Reads piece after piece until none is left; see `read_piece`."""
        while not self.read_piece(progress=progress):
            pass

    def _end_of_piece(self, first: int, end: int, most: int | None) -> int:
        """Returns the position at which the next piece ends."""
        config = self.plan.config.prefill
        piece = config.piece or end
        stop = first + min(piece, most or piece)
        if self.transfer.link.in_place and self.differs_by is not None:
            # What follows equal KV is computed alike only in the same chunks.
            stop = max(stop // config.chunk, first // config.chunk + 1) * config.chunk
        # The last piece has the queries that choose what is retrieved, and where a model has local layers the
        # tokens that are a portion of their own.
        least = 2 * LAST_PORTION + 1 if self.target.kinds.local else LAST_QUERIES
        return end if stop + least > end else stop

    def drop_unread(self) -> None:
        """Forgets the tokens without KV, but for one, where reading them was ended early."""
        length = min(len(self.tokens), self.full.verified_length + 1)
        self.prefill_tokens -= len(self.tokens) - length
        del self.tokens[length:]
        self._outputs = None

    def prefill(self, tokens: Sequence[int], progress: Progress | None = None) -> None:
        """Appends tokens and reads them. Where that fails, the sequence is as it was."""
        before = len(self.tokens)
        try:
            self.append(tokens)
            self.read_rest(progress)
        except BaseException:
            self.prefill_tokens -= len(self.tokens) - before
            self.rewind(before)
            raise

    def snapshot(self, lock: threading.RLock) -> KVPrefix:
        """Returns its tokens and their KV as a prefix, which shares the pages; see `KVPrefix` for `lock`."""
        self.transfer.flush()
        length = min(self.full.verified_length, len(self.tokens))
        if not self.full.whole:  # a step was interrupted
            self.full.rewind(length)
            length = self.full.verified_length
        states = None if self.full.states is None else self.full.states.saved(length)
        tokens, points = list(self.tokens), self.full.points(length)
        kv = self._kv.fork(length, *kept_means(self.plan.config))  # last: what fails before it leaves no KV
        return KVPrefix(tokens, kv, points, self.target, lock, states)

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on, and their KV."""
        del self.tokens[length:]
        self.full.rewind(min(self.full.verified_length, max(0, length - 1)))

    @torch.inference_mode()
    def begin(self, plan: SequencePlan, continuation: Continuation) -> None:
        """Begins a continuation of the sequence, by a composition over its full cache.

        Counters of transfers are those of this continuation from here on.

        Args:
            plan: the sequence's own, or `adapted` to another config.

        Raises:
            UsageError: see `check_length`.
        """
        self.check_length(len(self.tokens) + continuation.max_tokens)
        if self._consumed:
            self.prefill_tokens, self.prefill_ms = 0, 0.0
        self._consumed = True
        self.rewind(len(self.tokens))
        # The queries of the last tokens choose the retrieved cache.
        lacks_queries = bool(self.full.verified_length) and self.full.last_queries is None
        if lacks_queries and self.target.kinds.full:
            self.full.rewind(max(0, self.full.verified_length - LAST_QUERIES))
        self._read_from = self.full.verified_length
        self.read_rest()
        started = clock.now()
        self._kv.keep_means(*kept_means(plan.config))
        self.start = len(self.tokens)
        for transfer in self._transfers:
            transfer.counters = TransferCounters()
        self._compose(plan, continuation)
        self.take_prompt()
        self.prefill_ms += 1e3 * (clock.now() - started)

    def take_prompt(self) -> None:
        """Fills the caches of drafting levels. The full cache lacks only the last token."""
        if self.full.verified_length:
            self.full.build_derived()
        self.verifier.sampling.processor.begin(self.tokens)
        run_alone(self.verifier.drafter.prefill(self.view))
        self.controller.begin(len(self.tokens))

    def check_length(self, length: int) -> None:
        """Raises UsageError where a sequence of so many tokens would need KV by other rotary frequencies."""
        if self.tokens and self._resources.target.for_length(length, 0) is not self.target:
            self._resources.target.for_length(len(self.tokens), max(0, length - len(self.tokens)))
            raise UsageError(
                f"a sequence of {length} tokens of {self.target.name} has other rotary frequencies (longrope)"
                " than those that this one was read by: read it again"
            )

    @property
    def view(self) -> TokenView:
        """All tokens so far."""
        return TokenView(self.tokens)

    @property
    def counters(self) -> TransferCounters:
        """Bytes that crossed all links in this continuation, and waits for them."""
        return TransferCounters(
            *map(sum, zip(*(astuple(transfer.counters) for transfer in self._transfers), strict=True))
        )

    @property
    def placement(self) -> dict[str, int]:
        """Number of tokens of each layer by tier; the last page is on the device until it is full."""
        page, tiers = self._kv.layout.page_size, self.plan.tiers
        remaining = max(0, len(self.tokens) - 1) // page * page
        placement = {}
        for name, capacity in (
            ("resident_tokens", tiers.resident_tokens),
            ("cpu_tokens", tiers.cpu_tokens),
            ("other_gpus_tokens", sum(gpu.tokens for gpu in tiers.gpus)),
            ("streamed_tokens", remaining),
        ):
            placement[name] = min(capacity, remaining)
            remaining -= placement[name]
        return placement

    @property
    def differs_by(self) -> str | None:
        """What rounds a token otherwise in a pass of more or fewer tokens; None: nothing does."""
        target = self.target
        if target.differs_by is not None:
            return target.differs_by
        if self.full.backend.by_query(target.dtype, target.head_dim) is None:
            return f"attention to heads of {target.head_dim} entries, which runs in torch"
        return "attention that several devices share" if self.full.remote else None

    @property
    def stop_tokens(self) -> Collection[int]:
        """Tokens that end the sequence, wherever in a draft one occurs."""
        return self._continuation.sampling.stop_tokens

    @property
    def room(self) -> int:
        """Number of tokens that may still be generated."""
        return self._continuation.max_tokens - (len(self.tokens) - self.start)

    @property
    def ended(self) -> bool:
        """The sequence is complete."""
        return self._ended or self.room <= 0

    def ends_at(self, count: int) -> bool:
        """Returns whether the sequence has ended, for another reason than its room, after `count` tokens."""
        return self._ended and count == len(self.tokens) - self.start

    def extend(self, round: Round, times: RoundTimes) -> None:
        """Appends the tokens of a round, up to one that ends the sequence.

        Raises:
            UsageError: the model's vocabulary cannot write what the grammar wants.
        """
        length, sampling = len(self.tokens), self.verifier.sampling
        end = sampling.end(round.tokens)
        self.tokens += round.tokens
        sampling.processor.extend(round.tokens)
        if self.full.states is not None and round.states is not None:
            self.full.states.append(length - 1, round.states)
        self.verifier.drafter.observe(self.view, round)
        self.controller.observe(length, round, times)
        self.rounds.append(times)
        if end is not None:
            del self.tokens[length + end + 1 :]
            self._ended = True

    def stop(self) -> None:
        """Aborts prefetching for the next pass. No pass may be running."""
        self.full.abandon()
        if self.transfer.link.in_place:
            self.transfer.flush()  # so that the store counts all tokens

    def close(self) -> None:
        """Gives the KV back. Idempotent."""
        self._closing.close()
