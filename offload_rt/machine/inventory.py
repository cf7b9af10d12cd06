"""What a machine has, as the system and the driver tell it; nothing is measured here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import mmap
import os
import platform
import re
import resource
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from cpu_kv.pinned import PageLocking
from offload_rt.attention.backends import choose_backend, use_triton
from offload_rt.machine.memory import available_memory, memory_limit
from offload_rt.native import SWITCH, load_kernel

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
_PROCESSORS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PROBE_BYTES = 2**20
_LOWERED_LIMIT = 2**16


@dataclass(frozen=True)
class HostFacts:
    """Processor, memory and their limits; None where the system says nothing."""

    processor: str
    cores: int  # that this program may run on
    cores_of_machine: int
    threads: int  # that torch computes with
    instruction_sets: tuple[str, ...]  # those of `INSTRUCTION_SETS` that it has
    numa_nodes: int
    native_kernel: str  # "built", "switched off", "no compiler" or "build failed"
    attention: str  # name of the backend that attends on the CPU
    governor: str | None  # of the first processor's clock
    energy_preference: str | None
    total_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None  # what a container may have; None: all of it
    lock_limit_bytes: int | None  # RLIMIT_MEMLOCK; None: unlimited
    swap_used_bytes: int  # memory moved out to disk


@dataclass(frozen=True)
class Card:
    """A graphics card; None where the driver does not say."""

    name: str
    uuid: str
    bus: str | None = None  # its place, `domain:bus:device.function`
    device: int | None = None  # its number in torch; None: torch does not see it
    total_bytes: int = 0
    free_bytes: int = 0
    link_generation_most: int | None = None  # PCIe that the card can do, whatever slot it is in
    link_width_most: int | None = None
    numa_node: int | None = None
    performance_state: int | None = None  # from 0, full speed, to 15, idle
    power_limit_watts: float | None = None  # what it may draw
    power_default_watts: float | None = None  # what it came with
    attention: str | None = None  # the backend that attends on it (see `attention.choose_backend`)
    triton: str | None = None  # why the Triton kernels do not run on it; None: they do


def read_host() -> HostFacts:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    frequency = _PROCESSORS / "cpu0" / "cpufreq"
    flags = _processor_field("flags").split()
    return HostFacts(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        cores_of_machine=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        numa_nodes=max(1, len(list(_NODES.glob("node[0-9]*")))),
        native_kernel=native_kernel(),
        attention=choose_backend(torch.device("cpu")).name,
        governor=_line(frequency / "scaling_governor"),
        energy_preference=_line(frequency / "energy_performance_preference"),
        total_bytes=int(psutil.virtual_memory().total),
        available_bytes=available_memory(),
        memory_limit_bytes=memory_limit(),
        lock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        swap_used_bytes=int(psutil.swap_memory().used),
    )


def processor_name() -> str:
    return _processor_field("model name") or platform.processor() or platform.machine()


def read_cards() -> tuple[Card, ...]:
    """All graphics cards, those that torch computes on first and in its order; none without a driver."""
    listed = {card.uuid: card for card in map(_driver_card, range(_ask("nvmlDeviceGetCount") or 0))}
    seen = []
    for device in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        # The driver does not list a part of a card under its own uuid.
        card = listed.pop(uuid, None) or Card(torch.cuda.get_device_name(device), uuid)
        free, total = torch.cuda.mem_get_info(device)  # free is what torch's own context leaves
        backend = choose_backend(torch.device("cuda", device)).name
        card = replace(card, device=device, attention=backend, triton=use_triton())
        seen.append(replace(card, total_bytes=total, free_bytes=free))
    return (*seen, *listed.values())


def read_versions() -> dict[str, str | None]:
    """Of the software that the figures depend on; None: not there. Imports nothing heavy."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "flash_attn": _version("flash_attn"),
        "driver": _ask("nvmlSystemGetDriverVersion"),
    }


