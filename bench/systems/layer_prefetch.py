"""Layer prefetch in the style of transformers' offloaded cache, rebuilt over an emulated link.

All KV lies in host memory; while a layer is computed, the KV of the next one crosses the link into the other
of two buffers on the device. transformers' own needs a GPU (`transformers:offloaded`).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache

from bench.systems import Opener, Run, Setup
from bench.systems._passes import Continued, HostLayer, Text, load, put
from cpu_kv import Event, PacedLink


class PrefetchedCache(Cache):
    """KV in host memory, and two buffers on the device, which a link fills one layer ahead of the pass."""

    def __init__(self, layers: int, capacity: int, link: PacedLink) -> None:
        super().__init__([HostLayer(capacity) for _ in range(layers)])
        self._link = link
        self._buffers: list[list[Tensor]] = []
        self._next: tuple[int, Event] | None = None  # a layer, and when it has arrived

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends keys and values of a layer; a pass over one token gets what has crossed the link."""
        start = self.get_seq_length(layer_idx)
        if key_states.shape[2] > 1 or not start:  # the prompt, whose KV is on the device
            return super().update(key_states, value_states, layer_idx)
        arrived = self._arrived(layer_idx)
        super().update(key_states, value_states, layer_idx)
        return put(arrived, start, (key_states, value_states))

    def _arrived(self, index: int) -> list[Tensor]:
        """Waits for the KV of a layer and begins to fetch the next one; returns the buffers of the former."""
        if self._next is None or self._next[0] != index:
            self._fetch(index)
        assert self._next is not None
        self._next[1].synchronize()
        buffers = self._buffers[0]
        self._fetch((index + 1) % len(self.layers))
        return buffers

    def _fetch(self, index: int) -> None:
        """Begins to copy the KV of a layer into the buffers that are not in use."""
        layer: Any = self.layers[index]
        if not self._buffers:
            self._buffers = [[torch.empty_like(buffer) for buffer in layer.buffers] for _ in range(2)]
        self._buffers.reverse()
        count = layer.get_seq_length()
        pairs = zip(self._buffers[0], layer.buffers, strict=True)
        self._next = index, self._link.copy([(to[:, :, :count], of[:, :, :count]) for to, of in pairs])

    def crop(self, tokens_to_remove: int) -> None:
        """Drops tokens, and waits for the pending copy."""
        if self._next is not None:
            self._next[1].synchronize()
        self._next = None
        super().crop(tokens_to_remove)


class Rebuilt(Continued):
    """One token a pass, each over all KV."""

    notes: tuple[str, ...] = ("rebuilt; the link is emulated, and the prompt does not cross it",)

    def __init__(self, setup: Setup) -> None:
        if not setup.link_gb_s:
            raise ValueError("needs an emulated link: --link GB/s")
        model = load(setup.model, setup)
        layers: int = model.config.num_hidden_layers
        if layers < 2:
            raise ValueError("has nothing to prefetch in a model of one layer")
        self._link = PacedLink(1e9 * setup.link_gb_s)
        text = Text(model, setup.chunk, lambda: PrefetchedCache(layers, setup.capacity, self._link))
        label = f"layer prefetch, rebuilt on transformers {transformers.__version__}"
        super().__init__(label, setup, text, looped=True)

    def run(self, new_tokens: int) -> Run:
        run = super().run(new_tokens)
        self.text.rewind(self.text.cache)  # waits for the pending copy: other systems come next
        return run

    def close(self) -> None:
        self._link.close()
        super().close()


SYSTEMS: dict[str, Opener] = {"rebuilt": Rebuilt}
