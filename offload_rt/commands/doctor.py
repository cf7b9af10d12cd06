"""`offload-rt doctor`: prints what this machine can do, as a table, and warnings with their remedies."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from offload_rt.commands.generate import add_json
from offload_rt.files import write_json
from offload_rt.machine.hardware import GIB, Gpu

if TYPE_CHECKING:
    from offload_rt.machine.doctor import Report
    from offload_rt.machine.inventory import Card
    from offload_rt.machine.measuring import LinkFigures

LABEL_WIDTH = 20
LINE_WIDTH = 100

Rows = dict[str, str | None]
"""Values by their labels; those that are None are not printed."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can do",
        description="Measures this machine once; prints what it can do, and warnings with their remedies.",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("--refresh", action="store_true", help="measure again, whatever was measured before")
    add_json(doctor.add_argument, "the report")
    doctor.add_argument("--quiet", action="store_true", help="print nothing but errors on stderr")


def run(arguments: argparse.Namespace) -> int:
    from offload_rt.machine.advice import warnings
    from offload_rt.machine.doctor import inspect

    report = inspect(arguments.refresh, None if arguments.quiet else tell_measuring)
    found = warnings(report)
    if arguments.json is not None:
        write_json("--json", arguments.json, {**report.to_json(), "warnings": list(found)})
    for line in table(report):
        print(line)
    if found:
        print("\nWarnings")
        for warning in found:
            print(textwrap.fill(warning, LINE_WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return 0


def tell_measuring(what: str, done: int, total: int) -> None:
    """Prints a line of progress on stderr."""
    print(f"measuring  {what} ({done + 1} of {total})", file=sys.stderr, flush=True)


def table(report: Report) -> Iterator[str]:
    """Yields the lines of the report."""
    yield from _section("Processor and memory", _host_rows(report))
    for gpu, link, card in zip(report.hardware.gpus, report.links, report.cards, strict=False):
        yield ""
        yield from _section(f"GPU {card.device}", _gpu_rows(gpu, link, card))
    if report.no_cuda_device is not None and not report.cards:  # else it is a warning
        yield ""
        yield from _section("GPU", {"none": report.no_cuda_device})
    versions = report.versions.items()
    rows: Rows = {
        "measured": f"{report.measured_at}, load average {report.load_average:.2f}",
        "versions": ", ".join(f"{name.replace('_', '-')} {version}" for name, version in versions if version),
    }
    yield ""
    yield from _section("Figures", rows)
    for notice in report.notices:
        yield _row("note", notice)


def _section(title: str, rows: Rows) -> Iterator[str]:
    yield title
    yield from (_row(label, value) for label, value in rows.items() if value is not None)


def _row(label: str, value: str) -> str:
    return textwrap.fill(
        value,
        LINE_WIDTH,
        initial_indent=f"  {label:{LABEL_WIDTH}}",
        subsequent_indent=" " * (LABEL_WIDTH + 2),
        break_on_hyphens=False,
    )


def _host_rows(report: Report) -> Rows:
    facts, host = report.host, report.hardware.host
    container, locked = facts.memory_limit_bytes, facts.lock_limit_bytes
    available = f"{_gib(host.memory_bytes)} of {_gib(facts.total_bytes)} available"
    first, *others = host.attention
    attention = f"{first.rate:.1f} GB/s at {first.queries} query, "
    attention += ", ".join(f"{one.rate:.1f} at {one.queries}" for one in others)
    beside = f"attention keeps {host.attention_beside_link:.0%} of its rate, "
    beside += f"the link {host.link_beside_attention:.0%}"
    return {
        "processor": f"{facts.processor}; {facts.cores} of {facts.cores_of_machine} processors,"
        f" threads: {facts.threads}, NUMA nodes: {facts.numa_nodes}",
        "instruction sets": ", ".join(facts.instruction_sets) or "none of those that matter here",
        "native kernel": facts.native_kernel,
        "memory": available + (f", a container's limit is {_gib(container)}" if container else ""),
        "may be locked": f"{_gib(host.lockable_bytes)}; limit of the shell: "
        + ("none" if locked is None else f"{locked / 2**20:,.0f} MiB"),
        "memory read": f"{host.memory_rate:.1f} GB/s",
        "attention": f"{attention} (bf16 KV read)",
        "beside copies": beside if report.hardware.gpus else None,
        "matrix products": f"{host.compute_rate:,.0f} GFLOP/s float32",
        "launch of a layer": f"{host.launch_ms:.3f} ms",
    }


def _gpu_rows(gpu: Gpu, link: LinkFigures, card: Card) -> Rows:
    state, watts = card.performance_state, card.power_limit_watts
    return {
        "name": gpu.name,
        "memory": f"{_gib(gpu.memory_bytes)} of {_gib(card.total_bytes)} free",
        "link": f"PCIe {_known(link.generation)} ×{_known(link.width)} while copying; the card can do"
        f" {_known(card.link_generation_most)} ×{_known(card.link_width_most)}",
        "copies to the GPU": f"{gpu.to_device_rate:.1f} GB/s; both ways {link.to_device_rate_both:.1f}",
        "copies to the host": f"{gpu.to_host_rate:.1f} GB/s; both ways {link.to_host_rate_both:.1f}",
        "memory read": f"{gpu.memory_rate:,.0f} GB/s",
        "matrix products": f"{gpu.compute_rate:,.0f} TFLOP/s bf16",
        "launch of a layer": f"{gpu.launch_ms:.3f} ms",
        "attention": None if card.attention is None else f"{card.attention}; {_triton(card)}",
        "NUMA node": None if card.numa_node is None else str(card.numa_node),
        "performance state": None if state is None else f"P{state}",
        "power limit": None if watts is None else f"{watts:.0f} W",
    }


def _triton(card: Card) -> str:
    return "Triton kernels run" if card.triton is None else f"Triton kernels do not run ({card.triton})"


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)
