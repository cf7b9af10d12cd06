"""Layer prefetch in the style of transformers' offloaded cache, rebuilt over an emulated link.

All KV lies in host memory; while a layer is computed, the KV of the next one crosses the link into the other
of two buffers on the device. transformers' own needs a GPU (`transformers:offloaded`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache

from bench.systems import Opener, Run, Setup
from bench.systems._passes import HostLayer, decode, load, read, rewind
from cpu_kv import PacedLink, Ticket


class PrefetchedCache(Cache):
    """Two buffers on the device, which a link fills one layer ahead of the pass."""

    def __init__(self, layers: int, capacity: int, link: PacedLink) -> None:
        self._link = link
        self._buffers: list[list[Tensor]] = []
        self._next: tuple[int, Ticket] | None = None  # a layer, and when it has arrived
        super().__init__([PrefetchedLayer(self, index, capacity) for index in range(layers)])

    def fetch(self, index: int) -> None:
        """Begins to carry the KV of a layer into the buffers that are not in use."""
        layer: Any = self.layers[index % len(self.layers)]
        if not self._buffers:
            self._buffers = [[torch.empty_like(one) for one in layer.buffers] for _ in range(2)]
        self._buffers.reverse()
        count = layer.get_seq_length()
        pairs = zip(self._buffers[0], layer.buffers, strict=True)
        ticket = self._link.copy([(to[:, :, :count], of[:, :, :count]) for to, of in pairs])
        self._next = index % len(self.layers), ticket

    def arrived(self, index: int) -> list[Tensor]:
        """The buffers in which the KV of a layer is now; the next layer is on its way to the others."""
        if self._next is None or self._next[0] != index:
            self.fetch(index)
        assert self._next is not None
        self._next[1].synchronize()
        here = self._buffers[0]
        self.fetch(index + 1)
        return here

    def rewind(self, length: int) -> None:
        """Forgets all but the first `length` tokens."""
        if self._next is not None:
            self._next[1].synchronize()
        self._next = None
        rewind(self, length)


class PrefetchedLayer(HostLayer):
    """KV of a layer in host memory; a pass over one token gets what has crossed the link."""

    def __init__(self, cache: PrefetchedCache, index: int, capacity: int) -> None:
        super().__init__(capacity)
        self._cache, self._index = cache, index

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] > 1 or not self.is_initialized:  # of the prompt, whose KV is on the device
            return super().update(key_states, value_states)
        buffers, start = self._cache.arrived(self._index), self.get_seq_length()
        super().update(key_states, value_states)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, 1).copy_(states)
        keys, values = (buffer[:, :, : start + 1] for buffer in buffers)
        return keys, values


class Rebuilt:
    """One token a pass, each over all KV."""

    notes: tuple[str, ...] = ("rebuilt; the link is emulated, and free for the prompt",)

    def __init__(self, setup: Setup) -> None:
        if not setup.link_gb_s:
            raise ValueError("has a meaning over a link only: --link GB/s")
        self._model, self._setup = load(setup.model, setup), setup
        self._link = PacedLink(1e9 * setup.link_gb_s)
        layers: int = self._model.config.num_hidden_layers
        if layers < 2:
            raise ValueError("has nothing to prefetch in a model of one layer")
        self._cache = PrefetchedCache(layers, setup.capacity, self._link)
        self.label = f"layer prefetch, rebuilt on transformers {transformers.__version__}"

    def prepare(self, prompt: Sequence[int]) -> float:
        self._cache.rewind(0)
        self._ids, ms = read(self._model, prompt, self._cache, self._setup.chunk)
        return ms

    def run(self, new_tokens: int) -> Run:
        self._cache.rewind(self._ids.shape[1] - 1)
        run = decode(self._model, self._ids[:, -1:], self._cache, new_tokens, self._setup.temperature)
        self._cache.rewind(
            self._ids.shape[1] - 1
        )  # waits for what is under way: the next system's turn comes
        return run

    def close(self) -> None:
        self._link.close()


SYSTEMS: dict[str, Opener] = {"rebuilt": Rebuilt}
