"""Owns models, store, link and pass thread; opens sequences and steps any number of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import repeat

from cpu_kv import CpuLink, CudaLink, ElementType, Link, PagedKVStore
from offload_rt.attention.backends import choose_backend, use_triton
from offload_rt.attention.page_codec import machine_codec
from offload_rt.caches.sizes import EVERYTHING_STREAMED, GpuTier, Tiers, stored_layout
from offload_rt.config.schema import Config
from offload_rt.drafting.base import Round
from offload_rt.drafting.head_drafter import Heads
from offload_rt.drafting.levels.base import kept_means, levels_of, possible
from offload_rt.engine.batching import BatchRunner, PassThread
from offload_rt.engine.decode import decode_step
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.sequence import Continuation, Shared, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.machine.inspection import usable_hardware
from offload_rt.machine.inventory import native_kernel
from offload_rt.machine.recommendations import without_kernel, without_triton
from offload_rt.model.config_shapes import shape_of
from offload_rt.model.cuda_graphs import GraphedModel
from offload_rt.model.host_embedding import host_bytes
from offload_rt.model.runner import CausalModel
from offload_rt.model.shape import ModelShape
from offload_rt.planning.placement import (
    PlanRequest,
    available,
    check_positions,
    check_vocabulary,
    shared,
)
from offload_rt.planning.planner import Plan, comparison, ranked
from offload_rt.planning.prices import behind_a_link
from offload_rt.system.hardware import NO_GPU, Hardware, named_hardware
from offload_rt.system.memory import available_memory
from offload_rt.system.second_device import SecondDevice
from offload_rt.system.timeline import NO_TIMELINE

ProgressReport = Callable[[str, int, int], None]
"""Called with (phase, done, all) while a machine is first measured, and while a prompt is read."""


class Engine:
    """A target model, perhaps a draft model, and any number of sequences that they continue.

    Calls from several threads take turns.

    Args:
        link: moves KV to the device; None: the link that the target's device needs.
        on_notice: called with a line for the user.
        other_links: to other GPUs, which keep and attend a share of the KV of each sequence.

    Attributes:
        configs: the planner chooses one for each sequence; without levels that need a missing draft model.
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
        self.configs = tuple(
            map(self.available, possible(configs, draft is not None, bool(target.kinds.full)))
        )
        self._chosen = ""
        backend = choose_backend(target.device)
        if target.device.type == "cpu" and (kernel := native_kernel()) not in ("built", "switched off"):
            on_notice(without_kernel(kernel))
        store = self.configs[0].store
        no_triton = self._check_triton(store.page) if target.device.type == "cuda" else None
        if no_triton is not None:
            on_notice(without_triton(no_triton))
        self._triton = no_triton is None
        self._link = link or (CudaLink(target.device) if target.device.type == "cuda" else CpuLink())
        layout = target.kv_layout(store.page)
        if target.kinds.full:
            over_link = not self._link.in_place
            layout = stored_layout(layout, store.code, over_link=over_link, triton=self._triton)
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
                if isinstance(model, GraphedModel):
                    model.pass_running = lambda: thread.running
        self._second = SecondDevice(target.device, other_links[0]) if other_links else None
        self._shared = Shared(
            *(target, draft, self.store, self._link, backend, self._other_links),
            heads=self._heads,
            second=self._second,
        )
        self._sequences: list[TokenSequence] = []
        self.lock = threading.RLock()
        self._closed = False

    def _check_triton(self, page: int) -> str | None:
        """Returns why Triton kernels do not run on the models' KV, if they do not."""
        models = [model for model in (self.target, self.draft) if model is not None]
        shapes = [(model.kv_layout(page), model.heads) for model in models]
        found = [use_triton(kv, heads // kv.kv_heads) for kv, heads in shapes if kv.kv_heads]
        return found[-1] if found else None

    @property
    def sequences(self) -> tuple[TokenSequence, ...]:
        """Open sequences, in the order in which they were opened."""
        return tuple(self._sequences)

    def available(self, config: Config) -> Config:
        """Loads what the levels of `config` need; returns it without those that need a missing draft model.

        Raises:
            UsageError: no level would be left, or what a level needs cannot be loaded.
        """
        for level in levels_of(config):
            level.load(self.target, self._heads)
        left = available(config, self.draft is not None)
        if left != config:
            self._on_notice(f"no draft model: only {' → '.join(left.speculation.names)} drafts")
        return left

    def open(
        self,
        tokens: Sequence[int],
        new_tokens: int,
        tiers: Tiers | None = None,
        sequences: int = 1,
        prefix: KVPrefix | None = None,
    ) -> TokenSequence:
        """Opens a sequence and reads its prompt. Other sequences may be open.

        Args:
            new_tokens: how many more it is planned for.
            tiers: number of tokens in each tier but the streamed one; None: as planned.
            sequences: number of sequences, this one and those opened after it, that share a GPU's free
                memory.
            prefix: the KV of its longest common beginning with `tokens` is shared, and only what follows is
                read.
        """
        with self.lock:
            runner = self.target.for_length(len(tokens), new_tokens)
            kept = 0 if prefix is None else prefix.begins(tokens, runner)
            shared_tokens = 0 if prefix is None else prefix.shared_tokens(kept)
            self.check_room([(len(tokens), new_tokens)], shared_tokens)
            if tiers is None:
                request, tiers = self.plan(len(tokens), new_tokens, sequences, shared_tokens)
            else:
                request = self._request(self.configs[0], len(tokens), new_tokens, self._assumed_hardware)
            shared = replace(self._shared, timeline=self.timeline)
            room = len(tokens) + new_tokens
            sequence = TokenSequence(shared, request, runner, room, tiers, prefix, kept)
            self._sequences.append(sequence)
            try:
                self.read(sequence, tokens[kept:])
            except BaseException:
                self.close_sequence(sequence)
                raise
            return sequence

    def read(self, sequence: TokenSequence, tokens: Sequence[int]) -> None:
        """Appends tokens to a sequence. Where that fails, the sequence is as it was."""
        report = self.on_progress
        with self.lock:
            self.stop(sequence)
            sequence.read(tokens, None if report is None else lambda done, of: report("prefill", done, of))

    def snapshot(self, sequence: TokenSequence) -> KVPrefix:
        """Returns the tokens of a sequence and their KV, which it shares and goes on from; to be closed."""
        with self.lock:
            self.check_open()
            return sequence.snapshot(self.lock)

    def begin(self, sequence: TokenSequence, config: Config | None, continuation: Continuation) -> None:
        """Begins a continuation of a sequence.

        Args:
            config: None: the one that it was planned with.
        """
        with self.lock:
            self.check_open()
            self.stop(sequence)
            sequence.begin(sequence.planned if config is None else config, continuation)

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

    def plan(
        self, prompt: int, new_tokens: int, sequences: int = 1, shared_tokens: int = 0
    ) -> tuple[PlanRequest, Tiers]:
        """Plans a sequence of so many tokens; the planner keeps what the config gives.

        Args:
            sequences: number of sequences that share a GPU's free memory.
            shared_tokens: how many of them have their KV in the store already.

        Returns:
            The request with the config and sizes that were chosen, and where the KV lies.
        """
        on_gpu = self.target.device.type == "cuda"
        request = self._request(self.configs[0], prompt, new_tokens, self._assumed_hardware)
        if on_gpu or len(self.configs) > 1:
            planned = self._fastest(request.context, request.new_tokens, sequences, shared_tokens)
            request = replace(request, config=planned.request.config)
        if self._link.in_place:
            return request, EVERYTHING_STREAMED
        offload, page = request.config.offload, request.config.store.page
        resident, cpu = max(0, offload.resident_tokens), max(0, offload.cpu_tokens)
        gpus: tuple[GpuTier, ...] = ()
        if on_gpu:
            planned.check()
            request, placement = planned.request, planned.placement
            gpus = tuple(
                GpuTier(-(-gpu.resident_tokens // page) * page, gpu.streamed_tokens // page * page)
                for gpu in placement.gpus
            )
            resident = -(-placement.resident_tokens // page) * page
            if offload.cpu_tokens < 0:  # one that is given may be more than the prompt: all that follows too
                cpu = placement.cpu_tokens // page * page
        elif self._other_links:  # links of no known rate share evenly
            pages = max(0, request.context - resident - cpu) // page // (1 + len(self._other_links))
            gpus = (GpuTier(0, pages * page),) * len(self._other_links)
        return request, Tiers(resident, cpu, gpus, request.resident.packed)

    def _request(
        self, config: Config, prompt_tokens: int, new_tokens: int, hardware: Hardware
    ) -> PlanRequest:
        remote = len(self.target.remote_mlps)
        shapes = self._shapes
        return PlanRequest(*shapes, config, prompt_tokens, new_tokens, hardware, given_remote_mlps=remote)

    @cached_property
    def _assumed_hardware(self) -> Hardware:
        """The hardware by which passes and drafts are priced where no plan has measured any."""
        others = len(self._other_links)
        if self._link.in_place:
            return named_hardware(NO_GPU)
        if self.target.device.type == "cuda":
            named = named_hardware("rtx4090", 1 + others)
            return replace(named, gpus=tuple(replace(gpu, triton=self._triton) for gpu in named.gpus))
        rate = self._link.bytes_per_second
        return behind_a_link(None if rate is None else rate / 1e9, others)

    @cached_property
    def _shapes(self) -> tuple[ModelShape, ModelShape | None]:
        def shape(model: CausalModel) -> ModelShape:
            found = shape_of(model.module, ElementType.of(model.dtype), model.name)
            return replace(found, embedding_on_gpu=not host_bytes(model.module))

        return shape(self.target), None if self.draft is None else shape(self.draft)

    def _fastest(self, prompt_tokens: int, new_tokens: int, sequences: int, shared_tokens: int) -> Plan:
        """Returns the fastest plan for such a sequence; a notice names the composition that was chosen."""
        loaded = sum(model.weight_bytes for model in (self.target, self.draft) if model is not None)
        loaded += self._heads.weight_bytes
        loaded += self._shared.pool.free_bytes  # kept for this sequence, or let go before it takes others
        remote_mlps = self.target.remote_mlps  # on the first of the other GPUs
        there = sum(block.weight_bytes for block in remote_mlps)
        copies = sum(one.remote_blocks.weight_bytes for one in (self.target, self.draft) if one is not None)
        others = [(link.device, 0 if at else there + copies) for at, link in enumerate(self._other_links)]
        hardware = usable_hardware(self.target.device, loaded - there, self.on_progress, others)
        host, held = hardware.host, self._free_bytes + shared_tokens * self.store.layout.stored_token_bytes
        held += sum(host_bytes(model.module) for model in (self.target, self.draft) if model is not None)
        host = replace(host, memory_bytes=host.memory_bytes + held, lockable_bytes=host.lockable_bytes + held)
        hardware = replace(hardware, host=host)
        if sequences > 1:
            weights = loaded - there, *(size for _, size in others)
            hardware = replace(hardware, gpus=tuple(map(shared, hardware.gpus, repeat(sequences), weights)))
        plans = ranked(self._request(config, prompt_tokens, new_tokens, hardware) for config in self.configs)
        chosen = plans[0].request.config.name
        if len(plans) > 1 and plans[0].fits and chosen != self._chosen:
            self._on_notice(f"config auto: {comparison(plans)}")
            self._chosen = chosen
        return plans[0]

    @property
    def _free_bytes(self) -> int:
        """Bytes that the store has allocated and holds no KV in: they are used again."""
        return self.store.reserved_bytes - self.store.used_bytes

    def check_room(self, sizes: Sequence[tuple[int, int]], shared_tokens: int = 0) -> None:
        """Refuses sequences that exceed the model's positions, or together the memory.

        Args:
            sizes: tokens of each prompt, and new ones.
            shared_tokens: how many of them have their KV in the store already; each sequence keeps its own
                means of it.
        """
        self.check_open()
        for prompt_tokens, new_tokens in sizes:
            check_positions(self.target, prompt_tokens, new_tokens)
        total = sum(map(sum, sizes)) - shared_tokens
        layout = self.store.layout
        page = layout.page_size
        means = max(layout.means_bytes(page, *kept_means(config)) for config in self.configs) // page
        token_bytes = layout.stored_token_bytes + means
        if self.target.device.type == "cpu":
            token_bytes += self.target.hidden_size * self.target.dtype.itemsize  # the prompt's hidden states
        # What the store has free is used again before more is asked for.
        with self.lock:
            available = max(0, available_memory() + self._free_bytes - shared_tokens * means)
            used = self.store.used_bytes
            others = f", beside {used / 2**30:.1f} GiB of open contexts" if used else ""
        needed = total * token_bytes
        if needed > available:
            fits = "the longest context that fits is" if len(sizes) == 1 else "of all sequences together fit"
            raise UsageError(
                f"the KV of {total} tokens needs {needed / 2**30:.1f} GiB of memory and "
                f"{available / 2**30:.1f} GiB are available{others}: {fits} {available // token_bytes} tokens"
            )

    def check_growth(self, sequence: TokenSequence, tokens: int, kept: int | None = None) -> None:
        """Refuses so many more tokens of an open sequence where they exceed positions or memory.

        Args:
            kept: length to which it is rewound before; None: it is not.
        """
        kept = len(sequence.tokens) if kept is None else kept
        check_positions(self.target, kept, tokens)
        sequence.check_length(kept + tokens)
        room = sequence.full.sequence.room_after(min(sequence.full.sequence.length, max(0, kept - 1)))
        self.check_room([(0, max(0, kept + tokens - room))])

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
            closing.callback(self._shared.pool.drop_free)
            for sequence in self._sequences:
                closing.callback(sequence.close)
            self._sequences = []
