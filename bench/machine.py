"""What a figure was measured on, and the ceiling it is held against."""

from __future__ import annotations

import os
import platform
import re
import resource
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
import transformers

GIB = 2**30
READ_BYTES = 2**30  # far more than any cache of a processor holds
READ_REPEATS = 5


def processor(device: torch.device) -> str:
    """The name of what computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    information = Path("/proc/cpuinfo")
    if information.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and the versions, as JSON values."""
    return {
        "processor": processor(device),
        "device": device.type,
        "cores": len(psutil.Process().cpu_affinity() or [])
        if hasattr(psutil.Process, "cpu_affinity")
        else os.cpu_count(),
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


def read_rate(device: torch.device, size: int = READ_BYTES) -> float:
    """GB/s at which torch reads memory with its threads: the best of some sums over `size` bytes."""
    block = torch.ones(size // 4, device=device)
    best = float("inf")
    for _ in range(READ_REPEATS):
        started = perf_counter()
        block.sum().item()  # waits for a GPU too
        best = min(best, perf_counter() - started)
    return block.nbytes / best / 1e9


def peak_host_bytes() -> int:
    """The most memory the process has held so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
