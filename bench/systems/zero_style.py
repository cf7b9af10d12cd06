"""ZeRO-Inference's CPU attention, rebuilt: weights on the device, KV and decoding's attention on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from bench.systems import Opener, Run, Setup


class HostLayer(DynamicLayer):
    """KV of a layer in host memory, in buffers `[1, heads, capacity, head_dim]`.

    `keys` and `values` are views of what is filled: `crop` shortens them, and `update` goes on from there.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._buffers = [
            torch.empty(
                (1, states.shape[1], self._capacity, states.shape[3]),
                dtype=states.dtype,
                pin_memory=states.is_cuda,
            )
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (buffer[:, :, :0] for buffer in self._buffers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.get_seq_length(), key_states.shape[2]
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, count).copy_(states)  # a slice would quietly end at the capacity
        self.keys, self.values = (buffer[:, :, : start + count] for buffer in self._buffers)
        return self.keys, self.values


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
    """Greedy decoding, one token a pass."""

    notes: tuple[str, ...] = ("rebuilt: attention is torch's scaled_dot_product_attention on the CPU",)

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        AttentionInterface.register("host", host_attention)
        AttentionMaskInterface.register("host", sdpa_mask)
        model: Any = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=getattr(torch, setup.dtype), attn_implementation="host"
        )
        self._model: Any = model.to(setup.device).eval()
        self._cache: Any = Cache([HostLayer(setup.capacity) for _ in range(model.config.num_hidden_layers)])
        self._chunk = setup.chunk
        self._prompt = torch.empty(1, 0, dtype=torch.long)
        self.label = f"ZeRO-Inference style, rebuilt on transformers {transformers.__version__}"

    @torch.inference_mode()
    def prepare(self, prompt: Sequence[int]) -> float:
        started = perf_counter()
        self._prompt = torch.tensor([prompt], device=self._model.device)
        self._rewind(0)
        for chunk in self._prompt[:, :-1].split(self._chunk, dim=1):
            if chunk.shape[1]:
                self._next(chunk)
        return 1e3 * (perf_counter() - started)

    @torch.inference_mode()
    def run(self, new_tokens: int) -> Run:
        self._rewind(self._prompt.shape[1] - 1)
        started = perf_counter()
        token, out = self._prompt[:, -1:], []
        for _ in range(new_tokens):
            token = self._next(token)
            out.append(token)
        tokens = torch.cat(out, dim=1)[0].tolist()
        return Run(tokens, 1e3 * (perf_counter() - started), new_tokens)

    def close(self) -> None:
        self._model = self._cache = None

    def _next(self, ids: Tensor) -> Tensor:
        """The likeliest token `[1, 1]` after `ids`, which the cache holds from now on."""
        out = self._model(ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        token: Tensor = out.logits[:, -1].argmax(dim=-1, keepdim=True)
        return token

    def _rewind(self, length: int) -> None:
        self._cache.crop(length - self._cache.get_seq_length())


SYSTEMS: dict[str, Opener] = {"rebuilt": Rebuilt}
