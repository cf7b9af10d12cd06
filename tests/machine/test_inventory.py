"""Facts that NVIDIA's driver and the system report about a machine."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from support.machine_cases import HEALTHY, NVMLError, use_driver

from offload_rt.machine import inventory
from offload_rt.machine.inventory import GpuFacts, driver_gpus, link_now, read_gpus, read_versions
from offload_rt.system import memory
from offload_rt.system.hardware import GIB


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[GpuFacts, ...]]:
    """Reads GPUs where torch sees one with a UUID, in a slot whose system file says ×16."""
    (tmp_path / "0000:0a:00.0").mkdir()
    (tmp_path / "0000:0a:00.0" / "max_link_width").write_text("16\n")
    monkeypatch.setattr(inventory, "_PCI_DEVICES", tmp_path)
    monkeypatch.setattr(inventory, "use_triton", lambda: "no compiler")
    for name, answer in {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_name": lambda device: "NVIDIA GeForce RTX 4090",
        "mem_get_info": lambda device: (19 * GIB, 24 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)

    def gpus(uuid: str, **answers: Any) -> tuple[GpuFacts, ...]:
        use_driver(monkeypatch, **answers)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
        return read_gpus()

    return gpus


def test_a_gpu_in_a_narrow_slot(read: Callable[..., tuple[GpuFacts, ...]]) -> None:
    expected = replace(HEALTHY.gpus[0], bus="0000:0a:00.0", free_bytes=19 * GIB, attention="torch-cuda")
    assert read("1") == (replace(expected, triton="no compiler"),), "torch leaves the prefix of the UUID out"
    assert link_now("GPU-1") == (1, 8)
    assert driver_gpus() == ("NVIDIA GeForce RTX 4090",)


def test_what_the_driver_does_not_say_is_unknown(read: Callable[..., tuple[GpuFacts, ...]]) -> None:
    silent = ("PciInfo", "GpuMaxPcieLinkGeneration", "MaxPcieLinkWidth", "CurrPcieLinkWidth")
    (gpu,) = read("MIG-7", **{f"nvmlDeviceGet{name}": NVMLError("not supported") for name in silent})
    assert (gpu.uuid, gpu.bus, gpu.max_link) == ("MIG-7", None, (None, None))
    assert link_now("MIG-7") == (1, None)
    (gpu,) = read("1", nvmlInit=NVMLError("driver not loaded"))
    assert gpu.name == "NVIDIA GeForce RTX 4090" and gpu.bus is None
    assert driver_gpus() == () and read_versions()["driver"] is None


def test_the_host_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    host = inventory.read_host()
    assert host.processor and host.cores >= 1 and host.total_bytes > host.available_bytes > 0
    assert host.threads == torch.get_num_threads()
    monkeypatch.setattr(inventory, "load_kernel", lambda: None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert inventory.native_kernel() == "no compiler"
    monkeypatch.setenv("CXX", "/bin/false")
    assert inventory.native_kernel() == "build failed"
    monkeypatch.setenv("OFFLOAD_RT_NATIVE", "0")
    assert inventory.native_kernel() == "switched off"


def test_a_containers_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit, used = tmp_path / "max", tmp_path / "used"
    limit.write_text(f"{2**30}\n")
    used.write_text(f"{2**29}\n")
    monkeypatch.setattr(memory, "_CGROUP_FILES", ((str(limit), str(used)),))
    assert (memory.total_memory(), memory.available_memory()) == (2**30, 2**29)
    for unlimited in ("max", str(2**62)):  # in version 2 and in version 1
        limit.write_text(unlimited)
        assert memory.total_memory() == psutil.virtual_memory().total


def use_slabs(monkeypatch: pytest.MonkeyPatch, refused: Callable[[int], bool]) -> Mock:
    """Replaces the allocator of page-locked memory by one that tells of refusals, and CUDA is there."""
    slabs = Mock()

    def allocator(pin: bool, on_warning: Callable[[str], None]) -> Mock:
        def allocate(shape: tuple[int], dtype: torch.dtype) -> Mock:
            if refused(shape[0]):
                on_warning("refused")
            return Mock()

        slabs.allocate = allocate
        return slabs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inventory, "SlabAllocator", allocator)
    return slabs


@pytest.mark.parametrize(
    ("limit", "binds", "lockable"),
    [(None, True, 90 * GIB), (GIB, False, 90 * GIB), (GIB, True, GIB), (400 * GIB, True, 90 * GIB)],
)
def test_a_limit_counts_where_the_driver_is_held_to_it(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, binds: bool, lockable: int
) -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    slabs = use_slabs(
        monkeypatch, lambda size: binds and 0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < size
    )
    assert inventory.lockable_memory(replace(HEALTHY.host, lock_limit_bytes=limit)) == lockable
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
    assert slabs.close.call_count == (limit is not None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert inventory.lockable_memory(replace(HEALTHY.host, lock_limit_bytes=1)) == 90 * GIB


@pytest.mark.parametrize(("wall", "lockable"), [(GIB + 2**27, GIB + 2**27), (90 * GIB, 90 * GIB)])
def test_under_wsl_memory_is_locked_on_trial(
    monkeypatch: pytest.MonkeyPatch, wall: int, lockable: int
) -> None:
    """A little more than four steps can be locked, or all; no trial locks more than 4 GiB."""
    asked = list[int]()

    def refused(size: int) -> bool:
        asked.append(size)
        slabs.bytes_pinned = min(wall, sum(asked))
        return sum(asked) > wall

    slabs = use_slabs(monkeypatch, refused)
    assert inventory.lockable_memory(replace(HEALTHY.host, wsl=True)) == lockable
    assert set(asked) == {2**28} and sum(asked) <= 4 * GIB and slabs.close.called
