"""Facts that the system and NVIDIA's driver report about a machine; nothing is measured here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
import torch

from cpu_kv import SlabAllocator
from offload_rt.attention.cuda_backends import use_triton
from offload_rt.attention.selector import choose_backend
from offload_rt.kernels.native import SWITCH, load_kernel
from offload_rt.system.memory import available_memory, total_memory

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PROBE_BYTES = 2**20
_PROBE_LIMIT = 2**16
_WSL_DEVICE = Path("/dev/dxg")
"""The GPU of WSL2, where Windows bounds what may be page-locked, at about 1 GiB on many machines."""
_STEP_BYTES, _MOST_STEPS = 2**28, 16


PcieLink = tuple[int | None, int | None]
"""PCIe generation and width; None where the driver does not say."""


@dataclass(frozen=True)
class HostFacts:
    """Processor, memory and its limits."""

    processor: str
    cores: int  # that this process may run on
    cores_of_machine: int
    threads: int  # of torch
    instruction_sets: tuple[str, ...]  # of `INSTRUCTION_SETS`
    native_kernel: str  # "built", "switched off", "no compiler" or "build failed"
    attention: str  # the CPU's attention backend
    total_bytes: int  # in a container, its limit
    available_bytes: int
    lock_limit_bytes: int | None  # RLIMIT_MEMLOCK; None: unlimited
    wsl: bool = False  # under Windows, in WSL2


@dataclass(frozen=True)
class GpuFacts:
    """A GPU that torch sees."""

    name: str
    uuid: str
    bus: str | None  # PCI address, `domain:bus:device.function`; None where the driver does not say
    total_bytes: int
    free_bytes: int
    max_link: PcieLink  # whatever slot it is in
    attention: str  # its attention backend
    triton: str | None  # why Triton kernels do not run on it; None: they do


def read_host() -> HostFacts:
    """Returns what the system reports about processor and memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    flags = _processor_field("flags").split()
    return HostFacts(
        processor=processor_name(),
        cores=len(os.sched_getaffinity(0)),
        cores_of_machine=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        instruction_sets=tuple(name for name in INSTRUCTION_SETS if name in flags),
        native_kernel=native_kernel(),
        attention=choose_backend(torch.device("cpu")).name,
        total_bytes=total_memory(),
        available_bytes=available_memory(),
        lock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        wsl=_WSL_DEVICE.exists(),
    )


def processor_name() -> str:
    """Returns the processor's model name."""
    return _processor_field("model name") or platform.processor() or platform.machine()


def native_kernel() -> str:
    """Returns the state of the native CPU attention kernel, see `HostFacts.native_kernel`."""
    if load_kernel() is not None:
        return "built"
    if os.environ.get(SWITCH) == "0":
        return "switched off"
    return "build failed" if os.environ.get("CXX") or shutil.which("g++") else "no compiler"


def read_gpus() -> tuple[GpuFacts, ...]:
    """Returns the GPUs that torch sees, by their numbers in torch."""
    return tuple(map(_gpu, range(torch.cuda.device_count() if torch.cuda.is_available() else 0)))


def driver_gpus() -> tuple[str, ...]:
    """Returns the names of the GPUs that NVIDIA's driver lists, whether torch can use them or not."""
    handles = (_ask("DeviceGetHandleByIndex", number) for number in range(_ask("DeviceGetCount") or 0))
    return tuple(str(_ask("DeviceGetName", handle)) for handle in handles)


def read_versions() -> dict[str, str | None]:
    """Returns versions of the software that rates depend on; None where it is not installed."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "flash_attn": _version("flash_attn"),
        "bitsandbytes": _version("bitsandbytes"),
        "driver": _ask("SystemGetDriverVersion"),
    }


def link_now(uuid: str) -> PcieLink:
    """Returns the state of a GPU's link at this moment; an idle GPU lowers its generation."""
    ask = _asking(uuid)
    return ask("CurrPcieLinkGeneration"), ask("CurrPcieLinkWidth")


def lockable_memory(host: HostFacts) -> int:
    """Returns how many bytes may be page-locked for a GPU; without one, all that are available.

    RLIMIT_MEMLOCK does not bind administrators, nor drivers that lock memory on their own account. A trial
    under a lowered limit tells, without having to fill a high one.
    """
    if not torch.cuda.is_available():
        return host.available_bytes
    if host.wsl:
        return _locked_in_steps(host.available_bytes)
    if host.lock_limit_bytes is None:
        return host.available_bytes
    refusals: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(soft, _PROBE_LIMIT), hard))
    try:
        # It locks in a thread of its own: CUDA keeps a refusal as the last error of its thread.
        with closing(SlabAllocator(pin=True, on_warning=refusals.append)) as slabs:
            slabs.allocate((_PROBE_BYTES,), torch.uint8).result()
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    return min(host.lock_limit_bytes, host.available_bytes) if refusals else host.available_bytes


def _locked_in_steps(available: int) -> int:
    """Returns how many bytes can be page-locked: all that are available, unless a trial soon meets a wall."""
    refusals: list[str] = []
    steps = min(_MOST_STEPS, available // (2 * _STEP_BYTES))
    with closing(SlabAllocator(pin=True, on_warning=refusals.append)) as slabs:
        for _ in range(steps):
            slabs.allocate((_STEP_BYTES,), torch.uint8).result()
            if refusals:
                return slabs.bytes_pinned
    return available


def _gpu(device: int) -> GpuFacts:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    ask = _asking(uuid)
    pci = ask("PciInfo")
    # The driver writes the domain with eight digits, the system with four.
    bus = re.sub(r"^0000(?=[0-9a-f]{4}:)", "", str(pci.busId).lower()) if pci else None
    # The driver reports the width that GPU and slot have in common, the system that of the GPU.
    system = _text(_PCI_DEVICES / bus / "max_link_width") if bus else ""
    widths = ask("MaxPcieLinkWidth") or 0, int(system) if system.isdecimal() else 0
    free, total = torch.cuda.mem_get_info(device)  # free is what torch's own context leaves
    return GpuFacts(
        name=torch.cuda.get_device_name(device),
        uuid=uuid,
        bus=bus,
        total_bytes=total,
        free_bytes=free,
        max_link=(ask("GpuMaxPcieLinkGeneration"), max(widths) or None),
        attention=choose_backend(torch.device("cuda", device)).name,
        triton=use_triton(),
    )


def _ask(question: str, *arguments: object) -> Any:
    """Returns an answer of NVIDIA's driver; None without a driver, and where driver or GPU cannot say."""
    try:
        pynvml.nvmlInit()  # costs nothing after the first time
        return getattr(pynvml, f"nvml{question}")(*arguments)
    except pynvml.NVMLError:
        return None


def _asking(uuid: str) -> Callable[[str], Any]:
    handle = _ask("DeviceGetHandleByUUID", uuid)
    return lambda question: _ask(f"DeviceGet{question}", handle)


def _version(package: str) -> str | None:
    return next(
        (distribution.version for distribution in importlib.metadata.distributions(name=package)), None
    )


def _processor_field(name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
