"""Shared by adapters over transformers' models: a prompt read once, decoding loops, KV in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer

from bench.systems import Prompt, Run, Setup
from offload_rt.model.architecture import CACHE_ARGUMENT


def load(folder: str, setup: Setup, attention: str = "sdpa") -> Any:
    """Loads a checkpoint on the device of `setup`; no token ends its generation."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    dtype = getattr(torch, setup.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    model.generation_config = GenerationConfig()
    return model.to(setup.device).eval()


class Text:
    """A model and a cache that holds a prompt but for the last token of each sequence.

    Args:
        chunk: tokens read at a time.
        new_cache: makes the cache; None: a `DynamicCache`.

    Attributes:
        ids: the prompt, `[batch, tokens]`.
    """

    def __init__(self, model: Any, chunk: int, new_cache: Callable[[], Any] | None = None) -> None:
        self.model, self._chunk = model, chunk
        self._new_cache = new_cache or partial(DynamicCache, config=model.config)
        self.cache: Any = None
        self._prompt: Prompt = ()

    @torch.inference_mode()
    def prefill(self, prompt: Prompt) -> float:
        """Prefills a prompt, unless it is the previous one; returns ms of its prefill."""
        if prompt != self._prompt:
            self.cache = None  # frees its memory before the next one is filled
            self.cache, self._prompt = self._new_cache(), prompt
            started = perf_counter()
            self.ids = torch.tensor(self._prompt, device=self.model.device)
            for part in self.ids[:, :-1].split(self._chunk, dim=1):
                if part.shape[1]:
                    self.model(part, use_cache=True, **{CACHE_ARGUMENT: self.cache}, logits_to_keep=1)
            if self.ids.is_cuda:
                torch.cuda.synchronize(self.ids.device)
            self._ms = 1e3 * (perf_counter() - started)
        return self._ms

    @torch.no_grad()
    def rewind(self, cache: Any) -> None:
        """Rewinds a cache to the end of what was read."""
        length = self.ids.shape[1] - 1
        if not isinstance(cache, StaticCache):
            cache.crop(length - cache.get_seq_length())
            return
        layers: list[Any] = list(cache.layers)
        for layer in layers:
            if type(layer) is not StaticLayer:
                raise ValueError(f"a {type(layer).__name__} cannot be rewound")
            layer.cumulative_length.fill_(length)

    @torch.no_grad()  # `generate` could not write to tensors of inference mode
    def static_cache(self, capacity: int) -> StaticCache:
        """A static cache of `capacity` tokens with a copy of what was read."""
        static = StaticCache(config=self.model.config, max_cache_len=capacity)
        layers: list[Any] = list(static.layers)
        for layer, full in zip(layers, self.cache.layers, strict=True):
            if full.is_initialized:
                layer.update(full.keys, full.values)
        return static


class Continued:
    """Continues a text by `generate`, or by a loop of passes, which is faster.

    Args:
        static: whether it uses a `StaticCache`.
        looped: whether it runs a loop of passes.
        options: of `generate`.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self,
        label: str,
        setup: Setup,
        text: Text,
        *,
        static: bool = False,
        looped: bool = False,
        **options: Any,
    ) -> None:
        self.label, self.setup, self.text = label, setup, text
        self._static, self._looped, self._options = static, looped, options
        self._cache: Any = None

    def prepare(self, prompt: Prompt) -> float:
        self._cache = None  # as above
        prefill_ms, started = self.text.prefill(prompt), perf_counter()
        self._cache = self.text.static_cache(self.setup.capacity) if self._static else self.text.cache
        return prefill_ms + 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        self.text.rewind(self._cache)
        return self._loop(new_tokens) if self._looped else self._generate(new_tokens)

    @torch.inference_mode()
    def _loop(self, count: int) -> Run:
        started, tokens, token = perf_counter(), [], self.text.ids[:, -1:]
        for _ in range(count):
            out = self.text.model(token, use_cache=True, **{CACHE_ARGUMENT: self._cache}, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        ids = torch.cat(tokens, dim=1).flatten().tolist()
        return Run(ids, 1e3 * (perf_counter() - started), len(ids), count)

    def _generate(self, count: int) -> Run:
        """Times from the first round's tokens to the last, without the setup of `generate`, unless one round
        made all."""
        arrivals, ids = _Arrivals(), self.text.ids
        options = self._options | {CACHE_ARGUMENT: self._cache, "max_new_tokens": count}
        options |= {"attention_mask": torch.ones_like(ids), "streamer": arrivals, "do_sample": False}
        out = self.text.model.generate(ids, **options)
        times, (_, *rounds) = zip(*arrivals, strict=True)
        ms = 1e3 * (times[-1] - times[1 if len(rounds) > 1 else 0])
        new_ids = out[:, ids.shape[1] :].flatten().tolist()
        return Run(new_ids, ms, sum(rounds[1:]) or len(new_ids), len(rounds))

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int]) -> list[float]:
        self.text.rewind(self._cache)
        ids = torch.cat([self.text.ids[:, -1:], self.text.ids.new_tensor([tokens])], dim=1)
        out = self.text.model(ids, use_cache=True, **{CACHE_ARGUMENT: self._cache}, logits_to_keep=1)
        logits: list[float] = out.logits[0, -1].float().tolist()
        return logits

    def close(self) -> None:
        vars(self).clear()


class _Arrivals(list[tuple[float, int]]):
    """A streamer that notes when tokens arrive and how many; the prompt arrives first."""

    def put(self, value: Tensor) -> None:
        self.append((perf_counter(), value.numel()))

    def end(self) -> None:
        pass


class HostLayer(DynamicLayer):
    """KV of a layer in host memory, in buffers `[batch, heads, capacity, head_dim]`.

    `keys` and `values` are views of the filled part: `crop` shortens them, and `update` continues there.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        options: Any = {"dtype": key_states.dtype, "pin_memory": key_states.is_cuda}
        shapes = (
            (*states.shape[:2], self._capacity, states.shape[3]) for states in (key_states, value_states)
        )
        self.buffers = [torch.empty(shape, **options) for shape in shapes]
        self.keys, self.values = (buffer[:, :, :0] for buffer in self.buffers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        self.keys, self.values = put(self.buffers, start, (key_states, value_states))
        return self.keys, self.values


def put(buffers: Sequence[Tensor], start: int, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Writes keys and values from token `start` on; returns views of the filled part."""
    end = start + states[0].shape[2]
    for buffer, new in zip(buffers, states, strict=True):
        buffer.narrow(2, start, end - start).copy_(new)  # a slice would quietly end at the capacity
    keys, values = (buffer[:, :, :end] for buffer in buffers)
    return keys, values
