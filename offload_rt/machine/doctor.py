"""What this machine can do: measured once, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch

from offload_rt.errors import UsageError
from offload_rt.files import write_whole
from offload_rt.machine import measuring
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.machine.hardware import GIB, NO_GPU, SYSTEM_BYTES, Gpu, Hardware, Host, named_hardware
from offload_rt.machine.inventory import (
    Card,
    HostFacts,
    lockable_memory,
    read_cards,
    read_host,
    read_versions,
)
from offload_rt.machine.measuring import LinkFigures, Progress
from offload_rt.machine.memory import CACHE_FOLDER, available_memory, cache_folder
from offload_rt.native import SOURCES

FORMAT = 2
"""Of reports and of the files that keep rates: raised when the meaning of a figure changes."""


@dataclass(frozen=True)
class Report:
    """A machine: what was measured, and what the system says of it now, its free memory too."""

    measured_at: str  # ISO 8601 in UTC
    load_average: float  # programs that were running just before
    hardware: Hardware
    links: tuple[LinkFigures, ...]  # what else is seen of the link of each of `hardware.gpus`
    host: HostFacts
    cards: tuple[Card, ...]  # all graphics cards; those of `hardware.gpus` first
    versions: dict[str, str | None]  # of the software that the rates depend on, by name; None: not there
    notices: tuple[str, ...]  # what to know about the figures
    no_cuda_device: str | None = None  # why torch finds none; None: it does

    def to_json(self) -> dict[str, object]:
        return {"format": FORMAT, **asdict(self)}


def inspect(refresh: bool = False, on_progress: Progress | None = None) -> Report:
    """What this machine can do.

    Rates that have not been measured before are measured, which takes some seconds, and kept in the cache
    folder. Free memory, and whatever else the system says, is read anew each time.

    Args:
        refresh: measure again.
        on_progress: told what is measured.

    Raises:
        UsageError: a GPU fails, or has too little free memory, while it is measured.
    """
    load_average = os.getloadavg()[0]
    host, cards, versions = read_host(), read_cards(), read_versions()
    file_name, failures = _file_name(host, cards, versions), list[str]()
    measured = None if refresh else _kept(file_name)
    if measured is None:
        hardware, links = _measure(cards, host, on_progress or (lambda *_: None))
        torch.cuda.empty_cache()
        measured = {"measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
        measured |= {"load_average": load_average, "hardware": hardware, "links": links}
        failures = _keep(file_name, measured)
        host, cards = read_host(), read_cards()  # what was measured with is free again
    # What is free is never old.
    kept, lockable = measured["hardware"], lockable_memory(host)
    free = replace(kept.host, memory_bytes=host.available_bytes, lockable_bytes=lockable)
    gpus = (replace(gpu, memory_bytes=card.free_bytes) for gpu, card in zip(kept.gpus, cards, strict=False))
    measured |= {"hardware": replace(kept, host=free, gpus=tuple(gpus))}
    facts: dict[str, Any] = {"host": host, "cards": cards, "versions": versions}
    return Report(**measured, **facts, notices=tuple(failures), no_cuda_device=no_cuda_device())


def usable_hardware(
    device: torch.device,
    loaded_bytes: int = 0,
    on_progress: Progress | None = None,
    cards: Sequence[tuple[torch.device, int]] = (),
) -> Hardware:
    """The host and, where it is a GPU, the device, with the memory that is free or already taken for the run.

    Args:
        loaded_bytes: what the run already holds of the device's memory, or of the host's without one.
        on_progress: told what is measured of the machine, where it has not been before.
        cards: other GPUs that the run uses, and what it already holds of their memory.
    """
    if device.type != "cuda":
        # Attended in place there is nothing to place: only memory counts, and that needs no measurement.
        return named_hardware(NO_GPU, ram=(available_memory() + loaded_bytes + SYSTEM_BYTES) / GIB)
    measured = inspect(on_progress=on_progress).hardware
    used = (device, loaded_bytes), *cards
    return replace(measured, gpus=tuple(_usable(measured.gpus, *one) for one in used))


def _usable(gpus: Sequence[Gpu], device: torch.device, loaded_bytes: int) -> Gpu:
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    reserved, allocated = torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
    # torch may be kept to a part of the card. What it has reserved and not handed out is free to us as well.
    allowed = int(torch.cuda.get_per_process_memory_fraction(index) * total) - reserved
    return replace(gpus[index], memory_bytes=min(free, allowed) + reserved - allocated + loaded_bytes)


def _measure(
    cards: tuple[Card, ...], host: HostFacts, on_progress: Progress
) -> tuple[Hardware, tuple[LinkFigures, ...]]:
    """All rates; memory is left at nothing."""
    measured: list[tuple[Gpu, LinkFigures]] = []
    processor: Host | None = None
    for card in cards:
        if card.device is None:
            continue
        device, name = torch.device("cuda", card.device), f"GPU {card.device} ({card.name})"
        try:
            with closing(measuring.PinnedCopies(device, card.free_bytes)) as copies:
                measured.append(measuring.measure_gpu(card, copies, device, on_progress))
                processor = processor or measuring.measure_host(
                    host.available_bytes, copies.copy, on_progress
                )
        except torch.OutOfMemoryError:
            raise UsageError(
                f"{name}: {card.free_bytes / GIB:.1f} GiB of free memory are too few to measure it; end other"
                " programs that use it (nvidia-smi lists them)"
            ) from None
        except RuntimeError as error:
            raise UsageError(
                f"{name} failed while it was measured: {str(error).splitlines()[0]}; check it and its driver"
                " (nvidia-smi), or hide it with CUDA_VISIBLE_DEVICES"
            ) from error
    processor = processor or measuring.measure_host(host.available_bytes, None, on_progress)
    gpus, links = zip(*measured, strict=True) if measured else ((), ())
    return Hardware(processor, gpus, measured=True), links


def _file_name(host: HostFacts, cards: tuple[Card, ...], versions: dict[str, str | None]) -> str:
    """Named by all that the rates depend on: where any of it differs, they are measured again."""
    kernel = b"".join(part.read_bytes() for part in SOURCES)
    identity = [
        *(FORMAT, host.processor, host.instruction_sets, host.cores, host.threads, host.attention),
        *(hashlib.sha256(kernel).hexdigest(), round(host.total_bytes / GIB), versions),
        *([card.name, card.uuid, card.bus, card.device, card.link_generation_most] for card in cards),
    ]
    return f"machine-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.json"


def _kept(file_name: str) -> dict[str, Any] | None:
    """What was measured and kept in this file; None where there is none that can be read."""
    try:
        values = json.loads((cache_folder() / file_name).read_text(encoding="utf-8"))
        links = tuple(LinkFigures(**link) for link in values["links"])
        found = {"hardware": Hardware.from_json(values["hardware"]), "links": links}
        return {name: values[name] for name in ("measured_at", "load_average")} | found
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def _keep(file_name: str, measured: dict[str, Any]) -> list[str]:
    """Writes the file as a whole or not at all; returns a notice where it could not."""
    try:
        write_whole(cache_folder() / file_name, json.dumps(measured, default=asdict, indent=1))
    except (OSError, RuntimeError) as error:
        return [
            f"the figures could not be kept ({error}), so that they are measured each time; name a folder"
            f" that can be written in {CACHE_FOLDER}"
        ]
    return []
