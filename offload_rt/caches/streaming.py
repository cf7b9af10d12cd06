"""The cache of StreamingLLM (arXiv 2309.17453): attention sinks and a recent window, positions by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.base import CacheSource
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.local import LocalState


class StreamingCache(BoundedCache):
    """The first `sinks` tokens and the last `window` ones.

    Positions are those of the slots, so that distances never exceed the cache's size. Rotary attention
    depends on distances alone: recent tokens keep their absolute rotation, and the few sinks are rotated
    forward to stand right in front of the window.

    Args:
        inverse_frequencies: the model's rotary frequencies, `[rotated / 2]`, on the cache's device.
        source: the full cache of the same model; None for a model that fills the cache by its own passes.
        local: of such a model's layers that do not attend to the whole sequence; None: it has none.
    """

    def __init__(
        self,
        layout: KVLayout,
        inverse_frequencies: Tensor,
        *,
        sinks: int,
        window: int,
        backend: AttentionBackend,
        source: CacheSource | None = None,
        pool: BufferPool | None = None,
        local: LocalState | None = None,
    ) -> None:
        local = local if source is None else source.local.derived()
        super().__init__(layout, inverse_frequencies.device, sinks + window, backend, pool, local=local)
        self.sinks = sinks
        self.window = window
        self._frequencies = inverse_frequencies.float()
        self._sink_keys = self.kv[:, 0, :, :sinks].clone()  # as rotated by the model, at positions 0..
        self._oldest = 0  # overwritten next, counted from the first slot of the window
        self._first = 0  # position of the first token that may have an entry
        self._source = source

    def skip(self, tokens: int) -> None:
        """Treats the next `tokens` tokens as read and already out of the window.

        Possible only right behind the sinks. The middle of a prompt leaves nothing in this kind of cache but
        its influence on later hidden states.
        """
        if self.entries != self.sinks or len(self.speculative):
            raise ValueError("only a cache with its sinks alone can skip tokens")
        self.verified_length += tokens
        self._move_sinks()

    def reset(self, first: int = 0) -> None:
        """Forgets all tokens; the next one is at position `first`, and those before it have no entries."""
        self.entries = self._oldest = 0
        self.verified_length = self._first = first
        self.speculative.clear()
        self.local.restart()

    def build(self, queries: Tensor) -> None:
        """Fetches the sinks and the window from the store; `queries` are not needed."""
        if self._source is None:
            raise ValueError("a streaming cache without a source fills itself from its own passes")
        self.reset()
        length = self._source.verified_length
        recent = max(self.sinks, length - self.window)
        self.append_verified(self._source.transfer.read(0, min(self.sinks, length)))
        if recent > self.sinks:
            self.skip(recent - self.sinks)
        if length > recent:
            self.append_verified(self._source.transfer.read(recent, length))

    def append_verified(self, kv: Tensor) -> None:
        # In portions, as more tokens than the window has slots may be appended.
        first = max(0, min(self.sinks - self.entries, kv.shape[3]))
        if first:
            self._sink_keys[:, :, self.entries : self.entries + first] = kv[:, 0, :, :first]
            super().append_verified(kv[:, :, :, :first])
        for start in range(first, kv.shape[3], self.window):
            super().append_verified(kv[:, :, :, start : start + self.window])
        self._move_sinks()

    def victims(self, count: int) -> list[int]:
        slots = [self.sinks + (self._oldest + i) % self.window for i in range(count)]
        self._oldest = (self._oldest + count) % self.window
        return slots

    def _move_sinks(self) -> None:
        """Rotates the sinks to the positions right in front of the window's oldest token."""
        distance = self.verified_length - self._first - self.entries
        if distance <= 0:
            return
        angles = distance * self._frequencies.double()
        cos = torch.cat([angles.cos(), angles.cos()]).float()
        sin = torch.cat([angles.sin(), angles.sin()]).float()
        rotary = len(cos)  # less than head_dim for models that rotate only a part of it
        keys = self._sink_keys[..., :rotary].float()
        turned = torch.cat([-keys[..., rotary // 2 :], keys[..., : rotary // 2]], dim=-1)
        self.kv[:, 0, :, : self.sinks, :rotary] = (keys * cos + turned * sin).to(self.kv.dtype)
