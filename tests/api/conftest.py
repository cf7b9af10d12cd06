"""Fixtures of the tests of `LLM` and `Context`: a pair of models whose every token is an ASCII character."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.contexts import ASCII, CHUNK, PARAMS, PLACES, PROMPT, Make
from support.small_engine import CPU, engine_overrides, link_to, other_gpu, tier_keys
from support.small_engine import place as put
from support.tiny_models import byte_tokenizer, tiny_target, to
from transformers import PreTrainedModel

from cpu_kv import Link
from offload_rt import LLM


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa", vocabulary=ASCII)


@pytest.fixture(scope="module")
def models(target: PreTrainedModel, draft: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    return target, draft


@pytest.fixture(scope="module")
def plain_tokens(target: PreTrainedModel) -> list[int]:
    """60 greedy tokens after `PROMPT`."""
    with LLM.from_models(target, config="plain") as llm:
        return llm.generate(PROMPT, PARAMS).tokens


@pytest.fixture
def make(models: tuple[PreTrainedModel, PreTrainedModel]) -> Iterator[Make]:
    """Makes LLMs whose sequences lie in a place, and closes them."""
    with ExitStack() as closing:

        def llm(
            config: str = "triforce",
            place: str = "in place",
            device: torch.device = CPU,
            link: Link | None = None,
            step_down: bool = False,
            **options: Any,
        ) -> LLM:
            target, draft = (to(model, device) for model in models)
            tiers, options = PLACES[place], {"tokenizer": byte_tokenizer(), **options}
            overrides = engine_overrides(ahead=2, **{} if tiers is None else tier_keys(tiers))
            overrides |= {"prefill.chunk": CHUNK, "speculation.step_down": step_down}
            if tiers is not None:
                options["link"] = link or link_to(device)
                options["other_links"] = [link_to(other_gpu(device)) for _ in tiers.gpus]
            made = closing.enter_context(
                LLM.from_models(target, draft, config=config, overrides=overrides, **options)
            )
            if tiers is not None and tiers.gpus:
                put(made, tiers)
            return made

        yield llm
    for model in models:
        to(model, CPU)
