"""The declared side-by-side cases: systems, prompts, and placements of the KV."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload_rt.config.files import parse_override
from offload_rt.config.schema import Config
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError

HELD = "acceptance"
"""A setting of a system that is no configuration key: the rate at which a synthetic rule holds acceptance."""

OF_THE_TEXT = ("store.", "prefill.", "offload.resident_tokens", "offload.cpu_tokens")
"""Keys that apply to the prefill of a prompt, which happens once for all configurations of offload-rt."""

ADAPTERS = sorted(path.stem for path in (Path(__file__).parent / "systems").glob("[a-z]*.py"))


def system(text: str) -> str:
    """An argument type: a system of some adapter."""
    if text.partition(":")[0] not in ADAPTERS or ":" not in text:
        raise argparse.ArgumentTypeError(f"{text}: write adapter:system; adapters are {', '.join(ADAPTERS)}")
    return text


@dataclass(frozen=True)
class Named:
    """A system, from `adapter:system+key=value+…`.

    Attributes:
        settings: configuration keys for this system alone.
        acceptance: rate at which the acceptance of its drafts is held; None: it is not.
    """

    adapter: str
    system: str
    settings: Mapping[str, object] = field(default_factory=dict)
    acceptance: float | None = None

    @classmethod
    def parse(cls, text: str) -> Named:
        """
        Raises:
            UsageError: the system does not take these settings.
        """
        adapter, _, system_text = text.partition(":")
        system, *overrides = system_text.split("+")
        if overrides and adapter != "ours":
            raise UsageError(f"--systems {text}: only ours:… takes settings after a +")
        settings = dict(map(parse_override, overrides))
        if early := next((key for key in settings if key.startswith(OF_THE_TEXT)), None):
            raise UsageError(f"--systems {text}: all systems of ours share {early}; use --set {early}=…")
        acceptance: Any = settings.pop(HELD, None)
        if acceptance is not None and not (isinstance(acceptance, int | float) and 0 <= acceptance <= 1):
            raise UsageError(f"--systems {text}: {HELD} must be a number from 0 to 1, got {acceptance}")
        return cls(adapter, system, settings, acceptance)

    def config(self, options: Mapping[str, object]) -> Config:
        """The configuration of a system of ours, with `options` below its own settings.

        Raises:
            UsageError: there is no such configuration, or its acceptance cannot be held.
        """
        config = load_config(self.system, {**options, **self.settings})
        if self.acceptance is not None and not drafts_chains(config):
            raise UsageError(f"--systems ours:{self.system}: {HELD} can be held for chains only")
        return config


def drafts_chains(config: Config) -> bool:
    """True if the full cache verifies chains, for which an acceptance can be held."""
    levels = config.speculation.levels
    return bool(levels) and levels[-1].shape.kind == "chain" and not levels[-1].merge


def text_config(options: Mapping[str, object], *, draft: bool) -> Config:
    """The configuration of the prefill that all systems of ours share."""
    return load_config("triforce" if draft else "retrieval", options)


def with_acceptances(
    systems: Iterable[str], acceptances: Sequence[float], options: Mapping[str, object]
) -> tuple[str, ...]:
    """The systems, with each of ours that drafts chains repeated at every acceptance.

    Raises:
        UsageError: a system does not exist, or there are acceptances and none drafts chains.
    """
    texts, applied = list[str](), False
    for text in systems:
        named = Named.parse(text)
        repeats = (
            named.adapter == "ours" and drafts_chains(named.config(options)) and named.acceptance is None
        )
        texts += [f"{text}+{HELD}={acceptance:g}" for acceptance in acceptances if repeats] or [text]
        applied |= repeats
    if acceptances and not applied:
        raise UsageError("--acceptance: no system of ours among --systems drafts chains; name one that does")
    return tuple(texts)


def in_place(system: str) -> str:
    """The name of a system without the settings that matter over a link only."""
    return "+".join(override for override in system.split("+") if not override.startswith("offload."))


@dataclass(frozen=True)
class Place:
    """A placement of the KV of a prompt.

    Attributes:
        stream: time in which a paced link carries the KV once, over the time of drafting beside a pass; 0:
            the link of the case.
        shares: shares of the prompt that are resident on the device and attended by the CPU; None: as
            planned.
        timeline: whether a timeline of some rounds is drawn.
        gpus: further links of the same rate, each to an emulated GPU that attends to what it is sent.
    """

    name: str = ""
    stream: float = 0.0
    shares: tuple[float, float] | None = None
    timeline: bool = False
    gpus: int = 0

    def options(self, context: int, page: int) -> dict[str, object]:
        """The shares as configuration keys, in whole pages."""
        keys = "offload.resident_tokens", "offload.cpu_tokens"
        tokens = [int(share * context) // page * page for share in self.shares or ()]
        return dict(zip(keys, tokens, strict=False))


@dataclass(frozen=True)
class Case:
    """Systems that continue the same prompts.

    Attributes:
        systems: as `Named` parses them. The first is the reference for tokens, the last draws the timeline.
        contexts: prompt lengths in tokens, rising.
        batches: how many sequences of such a length are continued together.
        new_tokens: decoded in a run.
        turns: interleaved runs of every system, after one that is not timed.
        link_gb_s: bandwidth of an emulated link that the KV is behind; 0: none.
        places: placements of the KV. If they have names, figures of rounds are reported.
        options: configuration keys.
        threads: of torch on a CPU; 0: its default.
        quick, on_cuda: fields that differ with `--quick`, and on a GPU.
    """

    systems: tuple[str, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 64
    turns: int = 3
    link_gb_s: float = 0.0
    places: tuple[Place, ...] = (Place(),)
    options: Mapping[str, object] = field(default_factory=dict)
    threads: int = 0
    quick: Mapping[str, Any] = field(default_factory=dict)
    on_cuda: Mapping[str, Any] = field(default_factory=dict)


OURS = tuple(f"ours:{name}" for name in ("plain", "retrieval", "triforce", "lookup", "streaming", "naive"))
TRANSFORMERS = tuple(f"transformers:{name}" for name in ("dynamic", "static", "lookup", "assisted"))
ZERO_INFERENCE = "deepspeed:resident", "deepspeed:offloaded", "zero_style:rebuilt"
LLAMACPP = "llamacpp:f32", "llamacpp:f16", "llamacpp:f16-flash"
OPENVINO = "openvino:f32", "openvino:default"
IN_PLACE = Place("in place")
STREAMED = (0.0, 0.0)
GPU_MEMORY_GIB = 23.3
QUICK = {"contexts": (32_768,), "new_tokens": 32, "turns": 1}  # long enough for speculation to pay
ON_CUDA = {
    "speculation.gamma2": 16,
    "speculation.step_down": False,
    "offload.refresh_from": "stream",
    "retrieval.budget": 4096,
    "store.slab_tokens": 16_384,
}

CASES = {
    "peers": Case(
        (*TRANSFORMERS, *ZERO_INFERENCE, *LLAMACPP, *OPENVINO, *OURS[:4]),
        (4096, 32_768, 131_072),
        quick=QUICK,
    ),
    "speedup": Case((*TRANSFORMERS, *OURS), (4096, 8192, 16_384, 32_768, 65_536, 131_072), quick=QUICK),
    "batch": Case(
        (
            *TRANSFORMERS[:2],
            *ZERO_INFERENCE,
            *LLAMACPP[:1],
            *OPENVINO[:1],
            "ours:plain",
            "ours:lookup",
            "ours:retrieval",
            "ours:triforce",
        ),
        (8192,),
        batches=(1, 2, 4, 8),
        quick={"batches": (1, 4), "new_tokens": 32, "turns": 1},
    ),
    "link": Case(
        ("layer_prefetch:rebuilt", "zero_style:rebuilt", *OURS[:3]),
        (8192, 32_768),
        link_gb_s=4.0,
        quick={"contexts": (8192,), "new_tokens": 32, "turns": 1},
    ),
    "offload": Case(
        (
            "ours:plain",
            "ours:retrieval+offload.ahead=0",
            "ours:retrieval+offload.ahead=1",
            "ours:retrieval+offload.refresh_from=store",
            "ours:retrieval",
        ),
        (16_384,),
        new_tokens=128,
        places=(
            IN_PLACE,
            Place("balanced, streamed", 1.0, STREAMED),
            Place("balanced, quarter resident", 1.0, (0.25, 0.0)),
            Place("balanced, quarter CPU", 1.0, (0.0, 0.25)),
            Place("balanced, quarter resident, quarter CPU", 1.0, (0.25, 0.25), timeline=True),
            Place("stream-bound, streamed", 2.0, STREAMED),
            Place("stream-bound, over two links", 2.0, STREAMED, gpus=1),
            Place("draft-bound, streamed", 0.5, STREAMED),
        ),
        options={
            "speculation.gamma2": 12,
            "speculation.step_down": False,
            "offload.refresh_from": "stream",
            "retrieval.budget": 2048,
            "retrieval.recent": 64,
            "store.ring_buffers": 4,
        },
        threads=1,  # passes, drafts and the paced link share the cores
        quick={"contexts": (8192,), "new_tokens": 80, "turns": 1},
        on_cuda={
            "contexts": (16_384, 32_768, 65_536, 131_072),
            "places": (Place("streamed", shares=STREAMED), Place("planned", timeline=True)),
            "options": ON_CUDA,
            "new_tokens": 48,  # each a pass over all KV in plain decoding
        },
    ),
}
