"""`bench offload` without a GPU: paced links, the demo pair, and random weights in small shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.inputs import Models, say
from bench.offload_cases import BALANCED, LINK_CASES, STREAMED, Sizes, System, held_systems, paced_systems
from bench.offload_measure import InPlace, Measured, Subject, measure, measure_in_place, one_thread
from bench.plan_truth import shape_values
from bench.primitives import processor
from bench.random_models import random_model
from bench.timeline_plot import best_run, draw
from cpu_kv import PacedLink
from offload_rt.config import OffloadConfig
from offload_rt.errors import UsageError
from offload_rt.graphs import GraphedModel
from offload_rt.model import CausalModel

AHEAD = OffloadConfig().ahead


def measure_pair(
    models: Models, prompt: Sequence[int], sizes: Sizes, composition: str, picture: Path | None
) -> list[dict[str, Any]]:
    """A pair of models over links on which a stream takes as long as a draft, twice as long, and half.

    Raises:
        UsageError: a system's tokens are not those of plain decoding.
    """
    target = GraphedModel(models.target, models.names[0], say)
    draft = None if models.draft is None else GraphedModel(models.draft, models.names[1] or "", say)
    subject = Subject(target, draft, prompt)
    cases = []
    with one_thread():
        say(f"{target.name}, {len(prompt):,} tokens: what drafts and passes take with the KV in place")
        in_place = measure_in_place(subject, sizes, composition)
        figures = processor(target, sizes.context, sizes.gamma, in_place)
        for name, ratio in LINK_CASES.items():
            rate = _rate(target, sizes, in_place, ratio)
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s")
            measured = _measure(subject, sizes, paced_systems(composition, name, AHEAD), rate, in_place)
            for one in measured:
                _check_tokens(one, in_place.tokens)
            cases.append(_case(name, subject, sizes, composition, measured, figures))
            if name == BALANCED and picture is not None:
                shown = next(one for one in measured if one.system.offload.get("ahead") == AHEAD)
                draw(best_run(shown.runs), _title(shown, target.name, rate), picture)
    return cases


def measure_shape(shape: str, sizes: Sizes, acceptances: tuple[float, ...]) -> dict[str, Any]:
    """Random weights over random KV, with acceptance held at some values; a balanced link."""
    target = GraphedModel(random_model(shape, torch.device("cpu"), torch.float32), shape, say)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(target.vocabulary, (sizes.context,), generator=generator).tolist()
    subject = Subject(target, None, prompt, random_kv=True)
    with one_thread():
        say(f"{shape}, {len(prompt):,} tokens, synthetic acceptance")
        in_place = measure_in_place(subject, sizes, "retrieval")
        figures = processor(target, sizes.context, sizes.gamma, in_place)
        rate = _rate(target, sizes, in_place, LINK_CASES[BALANCED])
        systems = held_systems(acceptances, AHEAD, STREAMED, "both")
        measured = _measure(subject, sizes, systems, rate, in_place)
    return _case("synthetic acceptance", subject, sizes, "retrieval", measured, figures)


def _rate(target: CausalModel, sizes: Sizes, in_place: InPlace, ratio: float) -> float:
    """Bytes a second at which carrying the KV once takes `ratio` times as long as a draft."""
    token_bytes = 2 * target.layers * target.kv_heads * target.head_dim * target.dtype.itemsize
    return sizes.context * token_bytes / (ratio * sizes.gamma * in_place.draft_token / 1e3)


def _measure(
    subject: Subject, sizes: Sizes, systems: list[System], rate: float, in_place: InPlace
) -> list[Measured]:
    link: Callable[[], PacedLink] = lambda: PacedLink(rate)  # noqa: E731
    return measure(
        subject,
        sizes,
        systems,
        link,
        rate,
        lambda system: in_place.plain_pass if system.plain else in_place.verification,
    )


def _check_tokens(measured: Measured, expected: Sequence[int]) -> None:
    for run in measured.runs:
        if any(token != other for token, other in zip(run.tokens, expected, strict=False)):
            raise UsageError(
                f"{measured.system.name} ({measured.system.placement}): its tokens are not those of plain "
                "decoding; this is a fault of the engine, or two logits closer than rounding: try another one"
            )


def _case(
    name: str,
    subject: Subject,
    sizes: Sizes,
    drafting: str,
    measured: list[Measured],
    figures: dict[str, Any],
) -> dict[str, Any]:
    target, draft = subject.target, subject.draft
    return {
        "case": name,
        "model": target.name,
        "draft": None if draft is None else draft.name,
        "device": "cpu",
        "shape": shape_values(target),
        "draft_shape": None if draft is None else shape_values(draft),
        "drafting": drafting,
        "settings": sizes.keys,
        "processor": figures,
        "rows": [one.row for one in measured],
    }


def _title(shown: Measured, model: str, rate: float) -> str:
    one = shown.row
    return (
        f"{model}, {report.tokens_name(one['context'])} tokens over a paced link of {rate / 1e9:.2f} GB/s, "
        f"{one['gamma']} tokens drafted a round, {one['system']}: "
        f"{one['ms_per_token']['median']:.1f} ms a token"
    )
