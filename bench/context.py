"""A text in a full cache, read and passed over outside of any decoding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

from cpu_kv import CpuLink, CudaLink, Link, PagedKVStore, TransferEngine
from offload_rt.attention import choose_backend
from offload_rt.caches.base import Cache, NewTokens
from offload_rt.caches.full import FullCache
from offload_rt.config import Config
from offload_rt.model import CausalModel
from offload_rt.parts import Part
from offload_rt.prefill import prefill


class ContextReader(AbstractContextManager["ContextReader"]):
    """Holds the KV of one text.

    Args:
        config: its chunks are summarised, its store and prefill used.
        room: tokens to reserve memory for.

    Attributes:
        tokens: those that were read.
    """

    def __init__(self, model: CausalModel, config: Config, room: int) -> None:
        self.model, self.config, self.room = model, config, room
        self.tokens: Sequence[int] = ()
        self.backend = choose_backend(model.device)
        on_gpu = model.device.type == "cuda"
        self._link: Link = CudaLink(model.device) if on_gpu else CpuLink()
        self._store = PagedKVStore(model.kv_layout(config.store.page), pin=on_gpu)
        self._sequence = self._store.new_sequence(config.retrieval.chunk, page_means=True)
        self._sequence.reserve(room)
        self._engine = TransferEngine(
            self._sequence,
            self._link,
            segment_tokens=config.store.segment_tokens,
            ring_buffers=config.store.ring_buffers,
        )
        self.full = FullCache(self._engine, model.heads, self.backend)

    def read(self, tokens: Sequence[int], *, outputs: bool = False) -> Tensor | None:
        """Takes `tokens` into the empty cache; with `outputs`, returns the last layer's hidden states."""
        self.tokens = tokens
        return prefill(self.model, self.full, tokens, self.config.prefill.chunk, outputs=outputs)

    def logits(self, cache: Cache, tokens: Sequence[int], rows: int) -> Tensor:
        """Logits `[rows, vocabulary]` after the last `rows` of `tokens`, which follow what is in `cache`.

        The pass is pending in the cache: commit it or leave it.
        """
        new = NewTokens.below(cache.held, range(-1, len(tokens) - 1), tokens)
        return self.model.forward([Part(cache, new, rows)])[0].logits

    def __exit__(self, *_: object) -> None:
        """Gives the KV back."""
        self.full.abandon()
        self._engine.close()
        self._store.close()
        self._link.close()
