"""The declared cases: what runs side by side and where, if the command line does not say otherwise."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from bench import inputs
from bench.inputs import size
from offload_rt.config import Config
from offload_rt.errors import UsageError
from offload_rt.levels.base import kept_means
from offload_rt.toml import config_names, load_config, parse_override

HELD = "acceptance"
"""The setting of a system that is no key of a configuration: what coins hold its acceptance at."""

OF_THE_TEXT = ("store.", "prefill.", "offload.resident_tokens", "offload.cpu_tokens")
"""Keys that count when a prompt is read, once for all systems of ours."""

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
        settings: keys of our configurations that hold for this system alone.
        acceptance: of its drafts, held by coins; None: what it is.
    """

    adapter: str
    system: str
    settings: Mapping[str, object] = field(default_factory=dict)
    acceptance: float | None = None

    @classmethod
    def parse(cls, text: str) -> Named:
        """
        Raises:
            UsageError: settings that the system does not take.
        """
        adapter, _, rest = text.partition(":")
        system, *given = rest.split("+")
        if given and adapter != "ours":
            raise UsageError(f"--systems {text}: only systems of ours take settings behind a +")
        settings = dict(map(parse_override, given))
        late = next((key for key in settings if key.startswith(OF_THE_TEXT)), None)
        if late is not None:
            said = "is of the text, which all systems of ours share; give it to all, with --set"
            raise UsageError(f"--systems {text}: {late} {said}")
        held: Any = settings.pop(HELD, None)
        if held is not None and not (isinstance(held, int | float) and 0 <= held <= 1):
            raise UsageError(f"--systems {text}: {HELD} {held} is not a number of at least 0 and at most 1")
        return cls(adapter, system, settings, held)

    def config(self, options: Mapping[str, object]) -> Config:
        """The composition of a system of ours, with `options` below its own settings.

        Raises:
            UsageError: there is none such, or its acceptance cannot be held.
        """
        if self.system not in config_names():
            known = ", ".join(config_names())
            raise UsageError(f"--systems ours:{self.system}: no such config; there are {known}")
        config = load_config(self.system, {**options, **self.settings})
        if self.acceptance is not None and not _chains(config):
            raise UsageError(f"--systems ours:{self.system}: {HELD} is held where chains are drafted alone")
        return config


def _chains(config: Config) -> bool:
    levels = config.speculation.levels
    return bool(levels) and levels[-1].shape.kind == "chain" and not levels[-1].merge


def text_config(options: Mapping[str, object], *, draft: bool) -> Config:
    """By which a text is read that all systems of ours share."""
    return load_config("triforce" if draft else "retrieval", options)


def declared(
    systems: Iterable[str],
    acceptances: Sequence[float],
    options: Mapping[str, object],
    *,
    draft: bool,
    paced: bool,
) -> tuple[str, ...]:
    """The systems, each of ours that drafts chains once at every acceptance.

    Args:
        draft: whether there is a small model.
        paced: whether a link is paced by how long drafting takes.

    Raises:
        UsageError: one of ours cannot be had as it is named, or reads means that the text does not keep; or
            none drafts, and a link is paced or an acceptance is to be held.
    """
    kept_chunk, kept_pages = kept_means(text_config(options, draft=draft))
    found, holds, drafts = list[str](), False, False
    for text in systems:
        named, free = Named.parse(text), False
        if named.adapter == "ours":
            config = named.config(options)
            chunk, pages = kept_means(config)
            if chunk not in (None, kept_chunk) or pages > kept_pages:
                said = "needs means that are kept when the text is read, which all systems of ours share"
                raise UsageError(f"--systems {text}: {said}; give its keys to all, with --set")
            drafts |= bool(config.speculation.levels)
            free = _chains(config) and named.acceptance is None
        found += [f"{text}+{HELD}={each:g}" for each in acceptances if free] or [text]
        holds |= free
    if acceptances and not holds:
        raise UsageError("--acceptance: none of --systems drafts chains by ours; name one that does")
    if paced and not drafts:
        raise UsageError(
            "--systems: none of ours drafts, and how long that takes tells how fast a link to pace"
        )
    return tuple(found)


def in_place(system: str) -> str:
    """Its name without what only counts over a link."""
    return "+".join(one for one in system.split("+") if not one.startswith("offload."))


