"""What this machine can do: measured once, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from offload_rt.devices import CACHE_FOLDER, cache_folder
from offload_rt.errors import UsageError
from offload_rt.files import write_whole
from offload_rt.machine.hardware import GIB, Hardware
from offload_rt.machine.inventory import (
    Card,
    HostFacts,
    Versions,
    lockable_memory,
    read_cards,
    read_host,
    read_versions,
)
from offload_rt.machine.measuring import Progress, Sizes, measure_host
from offload_rt.machine.measuring_gpu import LinkFigures, PinnedCopies, measure_gpu
from offload_rt.native import SOURCES

FORMAT = 1
"""Of the files that keep reports: raised when what a figure means changes."""

STAND_IN = (
    "no GPU that torch can use: attention was measured beside a memory copy by one more thread, in the place"
    " of a link"
)


@dataclass(frozen=True)
class Report:
    """A machine.

    Attributes:
        measured_at: when its rates were measured, ISO 8601 in UTC.
        load_average: programs that were running just before.
        hardware: the figures that plans are made from; memory is what is free now.
        links: what else is seen of the link of each of `hardware.gpus`.
        host: what the system says of the processor and its memory now.
        cards: all graphics cards; those of `hardware.gpus` first.
        versions: of what computes.
        notices: what to know about the figures.
    """

    measured_at: str
    load_average: float
    hardware: Hardware
    links: tuple[LinkFigures, ...]
    host: HostFacts
    cards: tuple[Card, ...]
    versions: Versions
    notices: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """As JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, values: object) -> Report:
        """What `to_json` gave. Raises ValueError, naming the place, for anything else."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"not a report of format {FORMAT}")
        report: Report = _decoded(cls, {name: v for name, v in values.items() if name != "format"}, "report")
        return report


def inspect(refresh: bool = False, on_progress: Progress | None = None, sizes: Sizes | None = None) -> Report:
    """What this machine can do.

    Rates are measured where they have not been before, which takes some seconds, and kept in the cache
    folder; how much memory is free, and whatever else the system says, is read anew each time.

    Args:
        refresh: measure again.
        on_progress: told what is measured.
        sizes: how much to measure with.

    Raises:
        UsageError: where a GPU fails, or has too little free memory, while it is measured.
    """
    load_average = os.getloadavg()[0]
    host, cards, versions = read_host(), read_cards(), read_versions()
    identity = _identity(host, cards, versions)
    kept = None if refresh else _kept(identity)
    if kept is None:
        hardware, links = _measure(cards, host, sizes or Sizes(), on_progress or (lambda *_: None))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        notices = () if hardware.gpus else (STAND_IN,)
        kept = Report(now, load_average, hardware, links, host, cards, versions, notices)
        failure = _keep(identity, kept)
        if failure is not None:
            kept = replace(kept, notices=(*notices, failure))
        host, cards = read_host(), read_cards()  # what was measured with is free again
    return _as_of_now(kept, host, cards, versions)


def _measure(
    cards: tuple[Card, ...], host: HostFacts, sizes: Sizes, on_progress: Progress
) -> tuple[Hardware, tuple[LinkFigures, ...]]:
    """All rates; memory is left at nothing."""
    sizes = sizes.within(host.available_bytes)
    used = [card for card in cards if card.device is not None]
    gpus, links, copies = [], [], []
    with ExitStack() as open_copies:
        for card in used:
            device = torch.device(f"cuda:{card.device}")
            fitting = sizes.within(card.free_bytes)
            with _told_of(card):
                copies.append(PinnedCopies(device, fitting.copy_bytes))
                open_copies.callback(copies[-1].close)
                gpu, link = measure_gpu(card, copies[-1], device, fitting, on_progress)
            gpus.append(gpu)
            links.append(link)
        with _told_of(used[0]) if used else nullcontext():
            measured = measure_host(sizes, copies[0].copy if used else None, on_progress)
    if used:
        copies.clear()
        torch.cuda.empty_cache()
    return Hardware(measured, tuple(gpus), measured=True), tuple(links)


@contextmanager
def _told_of(card: Card) -> Iterator[None]:
    """Failures of a card, as a line to the user."""
    name = f"GPU {card.device} ({card.name})"
    try:
        yield
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


def _as_of_now(report: Report, host: HostFacts, cards: tuple[Card, ...], versions: Versions) -> Report:
    """The report with what is free now."""
    free = {card.device: card.free_bytes for card in cards}
    hardware = replace(
        report.hardware,
        host=replace(
            report.hardware.host, memory_bytes=host.available_bytes, lockable_bytes=lockable_memory(host)
        ),
        gpus=tuple(
            replace(gpu, memory_bytes=free[device]) for device, gpu in enumerate(report.hardware.gpus)
        ),
    )
    return replace(report, hardware=hardware, host=host, cards=cards, versions=versions)


def _identity(host: HostFacts, cards: tuple[Card, ...], versions: Versions) -> dict[str, Any]:
    """What the rates depend on, as JSON values: with any other of these they are measured again."""
    return {
        "processor": [host.processor, *host.instruction_sets],
        "cores": host.cores,
        "threads": host.threads,
        "attention": [
            host.attention,
            hashlib.sha256(b"".join(part.read_bytes() for part in SOURCES)).hexdigest(),
        ],
        "memory_gib": round(host.total_bytes / GIB),
        "cards": [[card.name, card.uuid, card.bus, card.device, card.link_generation_most] for card in cards],
        "versions": asdict(versions),
    }


def _file(identity: dict[str, Any]) -> Path:
    """Raises OSError or RuntimeError where there can be no such file."""
    text = json.dumps(identity, sort_keys=True)
    return cache_folder() / f"machine-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _kept(identity: dict[str, Any]) -> Report | None:
    """The report that was kept of this machine; None where there is none that can be read."""
    try:
        content = json.loads(_file(identity).read_text(encoding="utf-8"))
        if content["identity"] != identity:
            return None
        return Report.from_json(content["report"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def _keep(identity: dict[str, Any], report: Report) -> str | None:
    """Writes the file as a whole or not at all; returns why not."""
    text = json.dumps({"identity": identity, "report": report.to_json()}, indent=1, allow_nan=False)
    try:
        write_whole(_file(identity), text)
    except (OSError, RuntimeError) as error:
        return (
            f"the figures could not be kept ({error}), so that they are measured each time; name a folder"
            f" that can be written in {CACHE_FOLDER}"
        )
    return None


def _decoded(kind: Any, value: Any, place: str) -> Any:
    """A value of type `kind` from JSON values; ValueError names the `place` that does not fit."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        (other,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else _decoded(other, value, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{place}: {value!r} is not a list")
        return tuple(_decoded(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if is_dataclass(kind):
        names = [field.name for field in fields(kind)]
        if not isinstance(value, dict) or sorted(value) != sorted(names):
            raise ValueError(f"{place}: is not made of {', '.join(names)}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _decoded(hints[name], value[name], f"{place}.{name}") for name in names})  # type: ignore[operator]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{place}: {value!r} is not a {kind.__name__}")
    return value
