"""A desktop with a GPU, as planned for and as doctor reports it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pytest

from offload_rt.machine import inventory
from offload_rt.machine.inspection import Report
from offload_rt.machine.inventory import GpuFacts, HostFacts
from offload_rt.system.hardware import GIB, AttentionRate, Gpu, Hardware, Host

Record = TypeVar("Record")

HOST = Host(
    memory_bytes=92 * GIB,
    lockable_bytes=92 * GIB,
    memory_rate=70.0,
    compute_rate=800.0,
    attention=(AttentionRate(1, 50.0), AttentionRate(16, 40.0), AttentionRate(32, 30.0)),
    attention_beside_link=0.8,
    link_beside_attention=0.9,
    launch_ms=0.5,
)
GPU = Gpu("gpu", 24 * GIB, 1000.0, 160.0, 25.0, 20.0, 0.3)
DESKTOP = Hardware(HOST, (GPU,), measured=True)

HEALTHY = Report(
    measured_at="2026-01-02T03:04:05+00:00",
    load_average=0.1,
    hardware=Hardware(
        replace(HOST, memory_bytes=90 * GIB, lockable_bytes=90 * GIB),
        (replace(GPU, name="NVIDIA GeForce RTX 4090", memory_bytes=23 * GIB, to_host_rate=26.5),),
        measured=True,
    ),
    links=((4, 16),),
    host=HostFacts(
        processor="AMD Ryzen 9 7950X",
        cores=32,
        cores_of_machine=32,
        threads=8,
        instruction_sets=("avx2", "avx512f"),
        native_kernel="built",
        attention="native-cpu",
        total_bytes=96 * GIB,
        available_bytes=90 * GIB,
        lock_limit_bytes=None,
    ),
    gpus=(
        GpuFacts(
            name="NVIDIA GeForce RTX 4090",
            uuid="GPU-1",
            bus="0000:01:00.0",
            total_bytes=24 * GIB,
            free_bytes=23 * GIB,
            max_link=(4, 16),
            attention="flash-attn",
            triton=None,
        ),
    ),
    versions={
        "python": "3.12.1",
        "torch": "2.13.0",
        "flash_attn": "2.8.0",
        "driver": "580.1",
        "triton": None,
    },
    notices=("a note",),
)


def changed(record: Record, changes: Mapping[str, object]) -> Record:
    """Returns `record` with other values at some paths, where `gpus.0.name` means `gpus[0].name`."""
    for path, value in changes.items():
        record = _changed(record, *path.split("."), value=value)
    return record


def _changed(record: Any, name: str, *rest: str, value: object) -> Any:
    if isinstance(record, tuple):
        place = int(name)
        new = _changed(record[place], *rest, value=value) if rest else value
        return (*record[:place], new, *record[place + 1 :])
    if isinstance(record, dict):
        return record | {name: value}
    return replace(record, **{name: _changed(getattr(record, name), *rest, value=value) if rest else value})


def assert_positive(record: Any) -> None:
    """All rates are finite and more than 0."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, float):
            assert math.isfinite(value) and value > 0, field.name


class NVMLError(Exception):
    pass


DRIVER: dict[str, Any] = {  # its answers on a machine with one RTX 4090
    "nvmlInit": None,
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetHandleByUUID": "handle",
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:0A:00.0"),
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 8,
}


def use_driver(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Replaces NVIDIA's driver; an answer that is an exception is raised."""
    effects = {name: itertools.repeat(answer) for name, answer in (DRIVER | answers).items()}
    functions = {name: Mock(side_effect=effect) for name, effect in effects.items()}
    monkeypatch.setattr(inventory, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))
