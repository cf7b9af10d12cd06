"""`bench offload` on a GPU: random weights in the shapes of 7B and 8B models, memory capped at 24 GiB."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench import inputs
from bench.inputs import say
from bench.offload.cases import (
    AHEAD,
    GPU_MEMORY_BYTES,
    ON_GPU,
    STREAMED,
    SYNTHETIC,
    Sizes,
    System,
    held_systems,
)
from bench.offload.measure import Measured, measure
from bench.offload.random_models import random_model
from bench.offload.text import Subject
from cpu_kv import CudaLink, Link
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.graphs import GraphedModel
from offload_rt.machine.doctor import inspect
from offload_rt.machine.hardware import Hardware
from offload_rt.model import CausalModel
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, plan
from offload_rt.planning.shapes import from_config


def cases_on_gpu(
    shapes: Sequence[str], contexts: Sequence[int], acceptances: tuple[float, ...], device: torch.device
) -> Iterator[tuple[dict[str, Any], list[Measured]]]:
    """A case for each shape and context that fits; the others are named on stderr."""
    hardware = capped(inspect().hardware, device)
    for shape in shapes:
        say(f"{shape}: random weights on {device}")
        target = GraphedModel(random_model(shape, device, torch.bfloat16), shape, say)
        for context in contexts:
            sizes = dataclasses.replace(ON_GPU, context=context)
            case = case_on_gpu(target, sizes, acceptances, hardware, lambda: CudaLink(device))
            if case is not None:
                yield case
        del target
        inputs.free(device)


def capped(hardware: Hardware, device: torch.device) -> Hardware:
    """The machine with one card of 24 GiB, which torch keeps to as well."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_MEMORY_BYTES / total), device)
    card = hardware.gpus[device.index or 0]
    capped = dataclasses.replace(card, memory_bytes=min(card.memory_bytes, GPU_MEMORY_BYTES))
    return dataclasses.replace(hardware, gpus=(capped,))


def case_on_gpu(
    target: CausalModel,
    sizes: Sizes,
    acceptances: tuple[float, ...],
    hardware: Hardware,
    link: Callable[[], Link],
) -> tuple[dict[str, Any], list[Measured]] | None:
    """One model at one context: all KV streamed, and placed as planned. None where it does not fit."""
    planned = planned_for(target, sizes, hardware)
    if not planned.fits:
        say(f"{target.name} at {sizes.context:,} tokens is left out: {planned.refusal}")
        return None
    systems = held_systems(acceptances)
    placements = {STREAMED: (EVERYTHING_STREAMED, systems), "planned": (shares_of(planned), systems)}
    rate = hardware.gpus[0].to_device_rate * 1e9
    subject = Subject.random(target, sizes.context)
    case, measured = measure(SYNTHETIC, subject, sizes, placements, link, rate)
    return case | {"hardware": dataclasses.asdict(hardware)}, measured


def planned_for(target: CausalModel, sizes: Sizes, hardware: Hardware) -> Plan:
    """Where the KV of such a text goes, drafted for over a retrieved cache."""
    shape = from_config(target.module.config, target.dtype, target.name)
    config = sizes.config(System(AHEAD))
    return plan(PlanRequest(shape, None, config, sizes.context, sizes.new_tokens, hardware))


def shares_of(planned: Plan) -> Shares:
    """The planner lets the last share end with the text, and the engine with a page."""
    page, placement = planned.request.config.store.page, planned.placement
    return Shares(placement.resident_tokens // page * page, placement.cpu_tokens // page * page)
