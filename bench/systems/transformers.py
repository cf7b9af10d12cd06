"""transformers: `generate`, with look-up and assisted, and loops over other caches; one prefill for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from bench.systems import Opener, Run, Setup, refuse
from bench.systems._generate import generate, give_cache, go_on_from_caches, sampling
from bench.systems._passes import decode, load, read, rewind, static_copy

LOOKUP_TOKENS = 10  # what prompt look-up proposes a round by default


class Text:
    """A model that has read all of a prompt but its last token."""

    def __init__(self, folder: str, setup: Setup) -> None:
        self.model, self._chunk = load(folder, setup), setup.chunk
        go_on_from_caches(self.model)
        self._prompt: list[int] = []

    def read(self, prompt: Sequence[int]) -> float:
        """Returns ms of the prefill."""
        if list(prompt) != self._prompt:
            self.cache: Any = DynamicCache(config=self.model.config)
            self.ids, self._ms = read(self.model, prompt, self.cache, self._chunk)
            self._prompt = list(prompt)
        self.rewind()
        return self._ms

    def rewind(self) -> None:
        """Forgets all but what was read."""
        rewind(self.cache, len(self._prompt) - 1)


shared_text = lru_cache(2)(Text)  # target and draft


class Generate:
    """`generate` with a `DynamicCache`."""

    notes: tuple[str, ...] = ()

    def __init__(self, how: str, setup: Setup, *, lookup: bool = False, assisted: bool = False) -> None:
        refuse(setup, "link_gb_s")
        self.label = f"transformers {transformers.__version__}, {how}"
        self._text = shared_text(setup.model, setup)
        self._draft: Text | None = None
        self._options = sampling(setup)
        if lookup:
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if assisted:
            if setup.draft in (None, setup.model):
                raise ValueError("assisted generation needs a draft of its own: --draft FOLDER")
            assert setup.draft is not None
            self._draft = draft = shared_text(setup.draft, setup)
            give_cache(draft.model, lambda: draft.cache)
            self._options["assistant_model"] = draft.model

    def prepare(self, prompt: Sequence[int]) -> float:
        return self._text.read(prompt) + (self._draft.read(prompt) if self._draft else 0.0)

    def run(self, new_tokens: int) -> Run:
        for text in filter(None, (self._text, self._draft)):
            text.rewind()
        return generate(self._text.model, self._text.ids, self._text.cache, new_tokens, **self._options)

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int]) -> list[float]:
        self._text.rewind()
        ids = torch.cat([self._text.ids[:, -1:], self._text.ids.new_tensor([tokens])], dim=1)
        out = self._text.model(ids, past_key_values=self._text.cache, use_cache=True, logits_to_keep=1)
        logits: list[float] = out.logits[0, -1].float().tolist()
        return logits

    def close(self) -> None:
        shared_text.cache_clear()


class Passes:
    """A cache and a loop of forward passes: what `generate` does around them is left out.

    Args:
        offloaded: to host memory; each layer's KV is on its way to the device one layer ahead. Otherwise the
            cache is a `StaticCache`.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, how: str, setup: Setup, *, compiled: bool = False, offloaded: bool = False) -> None:
        refuse(setup, "link_gb_s")
        if offloaded and setup.device == "cpu":
            raise ValueError("an offloaded cache needs a GPU")
        self.label = f"transformers {transformers.__version__}, {how}"
        self._text, self._setup, self._offloaded = shared_text(setup.model, setup), setup, offloaded
        self._step = torch.compile(self._text.model) if compiled else self._text.model

    def prepare(self, prompt: Sequence[int]) -> float:
        if self._offloaded:
            self._cache: Any = DynamicCache(config=self._text.model.config, offloading=True)
            self._ids, read_ms = read(self._text.model, prompt, self._cache, self._setup.chunk)
            return read_ms
        read_ms, started = self._text.read(prompt), perf_counter()
        self._ids = self._text.ids
        self._cache = static_copy(self._text.cache, self._text.model, self._setup.capacity)
        return read_ms + 1e3 * (perf_counter() - started)

    def run(self, new_tokens: int) -> Run:
        rewind(self._cache, self._ids.shape[1] - 1)
        return decode(self._step, self._ids[:, -1:], self._cache, new_tokens, self._setup.temperature)

    def close(self) -> None:
        shared_text.cache_clear()


SYSTEMS: dict[str, Opener] = {
    "dynamic": partial(Generate, "generate with DynamicCache"),
    "lookup": partial(Generate, "generate with prompt look-up", lookup=True),
    "assisted": partial(Generate, "generate, assisted by the draft", assisted=True),
    "static": partial(Passes, "StaticCache in a loop of passes"),
    "static-compiled": partial(Passes, "StaticCache in a loop of compiled passes", compiled=True),
    "offloaded": partial(Passes, "DynamicCache offloaded, in a loop of passes", offloaded=True),
}
