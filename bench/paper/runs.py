"""What the parts share: a text that is read once and continued by composition after composition."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any

from bench.inputs import Models
from offload_rt.api import LLM
from offload_rt.results import GenerationResult, SamplingParams

BUDGET_SHARE = 32

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """What is measured on.

    Attributes:
        books: tokens of each text.
        tokens: of all, one behind the other.
    """

    models: Models
    books: list[list[int]]
    tokens: list[int]
    arguments: argparse.Namespace


Measure = Callable[[Study], list[Row]]


def base(arguments: argparse.Namespace) -> dict[str, object]:
    """Keys of every composition."""
    budget = max(256, arguments.context // BUDGET_SHARE)
    return {
        "speculation.step_down": False,
        "retrieval.budget": budget,
        "retrieval.recent": budget // 4,
        "retrieval.refresh": "every",
        **dict(arguments.overrides),
    }


def settings(arguments: argparse.Namespace, **level: object) -> dict[str, object]:
    """The same, with the target over its retrieved cache as the one level."""
    levels = [{"model": "target", "cache": "retrieved", **level}]
    return {"speculation.levels": levels, **base(arguments)}


def runs(
    llm: LLM,
    arguments: argparse.Namespace,
    overrides: Mapping[str, object],
    config: str = "retrieval",
    temperature: float | None = None,
    new_tokens: int | None = None,
) -> list[GenerationResult]:
    """A text of each seed, from the end of the prompt that was read last."""
    heat = arguments.temperature if temperature is None else temperature
    count = new_tokens or arguments.new_tokens
    return [
        llm.rerun(SamplingParams(heat, max_tokens=count, seed=seed, ignore_eos=True), config, overrides)
        for seed in range(1, arguments.seeds + 1)
    ]


def summary(results: Sequence[GenerationResult]) -> dict[str, Any]:
    """What the texts come to; `error` is the standard error of `tokens_per_pass`, over the texts."""
    yields = [len(one.tokens) / one.rounds for one in results]
    tokens, rounds = sum(len(one.tokens) for one in results), sum(one.rounds for one in results)
    proposed = sum(one.timings.draft_n for one in results)
    return {
        "tokens_per_pass": tokens / rounds,
        "error": stdev(yields) / len(yields) ** 0.5 if len(yields) > 1 else None,
        "proposed_per_pass": proposed / rounds,
        "accepted": sum(one.timings.draft_n_accepted for one in results) / max(1, proposed),
        "draft_ms_per_pass": sum(one.levels[0].ms for one in results) / rounds,
        "ms_per_token": median(one.timings.predicted_ms / len(one.tokens) for one in results),
    }


def reader(study: Study, context: int | None = None, **options: Any) -> LLM:
    """An LLM that has read the beginning of the text, for every composition to go on from."""
    models, arguments = study.models, study.arguments
    config = "retrieval" if models.draft is None else "triforce"
    llm = LLM.from_models(models.target, models.draft, models.tokenizer, config, base(arguments), **options)
    llm.generate(
        study.tokens[: context or arguments.context], SamplingParams(max_tokens=2, seed=0, ignore_eos=True)
    )
    return llm
