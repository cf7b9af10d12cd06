"""`bench offload` without a GPU: paced links, the demo pair, and random weights in small shapes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.inputs import Models, say
from bench.offload.cases import BALANCED, LINK_CASES, STREAMED, Sizes, System, held_systems, paced_systems
from bench.offload.measure import Measured, measure, one_thread
from bench.offload.prediction_accuracy import shape_values
from bench.offload.primitives import processor
from bench.offload.random_models import random_model
from bench.offload.references import References, Subject
from bench.offload.timeline_plot import best_run, draw
from cpu_kv import PacedLink
from offload_rt.config import OffloadConfig
from offload_rt.errors import UsageError
from offload_rt.graphs import GraphedModel

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
    with one_thread(), ExitStack() as opened:
        say(f"{target.name}, {len(prompt):,} tokens: what drafts and passes take with the KV in place")
        references = References(subject, sizes, composition)
        opened.callback(references.close)
        for name, ratio in LINK_CASES.items():
            systems = paced_systems(composition, name, AHEAD)
            case, measured = _case(name, references, systems, ratio)
            for one in measured:
                _check_tokens(one, references.tokens)
            cases.append(case)
            if name == BALANCED and picture is not None:
                # Of all shares at once, so that every resource is at work.
                shown = next(
                    one
                    for one in measured
                    if one.system.placement == "both" and one.system.offload.get("ahead") == AHEAD
                )
                draw(best_run(shown.runs), _title(shown, target.name), picture)
    return cases


def measure_shape(shape: str, sizes: Sizes, acceptances: tuple[float, ...]) -> dict[str, Any]:
    """Random weights over random KV, with acceptance held at some values; a balanced link."""
    target = GraphedModel(random_model(shape, torch.device("cpu"), torch.float32), shape, say)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(target.vocabulary, (sizes.context,), generator=generator).tolist()
    subject = Subject(target, None, prompt, random_kv=True)
    with one_thread(), ExitStack() as opened:
        say(f"{shape}, {len(prompt):,} tokens, synthetic acceptance")
        references = References(subject, sizes, "retrieval")
        opened.callback(references.close)
        systems = held_systems(acceptances, AHEAD, STREAMED, "both")
        return _case("synthetic acceptance", references, systems, LINK_CASES[BALANCED])[0]


def _case(
    name: str, references: References, systems: list[System], ratio: float
) -> tuple[dict[str, Any], list[Measured]]:
    """Runs a case; returns it as JSON values, and what was measured.

    Args:
        ratio: how long carrying the KV once takes, over a draft beside it.
    """
    subject, sizes = references.subject, references.sizes
    target, draft = subject.target, subject.draft
    references.begin(ratio)
    rate = references.rate
    say(f"{name}: a link of {rate / 1e9:.2f} GB/s, paced anew in every turn")
    measured = measure(subject, sizes, systems, lambda: PacedLink(rate), rate, references)
    case = {
        "case": name,
        "model": target.name,
        "draft": None if draft is None else draft.name,
        "device": "cpu",
        "shape": shape_values(target),
        "draft_shape": None if draft is None else shape_values(draft),
        "drafting": references.composition,
        "settings": sizes.keys,
        "processor": processor(references.attention),
        "rows": [one.row for one in measured],
    }
    return case, measured


def _check_tokens(measured: Measured, expected: Sequence[int]) -> None:
    for run in measured.runs:
        if any(token != other for token, other in zip(run.tokens, expected, strict=False)):
            raise UsageError(
                f"{measured.system.name} ({measured.system.placement}): its tokens are not those of plain "
                "decoding; this is a fault of the engine, or two logits closer than rounding: try another one"
            )


def _title(shown: Measured, model: str) -> str:
    one = shown.row
    rate = one["rate_bytes_per_second"]
    return (
        f"{model}, {report.tokens_name(one['context'])} tokens over a paced link of {rate / 1e9:.2f} GB/s, "
        f"{one['gamma']} tokens drafted a round, {one['system']}, "
        f"a quarter resident, a quarter attended by the CPU: {one['ms_per_token']['median']:.1f} ms a token"
    )