@dataclass(frozen=True)
class Place:
    """Where the KV of a prompt lies, and what is between it and those who attend to it.

    Attributes:
        stream: how long a paced link takes to carry the KV once, over how long a draft beside a pass does;
            0: the link of the case.
        shares: of the prompt, resident on the device and attended by the CPU; None: as configured or planned.
        drawn: a timeline of some rounds is drawn.
        cards: further links of the same rate, each to an emulated card that attends what it is sent.
    """

    name: str = ""
    stream: float = 0.0
    shares: tuple[float, float] | None = None
    drawn: bool = False
    cards: int = 0

    def options(self, context: int, page: int) -> dict[str, object]:
        """The shares as configuration keys, in whole pages."""
        keys = "offload.resident_tokens", "offload.cpu_tokens"
        tokens = [int(share * context) // page * page for share in self.shares or ()]
        return dict(zip(keys, tokens, strict=False))


@dataclass(frozen=True)
class Case:
    """Systems that continue the same prompts.

    Attributes:
        name: of the command.
        about: what it compares, in a line.
        systems: as `Named` has them: the first one is the reference, the last one stands for ours.
        contexts: prompt lengths in tokens.
        batches: how many texts of such a length are continued together.
        new_tokens: decoded a run.
        turns: interleaved runs of every system, after one that is not timed.
        link_gb_s: of an emulated link that KV lies behind; 0: none.
        places: at which every prompt is continued. Where they have names, rounds are looked into.
        options: keys of our configurations.
        threads: of torch on a CPU; 0: as many as it has.
        if_quick, on_cuda: fields that are others with `--quick`, and on a GPU.
    """

    name: str
    about: str
    systems: tuple[str, ...] = size(
        MISSING,
        "adapter:system; ours may have keys of their own: ours:retrieval+retrieval.budget=512",
        inputs.several(system),
        metavar="A,B",
    )
    contexts: tuple[int, ...] = size(MISSING, "tokens of prompts", inputs.counts(2), metavar="N,N")
    batches: tuple[int, ...] = size(
        (1,), "how many texts of a context are continued together", inputs.counts(1), metavar="N,N"
    )
    new_tokens: int = size(64, "of a run", inputs.count(2), "-n", "--new-tokens")
    turns: int = size(3, "runs of every system in turn, after one that is not timed", inputs.count(1))
    link_gb_s: float = size(
        0.0, "KV lies behind an emulated link; 0: none", inputs.number(), "--link", metavar="GB/s"
    )
    places: tuple[Place, ...] = (Place(),)
    options: Mapping[str, object] = field(default_factory=dict)
    threads: int = 0
    if_quick: Mapping[str, Any] = field(default_factory=dict)
    on_cuda: Mapping[str, Any] = field(default_factory=dict)


OURS = tuple(f"ours:{name}" for name in ("plain", "retrieval", "triforce", "lookup", "streaming", "naive"))
TRANSFORMERS = tuple(f"transformers:{name}" for name in ("dynamic", "static", "lookup", "assisted"))
ZERO_INFERENCE = "deepspeed:resident", "deepspeed:offloaded", "zero_style:rebuilt"
LLAMACPP = "llamacpp:f32", "llamacpp:f16", "llamacpp:f16-flash"
OPENVINO = "openvino:f32", "openvino:default"
IN_PLACE = Place("in place")
STREAMED = (0.0, 0.0)
GPU_MEMORY_GIB = 24.0  # of models with random weights: what a desktop's card has
ON_CUDA = {
    "speculation.gamma2": 16,
    "speculation.step_down": False,
    "offload.refresh_from": "stream",
    "retrieval.budget": 4096,
    "store.slab_tokens": 16_384,
}

CASES = (
    Case(
        "peers",
        "ours beside transformers, DeepSpeed-ZeRO-Inference, llama.cpp, OpenVINO",
        (*TRANSFORMERS, *ZERO_INFERENCE, *LLAMACPP, *OPENVINO, *OURS[:4]),
        (4096, 32_768, 131_072),
        if_quick={"contexts": (4096,), "new_tokens": 32},
    ),
    Case(
        "speedup",
        "every configuration of ours beside transformers, by context",
        (*TRANSFORMERS, *OURS),
        (4096, 8192, 16_384, 32_768, 65_536, 131_072),
        if_quick={"contexts": (4096, 8192), "new_tokens": 32},
    ),
    Case(
        "batch",
        "texts that are continued together, by how many: the best batch of each system",
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
        if_quick={"contexts": (4096,), "batches": (1, 4), "new_tokens": 32},
    ),
    Case(
        "link",
        "ours over an emulated link, beside layer prefetch and attention on the CPU",
        ("layer_prefetch:rebuilt", "zero_style:rebuilt", *OURS[:3]),
        (8192, 32_768),
        link_gb_s=4.0,
        if_quick={"contexts": (4096,), "new_tokens": 32},
    ),
    Case(
        "offload",
        "the engine over a link, against its lower bounds and its own plain decoding",
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
            Place("balanced, quarter resident, quarter CPU", 1.0, (0.25, 0.25), drawn=True),
            Place("stream-bound, streamed", 2.0, STREAMED),
            Place("stream-bound, over two links", 2.0, STREAMED, cards=1),
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
        threads=1,  # pass, drafting and the paced link share the cores
        if_quick={"contexts": (8192,), "new_tokens": 80, "turns": 1},
        on_cuda={
            "contexts": (16_384, 32_768, 65_536, 131_072),
            "places": (Place("streamed", shares=STREAMED), Place("planned", drawn=True)),
            "options": ON_CUDA,
            "new_tokens": 48,  # of plain decoding, a pass over all KV each
        },
    ),
)
