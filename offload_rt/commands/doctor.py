"""`offload-rt doctor`: what this machine can do, as a table; what stands in its way, and the remedy."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.files import check_writable, write_json
from offload_rt.machine.hardware import GIB, Gpu

if TYPE_CHECKING:
    from offload_rt.machine.doctor import Report
    from offload_rt.machine.inventory import Card
    from offload_rt.machine.measuring_gpu import LinkFigures

LABEL_WIDTH = 20
LINE_WIDTH = 100

Row = tuple[str, str]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can do",
        description="Measures this machine once, tells what it can do, and what stands in its way.",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("--refresh", action="store_true", help="measure again")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the report")
    doctor.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(arguments: argparse.Namespace) -> int:
    # What needs no torch is checked before it is imported: that alone takes seconds.
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    from offload_rt.machine.advice import warnings
    from offload_rt.machine.doctor import inspect

    report = inspect(arguments.refresh, None if arguments.quiet else tell_measuring)
    found = warnings(report)
    for line in table(report):
        print(line)
    if found:
        print("\nWarnings")
        for warning in found:
            print(textwrap.fill(warning, LINE_WIDTH, initial_indent="  - ", subsequent_indent="    "))
    if arguments.json is not None:
        write_json("--json", arguments.json, {**report.to_json(), "warnings": list(found)})
    return 0


def tell_measuring(what: str, done: int, total: int) -> None:
    """A line on stderr."""
    print(f"measuring  {what} ({done + 1} of {total})", file=sys.stderr, flush=True)


def table(report: Report) -> Iterator[str]:
    """The report for people, line by line."""
    yield from _section("Processor and memory", _host_rows(report))
    cards = {card.device: card for card in report.cards}
    for device, (gpu, link) in enumerate(zip(report.hardware.gpus, report.links, strict=True)):
        yield ""
        yield from _section(f"GPU {device}", _gpu_rows(gpu, link, cards[device]))
    versions = report.versions
    named = {"python": versions.python, "torch": versions.torch, "transformers": versions.transformers}
    named |= {"flash-attn": versions.flash_attn, "driver": versions.driver}
    yield ""
    yield from _section(
        "Figures",
        [
            ("measured", f"{report.measured_at}, load average {report.load_average:.2f}"),
            ("versions", ", ".join(f"{name} {version}" for name, version in named.items() if version)),
            *(("note", notice) for notice in report.notices),
        ],
    )


def _section(title: str, rows: list[Row]) -> Iterator[str]:
    yield title
    for label, value in rows:
        yield textwrap.fill(
            value,
            LINE_WIDTH,
            initial_indent=f"  {label:{LABEL_WIDTH}}",
            subsequent_indent=" " * (LABEL_WIDTH + 2),
            break_on_hyphens=False,
        )


def _host_rows(report: Report) -> list[Row]:
    facts, host = report.host, report.hardware.host
    limits = []
    if facts.memory_limit_bytes is not None:
        limits.append(f"a container's limit is {_gib(facts.memory_limit_bytes)}")
    limit = "none" if facts.lock_limit_bytes is None else f"{facts.lock_limit_bytes / 2**20:,.0f} MiB"
    attention = [f"{host.attention[0].rate:.1f} GB/s at {host.attention[0].queries} query"]
    attention += [f"{measured.rate:.1f} at {measured.queries}" for measured in host.attention[1:]]
    what_copies = "the link" if report.hardware.gpus else "a memory copy"
    return [
        (
            "processor",
            f"{facts.processor}; {facts.cores} of {facts.cores_of_machine} processors,"
            f" threads: {host.threads}, NUMA nodes: {facts.numa_nodes}",
        ),
        ("instruction sets", ", ".join(facts.instruction_sets) or "none of those that matter here"),
        ("native kernel", facts.native_kernel),
        ("memory", ", ".join([f"{_gib(host.memory_bytes)} of {_gib(facts.total_bytes)} available", *limits])),
        ("may be locked", f"{_gib(host.lockable_bytes)}; limit of the shell: {limit}"),
        ("memory read", f"{host.memory_rate:.1f} GB/s"),
        ("attention", ", ".join(attention) + " (bf16 KV read)"),
        (
            "beside copies",
            f"attention keeps {host.attention_beside_link:.0%} of its rate, {what_copies}"
            f" {host.link_beside_attention:.0%}",
        ),
        ("matrix products", f"{host.compute_rate:,.0f} GFLOP/s float32"),
        ("launch of a layer", f"{host.launch_ms:.3f} ms"),
    ]


def _gpu_rows(gpu: Gpu, link: LinkFigures, card: Card) -> list[Row]:
    rows = [
        ("name", gpu.name),
        ("memory", f"{_gib(gpu.memory_bytes)} of {_gib(card.total_bytes)} free"),
        (
            "link",
            f"PCIe {_or_unknown(link.generation)} ×{_or_unknown(link.width)} while copying; the card can do"
            f" {_or_unknown(card.link_generation_most)} ×{_or_unknown(card.link_width_most)}",
        ),
        ("copies to the GPU", f"{gpu.to_device_rate:.1f} GB/s; both ways {link.to_device_rate_both:.1f}"),
        ("copies to the host", f"{gpu.to_host_rate:.1f} GB/s; both ways {link.to_host_rate_both:.1f}"),
        ("memory read", f"{gpu.memory_rate:,.0f} GB/s"),
        ("matrix products", f"{gpu.compute_rate:,.0f} TFLOP/s bf16"),
        ("launch of a layer", f"{gpu.launch_ms:.3f} ms"),
    ]
    if card.numa_node is not None:
        rows.append(("NUMA node", str(card.numa_node)))
    if card.performance_state is not None:
        rows.append(("performance state", f"P{card.performance_state}"))
    if card.power_limit_watts is not None:
        rows.append(("power limit", f"{card.power_limit_watts:.0f} W"))
    return rows


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)
