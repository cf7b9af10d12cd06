"""What a machine has, as the system and the driver tell it: nothing is measured here."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import re
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from cpu_kv.pinned import PageLocking
from offload_rt.attention import choose_backend
from offload_rt.devices import available_memory, memory_limit
from offload_rt.native import SWITCH, load_kernel

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16")
_PROCESSORS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_PROBE_BYTES = 2**20
_LOWERED_LIMIT = 2**16

T = TypeVar("T")


@dataclass(frozen=True)
class HostFacts:
    """Processor, memory and their limits.

    Attributes:
        processor: its name.
        cores: processors this program may run on.
        cores_of_machine: processors there are.
        threads: that torch computes with.
        instruction_sets: those of `INSTRUCTION_SETS` that it has.
        numa_nodes: how many.
        native_kernel: "built", "switched off", "no compiler" or "build failed".
        attention: name of the backend that attends on the CPU.
        governor, energy_preference: of the first processor's clock; None where the system says nothing.
        total_bytes, available_bytes: of memory.
        memory_limit_bytes: what a container may have; None: all of it.
        lock_limit_bytes: RLIMIT_MEMLOCK; None: unlimited.
        swap_used_bytes: memory that was moved out to disk.
    """

    processor: str
    cores: int
    cores_of_machine: int
    threads: int
    instruction_sets: tuple[str, ...]
    numa_nodes: int
    native_kernel: str
    attention: str
    governor: str | None
    energy_preference: str | None
    total_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None
    lock_limit_bytes: int | None
    swap_used_bytes: int


@dataclass(frozen=True)
class Card:
    """A graphics card; None where the driver does not say.

    Attributes:
        name, uuid: as the driver calls it.
        bus: its place, `domain:bus:device.function`.
        device: its number in torch; None: torch does not see it.
        total_bytes, free_bytes: of its memory.
        link_generation, link_width: PCIe as it is now; an idle card lowers its generation.
        link_generation_most, link_width_most: what the card itself can do, whatever slot it is in.
        numa_node: the part of the machine it hangs on.
        performance_state: 0 full speed to 15 idle.
        power_limit_watts, power_default_watts: what it may draw, and what it came with.
    """

    name: str
    uuid: str
    bus: str | None
    device: int | None
    total_bytes: int
    free_bytes: int
    link_generation: int | None = None
    link_generation_most: int | None = None
    link_width: int | None = None
    link_width_most: int | None = None
    numa_node: int | None = None
    performance_state: int | None = None
    power_limit_watts: float | None = None
    power_default_watts: float | None = None


@dataclass(frozen=True)
class Versions:
    """Of what the figures depend on; None: not there."""

    python: str
    torch: str
    transformers: str | None
    flash_attn: str | None
    driver: str | None


def read_host() -> HostFacts:
    """Reads everything anew."""
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
        native_kernel=_native_kernel(),
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
    """What the system calls the processor."""
    return _processor_field("model name") or platform.processor() or platform.machine()


def read_cards() -> tuple[Card, ...]:
    """All graphics cards, those that torch computes on first and in its order; none without a driver."""
    cards = _driver_cards()
    seen = []
    for device, uuid in enumerate(_torch_uuids()):
        card = cards.pop(uuid, None) or _card_of_torch(device, uuid)
        seen.append(_on_device(card, device))
    return (*seen, *cards.values())


def read_versions() -> Versions:
    """Reads everything anew; imports nothing heavy."""
    return Versions(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        flash_attn=_version("flash_attn") if importlib.util.find_spec("flash_attn") else None,
        driver=_with_driver(lambda driver: str(driver.nvmlSystemGetDriverVersion())),
    )


def link_now(uuid: str) -> tuple[int | None, int | None]:
    """PCIe generation and width of a card at this moment."""

    def ask(driver: Any) -> tuple[int | None, int | None]:
        handle = driver.nvmlDeviceGetHandleByUUID(uuid)
        return (
            _answer(driver, driver.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            _answer(driver, driver.nvmlDeviceGetCurrPcieLinkWidth, handle),
        )

    return _with_driver(ask) or (None, None)


def lockable_memory(host: HostFacts) -> int:
    """Bytes of memory that can be page-locked now: for a card's copies where there is one, else at all."""
    locking = PageLocking() if torch.cuda.is_available() else _system_locking()
    if host.lock_limit_bytes is None or not _lock_limit_binds(locking):
        return host.available_bytes
    return min(host.lock_limit_bytes, host.available_bytes)


def _system_locking() -> PageLocking:
    system = ctypes.CDLL(None)

    def lock(address: int, size: int) -> int:
        return int(system.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)))

    def unlock(address: int) -> int:
        return int(system.munlock(ctypes.c_void_p(address), ctypes.c_size_t(_PROBE_BYTES)))

    return PageLocking(lock, unlock)


