"""offload-rt: every configuration, by its name. They share a process and a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch

import offload_rt
from bench.cases import text_config
from bench.recorded_text import RecordedText
from bench.rounds import draw, figures
from bench.systems import Opener, Prompt, Run, Setup
from cpu_kv import CpuLink, CudaLink, ElementType, Link, PacedLink
from offload_rt.config.files import config_names
from offload_rt.drafting.levels.base import needs_draft_model
from offload_rt.drafting.levels.configs import load_config
from offload_rt.machine.devices import choose_dtype
from offload_rt.machine.inspection import usable_hardware
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.embedded import model_name
from offload_rt.model.loading import load_model
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.planning.planner import plan
from offload_rt.planning.request import PlanRequest


@lru_cache(1)
def shared_text(setup: Setup) -> RecordedText:
    """The prompt that all configurations continue."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    device = torch.device(setup.device)
    dtype = choose_dtype(setup.dtype, device, model_config(setup.model).dtype)
    config = text_config(setup.options, draft=bool(setup.draft))
    if device.type == "cuda":  # refuses what does not fit before weights are loaded
        element = None if dtype is None else ElementType.of(dtype)
        shape, small = find_shape(setup.model, element), setup.draft and find_shape(setup.draft, element)
        hardware = usable_hardware(device)
        plan(PlanRequest(shape, small or None, config, setup.capacity, 0, hardware)).check()
    notices = list[str]()

    def load(source: str) -> CausalModel:
        return open_runner(load_model(source, device, dtype), model_name(source), notices.append)

    target, draft = load(setup.model), load(setup.draft) if setup.draft else None
    link: Link = CudaLink(device) if device.type == "cuda" else CpuLink()
    other_links: Sequence[Link] = ()
    if setup.link_gb_s:
        link, *other_links = (PacedLink(1e9 * setup.link_gb_s) for _ in range(1 + setup.gpus))
    return RecordedText(target, draft, link, config, setup.capacity, notices, other_links)


class Ours:
    """One configuration; options and settings are keys of it."""

    def __init__(self, name: str, setup: Setup) -> None:
        config = load_config(name, {**setup.options, **setup.settings})
        if setup.draft is None and needs_draft_model([config]):
            raise ValueError(f"{name} needs a draft model: --draft FOLDER")
        overrides = "".join(f", {key} = {value}" for key, value in setup.settings.items())
        self.label = f"offload-rt {offload_rt.__version__}, {name}{overrides}"
        acceptance = setup.acceptance
        self.notes: tuple[str, ...] = () if acceptance is None else (f"synthetic acceptance {acceptance:g}",)
        self._config, self._setup, self._text = config, setup, shared_text(setup)

    def prepare(self, prompt: Prompt) -> float:
        """Reads the prompt; the time to fill this configuration's own caches is part of the result."""
        prefill_ms = self._text.prefill(prompt)
        return prefill_ms + self._text.begin(self._config)

    def run(self, new_tokens: int) -> Run:
        setup = self._setup
        results, self._run = self._text.run(self._config, new_tokens, setup.acceptance)
        tokens = [token for result in results for token in result.tokens]
        levels = {of[0].name: of for of in zip(*(result.levels for result in results), strict=True)}
        plain = sum(result.plain_tokens for result in results)
        note = (
            f"{plain} of {len(tokens)} tokens used plain decoding, because drafting would have taken longer"
        )
        proposed = {name: sum(result.proposed for result in of) for name, of in levels.items()}
        return Run(
            tokens,
            max(result.timings.decode_ms for result in results),
            len(tokens),
            max(result.rounds for result in results),
            {
                name: sum(result.accepted for result in levels[name]) / count
                for name, count in proposed.items()
                if count
            },
            (*self._text.notices, *([note] if plain else ())),
            figures(self._run) | self._text.placement,
        )

    def draw(self, path: str) -> None:
        """Draws some rounds of the last run as PNG."""
        lies = (f"{count:,} {name.replace('_', ' ')}" for name, count in self._text.placement.items())
        link = f"over a link of {self._setup.link_gb_s:.2f} GB/s" if self._setup.link_gb_s else "over PCIe"
        draw(self._run, f"{self.label} {link}: {', '.join(lies)}", Path(path))

    def close(self) -> None:
        self._text.close()
        shared_text.cache_clear()


SYSTEMS: dict[str, Opener] = {name: partial(Ours, name) for name in config_names()}
