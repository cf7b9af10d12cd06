"""`python -m bench gpu`: checks that need a CUDA device, the most important first.

The result is JSON lines: the command and the machine, then a line for each check as soon as it is done. Each
check runs in a process of its own, `python -m bench.gpu CHECK SIZES`: an error of the GPU outlives the check
that met it, and a process that hangs can be ended.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import torch

from bench import arguments as args
from bench import gpu_bits, gpu_checks, gpu_engine_checks, gpu_kernel_checks, machine
from bench.cases import GPU_MEMORY_GIB
from bench.gpu_checks import SIZES, Sizes, Subject
from bench.results import RESULTS, Row, cell, envelope
from bench.runner import ROOT
from bench.worker import cap
from offload_rt.errors import UsageError
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.machine.devices import choose_device
from offload_rt.machine.inventory import read_versions
from offload_rt.machine.measuring import CPU
from offload_rt.system.files import check_writable

CHECKS: dict[str, Callable[[Subject], Iterable[Row]]] = {
    "bits": gpu_bits.bits,
    "kernels": gpu_kernel_checks.kernels,
    "packed-pages": gpu_kernel_checks.packed_pages,
    "link-rates": gpu_kernel_checks.link_rates,
    "temporaries": gpu_kernel_checks.temporaries,
    "equal-tokens": gpu_kernel_checks.equal_tokens,
    "drafting": gpu_engine_checks.drafting,
    "streamed": gpu_engine_checks.streamed,
    "cpu-share": gpu_engine_checks.cpu_share,
    "planned": gpu_engine_checks.planned,
    "graphs": gpu_engine_checks.graphs,
    "attention": gpu_checks.attention,
    "overtaking": gpu_checks.overtaking,
    "page-locking": gpu_checks.page_locking,
    "two-gpus": gpu_engine_checks.two_gpus,
    "groups": gpu_engine_checks.groups,
    "largest": gpu_engine_checks.largest,
}
OF_TWO_GPUS, ASKED_FOR = ("two-gpus", "groups"), ("largest",)
"""Checks that run where there are two GPUs or when they are asked for, and only when they are."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of the command."""
    lines = [f"  {check:12} {function.__doc__}" for check, function in CHECKS.items()]
    parser.description = "Checks, in this order:\n\n" + "\n".join(lines)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    kind = args.listed(args.one_of(tuple(CHECKS)))
    about = f"checks (default: all but {', '.join(ASKED_FOR)}, and those of two GPUs where there are two)"
    parser.add_argument("--only", type=kind, metavar="A,B", help=about)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines (default: in bench/results)")
    parser.add_argument("--quick", action="store_true", help="smaller sizes: five minutes in total")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks; returns 1 if one failed."""
    if reason := no_cuda_device():
        raise UsageError(f"bench gpu: {reason}")
    sizes = SIZES["quick" if arguments.quick else "full"]
    out: Path = arguments.out or RESULTS / f"gpu-{'quick' if arguments.quick else 'checks'}.jsonl"
    check_writable("--out", out)
    # The machine without its GPUs: this process must not use memory of theirs.
    head = envelope(arguments, machine.describe(CPU)) | {"versions": read_versions(), "sizes": asdict(sizes)}
    ended: dict[str, list[str]] = {"ok": [], "failed": [], "skipped": []}
    with out.open("w", encoding="utf-8") as lines:
        print(json.dumps(head), file=lines, flush=True)
        for name in arguments.only or _by_default(torch.cuda.device_count()):
            started = perf_counter()
            row = _row(name, findings(name, sizes)) | {"seconds": round(perf_counter() - started, 1)}
            print(json.dumps(row), file=lines, flush=True)
            print(_shown(row), flush=True)
            ended[row["status"]].append(name)
    print(json.dumps(ended))
    return 1 if ended["failed"] else 0


def _by_default(gpus: int) -> list[str]:
    left_out = ASKED_FOR if gpus > 1 else (*ASKED_FOR, *OF_TWO_GPUS)
    return [name for name in CHECKS if name not in left_out]


def findings(name: str, sizes: Sizes) -> Iterator[Row]:
    """Runs a check in a process of its own; yields its findings, and how the process failed if it did."""
    command = [sys.executable, "-m", "bench.gpu", name, sizes.name]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield from map(json.loads, process.stdout.splitlines())
    if process.returncode:
        yield {
            "failed": f"its process ended with {process.returncode}, or was not done after {sizes.limit_s} s"
        }


def _row(name: str, findings: Iterable[Row]) -> Row:
    """The line of a check, from all that it found."""
    figures: Row = {}
    why: dict[str, list[str]] = {"failed": [], "skipped": []}
    for finding in findings:
        for status, reasons in why.items():
            reasons += [finding.pop(status)] if status in finding else []
        figures |= finding
    status = next((status for status, reasons in why.items() if reasons), "ok")
    return {"check": name, "status": status, "why": why["failed"] + why["skipped"]} | figures


def _shown(row: Row) -> str:
    """A line for people, without figures that have many values."""
    of = (key for key, value in row.items() if key not in ("check", "status", "why"))
    figures = (f"{key} {cell(row[key])}" for key in of if not isinstance(row[key], (list, dict)))
    return f"{row['status']:8} {row['check']}: {', '.join((*row['why'], *figures))}"


def check(name: str, size: str) -> None:
    """Runs a check in this process; prints what it finds as JSON lines."""
    sizes, out = SIZES[size], sys.stdout
    faulthandler.dump_traceback_later(sizes.limit_s, exit=True)
    try:
        device = choose_device("cuda")
        for number in range(torch.cuda.device_count()):
            cap(GPU_MEMORY_GIB, torch.device("cuda", number))  # so that a large GPU stands for a desktop's
        with redirect_stdout(sys.stderr):
            for finding in CHECKS[name](Subject(device, sizes)):
                print(json.dumps(finding), file=out, flush=True)
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = traceback.format_exception_only(error)[-1].partition("\n")[0]
        print(json.dumps({"failed": f"{message} ({Path(last.filename).name}:{last.lineno})"}), file=out)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    check(*sys.argv[1:])
