"""offload-rt: every configuration, by its name. They share one prefill in one process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import count
from pathlib import Path

import torch

from bench.held import HeldVerifier
from bench.rounds import Recorded, figures, interval
from bench.systems import Opener, Run, Setup
from bench.timeline_plot import draw
from cpu_kv import CpuLink, CudaLink, Link, PacedLink
from cpu_kv.link import CopyRecord, RecordingLink
from offload_rt.caches.places import Shares
from offload_rt.config import Config, config_names, load_config, uses_small_model
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine import Engine
from offload_rt.graphs import GraphedModel
from offload_rt.loading import choose_dtype, load_model
from offload_rt.machine.doctor import usable_hardware
from offload_rt.model import CausalModel
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import plan
from offload_rt.planning.shapes import find_shape
from offload_rt.results import GenerationResult, SamplingParams
from offload_rt.sampling import GeneratorDraws, Sampler
from offload_rt.session import Continuation, Session
from offload_rt.timeline import Timeline
from offload_rt.writer import Writer


class Text:
    """A prompt in the store of an engine, continued again and again by several compositions.

    Args:
        link: is closed with the text.
        config: its store, its prefill and the means that it keeps hold for every composition.
        capacity: tokens of the longest prompt and its continuation together.
        shares: not as `config` says, or the plan on a GPU, but these.
    """

    def __init__(
        self,
        target: CausalModel,
        draft: CausalModel | None,
        link: Link,
        config: Config,
        capacity: int,
        shares: Shares | None = None,
    ) -> None:
        self._capacity, self._shares = capacity, shares
        self._notices: list[str] = []
        self._engine = Engine(target, draft, [config], link, on_notice=self._notices.append)
        self._timeline = self._engine.timeline = Timeline()
        self._recording = link if isinstance(link, RecordingLink) else None
        self._seeds = count()
        self._prompt: list[int] = []
        self._session: Session | None = None
        self.close = self._engine.close

    @property
    def session(self) -> Session:
        """The text that was read."""
        assert self._session is not None
        return self._session

    @property
    def placed(self) -> dict[str, int]:
        """How many tokens of the prompt lie where, by the names of `Shares`; whole pages are streamed."""
        page, shares = self._engine.store.layout.page_size, self.session.full.shares
        streamed = (len(self._prompt) - 1) // page * page - shares.resident_tokens - shares.cpu_tokens
        return asdict(shares) | {"streamed_tokens": max(0, streamed)}

    def _continuation(self, new_tokens: int, temperature: float = 0.0) -> Continuation:
        draws = GeneratorDraws(next(self._seeds), self._engine.target.device)
        return Continuation(Sampling(Sampler(temperature), draws), new_tokens)

    def read(self, prompt: Sequence[int]) -> float:
        """Takes a prompt, if it is another one than before; returns ms of its prefill."""
        if list(prompt) != self._prompt:
            if self._session is not None:
                self._engine.close_session(self._session)
            continuation = self._continuation(self._capacity - len(prompt))
            self._session = self._engine.open(prompt, continuation, self._shares)
            self._prompt, self._ms = list(prompt), self._session.prefill_ms
            if self._recording is not None:
                self._recording.record()
        return self._ms

    def begin(self, config: Config, new_tokens: int = 1, temperature: float = 0.0) -> float:
        """Back to the end of the prompt; returns ms in which the composition's caches took the prompt."""
        session = self.session
        if config.offload.refresh_from == "auto":  # there is room for as many buffers as were planned
            config = config.having("offload.refresh_from", session.planned.offload.refresh_from)
        session.rerun(self._engine.available(config), self._continuation(new_tokens, temperature))
        return session.prefill_ms

    def run(
        self, config: Config, new_tokens: int, held: float | None = None, temperature: float = 0.0
    ) -> tuple[GenerationResult, Recorded]:
        """Continues the prompt.

        Args:
            held: at what a synthetic verdict holds the acceptance.
        """
        session = self.session
        self.begin(config, new_tokens, temperature)
        if held is not None:
            session.verifier = HeldVerifier(session.verifier, held)
        self._timeline.spans.clear()
        self._copies()
        params = SamplingParams(temperature, max_tokens=new_tokens, ignore_eos=True)
        writer = Writer(self._engine, session, params, None, self._notices)
        try:
            while not writer.ended:
                (round,) = self._engine.step([session])
                if isinstance(round, Exception):
                    raise round
                list(writer.write(round))
        finally:
            self._engine.stop(session)  # the link would go on into a pass that nobody asks for
        start, end = interval(session.rounds)
        copies = [copy for copy in self._copies() if start <= copy.end and copy.start <= end]
        return writer.result(), Recorded(session.rounds, list(self._timeline.spans), copies)

    def _copies(self) -> list[CopyRecord]:
        return self._recording.recorded() if self._recording is not None else []


