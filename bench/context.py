"""A text in a full cache, read and passed over outside of any decoding."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from cpu_kv import CpuLink, CudaLink, Link, PagedKVStore, TransferEngine
from offload_rt.attention import choose_backend
from offload_rt.caches.base import Cache, NewTokens
from offload_rt.caches.full import LAST_QUERIES, FullCache
from offload_rt.config import Config
from offload_rt.model import CausalModel
from offload_rt.prefill import prefill
from offload_rt.session import kv_layout


class ContextReader:
    """Holds the KV of one text at a time.

    Args:
        config: its chunks are summarised, its store and prefill used.
        room: tokens to reserve memory for.
    """

    def __init__(self, model: CausalModel, config: Config, room: int) -> None:
        self.model = model
        self.config = config
        self.backend = choose_backend(model.device)
        on_gpu = model.device.type == "cuda"
        self._link: Link = CudaLink(model.device) if on_gpu else CpuLink()
        self._store = PagedKVStore(kv_layout(model, config.store.page), pin=on_gpu)
        self._sequence = self._store.new_sequence(config.retrieval.chunk)
        self._sequence.reserve(room)
        self._engine = TransferEngine(
            self._sequence,
            self._link,
            segment_tokens=config.store.segment_tokens,
            ring_buffers=config.store.ring_buffers,
        )
        self.full = FullCache(
            self._sequence, self._engine, self._store.layout, model.heads, model.device, self.backend
        )

    def read(self, tokens: Sequence[int], *, outputs: bool = False) -> Tensor | None:
        """Takes `tokens` into the empty cache; with `outputs`, returns the last layer's hidden states."""
        return prefill(self.model, self.full, tokens, self.config.prefill.chunk, outputs=outputs)

    def logits(self, cache: Cache, tokens: Sequence[int], rows: int) -> Tensor:
        """Logits `[rows, vocabulary]` after the last `rows` of `tokens`, which follow what is in `cache`.

        The pass is pending in the cache: commit it or leave it.
        """
        new = NewTokens.chain_and_tree(len(tokens), (), self.model.device, self.model.dtype)
        positions = range(cache.length, cache.length + len(tokens))
        return self.model.forward(cache, tokens, positions, new, rows)

    def cut(self, tokens: Sequence[int]) -> None:
        """Back to `tokens`, the beginning of what was read."""
        last = min(LAST_QUERIES, len(tokens))
        with torch.inference_mode():
            self.full.truncate(len(tokens) - last)
            # Their queries, which retrieval chooses by, come with a pass.
            self.logits(self.full, tokens[-last:], 1)
            self.full.commit(range(last))

    def close(self) -> None:
        """Gives the KV back."""
        self.full.abandon()
        self._engine.close()
        self._store.close()
        self._link.close()

    def __enter__(self) -> ContextReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
