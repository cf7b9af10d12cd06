"""A desktop with a card, as planned for and as doctor reports it, and measurements that take no time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from offload_rt.machine import measuring
from offload_rt.machine.doctor import Report
from offload_rt.machine.hardware import GIB, AttentionRate, Gpu, Hardware, Host
from offload_rt.machine.inventory import Card, HostFacts
from offload_rt.machine.measuring import LinkFigures

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
CARD = Gpu("card", 24 * GIB, 1000.0, 160.0, 25.0, 20.0, 0.3)
DESKTOP = Hardware(HOST, (CARD,), measured=True)

HEALTHY = Report(
    measured_at="2026-01-02T03:04:05+00:00",
    load_average=0.1,
    hardware=Hardware(
        replace(HOST, memory_bytes=90 * GIB, lockable_bytes=90 * GIB),
        (replace(CARD, name="NVIDIA GeForce RTX 4090", memory_bytes=23 * GIB, to_host_rate=26.5),),
        measured=True,
    ),
    links=(LinkFigures(20.5, 21.5, 4, 16, True),),
    host=HostFacts(
        processor="AMD Ryzen 9 7950X",
        cores=32,
        cores_of_machine=32,
        threads=8,
        instruction_sets=("avx2", "avx512f"),
        numa_nodes=1,
        native_kernel="built",
        attention="native-cpu",
        governor="schedutil",
        energy_preference=None,
        total_bytes=96 * GIB,
        available_bytes=90 * GIB,
        memory_limit_bytes=None,
        lock_limit_bytes=None,
        swap_used_bytes=0,
    ),
    cards=(
        Card(
            name="NVIDIA GeForce RTX 4090",
            uuid="GPU-1",
            bus="0000:01:00.0",
            device=0,
            total_bytes=24 * GIB,
            free_bytes=23 * GIB,
            link_generation_most=4,
            link_width_most=16,
            numa_node=0,
            performance_state=8,
            power_limit_watts=450.0,
            power_default_watts=450.0,
            attention="flash-attn",
        ),
    ),
    versions={
        "python": "3.12.1",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "flash_attn": "2.8.0",
        "driver": "580.1",
    },
    notices=("a note",),
)


def changed(report: Report, changes: Mapping[str, object]) -> Report:
    """`report` with other values at some paths, where `cards.0.name` means `cards[0].name`."""
    for path, value in changes.items():
        report = _changed(report, path, value)
    return report


def _changed(record: Any, path: str, value: object) -> Any:
    name, _, rest = path.partition(".")
    if isinstance(record, tuple):
        place = int(name)
        return (*record[:place], _changed(record[place], rest, value), *record[place + 1 :])
    if isinstance(record, dict):
        return record | {name: value}
    return replace(record, **{name: _changed(getattr(record, name), rest, value) if rest else value})


def assert_positive(figures: Any) -> None:
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if isinstance(value, float):
            assert math.isfinite(value) and value > 0, field.name


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that show only that they work."""
    for name in ("MEMORY_BYTES", "ATTENTION_BYTES", "COPY_BYTES"):
        monkeypatch.setattr(measuring, name, 2**20)
    monkeypatch.setattr(measuring, "PRODUCT", (8, 64))
    monkeypatch.setattr(measuring, "LAYERS", 1)
    monkeypatch.setattr(measuring, "REPEATS", 1)
    monkeypatch.setattr(measuring, "PRODUCT_WIDTH", 64)