@lru_cache(1)
def shared_text(setup: Setup) -> Text:
    """What all systems of ours continue."""
    if setup.device == "cpu":
        torch.set_num_threads(setup.threads)
    device = torch.device(setup.device)
    dtype = choose_dtype(setup.dtype, device)
    config = load_config("triforce" if setup.draft else "retrieval", setup.options)
    if device.type == "cuda":  # refused before weights are loaded that have no room
        shape, small = find_shape(setup.model, dtype), setup.draft and find_shape(setup.draft, dtype)
        hardware = usable_hardware(device)
        plan(PlanRequest(shape, small or None, config, setup.capacity, 0, hardware)).check()
    target, draft = (
        None if path is None else GraphedModel(load_model(path, device, dtype), path, print)
        for path in (setup.model, setup.draft)
    )
    assert target is not None
    link: Link = CudaLink(device) if device.type == "cuda" else CpuLink()
    if setup.link_gb_s:
        link = PacedLink(1e9 * setup.link_gb_s)
    return Text(target, draft, link, config, setup.capacity)


class Ours:
    """One configuration; options and settings are keys of it."""

    def __init__(self, name: str, setup: Setup) -> None:
        config = load_config(name, {**setup.options, **setup.settings})
        if setup.draft is None and uses_small_model([config]):
            raise ValueError(f"{name} needs a draft: --draft FOLDER")
        given = "".join(f", {key} = {value}" for key, value in setup.settings.items())
        self.label = f"offload-rt {importlib.metadata.version('offload-rt')}, {name}{given}"
        held = f"synthetic acceptance {setup.acceptance:g}" if setup.acceptance is not None else None
        self.notes: tuple[str, ...] = () if held is None else (held,)
        self._config, self._setup, self._text = config, setup, shared_text(setup)

    def prepare(self, prompt: Sequence[int]) -> float:
        """What a configuration makes of the prompt for itself (its caches, an index) is part of it."""
        read_ms = self._text.read(prompt)
        return read_ms + self._text.begin(self._config)

    def run(self, new_tokens: int) -> Run:
        setup = self._setup
        done, self._run = self._text.run(self._config, new_tokens, setup.acceptance, setup.temperature)
        proposed = {level.name: level for level in done.levels if level.proposed}
        return Run(
            done.tokens,
            done.timings.predicted_ms,
            len(done.tokens),
            done.rounds,
            {name: level.accepted / level.proposed for name, level in proposed.items()},
            {level.name: level.ms for level in done.levels},
            tuple(done.notices),
            figures(self._run) | self._text.placed,
        )

    def draw(self, path: str) -> None:
        """A picture of some rounds of the last run, as PNG."""
        lies = (f"{count:,} {name.replace('_', ' ')}" for name, count in self._text.placed.items())
        link = f"over a link of {self._setup.link_gb_s:.2f} GB/s" if self._setup.link_gb_s else "over PCIe"
        draw(self._run, f"{self.label} {link}: {', '.join(lies)}", Path(path))

    def close(self) -> None:
        self._text.close()
        shared_text.cache_clear()


SYSTEMS: dict[str, Opener] = {name: partial(Ours, name) for name in config_names()}
