"""What adapters over transformers' models share: prefill in chunks, a loop of passes, and `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation.streamers import BaseStreamer

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
def static_copy(cache: Any, model: Any, capacity: int) -> tuple[StaticCache, float]:
    """A cache of `capacity` tokens with what another one holds, and ms."""
    started = perf_counter()
    static = StaticCache(config=model.config, max_cache_len=capacity)
    layers: list[Any] = list(static.layers)
    for layer, full in zip(layers, cache.layers, strict=True):
        if full.is_initialized:
            layer.update(full.keys, full.values)
    return static, 1e3 * (perf_counter() - started)


class Passes:
    """A cache that is read into, and a loop of passes: what `generate` does around them is left out.

    Attributes:
        ids: the prompt, `[1, tokens]`.
    """

    label: str
    notes: tuple[str, ...] = ()
    ids: Tensor

    def __init__(self, setup: Setup, model: Any, cache: Any) -> None:
        self.setup, self.model, self.cache = setup, model, cache

    def prepare(self, prompt: Sequence[int]) -> float:
        rewind(self.cache, 0)
        self.ids, ms = read(self.model, prompt, self.cache, self.setup.chunk)
        return ms

    def run(self, new_tokens: int) -> Run:
        rewind(self.cache, self.ids.shape[1] - 1)
        return self._decode(new_tokens)

    @torch.inference_mode()
    def _decode(self, count: int) -> Run:
        started, tokens, token = perf_counter(), [], self.ids[:, -1:]
        for _ in range(count):
            out = self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[:, -1].float()
            if self.setup.temperature:
                token = torch.multinomial((logits / self.setup.temperature).softmax(-1), 1)
            else:
                token = logits.argmax(-1, keepdim=True)
            tokens.append(token)
        found = torch.cat(tokens, dim=1)[0].tolist()
        return Run(found, 1e3 * (perf_counter() - started), count, count)

    def close(self) -> None:
        self.model = self.cache = None


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
        start = self.get_seq_length()
        self.keys, self.values = put(self.buffers, start, (key_states, value_states))
        return self.keys, self.values


def put(buffers: Sequence[Tensor], start: int, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Writes keys and values from token `start` on; returns all that is filled then."""
    end = start + states[0].shape[2]
    for buffer, new in zip(buffers, states, strict=True):
        buffer.narrow(2, start, end - start).copy_(new)  # a slice would quietly end at the capacity
    keys, values = (buffer[:, :, :end] for buffer in buffers)
    return keys, values


def generate(setup: Setup, model: Any, ids: Tensor, cache: Any, count: int, **options: Any) -> Run:
    """Timed from the first round's tokens to the last: without what `generate` sets up, but where one round
    made all."""
    arrivals = _Arrivals()
    options |= {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "max_new_tokens": count}
    options |= {"do_sample": bool(setup.temperature), "streamer": arrivals}
    if setup.temperature:
        options |= {"temperature": setup.temperature, "top_k": 0}
    out = model.generate(ids, **options)
    times, (_, *rounds) = arrivals.times, arrivals.counts
    ms = 1e3 * (times[-1] - times[1 if len(rounds) > 1 else 0])
    return Run(out[0, ids.shape[1] :].tolist(), ms, sum(rounds[1:]) or count, len(rounds))


class _Arrivals(BaseStreamer):
    """Notes when tokens come, and how many at a time; first of all comes the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
