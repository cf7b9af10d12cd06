"""`bench offload` on a GPU: random weights in the shapes of 7B and 8B models, memory capped at 24 GiB."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import inputs, report
from bench.inputs import say
from bench.offload.cases import GPU_MEMORY_BYTES, ON_GPU, STREAMED, Sizes, held_systems
from bench.offload.engine import EngineText
from bench.offload.measure import Measured, measure
from bench.offload.prediction_accuracy import shape_values
from bench.offload.random_models import random_model
from bench.offload.references import Subject
from bench.offload.timeline_plot import best_run, draw
from cpu_kv import CudaLink, Link
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.config import OffloadConfig
from offload_rt.graphs import GraphedModel
from offload_rt.machine.doctor import inspect
from offload_rt.machine.hardware import Hardware
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, plan
from offload_rt.planning.shapes import from_config

AHEAD = OffloadConfig().ahead
PLANNED = "planned"


def measure_shapes(
    shapes: Sequence[str],
    contexts: Sequence[int],
    acceptances: tuple[float, ...],
    device: torch.device,
    picture: Path | None,
) -> list[dict[str, Any]]:
    """A case for each shape and context that fits; the others are named on stderr.

    Args:
        picture: where the timeline of the first case goes.
    """
    hardware = capped(inspect().hardware, device)
    cases: list[dict[str, Any]] = []
    for shape in shapes:
        say(f"{shape}: random weights on {device}")
        target = GraphedModel(random_model(shape, device, torch.bfloat16), shape, say)
        for context in contexts:
            sizes = dataclasses.replace(ON_GPU, context=context)
            # What the prompt is does not matter, so a prefill is read once, where it is shortest.
            case = measure_context(
                target,
                sizes,
                acceptances,
                hardware,
                lambda: CudaLink(device),
                prefill=context == min(contexts),
                picture=None if cases else picture,
            )
            cases += [] if case is None else [case]
            inputs.free(device)
        del target
        inputs.free(device)
    return cases


def capped(hardware: Hardware, device: torch.device) -> Hardware:
    """The machine with one card of 24 GiB, which torch keeps to as well."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_MEMORY_BYTES / total), device)
    card = hardware.gpus[device.index or 0]
    capped = dataclasses.replace(card, memory_bytes=min(card.memory_bytes, GPU_MEMORY_BYTES))
    return dataclasses.replace(hardware, gpus=(capped,))


def measure_context(
    target: GraphedModel,
    sizes: Sizes,
    acceptances: tuple[float, ...],
    hardware: Hardware,
    link: Callable[[], Link],
    *,
    prefill: bool,
    picture: Path | None = None,
) -> dict[str, Any] | None:
    """Rows of one model at one context: all KV streamed, and placed as planned. None where it does not fit.

    Args:
        prefill: read a prompt as well, to time it.
    """
    planned = planned_for(target, sizes, hardware)
    if not planned.fits:
        say(f"{target.name} at {sizes.context:,} tokens is left out: {planned.refusal}")
        return None
    subject = Subject(target, None, random_prompt(target, sizes), random_kv=True)
    rate = hardware.gpus[0].to_device_rate * 1e9
    measured: list[Measured] = []
    # One placement after the other: each holds all KV in host memory.
    for name, shares in {STREAMED: EVERYTHING_STREAMED, PLANNED: shares_of(planned)}.items():
        say(f"{target.name}, {sizes.context:,} tokens, {name}")
        systems = held_systems(acceptances, AHEAD, name)
        measured += measure(subject, sizes, systems, link, rate, placements={name: shares})
        inputs.free(target.device)
    if prefill:
        milliseconds, moved = _prefill(subject, sizes, link())
        for one in measured:
            one.row["prefill_ms"], one.row["prefill_bytes"] = milliseconds, moved
    if picture is not None:
        shown = next(one for one in measured if one.system.offload.get("ahead") == AHEAD)
        title = (
            f"{target.name}, {report.tokens_name(sizes.context)} tokens, {shown.system.name}, all streamed"
        )
        draw(best_run(shown.runs), f"{title}; synthetic acceptance {acceptances[0]:g}", picture)
    return {
        "case": "synthetic acceptance",
        "model": target.name,
        "draft": None,
        "device": target.device.type,
        "shape": shape_values(target),
        "draft_shape": None,
        "drafting": "retrieval",
        "settings": sizes.keys,
        "hardware": dataclasses.asdict(hardware),
        "rows": [one.row for one in measured],
    }


def planned_for(target: GraphedModel, sizes: Sizes, hardware: Hardware) -> Plan:
    """Where the KV of such a text goes, drafted for over a retrieved cache."""
    shape = from_config(target.module.config, target.dtype, target.name)
    return plan(
        PlanRequest(shape, None, sizes.config("retrieval"), sizes.context, sizes.new_tokens, hardware)
    )


def shares_of(planned: Plan) -> Shares:
    """The planner lets the last share end with the text, and the engine with a page."""
    page, placement = planned.request.config.store.page, planned.placement
    return Shares(placement.resident_tokens // page * page, placement.cpu_tokens // page * page)


def random_prompt(target: GraphedModel, sizes: Sizes) -> list[int]:
    """Tokens of a prompt, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(target.vocabulary, (sizes.context,), generator=generator).tolist()


def _prefill(subject: Subject, sizes: Sizes, link: Link) -> tuple[float, int]:
    config = sizes.config("retrieval")
    text = EngineText(subject.target, None, link, config, subject.prompt, sizes.new_tokens)
    try:
        return text.read_prompt()
    finally:
        text.close()
