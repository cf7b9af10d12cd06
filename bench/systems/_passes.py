"""What adapters over transformers' models share: loading, prefill in chunks, and a loop of passes."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from bench.systems import Run, Setup


def load(folder: str, setup: Setup, attention: str = "sdpa") -> Any:
    """A checkpoint on the device of `setup`, whose generation no token ends."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    dtype = getattr(torch, setup.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.generation_config = GenerationConfig()
    return model.to(setup.device).eval()


@torch.inference_mode()
def read(model: Any, prompt: Sequence[int], cache: Any, chunk: int) -> tuple[Tensor, float]:
    """Takes all of a prompt but its last token into a cache; returns the prompt `[1, tokens]`, and ms."""
    started = perf_counter()
    ids = torch.tensor([prompt], device=model.device)
    for part in ids[:, :-1].split(chunk, dim=1):
        if part.shape[1]:
            model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize(ids.device)
    return ids, 1e3 * (perf_counter() - started)


@torch.inference_mode()
def decode(step: Any, token: Tensor, cache: Any, count: int, temperature: float) -> Run:
    """`count` tokens behind `token` `[1, 1]`, one a pass."""
    started, tokens = perf_counter(), []
    for _ in range(count):
        out = step(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = out.logits[:, -1].float()
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            token = logits.argmax(-1, keepdim=True)
        tokens.append(token)
    found = torch.cat(tokens, dim=1)[0].tolist()
    return Run(found, 1e3 * (perf_counter() - started), count, count)


@torch.no_grad()
def rewind(cache: Any, length: int) -> None:
    """Forgets all but the first `length` tokens."""
    if not isinstance(cache, StaticCache):
        cache.crop(length - cache.get_seq_length())
        return
    layers: list[Any] = list(cache.layers)
    for layer in layers:
        if type(layer) is not StaticLayer:
            raise ValueError(f"a {type(layer).__name__} cannot be rewound")
        layer.cumulative_length.fill_(length)


@torch.no_grad()  # what is made in inference mode could not be written by `generate`
def static_copy(cache: Any, model: Any, capacity: int) -> StaticCache:
    """A cache of `capacity` tokens with what another one holds."""
    static = StaticCache(config=model.config, max_cache_len=capacity)
    layers: list[Any] = list(static.layers)
    for layer, full in zip(layers, cache.layers, strict=True):
        if full.is_initialized:
            layer.update(full.keys, full.values)
    return static


class HostLayer(DynamicLayer):
    """KV of a layer in host memory, in buffers `[1, heads, capacity, head_dim]`.

    `keys` and `values` are views of what is filled: `crop` shortens them, and `update` goes on from there.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.buffers = [
            torch.empty(
                (1, states.shape[1], self._capacity, states.shape[3]),
                dtype=states.dtype,
                pin_memory=states.is_cuda,
            )
            for states in (key_states, value_states)
        ]
        self.keys, self.values = (buffer[:, :, :0] for buffer in self.buffers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, count = self.get_seq_length(), key_states.shape[2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, count).copy_(states)  # a slice would quietly end at the capacity
        self.keys, self.values = (buffer[:, :, : start + count] for buffer in self.buffers)
        return self.keys, self.values
