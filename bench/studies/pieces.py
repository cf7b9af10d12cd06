"""`python -m bench pieces`: time of a prefill in the planned pieces, beside that of the whole prompt."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

from bench.random_models import random_prompt
from bench.results import Row
from bench.studies.study import Part, Study, Subject, timed
from cpu_kv import Link, PacedLink
from offload_rt.api.llm import LLM
from offload_rt.attention.backends import torch_threads
from offload_rt.machine.measuring import CPU
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_model


@dataclass(frozen=True)
class Sizes:
    """Sizes of `pieces`.

    Attributes:
        contexts: tokens of the prompts.
        link: GB/s of the emulated link.
        turns: times that each way is measured.
    """

    contexts: tuple[int, ...] = (16384, 32768, 65536)
    link: float = 4.0
    turns: int = 3


@dataclass(frozen=True)
class DemoTarget(Subject):
    """The embedded target in bfloat16."""

    model: PreTrainedModel

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Sizes) -> DemoTarget:
        return cls({"dtype": "bfloat16"}, sizes, load_model(demo_model("target"), CPU, torch.bfloat16))

    def llm(self, link: Link | None, piece: int) -> LLM:
        """Opens the model; `piece` 0: as is planned."""
        overrides = {"prefill.piece": piece, "store.code": "raw"}
        return LLM.from_models(self.model, config="retrieval", link=link, overrides=overrides)


def in_place(subject: DemoTarget) -> Iterator[Row]:
    """Seconds of a prefill in place, in planned pieces and of the whole prompt at once.

    In turns. `ratio`: the median of that of each turn.
    """
    return _compared(subject, lambda: None)


def over_link(subject: DemoTarget) -> Iterator[Row]:
    """Seconds of a prefill over an emulated link, likewise.

    As on a GPU, what computes neither copies nor attends to packed pages: one thread computes, so that copies
    have another core, and pages are not packed.
    """
    with torch_threads(1):
        yield from _compared(subject, lambda: PacedLink(1e9 * subject.sizes.link))


def _compared(subject: DemoTarget, link: Callable[[], Link | None]) -> Iterator[Row]:
    for context in subject.sizes.contexts:
        prompt = random_prompt(subject.model.config.vocab_size, context)
        with subject.llm(link(), piece=0) as planned, subject.llm(link(), piece=context) as whole:
            turns = []
            for turn in range(subject.sizes.turns):
                ways = (planned, whole) if turn % 2 == 0 else (whole, planned)
                turns.append({llm: _read(llm, prompt) for llm in ways})
            pieces, at_once = ([seconds[llm][0] for seconds in turns] for llm in (planned, whole))
            yield {
                "context": context,
                "piece": turns[0][planned][1],
                "pieces": median(pieces),
                "at_once": median(at_once),
                "ratio": median(one / other for one, other in zip(pieces, at_once, strict=True)),
            }


def _read(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Returns the seconds that reading takes, and the tokens of a piece."""
    seconds, context = timed(lambda: llm.read(prompt))
    (sequence,) = llm.engine.sequences
    context.close()
    return seconds, sequence.plan.config.prefill.piece


STUDY = Study(
    note="Medians in seconds of the demo's target with random tokens, on a CPU.",
    sizes=Sizes(),
    quick={"contexts": (8192,), "turns": 1},
    minutes=(20, 1),
    opened=DemoTarget.opened,
    parts={"in-place": Part(in_place), "link": Part(over_link)},
)
