"""transformers: `generate`, with look-up and assisted, and loops over other caches; one prefill for all."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from bench.systems import Opener, Prompt, Run, Setup
from bench.systems._passes import Continued, Text, load

LOOKUP_TOKENS = 10  # what prompt look-up proposes a round by default


@lru_cache(2)  # target and draft
def shared_text(folder: str, setup: Setup) -> Text:
    """What all systems here continue."""
    model = load(folder, setup)
    prepare = model.prepare_inputs_for_generation

    def going_on(input_ids: Tensor, next_sequence_length: int = 0, **kwargs: Any) -> Any:
        """The first pass of look-up and assisted generation takes the whole text behind a filled cache."""
        lacking = input_ids.shape[1] - kwargs["past_key_values"].get_seq_length()
        return prepare(input_ids, next_sequence_length=lacking, **kwargs)

    model.prepare_inputs_for_generation = going_on
    return Text(model, setup.chunk)


class Generate(Continued):
    """A way to continue the shared text."""

    def __init__(self, how: str, setup: Setup, *, compiled: bool = False, **given: Any) -> None:
        text = shared_text(setup.model, setup)
        super().__init__(f"transformers {transformers.__version__}, {how}", setup, text, **given)
        if compiled:
            self.model = torch.compile(text.model)

    def close(self) -> None:
        shared_text.cache_clear()
        super().close()


class Assisted(Generate):
    """`generate` with an assistant."""

    def __init__(self, how: str, setup: Setup) -> None:
        if setup.draft is None or setup.draft == setup.model:
            raise ValueError("assisted generation needs a draft of its own: --draft FOLDER")
        self._draft = shared_text(setup.draft, setup)
        super().__init__(how, setup, assistant_model=self._draft.model)

    def prepare(self, prompt: Prompt) -> float:
        return super().prepare(prompt) + self._draft.read(prompt)

    def run(self, new_tokens: int) -> Run:
        model, cache = self._draft.model, self._draft.cache
        self._draft.rewind(cache)
        # An assistant has no other way to be given a filled cache.
        model.generate = partial(type(model).generate, model, past_key_values=cache)
        return super().run(new_tokens)


class Offloaded(Generate):
    """A cache in host memory; each layer's KV is on its way to the device one layer ahead."""

    def __init__(self, how: str, setup: Setup) -> None:
        if setup.device == "cpu":
            raise ValueError("an offloaded cache needs a GPU")
        super().__init__(how, setup, looped=True)
        offloaded = partial(DynamicCache, config=self.model.config, offloading=True)
        self.text = Text(self.model, setup.chunk, offloaded)


SYSTEMS: dict[str, Opener] = {
    "dynamic": partial(Generate, "generate with DynamicCache"),
    "lookup": partial(Generate, "generate with prompt look-up", prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "assisted": partial(Assisted, "generate, assisted by the draft"),
    "static": partial(Generate, "StaticCache in a loop of passes", static=True, looped=True),
    "static-compiled": partial(
        Generate, "StaticCache in a loop of compiled passes", static=True, looped=True, compiled=True
    ),
    "offloaded": partial(Offloaded, "DynamicCache offloaded, in a loop of passes"),
}
