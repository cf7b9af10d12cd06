"""Inspects this machine: rates are measured once and kept in a file; all else is read each time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from cpu_kv.streams import release_cached_memory
from offload_rt.errors import UsageError, first_line
from offload_rt.kernels.native import SOURCES
from offload_rt.machine import inventory
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.machine.inventory import GpuFacts, HostFacts, PcieLink
from offload_rt.system.digests import digest
from offload_rt.system.files import locked, write_whole
from offload_rt.system.hardware import GIB, NO_GPU, SYSTEM_BYTES, Gpu, Hardware, Host, named_hardware
from offload_rt.system.memory import CACHE_FOLDER, available_memory, cache_folder

OnProgress = Callable[[str, int, int], None]
"""Called with what is measured next, how much of it is done, and how much there is."""

FORMAT = 5
"""Version of reports and of the files that keep rates."""


@dataclass(frozen=True)
class Report:
    """Measured rates and current facts of a machine."""

    measured_at: str  # ISO 8601 in UTC
    load_average: float  # just before it was measured
    hardware: Hardware  # with the memory that is free now
    links: tuple[PcieLink, ...]  # of `hardware.gpus`, while they copied
    host: HostFacts
    gpus: tuple[GpuFacts, ...]  # of `hardware.gpus`
    versions: dict[str, str | None]
    notices: tuple[str, ...]
    no_cuda_device: str | None = None  # why torch finds none; None: it does

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT, **asdict(self)}


def inspect(refresh: bool = False, on_progress: OnProgress | None = None) -> Report:
    """Returns what this machine is and can do. The first measurement takes some seconds.

    Args:
        refresh: measure again.

    Raises:
        UsageError: a GPU fails or has too little free memory to be measured.
    """
    load_average = os.getloadavg()[0]
    host, gpus, versions = inventory.read_host(), inventory.read_gpus(), inventory.read_versions()
    file_name, notices = _file_name(host, gpus, versions), list[str]()
    measured = None if refresh else _load(file_name)
    if measured is None:
        # One process at a time: two that measure at once find half of the rates, and plans change.
        with _measuring_alone():
            measured = None if refresh else _load(file_name)
            if measured is None:
                hardware, links = _measure(host, gpus, on_progress or (lambda *_: None))
                measured = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
                measured |= {"load_average": load_average, "hardware": hardware, "links": links}
                notices = _save(file_name, measured)
        release_cached_memory()
        host, gpus = inventory.read_host(), inventory.read_gpus()  # measuring loads libraries, which stay
    hardware = measured["hardware"]
    memory = {"memory_bytes": host.available_bytes, "lockable_bytes": inventory.lockable_memory(host)}
    usable_gpus = (
        replace(gpu, memory_bytes=facts.free_bytes) for gpu, facts in zip(hardware.gpus, gpus, strict=True)
    )
    hardware = replace(hardware, host=replace(hardware.host, **memory), gpus=tuple(usable_gpus))
    facts: dict[str, Any] = {"host": host, "gpus": gpus, "versions": versions, "notices": tuple(notices)}
    return Report(**measured | facts | {"hardware": hardware}, no_cuda_device=no_cuda_device())


@contextmanager
def _measuring_alone() -> Iterator[None]:
    """Waits until no other process of the user measures, where the cache folder can be written to."""
    with ExitStack() as locks:
        with suppress(OSError):
            locks.enter_context(locked(cache_folder() / "measuring.lock", "ab"))
        yield


def usable_hardware(
    device: torch.device,
    loaded_bytes: int = 0,
    on_progress: OnProgress | None = None,
    other_gpus: Sequence[tuple[torch.device, int]] = (),
) -> Hardware:
    """Returns the hardware of a run, with the memory that is free or that the run already holds.

    Without a GPU only memory is known; rates are those of a desktop, and nothing is measured.

    Args:
        loaded_bytes: memory of the device that the run already holds.
        other_gpus: further GPUs of the run, each with the bytes that it already holds there.
    """
    if device.type != "cuda":
        return named_hardware(NO_GPU, ram=(available_memory() + loaded_bytes + SYSTEM_BYTES) / GIB)
    measured = inspect(on_progress=on_progress).hardware
    devices = (device, loaded_bytes), *other_gpus
    return replace(
        measured, gpus=tuple(_usable(measured.gpus, *device_and_bytes) for device_and_bytes in devices)
    )


def _usable(gpus: Sequence[Gpu], device: torch.device, loaded_bytes: int) -> Gpu:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved, allocated = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
    # torch may be limited to a part of the GPU. What it has reserved and not handed out is free as well.
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total) - reserved
    return replace(gpus[index], memory_bytes=min(free, allowed) + reserved - allocated + loaded_bytes)


@torch.inference_mode(False)  # a caller may be in it, but threads that measure are not
def _measure(
    host: HostFacts, gpus: tuple[GpuFacts, ...], on_progress: OnProgress
) -> tuple[Hardware, tuple[PcieLink, ...]]:
    """Measures all rates; memory sizes stay 0."""
    from offload_rt.machine import measuring  # with transformers: two seconds, where rates are not known yet

    measured: list[tuple[Gpu, PcieLink]] = []
    processor: Host | None = None
    for number, facts in enumerate(gpus):
        on_progress(f"measure GPU {number}", number, len(gpus))
        device = torch.device("cuda", number)
        try:
            with closing(measuring.PinnedCopies(device, facts.free_bytes)) as copies:
                measured.append(measuring.measure_gpu(facts, copies, device))
                processor = processor or measuring.measure_host(host.available_bytes, copies.copy)
        except RuntimeError as error:
            memory = f"{facts.free_bytes / GIB:.1f} GiB free"
            raise UsageError(
                f"GPU {number} ({facts.name}, {memory}) could not be measured: {first_line(error)}; end other"
                " programs that use it (nvidia-smi lists them), or hide it with CUDA_VISIBLE_DEVICES"
            ) from error
    if processor is None:
        on_progress("measure processor", 0, 1)
        processor = measuring.measure_host(host.available_bytes, None)
    measured_gpus, links = zip(*measured, strict=True) if measured else ((), ())
    return Hardware(processor, measured_gpus, measured=True), links


def _file_name(host: HostFacts, gpus: tuple[GpuFacts, ...], versions: dict[str, str | None]) -> str:
    """Returns a name that differs where anything differs that rates depend on."""
    identity = [
        *(FORMAT, host.processor, host.instruction_sets, host.cores, host.threads, host.attention),
        *(round(host.total_bytes / GIB), versions, [part.read_text() for part in SOURCES]),
        *((gpu.name, gpu.uuid, gpu.bus, gpu.max_link) for gpu in gpus),
    ]
    return f"machine-{digest(json.dumps(identity), digits=16)}.json"


def _load(file_name: str) -> dict[str, Any] | None:
    """Returns kept measurements; None without a file that can be read."""
    try:
        values = json.loads((cache_folder() / file_name).read_text(encoding="utf-8"))
        links = tuple((generation, width) for generation, width in values["links"])
        measurements = {"hardware": Hardware.from_json(values["hardware"]), "links": links}
        return {name: values[name] for name in ("measured_at", "load_average")} | measurements
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save(file_name: str, measured: dict[str, Any]) -> list[str]:
    """Keeps measurements; returns notices where that fails."""
    try:
        write_whole(cache_folder() / file_name, json.dumps(measured, default=asdict, indent=1))
    except OSError as error:
        return [
            f"the rates could not be kept ({error}) and are measured each time; set {CACHE_FOLDER} to a"
            " folder that can be written"
        ]
    return []
