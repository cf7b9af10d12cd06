"""ZeRO-Inference's CPU attention, rebuilt: weights on the device, KV and decoding's attention on the CPU."""

from __future__ import annotations

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
from bench.systems._passes import Continued, HostLayer, Text, load


def host_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` `[batch, query_heads, queries, head_dim]` over host KV `[batch, heads, tokens,
    head_dim]`.

    Single queries go to the CPU. For chunks of the prompt, which are compute-bound, the KV goes to the
    device.
    """
    if query.shape[2] > 1:
        key, value = key.to(query.device), value.to(query.device)
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
        return out, None
    # The query heads of a KV head become rows, so that its KV is read once for all of them.
    rows = query.cpu().reshape(*key.shape[:2], -1, query.shape[3])
    out = scaled_dot_product_attention(rows, key, value, scale=scaling)
    return out.reshape(len(out), 1, query.shape[1], -1).to(query.device), None


class Rebuilt(Continued):
    """One token a pass. Only queries and results cross the link."""

    notes: tuple[str, ...] = ("rebuilt: attention is torch's scaled_dot_product_attention on the CPU",)

    def __init__(self, setup: Setup) -> None:
        AttentionInterface.register("host", host_attention)
        AttentionMaskInterface.register("host", sdpa_mask)
        model = load(setup.model, setup, attention="host")
        layers = range(model.config.num_hidden_layers)
        text = Text(model, setup.chunk, lambda: Cache([HostLayer(setup.capacity) for _ in layers]))
        label = f"ZeRO-Inference style, rebuilt on transformers {transformers.__version__}"
        super().__init__(label, setup, text, looped=True)
        if setup.link_gb_s:
            self.notes += ("queries and results cross the link in no time",)

    def run(self, new_tokens: int) -> Run:
        run = super().run(new_tokens)
        return replace(run, rounds=None) if self.setup.link_gb_s else run  # its KV does not cross the link


SYSTEMS: dict[str, Opener] = {"rebuilt": Rebuilt}
