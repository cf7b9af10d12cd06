"""transformers: `generate`, also with look-up and assisted, and loops of passes. They share a prefill."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import transformers
from torch import Tensor
from transformers import DynamicCache

from bench.systems import Opener, Prompt, Run, Setup
from bench.systems._passes import Continued, Text, load
from offload_rt.model.architecture import CACHE_ARGUMENT

LOOKUP_TOKENS = 10  # per round, as prompt look-up proposes by default


@lru_cache(2)  # target and draft
def shared_prompt(folder: str, setup: Setup) -> Text:
    """The prompt that all systems here continue."""
    model = load(folder, setup)
    prepare = model.prepare_inputs_for_generation

    def going_on(input_ids: Tensor, next_sequence_length: int = 0, **kwargs: Any) -> Any:
        """Passes only what the cache lacks; look-up and assisted generation would pass the whole text."""
        lacking = input_ids.shape[1] - kwargs[CACHE_ARGUMENT].get_seq_length()
        return prepare(input_ids, next_sequence_length=lacking, **kwargs)

    model.prepare_inputs_for_generation = going_on
    return Text(model, setup.chunk)


class Generate(Continued):
    """Continues the shared prompt."""

    def __init__(self, how: str, setup: Setup, **options: Any) -> None:
        text = shared_prompt(setup.model, setup)
        super().__init__(f"transformers {transformers.__version__}, {how}", setup, text, **options)

    def close(self) -> None:
        shared_prompt.cache_clear()
        super().close()


class Assisted(Generate):
    """`generate` with an assistant."""

    def __init__(self, how: str, setup: Setup) -> None:
        if setup.draft is None or setup.draft == setup.model:
            raise ValueError("assisted generation needs a draft model: --draft FOLDER")
        self._draft = shared_prompt(setup.draft, setup)
        super().__init__(how, setup, assistant_model=self._draft.model)

    def prepare(self, prompt: Prompt) -> float:
        return super().prepare(prompt) + self._draft.prefill(prompt)

    def run(self, new_tokens: int) -> Run:
        model, cache = self._draft.model, self._draft.cache
        self._draft.rewind(cache)
        # There is no other way to give an assistant a filled cache.
        model.generate = partial(type(model).generate, model, **{CACHE_ARGUMENT: cache})
        return super().run(new_tokens)


class Offloaded(Generate):
    """A cache in host memory; each layer's KV is copied to the device one layer ahead."""

    def __init__(self, how: str, setup: Setup) -> None:
        if setup.device == "cpu":
            raise ValueError("an offloaded cache needs a GPU")
        super().__init__(how, setup, looped=True)
        offloaded = partial(DynamicCache, config=self.text.model.config, offloading=True)
        self.text = Text(self.text.model, setup.chunk, offloaded)


SYSTEMS: dict[str, Opener] = {
    "dynamic": partial(Generate, "generate with DynamicCache"),
    "lookup": partial(Generate, "generate with prompt look-up", prompt_lookup_num_tokens=LOOKUP_TOKENS),
    "assisted": partial(Assisted, "generate, assisted by the draft"),
    "static": partial(Generate, "StaticCache in a loop of passes", static=True, looped=True),
    "offloaded": partial(Offloaded, "DynamicCache offloaded, in a loop of passes"),
}
