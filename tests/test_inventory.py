"""What the driver and the system say of a machine."""

from __future__ import annotations

import itertools
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from machine_cases import HEALTHY

from offload_rt.machine import inventory
from offload_rt.machine import memory as devices
from offload_rt.machine.hardware import GIB
from offload_rt.machine.inventory import Card, read_cards, read_versions


class NVMLError(Exception):
    pass


DRIVER: dict[str, Any] = {  # what it answers on a machine with one RTX 4090
    "nvmlInit": None,
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": "handle",
    "nvmlDeviceGetHandleByUUID": "handle",
    "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:0A:00.0"),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=24 * GIB, free=20 * GIB),
    "nvmlDeviceGetCurrPcieLinkGeneration": 1,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkWidth": 8,
    "nvmlDeviceGetPerformanceState": 8,
    "nvmlDeviceGetEnforcedPowerLimit": 300_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 450_000,
}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Card, ...]]:
    """Cards as they are read where torch sees those of some uuids, and the driver gives other answers.

    An answer that is an exception is raised. The slot says that the card can do ×16.
    """
    place = tmp_path / "0000:0a:00.0"
    place.mkdir()
    (place / "max_link_width").write_text("16\n")
    (place / "numa_node").write_text("-1\n")
    monkeypatch.setattr(inventory, "_PCI_DEVICES", tmp_path)

    def cards(*uuids: str, **answers: Any) -> tuple[Card, ...]:
        # An exception in a list of effects is raised.
        effects = {name: itertools.repeat(answer) for name, answer in (DRIVER | answers).items()}
        functions = {name: Mock(side_effect=effect) for name, effect in effects.items()}
        monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))
        for name, answer in {
            "is_available": lambda: bool(uuids),
            "device_count": lambda: len(uuids),
            "get_device_properties": lambda device: SimpleNamespace(uuid=uuids[device]),
            "get_device_name": lambda device: f"card {device}",
            "mem_get_info": lambda device: (19 * GIB, 24 * GIB),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        return read_cards()

    return cards


def test_no_driver_or_no_card(read: Callable[..., tuple[Card, ...]]) -> None:
    assert read(nvmlDeviceGetCount=0) == () and read_versions()["driver"] == "580.1"
    assert read(nvmlInit=NVMLError("driver not loaded")) == () and read_versions()["driver"] is None


def test_a_card_in_a_narrow_slot(
    read: Callable[..., tuple[Card, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "use_triton", lambda: "no compiler")
    expected = replace(HEALTHY.cards[0], bus="0000:0a:00.0", free_bytes=19 * GIB)
    expected = replace(expected, numa_node=None, power_limit_watts=300.0, attention="torch-cuda")
    expected = replace(expected, triton="no compiler")
    assert read("1") == (expected,), "torch leaves the prefix out"
    assert inventory.link_now("GPU-1") == (1, 8)


def test_what_the_driver_does_not_say_is_unknown(read: Callable[..., tuple[Card, ...]]) -> None:
    silent = ("PciInfo", "MemoryInfo", "CurrPcieLinkWidth", "MaxPcieLinkWidth", "EnforcedPowerLimit")
    (card,) = read(**{f"nvmlDeviceGet{name}": NVMLError("not supported") for name in silent})
    assert (card.bus, card.link_width_most, card.power_limit_watts) == (None,) * 3
    assert (card.device, card.total_bytes, card.free_bytes) == (None, 0, 0)
    assert inventory.link_now("GPU-1") == (1, None)


def test_cards_stand_in_torchs_order_and_hidden_ones_behind(read: Callable[..., tuple[Card, ...]]) -> None:
    seen, hidden = read("MIG-7")
    assert (seen.name, seen.uuid, seen.device, seen.free_bytes) == ("card 0", "MIG-7", 0, 19 * GIB)
    assert (hidden.uuid, hidden.device, hidden.free_bytes) == ("GPU-1", None, 20 * GIB)


# What the system says


def test_the_host_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    host = inventory.read_host()
    assert host.processor and host.cores >= 1 and host.total_bytes > host.available_bytes > 0
    assert host.threads == torch.get_num_threads()
    monkeypatch.setattr(inventory, "load_kernel", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(inventory.shutil, "which", lambda name: None)
    assert inventory.read_host().native_kernel == "no compiler"
    monkeypatch.setenv("CXX", "/bin/false")
    assert inventory.read_host().native_kernel == "build failed"
    monkeypatch.setenv("OFFLOAD_RT_NATIVE", "0")
    assert inventory.read_host().native_kernel == "switched off"


def test_a_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "max").write_text(f"{2**30}\n")
    (tmp_path / "used").write_text(f"{2**29}\n")
    files = (str(tmp_path / "max"), str(tmp_path / "used"))
    monkeypatch.setattr(devices, "_CGROUP_LIMITS", (files,))
    assert devices.memory_limit() == 2**30
    assert devices.available_memory() == 2**29
    (tmp_path / "max").write_text(f"{2**62}\n")  # how version 1 says that there is none
    assert devices.memory_limit() is None


@pytest.mark.parametrize(
    ("limit", "binds", "lockable"),
    [(None, True, 90 * GIB), (GIB, False, 90 * GIB), (GIB, True, GIB), (400 * GIB, True, 90 * GIB)],
)
def test_what_can_be_locked(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, binds: bool, lockable: int
) -> None:
    """A limit counts only for what is held to it: the lock is tried under a lowered one."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)

    def can_lock(memory: torch.Tensor) -> bool:
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return not (binds and 0 <= soft < memory.nbytes)

    monkeypatch.setattr(inventory, "_can_lock", can_lock)
    facts = replace(HEALTHY.host, lock_limit_bytes=limit)
    assert inventory.lockable_memory(facts) == lockable
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before


def test_the_systems_own_lock() -> None:
    assert inventory._can_lock(torch.zeros(4096, dtype=torch.uint8))
    assert not inventory._can_lock(torch.empty(2**40, dtype=torch.uint8, device="meta"))
