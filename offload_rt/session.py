"""One text being continued: its tokens, its KV, its caches, its composition; nothing of other texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from time import perf_counter

import torch

from cpu_kv import Link, PagedKVStore, TransferCounters, TransferEngine
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.full import FullCache
from offload_rt.caches.remote import CpuAttention, GpuAttention, RemoteAttention
from offload_rt.caches.tiers import EVERYTHING_STREAMED, Tiers
from offload_rt.config import TARGET_RETRIEVED, Config
from offload_rt.drafting.base import Proposal, Round, TokenView
from offload_rt.drafting.compose import Parts, compose
from offload_rt.drafting.head_drafter import Heads
from offload_rt.drafting.verifier import Sampling
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.pace import Pace, RoundTimes
from offload_rt.passes import run_alone
from offload_rt.prefill import Progress, prefill
from offload_rt.timeline import NO_TIMELINE, Timeline


@dataclass(frozen=True)
class Shared:
    """What all texts of an engine share.

    Attributes:
        link: to the device where the target is.
        other_links: to other GPUs, which keep and attend a share of the KV.
    """

    target: CausalModel
    draft: CausalModel | None
    store: PagedKVStore
    link: Link
    backend: AttentionBackend
    other_links: Sequence[Link] = ()
    timeline: Timeline = NO_TIMELINE
    pool: BufferPool = field(default_factory=BufferPool)
    heads: Heads = field(default_factory=Heads)


@dataclass(frozen=True)
class Continuation:
    """How a text is continued.

    Attributes:
        max_tokens: how many may be generated.
    """

    sampling: Sampling
    max_tokens: int


class Session:
    """Owns what a text needs, from its prefill to `close`.

    Args:
        prompt: its tokens.
        tiers: which tokens of each layer are not streamed to the device.

    Attributes:
        tokens: the prompt, and what is generated.
        verifier: the composition; the target over its full cache.
        ready: a draft that was begun for the text as it is now.
        rounds: times of the rounds so far.
        opened: seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        shared: Shared,
        config: Config,
        prompt: Sequence[int],
        continuation: Continuation,
        tiers: Tiers = EVERYTHING_STREAMED,
    ) -> None:
        self.config = config
        self.planned = config  # stays, whatever it is recomposed to
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.opened = perf_counter()
        self.prefill_ms = 0.0
        self.tiers = tiers
        self.timeline = shared.timeline
        self.ready: Proposal | None = None
        self.rounds: list[RoundTimes] = []
        self._shared = shared
        self._target = shared.target.for_text(len(prompt), continuation.max_tokens)
        self._ended = False
        self._caches: list[BoundedCache] = []
        self._sequence = shared.store.new_sequence(*config.kept_means)
        with ExitStack() as closing:
            closing.callback(self._release_caches)
            closing.callback(self._sequence.close)
            self._sequence.reserve(len(self.tokens) + continuation.max_tokens)
            self.engine = self._transfer_over(shared.link)
            closing.callback(self.engine.close)
            remote = list[RemoteAttention]()
            if tiers.cpu_tokens:
                remote.append(CpuAttention(tiers.cpu_tokens, shared.target.device, shared.timeline))
                closing.callback(remote[-1].close)
            self._engines = [self.engine]
            for link, tier in zip(shared.other_links, tiers.gpus, strict=False):
                engine = self._transfer_over(link)
                closing.callback(engine.close)
                remote.append(GpuAttention(engine, tier, shared.target.device, shared.timeline))
                closing.callback(remote[-1].close)
                self._engines.append(engine)
            self.full = FullCache(
                self.engine, shared.backend, tiers.resident_tokens, remote, tiers.late_resident_tokens
            )
            closing.callback(self.full.close)
            self._compose(continuation)
            self._closing = closing.pop_all()

    def _transfer_over(self, link: Link) -> TransferEngine:
        store, layout = self.config.store, self._sequence.layout
        segment_tokens = layout.segment_tokens(store.segment_bytes, self._sequence.reserved_tokens)
        return TransferEngine(
            self._sequence, link, segment_tokens=segment_tokens, ring_buffers=store.ring_buffers
        )

    def _compose(self, continuation: Continuation) -> None:
        config, shared = self.config, self._shared
        self._continuation = continuation
        self._release_caches()
        parts = Parts(
            config,
            self._target,
            shared.draft,
            self.full,
            continuation.sampling,
            shared.store.layout.pages(self.prompt_tokens + continuation.max_tokens),
            shared.pool,
            shared.heads,
        )
        self._caches = parts.caches
        self.verifier = compose(parts)
        shared.pool.drop_free()
        shapes = config.speculation.shapes
        # In place, a pass and its drafts share one processor: nothing is gained by overlapping them.
        ahead = 0 if shared.link.in_place or not shapes else config.offload.ahead
        self.pace = Pace(
            self.verifier,
            shapes[-1] if shapes else None,
            ahead=ahead,
            step_down=config.speculation.step_down,
            # Which random numbers are drawn depends on how much is drafted, and a seed repeats its tokens.
            clock=continuation.sampling.sampler.greedy,
        )
        self.ready = None
        self.rounds = []
        self._ended = False

    def _release_caches(self) -> None:
        for cache in self._caches:
            cache.release()
        self._caches = []

    def prefill(self, progress: Progress | None = None) -> None:
        """Takes the prompt but for its last token into the caches; that token opens the first round."""
        started = perf_counter()
        prompt = self.tokens[:-1]
        if prompt:
            prefill(self._target, self.full, prompt, self.config.prefill.chunk, progress)
            if self._target.device.type == "cuda":
                # What the prefill needed must not stay cached for its stream: others need it from here on.
                torch.cuda.empty_cache()
            self.full.load_late()
        self.take_prompt()
        self.prefill_ms = 1e3 * (perf_counter() - started)

    @torch.inference_mode()
    def take_prompt(self) -> None:
        """The full cache holds the prompt but for its last token: the drafts' caches fill themselves."""
        if self.full.verified_length:
            self.full.build_derived()
        run_alone(self.verifier.drafter.prefill(self.view))
        self.pace.begin(len(self.tokens))

    @property
    def view(self) -> TokenView:
        """The text so far."""
        return TokenView(self.tokens)

    @property
    def counters(self) -> TransferCounters:
        """What crossed all links, since the prompt was read or the text begun again."""
        return TransferCounters(
            *map(sum, zip(*(astuple(engine.counters) for engine in self._engines), strict=True))
        )

    @property
    def stop_tokens(self) -> Collection[int]:
        """The text ends with the first of these, wherever in a draft it occurs."""
        return self._continuation.sampling.stop_tokens

    @property
    def room(self) -> int:
        """How many more tokens may be generated."""
        return self._continuation.max_tokens - (len(self.tokens) - self.prompt_tokens)

    @property
    def ended(self) -> bool:
        """Whether the text is complete."""
        return self._ended or self.room <= 0

    def extend(self, round: Round, times: RoundTimes) -> None:
        """Appends what a round yielded, up to a stop token."""
        length = len(self.tokens)
        self.tokens += round.tokens
        self.verifier.drafter.observe(self.view, round)
        self.pace.observe(length, round, times)
        self.rounds.append(times)
        end = next((at for at, token in enumerate(round.tokens) if token in self.stop_tokens), None)
        if end is not None:
            del self.tokens[length + end + 1 :]
            self._ended = True

    def stop(self) -> None:
        """Ends what was begun for a pass that nobody will ask for; no pass of this text may be running."""
        self.full.abandon()

    def rerun(self, config: Config, continuation: Continuation) -> None:
        """Back to the end of the prompt, with another composition over the same full cache.

        `prefill_ms` and the transfer counters are those of the new composition from here on; the keys of
        `config` for prefill and store come too late.

        Raises:
            UsageError: `config` retrieves by means that were not kept when the prompt was read, or in chunks
                that its pages do not hold whole; or see `CausalModel.for_text`.
        """
        self._shared.target.for_text(self.prompt_tokens, continuation.max_tokens)
        if config.offload.refresh_from == "auto":  # there is room for as many buffers as were planned
            config = config.having("offload.refresh_from", self.planned.offload.refresh_from)
        (chunks, pages), (kept_chunks, kept_pages) = config.kept_means, self.planned.kept_means
        if chunks not in (None, kept_chunks):
            raise UsageError(
                f"config {config.name}: retrieval.select mean_keys needs mean keys of chunks of {chunks} "
                "tokens, and the prompt was read without: generate with it first, or set "
                "retrieval.select=attention"
            )
        if pages and not kept_pages:
            raise UsageError(
                f"config {config.name}: retrieval.rest needs means of pages, and the prompt was read "
                "without: generate with it first, or set retrieval.rest=false"
            )
        chunk, page = config.retrieval.chunk, self._sequence.layout.page_size
        if TARGET_RETRIEVED in config.speculation.names and page % chunk:
            raise UsageError(
                f"config {config.name}: retrieval.chunk = {chunk} must divide the store's page of {page} "
                "tokens, by which the prompt was read"
            )
        started = perf_counter()
        del self.tokens[self.prompt_tokens :]
        self.full.rewind()
        self.full.derived.clear()
        self.full.scores = None
        for engine in self._engines:
            engine.counters = TransferCounters()
        self.config = config
        self._compose(continuation)
        self.take_prompt()
        self.prefill_ms = 1e3 * (perf_counter() - started)

    def close(self) -> None:
        """Gives the KV back. Idempotent."""
        self._closing.close()
