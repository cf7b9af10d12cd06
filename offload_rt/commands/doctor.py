"""`offload-rt doctor`: prints what this machine is and can do, and recommendations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.commands.options import add_json
from offload_rt.system.files import write_json
from offload_rt.system.hardware import GIB, Gpu, ProductRate

if TYPE_CHECKING:
    from offload_rt.machine.inspection import Report
    from offload_rt.machine.inventory import GpuFacts, PcieLink

LABEL_WIDTH = 18

Section = tuple[str, dict[str, str | None]]
"""A title, and values by label; None is left out."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    doctor = commands.add_parser(
        "doctor",
        help="what this machine is and can do",
        description="Measures this machine once and prints what it can do, with recommendations.",
        allow_abbrev=False,
    )
    doctor.set_defaults(run=run)
    doctor.add_argument("--refresh", action="store_true", help="measure again instead of reading kept rates")
    add_json(doctor.add_argument, "the report")
    doctor.add_argument("--quiet", action="store_true", help="print only errors on stderr")


def run(arguments: argparse.Namespace) -> int:
    from offload_rt.machine.inspection import inspect
    from offload_rt.machine.recommendations import recommendations

    console = Console(arguments.quiet)
    report = inspect(arguments.refresh, console.progress)
    console.clear()
    recommended = recommendations(report)
    if arguments.json is not None:
        write_json("--json", arguments.json, {**report.to_json(), "recommendations": list(recommended)})
    show(report, recommended)
    return 0


def show(report: Report, recommendations: tuple[str, ...]) -> None:
    """Prints tables as wide as the terminal."""
    from rich import console, table

    stdout = console.Console(highlight=False, markup=False, emoji=False)
    for title, rows in _sections(report, recommendations):
        shown = table.Table(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False
        )
        shown.add_column(min_width=LABEL_WIDTH)
        shown.add_column(overflow="fold")
        for label, value in rows.items():
            if value is not None:
                shown.add_row(label, value)
        stdout.print(shown, "")


def _sections(report: Report, recommendations: tuple[str, ...]) -> Iterator[Section]:
    yield "Processor and memory", _host_rows(report)
    for number, gpu in enumerate(zip(report.hardware.gpus, report.links, report.gpus, strict=True)):
        yield f"GPU {number}", _gpu_rows(*gpu)
    if report.no_cuda_device is not None:
        yield "GPU", {"none": report.no_cuda_device}
    versions = ((name.replace("_", "-"), version) for name, version in report.versions.items())
    yield (
        "Measurement",
        {
            "measured": f"{report.measured_at}, load average {report.load_average:.2f}",
            "versions": ", ".join(f"{name} {version}" for name, version in versions if version),
            "notes": "; ".join(report.notices) or None,
        },
    )
    if recommendations:
        yield "Recommendations", {str(number): line for number, line in enumerate(recommendations, 1)}


def _host_rows(report: Report) -> dict[str, str | None]:
    facts, host, gpus = report.host, report.hardware.host, report.hardware.gpus
    cores = f"{facts.cores} of {facts.cores_of_machine} cores, {facts.threads} threads"
    limit = "none" if facts.lock_limit_bytes is None else f"{facts.lock_limit_bytes / 2**20:,.0f} MiB"
    first, *further = host.attention
    rates = "".join(f", {rate.rate:.1f} at {rate.queries}" for rate in further)
    shares = f"attention keeps {host.attention_beside_link:.0%} of its rate, "
    shares += f"the link {host.link_beside_attention:.0%}"
    return {
        "processor": f"{facts.processor}; {cores}",
        "instruction sets": ", ".join(facts.instruction_sets) or "none that attention uses",
        "memory": f"{_gib(host.memory_bytes)} of {_gib(facts.total_bytes)} available",
        "lockable memory": f"{_gib(host.lockable_bytes)} (`ulimit -l`: {limit})" if gpus else None,
        "memory rate": f"{host.memory_rate:.1f} GB/s",
        "matrix products": f"{host.compute_rate:,.0f} GFLOP/s in float32",
        "attention": f"{facts.attention} (native kernel: {facts.native_kernel})",
        "attention rate": f"{first.rate:.1f} GB/s of bfloat16 KV at 1 query a key head{rates}",
        "beside copies": shares if gpus else None,
        "launch of a layer": f"{host.launch_ms:.3f} ms",
        "quantized products": _products(host.products),
    }


def _gpu_rows(gpu: Gpu, link: PcieLink, facts: GpuFacts) -> dict[str, str | None]:
    triton = "Triton kernels run" if facts.triton is None else f"Triton kernels do not run ({facts.triton})"
    return {
        "name": gpu.name,
        "memory": f"{_gib(gpu.memory_bytes)} of {_gib(facts.total_bytes)} free",
        "link": f"{_pcie(link)} while copying; the GPU supports {_pcie(facts.max_link)}",
        "copies": f"{gpu.to_device_rate:.1f} GB/s to the GPU, {gpu.to_host_rate:.1f} GB/s to the host",
        "memory rate": f"{gpu.memory_rate:,.0f} GB/s",
        "matrix products": f"{gpu.compute_rate:,.0f} TFLOP/s in bfloat16",
        "attention": f"{facts.attention}; {triton}",
        "launch of a layer": f"{gpu.launch_ms:.3f} ms",
        "quantized products": _products(gpu.products),
    }


def _products(rates: Sequence[ProductRate]) -> str | None:
    """Returns rates of products with quantised weights; None where none were measured."""
    by_name: dict[str, list[ProductRate]] = {}
    for rate in rates:
        by_name.setdefault(rate.quantization, []).append(rate)
    products = "; ".join(
        f"{name} " + ", ".join(f"{rate.rate:.1f} at {rate.rows}" for rate in rates)
        for name, rates in by_name.items()
    )
    return f"{products} rows, in billions of weights a second" if rates else None


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _pcie(link: PcieLink) -> str:
    generation, width = link
    return f"PCIe {generation or '?'} ×{width or '?'}"
