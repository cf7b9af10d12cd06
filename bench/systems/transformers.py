"""transformers: `generate` over its default cache, with prompt look-up and assisted, and its static cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from bench.peers import Peers
from bench.systems import Opener, Run, Setup


def load(folder: str, setup: Setup) -> PreTrainedModel:
    """A checkpoint on the device of `setup`."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    dtype = getattr(torch, setup.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    moved: PreTrainedModel = model.to(setup.device).eval()
    return moved


class Generate:
    """`generate` with a `DynamicCache`: plain, with prompt look-up, or assisted by the draft."""

    notes: tuple[str, ...] = ()

    def __init__(self, system: str, setup: Setup) -> None:
        named = {"dynamic": "DynamicCache", "lookup": "prompt look-up", "assisted": "assisted by the draft"}
        self.label = f"transformers {transformers.__version__}, {named[system]}"
        self._system = "plain" if system == "dynamic" else system
        self._target = load(setup.model, setup)
        self._draft = load(setup.draft, setup) if setup.draft and system == "assisted" else None
        if system == "assisted" and self._draft is None:
            raise ValueError("assisted generation needs a draft")
        self._peers: Peers | None = None

    def prepare(self, prompt: Sequence[int]) -> float:
        self._peers = None
        self._peers = Peers(self._target, self._draft, prompt)
        return self._peers.prefill_ms + (self._peers.assistant_prefill_ms or 0.0)

    def run(self, new_tokens: int) -> Run:
        assert self._peers is not None
        found = self._peers.run(self._system, new_tokens)
        return Run(found.tokens, found.ms, found.timed)

    def close(self) -> None:
        self._peers = None


class Static:
    """A `StaticCache` and a loop of forward passes: what `generate` does around them is left out.

    Args:
        compiled: by `torch.compile`, once for the shape of a decoding step.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, compiled: bool, setup: Setup) -> None:
        how = ", torch.compile" if compiled else ""
        self.label = f"transformers {transformers.__version__}, StaticCache{how}"
        self._model = load(setup.model, setup)
        self._step = torch.compile(self._model) if compiled else self._model
        self._setup = setup
        self._length = 0
        self._last = torch.empty(0)

    @torch.inference_mode()
    def prepare(self, prompt: Sequence[int]) -> float:
        started = perf_counter()
        self._cache = StaticCache(config=self._model.config, max_cache_len=self._setup.capacity)
        ids = torch.tensor([prompt], device=self._model.device)
        for part in ids[:, :-1].split(self._setup.chunk, dim=1):
            self._model(part, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._length, self._last = len(prompt) - 1, ids[:, -1:]
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        return 1e3 * (perf_counter() - started)

    @torch.inference_mode()
    def run(self, new_tokens: int) -> Run:
        layers: list[Any] = list(self._cache.layers)
        for layer in layers:
            layer.cumulative_length.fill_(self._length)
        started, token = perf_counter(), self._last
        tokens: list[Tensor] = []
        for _ in range(new_tokens):
            out = self._step(token, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(token)
        found = torch.cat(tokens, dim=1)[0].tolist()
        return Run(found, 1e3 * (perf_counter() - started), new_tokens)

    def close(self) -> None:
        pass


SYSTEMS: dict[str, Opener] = {
    **{name: partial(Generate, name) for name in ("dynamic", "lookup", "assisted")},
    "static": partial(Static, False),
    "static-compiled": partial(Static, True),
}
