"""The plan of a run on this machine: what `generate` places where, and what it refuses before loading."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from offload_rt.config import Config
from offload_rt.devices import available_memory
from offload_rt.machine.hardware import GIB, Hardware
from offload_rt.machine.named_hardware import NO_GPU, SYSTEM_BYTES, named_hardware
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import Plan, plan
from offload_rt.planning.shapes import ModelShape

if TYPE_CHECKING:
    from offload_rt.machine.measuring import Progress


def fitting_plan(
    target: ModelShape,
    draft: ModelShape | None,
    config: Config,
    context: int,
    new_tokens: int,
    device: torch.device,
    loaded_bytes: int = 0,
    on_progress: Progress | None = None,
) -> Plan:
    """The fastest plan for so many prompt tokens and new ones.

    Args:
        loaded_bytes: what the run already holds of the device's memory, or of the host's without one.
        on_progress: told what is measured of the machine, where it has not been before.

    Raises:
        UsageError: nothing fits; names the nearest plans that do.
    """
    hardware = _hardware(device, loaded_bytes, on_progress)
    planned = plan(PlanRequest(target, draft, config, context, new_tokens, hardware))
    planned.check()
    return planned


def _hardware(device: torch.device, loaded_bytes: int, on_progress: Progress | None) -> Hardware:
    if device.type != "cuda":
        # Attended in place there is nothing to place: only memory counts, and that needs no measurement.
        return named_hardware(NO_GPU, ram=(available_memory() + loaded_bytes + SYSTEM_BYTES) / GIB)
    from offload_rt.machine.doctor import inspect

    measured = inspect(on_progress=on_progress).hardware
    index = torch.cuda.current_device() if device.index is None else device.index
    free, _ = torch.cuda.mem_get_info(index)
    # What torch has reserved and not handed out is free to us as well.
    spare = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    card = replace(measured.gpus[index], memory_bytes=free + spare + loaded_bytes)
    return replace(measured, gpus=(card,))