def _lock_limit_binds(locking: PageLocking) -> bool:
    """Whether `locking` is held to RLIMIT_MEMLOCK in this process.

    The administrator's programs are not, nor need drivers be that lock memory on their own account. It is
    tried with the limit lowered for a moment, so that a high limit need not be filled to be felt.
    """
    code = None

    def attempt() -> None:
        nonlocal code
        memory = torch.frombuffer(mmap.mmap(-1, _PROBE_BYTES), dtype=torch.uint8)  # pages of its own
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (min(soft, _LOWERED_LIMIT), hard))
        try:
            code = locking.register(memory.data_ptr(), memory.nbytes)
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
        if code == 0:
            locking.unregister(memory.data_ptr())

    # A CUDA driver leaves a refusal behind as its thread's last error: this thread ends with it.
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return code != 0


def _line(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _processor_field(name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(.+)$", _line(Path("/proc/cpuinfo")) or "", re.MULTILINE)
    return found[1].strip() if found else ""


def _native_kernel() -> str:
    if load_kernel() is not None:
        return "built"
    if os.environ.get(SWITCH) == "0":
        return "switched off"
    return "build failed" if os.environ.get("CXX") or shutil.which("g++") else "no compiler"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _with_driver(ask: Callable[[Any], T]) -> T | None:
    """What `ask(pynvml)` says; None without a driver or where it refuses."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return ask(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _answer(driver: Any, question: Callable[..., T], *arguments: object) -> T | None:
    """One answer of the driver; None for what this card or this driver does not tell."""
    try:
        return question(*arguments)
    except driver.NVMLError:
        return None


def _driver_cards() -> dict[str, Card]:
    """By uuid, in the driver's order."""

    def ask(driver: Any) -> dict[str, Card]:
        cards = {}
        for number in range(driver.nvmlDeviceGetCount()):
            card = _card_of_driver(driver, driver.nvmlDeviceGetHandleByIndex(number))
            cards[card.uuid] = card
        return cards

    return _with_driver(ask) or {}


def _card_of_driver(driver: Any, handle: Any) -> Card:
    place = _answer(driver, driver.nvmlDeviceGetPciInfo, handle)
    # The driver writes the domain with eight digits, the system with four.
    bus = None if place is None else re.sub(r"^0000(?=[0-9a-f]{4}:)", "", str(place.busId).lower())
    memory = _answer(driver, driver.nvmlDeviceGetMemoryInfo, handle)
    node = _number(bus, "numa_node")
    limit = _answer(driver, driver.nvmlDeviceGetEnforcedPowerLimit, handle)
    default = _answer(driver, driver.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    # Of the width the driver tells what card and slot can do together, the system what the card can do.
    widths = (_answer(driver, driver.nvmlDeviceGetMaxPcieLinkWidth, handle), _number(bus, "max_link_width"))
    return Card(
        name=driver.nvmlDeviceGetName(handle),
        uuid=driver.nvmlDeviceGetUUID(handle),
        bus=bus,
        device=None,
        total_bytes=0 if memory is None else int(memory.total),
        free_bytes=0 if memory is None else int(memory.free),
        link_generation=_answer(driver, driver.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        link_generation_most=_answer(driver, driver.nvmlDeviceGetGpuMaxPcieLinkGeneration, handle),
        link_width=_answer(driver, driver.nvmlDeviceGetCurrPcieLinkWidth, handle),
        link_width_most=max((width for width in widths if width), default=None),
        numa_node=node if node is not None and node >= 0 else None,
        performance_state=_answer(driver, driver.nvmlDeviceGetPerformanceState, handle),
        power_limit_watts=None if limit is None else limit / 1000,
        power_default_watts=None if default is None else default / 1000,
    )


def _number(bus: str | None, name: str) -> int | None:
    """What the system says of the device at `bus`."""
    text = _line(_PCI_DEVICES / bus / name) if bus else None
    return int(text) if text is not None and text.lstrip("-").isdecimal() else None


def _torch_uuids() -> list[str]:
    """Of the cards that torch computes on, in its order."""
    if not torch.cuda.is_available():
        return []
    uuids = [str(torch.cuda.get_device_properties(n).uuid) for n in range(torch.cuda.device_count())]
    return [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in uuids]


def _card_of_torch(device: int, uuid: str) -> Card:
    """A card that the driver's library does not list under this uuid: a part of one, say."""
    return Card(torch.cuda.get_device_name(device), uuid, None, device, 0, 0)


def _on_device(card: Card, device: int) -> Card:
    """The card with what torch says of its memory: free is what torch's own context leaves."""
    free, total = torch.cuda.mem_get_info(device)
    return replace(card, device=device, total_bytes=total, free_bytes=free)
