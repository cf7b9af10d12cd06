"""One text being continued: its KV in the store, its caches, its composition."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter

import torch

from cpu_kv import KVLayout, Link, PagedKVStore, TransferEngine
from offload_rt.attention import AttentionBackend
from offload_rt.caches.full import FullCache
from offload_rt.config import Config
from offload_rt.costs import PassCost
from offload_rt.drafting.base import NoDrafter, Text
from offload_rt.drafting.compose import TARGET_FULL, TARGET_RETRIEVED, Parts, compose
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.governor import Governor
from offload_rt.model import CausalModel
from offload_rt.prefill import Progress, prefill


class Session:
    """Owns what a text needs, from its prefill to `close`.

    Args:
        text: the prompt; grows by what is generated.
        max_tokens: how many may be generated; room for them is reserved.
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
    ) -> None:
        self.config = config
        self.text = list(text)
        self.prompt_tokens = len(self.text)
        self.stop_tokens = stop_tokens
        self.prefill_ms = 0.0
        self._target = target
        self._sampling = sampling
        retrieves = TARGET_RETRIEVED in config.speculation.levels
        self._sequence = store.new_sequence(config.retrieval.chunk if retrieves else None)
        self._sequence.reserve(len(self.text) + max_tokens)
        self.engine = TransferEngine(
            self._sequence,
            link,
            segment_tokens=config.store.segment_tokens,
            ring_buffers=config.store.ring_buffers,
        )
        self.full = FullCache(
            self._sequence, self.engine, store.layout, target.heads, target.device, backend
        )
        self.verifier = compose(
            Parts(config, target, draft, self.full, sampling, stop_tokens, backend)
        )

    def prefill(self, progress: Progress | None = None) -> None:
        """Takes the prompt but for its last token into the caches; that token opens the first round."""
        started = perf_counter()
        prompt = self.text[:-1]
        if prompt:
            prefill(self._target, self.full, prompt, self.config.prefill.chunk, progress)
        self._fill_drafts()
        self.prefill_ms = 1e3 * (perf_counter() - started)

    @torch.inference_mode()
    def _fill_drafts(self) -> None:
        if self.full.length:
            self.full.build_derived()
        self.verifier.drafter.prefill(Text(self.text))

    def governor(self, clock: bool) -> Governor:
        """Watches whether this composition pays; see `Governor`."""
        speculation = self.config.speculation
        return Governor(
            speculation.gamma2 if speculation.levels else 0,
            step_down=speculation.step_down,
            least_ms=self.verifier.least_ms,
            clock=clock,
        )

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        del self.text[self.prompt_tokens :]
        self.full.truncate(self.prompt_tokens - 1)

    def plain_verifier(self) -> Verifier:
        """The target over the same full cache, without drafts. The caches below are not kept up any more."""
        self.full.derived.clear()
        return Verifier(
            TARGET_FULL,
            self._target,
            self.full,
            NoDrafter(),
            self._sampling,
            PassCost(self._target, None),
        )

    def close(self) -> None:
        """Gives the KV back."""
        self.full.abandon()
        self.engine.close()
        self._sequence.close()


def kv_layout(model: CausalModel, page_size: int) -> KVLayout:
    """How the model's KV lies in the store."""
    return KVLayout(model.layers, model.kv_heads, model.head_dim, model.dtype, page_size)
