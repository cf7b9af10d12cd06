"""offload-rt: every configuration, by its name. They share one prefill in one process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import lru_cache, partial

import torch

from bench.systems import Opener, Run, Setup
from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.config import config_names, load_config, uses_small_model
from offload_rt.loading import choose_dtype, load_model


class Text:
    """A model that has read a prompt so that every configuration can go on from it."""

    def __init__(self, setup: Setup) -> None:
        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        device = torch.device(setup.device)
        dtype = choose_dtype(setup.dtype, device)
        target = load_model(setup.model, device, dtype)
        draft = load_model(setup.draft, device, target.dtype) if setup.draft else None
        link = PacedLink(1e9 * setup.link_gb_s) if setup.link_gb_s else None
        overrides = {"prefill.chunk": setup.chunk, **setup.options}
        config = "triforce" if setup.draft else "retrieval"
        self.llm = LLM.from_models(target, draft, config=config, overrides=overrides, link=link)
        self._prompt: list[int] = []

    def read(self, prompt: Sequence[int]) -> float:
        """Returns ms of the prefill."""
        if list(prompt) != self._prompt:
            self.llm.generate(list(prompt), SamplingParams(max_tokens=1, ignore_eos=True))
            self._prompt = list(prompt)
            self._ms = self.llm.last_result.timings.prompt_ms
        return self._ms


shared_text = lru_cache(1)(Text)


class Ours:
    """One configuration; options are keys of the configuration."""

    notes: tuple[str, ...] = ()

    def __init__(self, config: str, setup: Setup) -> None:
        self.label = f"offload-rt {importlib.metadata.version('offload-rt')}, {config}"
        if setup.draft is None and uses_small_model([load_config(config, setup.options)]):
            raise ValueError(f"{config} needs a draft: --draft FOLDER")
        self._config, self._setup, self._text = config, setup, shared_text(setup)

    def prepare(self, prompt: Sequence[int]) -> float:
        """What a configuration makes of the prompt for itself (its caches, an index) is part of it."""
        read_ms = self._text.read(prompt)
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        return read_ms + self._text.llm.rerun(params, self._config, self._setup.options).timings.prompt_ms

    def run(self, new_tokens: int) -> Run:
        params = SamplingParams(self._setup.temperature, max_tokens=new_tokens, ignore_eos=True)
        done = self._text.llm.rerun(params, self._config, self._setup.options)
        proposed = {level.name: level for level in done.levels if level.proposed}
        return Run(
            done.tokens,
            done.timings.predicted_ms,
            len(done.tokens),
            done.rounds,
            {name: level.accepted / level.proposed for name, level in proposed.items()},
            {level.name: level.ms for level in done.levels},
            tuple(done.notices),
        )

    def close(self) -> None:
        self._text.llm.close()
        shared_text.cache_clear()


SYSTEMS: dict[str, Opener] = {name: partial(Ours, name) for name in config_names()}
