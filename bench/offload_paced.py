"""`bench offload` without a GPU: paced links, the demo pair, and random weights in small shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import report
from bench.inputs import Models, say
from bench.offload_cases import BALANCED, LINK_CASES, STREAMED, Sizes, System, held_systems, paced_systems
from bench.offload_measure import (
    InPlace,
    InPlaceText,
    Measured,
    Subject,
    drafting_beside_a_pass,
    measure,
    measure_in_place,
    one_thread,
)
from bench.plan_truth import shape_values
from bench.primitives import attention_rates, processor
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
        alone = measure_in_place(subject, sizes, composition)
        attention = attention_rates(target, sizes.context, sizes.gamma)
        token_bytes = _token_bytes(target)
        beside = drafting_beside_a_pass(subject, sizes, composition, alone, token_bytes)
        for name, ratio in LINK_CASES.items():
            rate = _rate(sizes, token_bytes, ratio * beside)
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s")
            systems = paced_systems(composition, name, AHEAD)
            case, measured, in_place = _case(name, subject, sizes, composition, systems, rate, attention)
            for one in measured:
                _check_tokens(one, in_place.tokens)
            cases.append(case)
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
        alone = measure_in_place(subject, sizes, "retrieval")
        attention = attention_rates(target, sizes.context, sizes.gamma)
        token_bytes = _token_bytes(target)
        beside = drafting_beside_a_pass(subject, sizes, "retrieval", alone, token_bytes)
        rate = _rate(sizes, token_bytes, LINK_CASES[BALANCED] * beside)
        systems = held_systems(acceptances, AHEAD, STREAMED, "both")
        return _case("synthetic acceptance", subject, sizes, "retrieval", systems, rate, attention)[0]


def _rate(sizes: Sizes, token_bytes: int, stream_ms: float) -> float:
    """Bytes a second at which carrying the KV once takes `stream_ms`."""
    return 1e3 * sizes.context * token_bytes / stream_ms


def _token_bytes(target: CausalModel) -> int:
    return 2 * target.layers * target.kv_heads * target.head_dim * target.dtype.itemsize


def _case(
    name: str,
    subject: Subject,
    sizes: Sizes,
    drafting: str,
    systems: list[System],
    rate: float,
    attention: list[dict[str, float]],
) -> tuple[dict[str, Any], list[Measured], InPlace]:
    """Runs a case; returns it as JSON values, what was measured, and the same with the KV in place."""
    target, draft = subject.target, subject.draft
    beside = InPlaceText(subject, sizes, drafting)
    try:
        measured = measure(subject, sizes, systems, lambda: PacedLink(rate), rate, beside)
        in_place = beside.result()
    finally:
        beside.close()
    case = {
        "case": name,
        "model": target.name,
        "draft": None if draft is None else draft.name,
        "device": "cpu",
        "shape": shape_values(target),
        "draft_shape": None if draft is None else shape_values(draft),
        "drafting": drafting,
        "settings": sizes.keys,
        "processor": processor(in_place, attention),
        "rows": [one.row for one in measured],
    }
    return case, measured, in_place


def _check_tokens(measured: Measured, expected: Sequence[int]) -> None:
    for run in measured.runs:
        if any(token != other for token, other in zip(run.tokens, expected, strict=False)):
            raise UsageError(
                f"{measured.system.name} ({measured.system.placement}): its tokens are not those of plain "
                "decoding; this is a fault of the engine, or two logits closer than rounding: try another one"
            )


def _title(shown: Measured, model: str, rate: float) -> str:
    one = shown.row
    return (
        f"{model}, {report.tokens_name(one['context'])} tokens over a paced link of {rate / 1e9:.2f} GB/s, "
        f"{one['gamma']} tokens drafted a round, {one['system']}: "
        f"{one['ms_per_token']['median']:.1f} ms a token"
    )