def link_now(uuid: str) -> tuple[int | None, int | None]:
    """PCIe generation and width of a card at this moment; an idle one lowers its generation."""
    ask = partial(_ask_card, _ask("nvmlDeviceGetHandleByUUID", uuid))
    return ask("CurrPcieLinkGeneration"), ask("CurrPcieLinkWidth")


def lockable_memory(host: HostFacts) -> int:
    """Bytes of memory that can be page-locked now: for a card's copies where there is one, else at all."""
    if host.lock_limit_bytes is None or not _lock_limit_binds():
        return host.available_bytes
    return min(host.lock_limit_bytes, host.available_bytes)


def _lock_limit_binds() -> bool:
    """Whether RLIMIT_MEMLOCK holds for this process.

    It does not for the administrator's programs, nor need it for drivers that lock memory on their own
    account. A trial with a lowered limit tells, without filling a high one.
    """
    memory = torch.frombuffer(mmap.mmap(-1, _PROBE_BYTES), dtype=torch.uint8)  # pages of its own
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    # CUDA leaves a refusal behind as its thread's last error: this thread ends with it.
    with ThreadPoolExecutor(1) as pool:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(soft, _LOWERED_LIMIT), hard))
        try:
            return not pool.submit(_can_lock, memory).result()
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def _can_lock(memory: Tensor) -> bool:
    """Tries to page-lock `memory`, and leaves it unlocked once it is freed."""
    address, size = memory.data_ptr(), memory.nbytes
    if not torch.cuda.is_available():
        return int(ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(size))) == 0
    locking = PageLocking()
    locked = locking.register(address, size) == 0
    if locked:
        locking.unregister(address)
    return locked


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _processor_field(name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.+)$", _line(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found[1].strip() if found else ""


def native_kernel() -> str:
    """Whether attention on the processor has its kernel; see `HostFacts.native_kernel`."""
    if load_kernel() is not None:
        return "built"
    if os.environ.get(SWITCH) == "0":
        return "switched off"
    return "build failed" if os.environ.get("CXX") or shutil.which("g++") else "no compiler"


def _version(package: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=package)), None)


def _ask(question: str, *arguments: object) -> Any:
    """One answer of NVIDIA's driver; None where there is none, or for what driver or card do not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()  # costs nothing after the first time
        return getattr(pynvml, question)(*arguments)
    except pynvml.NVMLError:
        return None


def _ask_card(handle: object, question: str) -> Any:
    return _ask(f"nvmlDeviceGet{question}", handle)


def _driver_card(number: int) -> Card:
    ask = partial(_ask_card, _ask("nvmlDeviceGetHandleByIndex", number))
    place, memory = ask("PciInfo"), ask("MemoryInfo")
    # The driver writes the domain with eight digits, the system with four.
    bus = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", str(place.busId).lower()) if place else None
    node = _number(bus, "numa_node")
    limit, default = ask("EnforcedPowerLimit"), ask("PowerManagementDefaultLimit")
    # The driver tells the width that card and slot have in common, the system that of the card.
    widths = ask("MaxPcieLinkWidth"), _number(bus, "max_link_width")
    return Card(
        name=str(ask("Name")),
        uuid=str(ask("UUID")),
        bus=bus,
        total_bytes=int(memory.total) if memory else 0,
        free_bytes=int(memory.free) if memory else 0,
        link_generation_most=ask("GpuMaxPcieLinkGeneration"),
        link_width_most=max((width for width in widths if width), default=None),
        numa_node=node if node is not None and node >= 0 else None,
        performance_state=ask("PerformanceState"),
        power_limit_watts=None if limit is None else limit / 1000,
        power_default_watts=None if default is None else default / 1000,
    )


def _number(bus: str | None, name: str) -> int | None:
    """What the system says of the device at `bus`."""
    text = _line(_PCI_DEVICES / bus / name) if bus else None
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None
