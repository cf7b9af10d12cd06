"""The machine that a figure was measured on, and the memory rate that figures are held against."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

import psutil
import torch
import transformers

from offload_rt.machine.inventory import processor_name
from offload_rt.machine.measuring import memory_rate
from offload_rt.system.hardware import GIB

READ_BYTES = GIB  # far more than any processor caches


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, as JSON values."""
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "device": device.type,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def slug(machine: dict[str, Any]) -> str:
    """The machine's name as part of a file name."""
    name = f"{machine['processor']} {machine['threads']}-threads"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\(\w+\)|@", " ", name.lower())).strip("-")


def read_rate(device: torch.device) -> float:
    """GB/s at which torch reads the memory of `device`: the best of some sums, with all threads of a CPU."""
    return memory_rate(device, READ_BYTES)
