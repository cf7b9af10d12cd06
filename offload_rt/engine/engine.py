"""Owns models, store, link and pass thread; opens sequences and steps any number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from cpu_kv import CpuLink, CudaLink, Link, PagedKVStore
from offload_rt.attention.cuda_backends import use_triton
from offload_rt.attention.page_codec import machine_codec
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.sizes import Tiers, stored_layout
from offload_rt.config.schema import Config
from offload_rt.drafting.base import Round
from offload_rt.drafting.head_model import Heads
from offload_rt.drafting.levels.base import levels_of, possible
from offload_rt.drafting.resources import SharedResources
from offload_rt.engine.batching import BatchRunner, PassThread
from offload_rt.engine.decode import decode_step
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.scoring import PromptScorer
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.machine.inventory import native_kernel
from offload_rt.machine.recommendations import without_kernel, without_triton
from offload_rt.model.runner import CausalModel
from offload_rt.planning.request import available, check_positions, check_vocabulary
from offload_rt.planning.sequence_planner import SequencePlan, SequencePlanner
from offload_rt.system.second_device import SecondDevice
from offload_rt.system.timeline import NO_TIMELINE

ProgressReport = Callable[[str, int, int], None]
"""Called with (phase, done, all) while a machine is first measured, and during a prefill."""


class Engine:
    """A target model, perhaps a draft model, and any number of sequences that they continue.

    Calls from several threads take turns.

    Args:
        link: moves KV to the device; None: the link that the target's device needs.
        on_notice: called with a line for the user.
        other_links: to other GPUs, which keep and attend a share of the KV of each sequence.

    Attributes:
        planner: plans each sequence, by one of the configs.
        timeline: records what runs when; it may be set before a sequence is opened.
        on_progress: called with the progress of a prefill, of saving and loading a context, and of measuring
            a machine for its first plan. A prefill in which it raises an exception leaves the sequence as it
            was.
        lock: held by the thread that opens, steps or ends sequences.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        configs: Sequence[Config],
        link: Link | None = None,
        on_progress: ProgressReport | None = None,
        on_notice: Callable[[str], None] = lambda text: None,
        other_links: Sequence[Link] = (),
    ) -> None:
        if draft is not None:
            check_vocabulary(draft, target)
            if draft.device != target.device:
                raise UsageError(
                    f"draft {draft.name} is on {draft.device}, the target {target.name} on {target.device}: "
                    "put both on one device"
                )
            draft.vocabulary = target.vocabulary
        self.target = target
        self.draft = draft
        self.timeline = NO_TIMELINE
        self.on_progress = on_progress
        self._on_notice = on_notice
        self._heads = Heads()
        usable = tuple(self._usable(possible(configs, draft is not None, bool(target.kinds.full))))
        backend = choose_backend(target.device)
        if target.device.type == "cpu" and (kernel := native_kernel()) not in ("built", "switched off"):
            on_notice(without_kernel(kernel))
        store = usable[0].store
        no_triton = self._check_triton(store.page) if target.device.type == "cuda" else None
        if no_triton is not None:
            on_notice(without_triton(no_triton))
        self._link = link or (CudaLink(target.device) if target.device.type == "cuda" else CpuLink())
        layout = target.kv_layout(store.page)
        if target.kinds.full:
            over_link = not self._link.in_place
            layout = stored_layout(layout, store.code, over_link=over_link, triton=no_triton is None)
        self.store = PagedKVStore(
            layout,
            pin=target.device.type == "cuda",
            slab_tokens=store.slab_tokens,
            on_warning=on_notice,
            codec=machine_codec(),
        )
        if other_links and self._link.in_place:
            raise UsageError("a target on the CPU attends KV in place: omit the other GPUs")
        self._other_links = tuple(other_links)
        self._thread: PassThread | None = None
        if not self._link.in_place:
            thread = self._thread = PassThread(target.device, lambda: self.timeline)
            for model in (target, draft):
                if model is not None and model.graphs is not None:
                    model.graphs.pass_running = lambda: thread.running
        self._second = SecondDevice(target.device, other_links[0]) if other_links else None
        self._resources = SharedResources(
            target=target,
            draft=draft,
            store=self.store,
            link=self._link,
            backend=backend,
            other_links=self._other_links,
            heads=self._heads,
            second=self._second,
        )
        self.planner = SequencePlanner(
            self._resources,
            usable,
            triton=no_triton is None,
            on_progress=self._report,
            on_notice=on_notice,
        )
        self._sequences: list[TokenSequence] = []
        self._unfinished: KVPrefix | None = None  # what `open` had read when it failed
        self.lock = threading.RLock()
        self._closed = False

    def _prefilled(self, done: int, of: int) -> None:
        self._report("prefill", done, of)

    def _report(self, phase: str, done: int, of: int) -> None:
        if self.on_progress is not None:
            self.on_progress(phase, done, of)

    def _check_triton(self, page: int) -> str | None:
        """Returns why Triton kernels do not run on the models' KV, if they do not."""
        models = [model for model in (self.target, self.draft) if model is not None]
        shapes = [(model.kv_layout(page), model.heads) for model in models]
        fits = [use_triton(kv, heads // kv.kv_heads) for kv, heads in shapes if kv.kv_heads]
        return fits[-1] if fits else None

    @property
    def in_place(self) -> bool:
        """Whether KV is attended where it is stored, and crosses no link."""
        return self._link.in_place

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Open sequences, in the order in which they were opened."""
        return tuple(self._sequences)

    def _usable(self, configs: Sequence[Config]) -> Iterator[Config]:
        """Yields what `available` makes of configs, without one whose head, found for it, cannot be run."""
        for config in configs:
            try:
                yield self.available(config)
            except UsageError as error:
                if len(configs) == 1 or not any(level.needs_target_states for level in levels_of(config)):
                    raise
                self._on_notice(str(error))

    def available(self, config: Config) -> Config:
        """Loads what the levels of `config` need; returns it without those that need a missing draft model.

        Raises:
            UsageError: no level would be left, or what a level needs cannot be loaded.
        """
        for level in levels_of(config):
            level.load(self.target, self._heads)
        usable = available(config, self.draft is not None)
        if usable != config:
            self._on_notice(f"no draft model: only {' → '.join(usable.speculation.names)} drafts")
        return usable

    def open(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        tiers: Tiers | None = None,
        sequences: int = 1,
        prefix: KVPrefix | None = None,
        scorer: PromptScorer | None = None,
    ) -> TokenSequence:
        """Opens a sequence and prefills its prompt. Other sequences may be open.

        Where that fails, what was read is kept until the next sequence is opened: one that begins like it
        reads on (see `take_unfinished`).

        Args: see `start`.
        """
        with self.lock:
            runner = self.target.for_length(len(tokens), new_tokens)
            reusable = tokens if scorer is None else scorer.unscored
            others, unfinished = len(self._sequences), self._unfinished
            try:
                begins = 0 if prefix is None else prefix.begins(reusable, runner)
                further = unfinished is not None and unfinished.begins(reusable, runner) > begins
                self._unfinished = None  # `check_room` would close it
                if further:
                    prefix = unfinished
                elif unfinished is not None:
                    unfinished.close()  # there may be no room beside it
                sequence = self.start(tokens, new_tokens, tiers, sequences, prefix, scorer)
                sequence.read_rest(self._prefilled)
                prefix = None  # it is not needed again
                if unfinished is not None:
                    unfinished.close()
                return sequence
            except BaseException:
                with ExitStack() as closing:
                    for opened in self._sequences[others:]:
                        closing.callback(self.close_sequence, opened)
                        self._keep_unfinished(opened)
                    if self._unfinished is None and prefix is unfinished:
                        self._unfinished = unfinished
                    elif unfinished is not None and self._unfinished is not unfinished:
                        unfinished.close()
                raise

    def start(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        tiers: Tiers | None = None,
        sequences: int = 1,
        prefix: KVPrefix | None = None,
        scorer: PromptScorer | None = None,
    ) -> TokenSequence:
        """Opens a sequence whose prompt `read` reads, piece by piece.

        Args:
            new_tokens: how many more it is planned for.
            tiers: number of tokens in each tier but the streamed one; None: as planned.
            sequences: number of sequences, this one and those opened after it, that share a GPU's free
                memory.
            prefix: the KV of its longest common beginning with `tokens` is shared, and only what follows is
                prefilled.
            scorer: scores the prompt while it is read. The prefix is used for tokens that are not scored.
        """
        with self.lock:
            runner = self.target.for_length(len(tokens), new_tokens)
            reusable = tokens if scorer is None else scorer.unscored
            prefix_tokens = 0 if prefix is None else prefix.begins(reusable, runner)
            shared_tokens = 0 if prefix is None else prefix.shared_tokens(prefix_tokens)
            self.check_room([(len(tokens), new_tokens)], shared_tokens)
            if tiers is None:
                plan = self.planner.plan(len(tokens), new_tokens, sequences, shared_tokens)
            else:
                plan = self.planner.plan_with(len(tokens), new_tokens, tiers)
            resources = replace(self._resources, timeline=self.timeline)
            room = len(tokens) + new_tokens
            self._sequences.append(TokenSequence(resources, plan, runner, room, prefix, prefix_tokens))
            sequence = self._sequences[-1]
            try:
                sequence.append(tokens[prefix_tokens:], None if scorer is None else scorer.take)
            except BaseException:
                self.close_sequence(sequence)
                raise
            return sequence

    def read(self, sequence: TokenSequence, most: int | None = None) -> bool:
        """Reads the next piece of what a sequence has not read yet; see `TokenSequence.read_piece`.

        Returns:
            Whether all is read.
        """
        with self.lock:
            self.check_open()
            return sequence.read_piece(most, self._prefilled)

    def prefill(self, sequence: TokenSequence, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence and prefills them. Where that fails, the sequence is as it was."""
        with self.lock:
            self.stop(sequence)
            sequence.prefill(tokens, self._prefilled)

    def read_on(self, sequence: TokenSequence, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence and prefills them. Where that fails, those that were read stay."""
        with self.lock:
            self.stop(sequence)
            try:
                sequence.append(tokens)
                sequence.read_rest(self._prefilled)
            except BaseException:
                sequence.drop_unread()
                raise

    def take_unfinished(self) -> KVPrefix | None:
        """Returns what `open` had read of a prompt when it failed, to be closed; None: nothing."""
        with self.lock:
            unfinished, self._unfinished = self._unfinished, None
            return unfinished

    def _keep_unfinished(self, sequence: TokenSequence) -> None:
        """Keeps what a sequence has read when reading is ended early."""
        if sequence.full.verified_length:
            with suppress(Exception):  # of a broken link, say: that one is reported already
                self._unfinished = sequence.snapshot(self.lock).without_unread()

    def snapshot(self, sequence: TokenSequence) -> KVPrefix:
        """Returns the tokens of a sequence and their KV, which it shares and goes on from; to be closed."""
        with self.lock:
            self.check_open()
            return sequence.snapshot(self.lock)

    def begin(self, sequence: TokenSequence, plan: SequencePlan, continuation: Continuation) -> None:
        """Begins a continuation of a sequence.

        Args:
            plan: the sequence's own, or what it `adapted` to another config.
        """
        with self.lock:
            self.check_open()
            self.stop(sequence)
            sequence.begin(plan, continuation)

    def rewind(self, sequence: TokenSequence, length: int) -> None:
        """Forgets the tokens of a sequence from position `length` on."""
        with self.lock:
            self.stop(sequence)
            sequence.rewind(length)

    def step(self, sequences: Sequence[TokenSequence]) -> list[Round | Exception]:
        """Runs a decode step of all sequences as one batch; the result of one that fails is its exception."""
        with self.lock:
            self.check_open()
            return BatchRunner([decode_step(sequence) for sequence in sequences], self._thread).run()

    def stop(self, sequence: TokenSequence) -> None:
        """Aborts what was begun for the next round of a sequence. Idempotent."""
        with self.lock:
            if sequence in self._sequences:
                self._end_pass(sequence)
                sequence.stop()

    def close_sequence(self, sequence: TokenSequence) -> None:
        """Gives the memory of a sequence back. Idempotent."""
        with self.lock:
            if sequence in self._sequences:
                self._sequences.remove(sequence)
                self._end_pass(sequence)
                sequence.close()

    def _end_pass(self, sequence: TokenSequence) -> None:
        """Ends a pass that still runs because a second interrupt cut short the wait of the first one."""
        if self._thread is not None:
            sequence.full.cancel()
            self._thread.join()

    def check_room(self, sizes: Sequence[tuple[int, int]], shared_tokens: int = 0) -> None:
        """Refuses sequences for which there is no room together; see `SequencePlanner.check_room`."""
        with self.lock:
            self.check_open()
            try:
                self.planner.check_room(sizes, shared_tokens)
            except UsageError:
                if (unfinished := self.take_unfinished()) is None:
                    raise
                unfinished.close()
                self.planner.check_room(sizes, shared_tokens)

    def check_growth(self, sequence: TokenSequence, tokens: int, start: int | None = None) -> None:
        """Refuses so many more tokens of an open sequence where they exceed positions or memory.

        Args:
            start: length to which it is rewound before; None: it is not.
        """
        start = len(sequence.tokens) if start is None else start
        check_positions(self.target, start, tokens)
        sequence.check_length(start + tokens)
        room = sequence.full.sequence.room_after(min(sequence.full.sequence.length, max(0, start - 1)))
        self.check_room([(0, max(0, start + tokens - room))])

    def check_open(self) -> None:
        """Raises UsageError where everything was closed."""
        if self._closed:
            raise UsageError("this LLM is closed: make a new one")

    def close(self) -> None:
        """Gives memory back and leaves models as they were given. Idempotent."""
        with self.lock, ExitStack() as closing:
            if self._closed:
                return
            self._closed = True
            closing.callback(self.target.restore)  # last: it may be its own draft
            if self.draft is not None:
                closing.callback(self.draft.restore)
            for link in (self._link, *self._other_links):
                closing.callback(link.close)
            closing.callback(self.store.close)
            if self._second is not None:
                closing.callback(self._second.close)
            if self._thread is not None:
                closing.callback(self._thread.close)
            closing.callback(self._resources.pool.drop_free)
            for sequence in self._sequences:
                closing.callback(sequence.close)
            if self._unfinished is not None:
                closing.callback(self._unfinished.close)
            self._sequences = []
