"""transformers: `generate`, with look-up and assisted, and loops over other caches; one prefill for all.

For `generate` to go on from a prompt that was read before, three things are left to do. Plain generation goes
on from a filled cache; the first pass of look-up and assisted generation does not, and reads the whole text a
second time behind it. An assistant has no way to be given a filled cache. And generation with a cache leaves
it longer: it is rewound before each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, wraps
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from bench.systems import Opener, Run, Setup, refuse_link
from bench.systems._passes import Passes, generate, load, read, rewind, static_copy

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

    def __init__(self, how: str, setup: Setup, *, assisted: bool = False, **options: Any) -> None:
        refuse_link(setup)
        self.label = f"transformers {transformers.__version__}, {how}"
        self._setup, self._options = setup, options
        self._text = shared_text(setup.model, setup)
        self._texts = [self._text]
        if assisted:
            if setup.draft is None or setup.draft == setup.model:
                raise ValueError("assisted generation needs a draft of its own: --draft FOLDER")
            draft = shared_text(setup.draft, setup)
            give_cache(draft.model, lambda: draft.cache)
            self._options["assistant_model"] = draft.model
            self._texts.append(draft)

    def prepare(self, prompt: Sequence[int]) -> float:
        return sum(text.read(prompt) for text in self._texts)

    def run(self, new_tokens: int) -> Run:
        for text in self._texts:
            text.rewind()
        model, ids, cache = self._text.model, self._text.ids, self._text.cache
        return generate(self._setup, model, ids, cache, new_tokens, **self._options)

    @torch.inference_mode()
    def logits_after(self, tokens: Sequence[int]) -> list[float]:
        self._text.rewind()
        ids = torch.cat([self._text.ids[:, -1:], self._text.ids.new_tensor([tokens])], dim=1)
        out = self._text.model(ids, past_key_values=self._text.cache, use_cache=True, logits_to_keep=1)
        logits: list[float] = out.logits[0, -1].float().tolist()
        return logits

    def close(self) -> None:
        shared_text.cache_clear()


def give_cache(assistant: Any, cache: Callable[[], Any]) -> None:
    """Lets an assistant generate from a cache."""
    plain = assistant.generate

    @wraps(plain)
    def given(*arguments: Any, **options: Any) -> Any:
        if options.get("past_key_values") is None:
            options["past_key_values"] = cache()
        return plain(*arguments, **options)

    assistant.generate = given


def go_on_from_caches(model: Any) -> None:
    """Lets no pass of generation run over what its cache holds already."""
    prepare = model.prepare_inputs_for_generation

    @wraps(prepare)
    def going_on(
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        if next_sequence_length is None and past_key_values is not None:
            next_sequence_length = input_ids.shape[1] - past_key_values.get_seq_length()
        return prepare(
            input_ids, next_sequence_length=next_sequence_length, past_key_values=past_key_values, **options
        )

    model.prepare_inputs_for_generation = going_on


class Static(Passes):
    """A `StaticCache`, which takes what was read."""

    def __init__(self, how: str, setup: Setup, *, compiled: bool = False) -> None:
        refuse_link(setup)
        self._text = text = shared_text(setup.model, setup)
        super().__init__(setup, torch.compile(text.model) if compiled else text.model, None)
        self.label = f"transformers {transformers.__version__}, {how}"

    def prepare(self, prompt: Sequence[int]) -> float:
        read_ms, self.ids = self._text.read(prompt), self._text.ids
        self.cache, copy_ms = static_copy(self._text.cache, self._text.model, self.setup.capacity)
        return read_ms + copy_ms

    def close(self) -> None:
        shared_text.cache_clear()


class Offloaded(Passes):
    """A cache in host memory; each layer's KV is on its way to the device one layer ahead."""

    def __init__(self, how: str, setup: Setup) -> None:
        refuse_link(setup)
        if setup.device == "cpu":
            raise ValueError("an offloaded cache needs a GPU")
        super().__init__(setup, shared_text(setup.model, setup).model, None)
        self.label = f"transformers {transformers.__version__}, {how}"

    def prepare(self, prompt: Sequence[int]) -> float:
        self.cache = DynamicCache(config=self.model.config, offloading=True)
        return super().prepare(prompt)

    def close(self) -> None:
        shared_text.cache_clear()


SYSTEMS: dict[str, Opener] = {
    "dynamic": partial(Generate, "generate with DynamicCache"),
    "lookup": partial(Generate, "generate with prompt look-up", prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "assisted": partial(Generate, "generate, assisted by the draft", assisted=True),
    "static": partial(Static, "StaticCache in a loop of passes"),
    "static-compiled": partial(Static, "StaticCache in a loop of compiled passes", compiled=True),
    "offloaded": partial(Offloaded, "DynamicCache offloaded, in a loop of passes"),
}
