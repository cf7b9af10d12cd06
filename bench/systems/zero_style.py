"""ZeRO-Inference's CPU attention, rebuilt: weights on the device, KV and decoding's attention on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from bench.systems import Opener, Run, Setup
from bench.systems._passes import HostLayer, decode, load, read, rewind


def host_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` `[1, query_heads, queries, head_dim]` over host KV `[1, heads, tokens, head_dim]`.

    A single query goes to the CPU. A chunk of the prompt is compute-bound, and the KV comes to it.
    """
    if query.shape[2] > 1:
        key, value = key.to(query.device), value.to(query.device)
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    # The query heads of a KV head are its rows, so that it is read once for all of them.
    rows = query.cpu().reshape(1, key.shape[1], -1, query.shape[3])
    out = scaled_dot_product_attention(rows, key, value, scale=scaling)
    return out.reshape(1, 1, query.shape[1], -1).to(query.device), None


class Rebuilt:
    """One token a pass. Only queries and results cross the link."""

    notes: tuple[str, ...] = ("rebuilt: attention is torch's scaled_dot_product_attention on the CPU",)

    def __init__(self, setup: Setup) -> None:
        AttentionInterface.register("host", host_attention)
        AttentionMaskInterface.register("host", sdpa_mask)
        self._model, self._setup = load(setup.model, setup, attention="host"), setup
        layers = self._model.config.num_hidden_layers
        self._cache: Any = Cache([HostLayer(setup.capacity) for _ in range(layers)])
        self.label = f"ZeRO-Inference style, rebuilt on transformers {transformers.__version__}"
        if setup.link_gb_s:
            self.notes += ("queries and results cross for nothing",)

    def prepare(self, prompt: Sequence[int]) -> float:
        rewind(self._cache, 0)
        self._prompt, ms = read(self._model, prompt, self._cache, self._setup.chunk)
        return ms

    def run(self, new_tokens: int) -> Run:
        rewind(self._cache, self._prompt.shape[1] - 1)
        last = self._prompt[:, -1:]
        run = decode(self._model, last, self._cache, new_tokens, self._setup.temperature)
        return replace(run, rounds=None) if self._setup.link_gb_s else run  # its KV crosses no link

    def close(self) -> None:
        self._model = self._cache = None


SYSTEMS: dict[str, Opener] = {"rebuilt": Rebuilt}
