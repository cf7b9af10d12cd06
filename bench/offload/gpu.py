"""`bench offload` on a GPU: random weights in the shapes of 7B and 8B models, memory capped at 24 GiB."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

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
from bench.offload.measure import Measured, measure, shape_of
from bench.offload.random_models import LARGE_SHAPES, random_model
from bench.offload.text import Subject
from cpu_kv import CudaLink, Link
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.graphs import GraphedModel
from offload_rt.machine.doctor import inspect
from offload_rt.machine.hardware import Hardware
from offload_rt.model import CausalModel
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, plan


def cases_on_gpu(arguments: argparse.Namespace, device: torch.device) -> Iterator[Measured]:
    """A case for each shape and context that fits; the others are named on stderr."""
    hardware = capped(inspect().hardware, device)
    for shape in arguments.shapes or (LARGE_SHAPES[-1:] if arguments.quick else LARGE_SHAPES):
        say(f"{shape}: random weights on {device}")
        target = GraphedModel(random_model(shape, device, torch.bfloat16), shape, say)
        for context in arguments.contexts[:1] if arguments.quick else arguments.contexts:
            sizes = replace(ON_GPU, context=context)
            systems = held_systems(arguments.acceptances)
            yield from case_on_gpu(target, sizes, systems, hardware, lambda: CudaLink(device))
        del target
        inputs.free(device)


def capped(hardware: Hardware, device: torch.device) -> Hardware:
    """The machine with one card of 24 GiB, which torch keeps to as well."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, GPU_MEMORY_BYTES / total), device)
    card = hardware.gpus[device.index or 0]
    return replace(hardware, gpus=(replace(card, memory_bytes=min(card.memory_bytes, GPU_MEMORY_BYTES)),))


def case_on_gpu(
    target: CausalModel,
    sizes: Sizes,
    systems: list[System],
    hardware: Hardware,
    link: Callable[[], Link],
) -> Iterator[Measured]:
    """One model at one context: all KV streamed, and placed as planned. Nothing where it does not fit."""
    planned = planned_for(target, sizes, hardware)
    if not planned.fits:
        say(f"{target.name} at {sizes.context:,} tokens is left out: {planned.refusal}")
        return
    placements = {STREAMED: (EVERYTHING_STREAMED, systems), "planned": (shares_of(planned), systems)}
    subject, rate = Subject.random(target, sizes.context), hardware.gpus[0].to_device_rate * 1e9
    case, runs = measure(SYNTHETIC, subject, sizes, placements, link, rate)
    yield case | {"hardware": asdict(hardware)}, runs


def planned_for(target: CausalModel, sizes: Sizes, hardware: Hardware) -> Plan:
    """Where the KV of such a text goes, drafted for over a retrieved cache."""
    config = sizes.config(System(AHEAD))
    return plan(PlanRequest(shape_of(target), None, config, sizes.context, sizes.new_tokens, hardware))


def shares_of(planned: Plan) -> Shares:
    """The planner lets the last share end with the text, and the engine with a page."""
    page, placement = planned.request.config.store.page, planned.placement
    return Shares(placement.resident_tokens // page * page, placement.cpu_tokens // page * page)
