"""One text being continued: its KV in the store, its caches, its composition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from time import perf_counter

import torch

from cpu_kv import KVLayout, Link, PagedKVStore, TransferCounters, TransferEngine
from offload_rt.attention import AttentionBackend, choose_backend
from offload_rt.caches.full import FullCache
from offload_rt.caches.places import EVERYTHING_STREAMED, CpuShare, Shares
from offload_rt.config import TARGET_RETRIEVED, Config
from offload_rt.draft_length import DraftLength
from offload_rt.drafting.base import Text
from offload_rt.drafting.compose import Parts, compose
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.errors import UsageError
from offload_rt.governor import Governor
from offload_rt.model import CausalModel
from offload_rt.prefill import Progress, prefill
from offload_rt.schedule import PassLane, Schedule
from offload_rt.timeline import NO_TIMELINE, Timeline


class Session:
    """Owns what a text needs, from its prefill to `close`.

    Args:
        text: the prompt; grows by what is generated.
        max_tokens: how many may be generated; room for them is reserved.
        shares: which shares of the KV are not streamed.
    """

    def __init__(
        self,
        config: Config,
        target: CausalModel,
        draft: CausalModel | None,
        store: PagedKVStore,
        link: Link,
        backend: AttentionBackend,
        sampling: Sampling,
        text: Sequence[int],
        max_tokens: int,
        stop_tokens: Collection[int],
        shares: Shares = EVERYTHING_STREAMED,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self.config = config
        self.planned = config  # stays, whatever it is recomposed to
        self.text = list(text)
        self.prompt_tokens = len(self.text)
        self.stop_tokens = stop_tokens
        self.prefill_ms = 0.0
        self._target = target
        self._draft = draft
        self._backend = backend
        self._timeline = timeline
        self._sequence = store.new_sequence(config.retrieval.chunk if _retrieves(config) else None)
        with ExitStack() as failed:
            failed.callback(self._sequence.close)
            self._sequence.reserve(len(self.text) + max_tokens)
            self.engine = TransferEngine(
                self._sequence,
                link,
                segment_tokens=config.store.segment_tokens,
                ring_buffers=config.store.ring_buffers,
            )
            failed.callback(self.engine.close)
            cpu = None
            if shares.cpu_tokens:
                cpu = CpuShare(choose_backend(torch.device("cpu")), target.device, timeline)
                failed.callback(cpu.close)
            self.full = FullCache(
                self._sequence,
                self.engine,
                store.layout,
                target.heads,
                target.device,
                backend,
                shares,
                cpu,
            )
            self._cpu = cpu
            # In place, a pass and its drafts share one processor: nothing is gained by overlapping them.
            self._lane = None if link.in_place else PassLane(self.full, timeline)
            self._prompt_queries = self.full.last_queries
            self.verifier = self._compose(sampling)
            failed.pop_all()

    def _compose(self, sampling: Sampling) -> Verifier:
        return compose(
            Parts(
                self.config,
                self._target,
                self._draft,
                self.full,
                sampling,
                self.stop_tokens,
                self._backend,
            )
        )

    def prefill(self, progress: Progress | None = None) -> None:
        """Takes the prompt but for its last token into the caches; that token opens the first round."""
        started = perf_counter()
        prompt = self.text[:-1]
        if prompt:
            prefill(self._target, self.full, prompt, self.config.prefill.chunk, progress)
        self.take_prompt()
        self.prefill_ms = 1e3 * (perf_counter() - started)

    def take_prompt(self) -> None:
        """The full cache holds the prompt but for its last token: the drafts' caches fill themselves."""
        self._prompt_queries = self.full.last_queries
        self._fill_drafts()

    @torch.inference_mode()
    def _fill_drafts(self) -> None:
        if self.full.length:
            self.full.build_derived()
        self.verifier.drafter.prefill(Text(self.text))

    def draft_length(self, clock: bool) -> int | DraftLength:
        """Tokens to draft for a verification, or what chooses them as it runs."""
        speculation = self.config.speculation
        if not speculation.levels or speculation.gamma2:
            return speculation.gamma2 if speculation.levels else 0
        return DraftLength(self.verifier, clock=clock, ahead=self._lane is not None and self._ahead > 0)

    def governor(self, clock: bool, length: int | DraftLength) -> Governor:
        """Watches whether this composition pays; see `Governor`."""
        step_down = self.config.speculation.step_down
        return Governor(length, step_down=step_down, forecast=self.verifier, clock=clock)

    def schedule(self, clock: bool, length: int | DraftLength = 0) -> Schedule:
        """What runs when, for one continuation; see `Schedule`."""
        fitted = length if isinstance(length, DraftLength) else None
        return Schedule(self.verifier, self._lane, self._ahead, fitted, clock=clock, timeline=self._timeline)

    @property
    def _ahead(self) -> int:
        return self.config.offload.ahead if self.config.speculation.levels else 0

    def stop(self) -> None:
        """Ends what runs or was begun for a pass that nobody will ask for."""
        if self._lane is not None:
            self._lane.give_up()
        self.full.abandon()

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        del self.text[self.prompt_tokens :]
        self.full.truncate(self.prompt_tokens - 1)
        self.full.last_queries = self._prompt_queries

    def recompose(self, config: Config, sampling: Sampling, stop_tokens: Collection[int]) -> None:
        """Back to the end of the prompt, with another composition over the same full cache.

        `prefill_ms` and the transfer counters are those of the new composition from here on; the keys of
        `config` for prefill and store come too late.

        Raises:
            UsageError: `config` retrieves, and the prompt was read without summaries of its chunks.
        """
        summaries = self._sequence.summaries
        held = None if summaries is None else summaries.chunk_size
        chunk = config.retrieval.chunk
        if _retrieves(config) and held != chunk:
            raise UsageError(
                f"config {config.name} retrieves chunks of {chunk} tokens, and the prompt was read with "
                f"{'none' if held is None else f'chunks of {held}'} summarised: generate with it first"
            )
        started = perf_counter()
        self.rewind()
        self.full.derived.clear()
        self.engine.counters = TransferCounters()
        self.config = config
        self.stop_tokens = stop_tokens
        self.verifier = self._compose(sampling)
        self._fill_drafts()
        self.prefill_ms = 1e3 * (perf_counter() - started)

    def close(self) -> None:
        """Gives the KV back."""
        with ExitStack() as closing:
            closing.callback(self._sequence.close)
            closing.callback(self.engine.close)
            closing.callback(self.full.abandon)
            if self._cpu is not None:
                closing.callback(self._cpu.close)
            if self._lane is not None:
                closing.callback(self._lane.close)


def _retrieves(config: Config) -> bool:
    return TARGET_RETRIEVED in config.speculation.levels


def kv_layout(model: CausalModel, page_size: int) -> KVLayout:
    """How the model's KV lies in the store."""
    return KVLayout(model.layers, model.kv_heads, model.head_dim, model.dtype, page_size)
