"""offload-rt: every configuration, by its name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from functools import partial

import torch

from bench.systems import Opener, Run, Setup
from offload_rt import LLM, SamplingParams
from offload_rt.config import config_names


class Ours:
    """One configuration; the prompt is read once, and continued again and again."""

    notes: tuple[str, ...] = ()

    def __init__(self, config: str, setup: Setup) -> None:
        if setup.device == "cpu":
            torch.set_num_threads(setup.threads)
        self.label = f"offload-rt {importlib.metadata.version('offload-rt')}, {config}"
        overrides = {"prefill.chunk": setup.chunk, **setup.options}
        # A draft that the configuration has no use for is not loaded.
        draft = setup.draft or "none"
        self._llm = LLM(setup.model, draft, config, setup.device, setup.dtype, overrides)

    def prepare(self, prompt: Sequence[int]) -> float:
        self._llm.generate(list(prompt), SamplingParams(max_tokens=1, ignore_eos=True))
        return self._llm.last_result.timings.prompt_ms

    def run(self, new_tokens: int) -> Run:
        result = self._llm.rerun(SamplingParams(max_tokens=new_tokens, ignore_eos=True))
        return Run(result.tokens, result.timings.predicted_ms, len(result.tokens))

    def close(self) -> None:
        self._llm.close()


SYSTEMS: dict[str, Opener] = {name: partial(Ours, name) for name in config_names()}
