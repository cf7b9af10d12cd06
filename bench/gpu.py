"""`python -m bench gpu`: what only a GPU can tell, what matters first comes first.

The result is JSON lines: the command and the machine, then a line for each check, written when it is done.
Each check has a process of its own, because an error of the GPU outlives the check that met it, and because a
process that hangs can be ended.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench import gpu_checks, gpu_engine_checks, inputs, machine, report
from bench.cases import GPU_MEMORY_GIB
from bench.gpu_checks import FULL, QUICK, TINY, Given, Sizes
from bench.report import Row
from bench.worker import cap
from offload_rt.errors import UsageError
from offload_rt.files import check_writable
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.machine.inventory import read_versions
from offload_rt.machine.measuring import CPU
from offload_rt.model.loading import choose_device

PROCESSES = get_context("spawn")
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
CHECKS: dict[str, Callable[[Given], Iterator[Row]]] = {
    "registration": gpu_checks.registration,
    "overtaking": gpu_checks.overtaking,
    "attention": gpu_checks.attention,
    "graphs": gpu_engine_checks.graphs,
    "planned": gpu_engine_checks.planned,
    "streamed": gpu_engine_checks.streamed,
    "cpu-share": gpu_engine_checks.cpu_share,
    "drafting": gpu_engine_checks.drafting,
    "two-gpus": gpu_engine_checks.two_gpus,
}
"""What matters first comes first."""


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = inputs.command(commands, "gpu", run, "all that only a CUDA device can tell")
    said = [f"  {name:12} {check.__doc__}" for name, check in CHECKS.items()]
    parser.description = "Checks, in this order:\n\n" + "\n".join(said)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=inputs.names(CHECKS), default=tuple(CHECKS), metavar="A,B")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON lines (default: in bench/results)")
    sizes = parser.add_mutually_exclusive_group()
    add = sizes.add_argument
    add("--quick", dest="sizes", action="store_const", const=QUICK, default=FULL, help="ten minutes in all")
    add(
        "--tiny",
        dest="sizes",
        action="store_const",
        const=TINY,
        help="seconds: to test the checks themselves",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks; returns 1 where one failed."""
    if missing := no_cuda_device():
        raise UsageError(f"bench gpu: {missing}")
    sizes: Sizes = arguments.sizes
    out: Path = arguments.out or inputs.RESULTS / f"gpu-{'checks' if sizes is FULL else sizes.name}.jsonl"
    if arguments.out is None:
        inputs.RESULTS.mkdir(parents=True, exist_ok=True)
    check_writable("--out", out)
    # The machine without its GPUs: this process must not take memory of theirs.
    head = report.envelope("gpu", arguments, machine.describe(CPU))
    head |= {"versions": read_versions() | {"kernel": platform.release()}, "sizes": asdict(sizes)}
    ended: dict[str, list[str]] = {OK: [], FAILED: [], SKIPPED: []}
    with out.open("w", encoding="utf-8") as lines:
        print(json.dumps(head), file=lines, flush=True)
        for name in arguments.only:
            row = _row(name, sizes)
            print(json.dumps(row), file=lines, flush=True)
            print(_said(row), flush=True)
            ended[row["status"]].append(name)
    print(json.dumps(ended))
    return 1 if ended[FAILED] else 0


def _row(name: str, sizes: Sizes) -> Row:
    """What a check found; it fails by what it says, by an exception, or by the end of its process."""
    figures: Row = {}
    failures: list[str] = []
    skipped: list[str] = []
    started = perf_counter()
    for found in _in_a_process(name, sizes):
        failures += [found.pop("failed")] if "failed" in found else []
        skipped += [found.pop("skipped")] if "skipped" in found else []
        figures |= found
    status = FAILED if failures else SKIPPED if skipped else OK
    row: Row = {"check": name, "status": status, "seconds": round(perf_counter() - started, 1)}
    return row | ({"why": failures + skipped} if failures or skipped else {}) | figures


def _said(row: Row) -> str:
    """A row for people; what has many values is left to the file."""
    of = {key: one for key, one in row.items() if key not in ("check", "status", "why")}
    figures = (
        f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}"
        for key, one in of.items()
        if not isinstance(one, (list, dict))
    )
    return f"{row['status']:8} {row['check']}: {', '.join((*row.get('why', ()), *figures))}"


def _in_a_process(name: str, sizes: Sizes) -> Iterator[Row]:
    """The figures of a check as they come, and what ended it before its time."""
    started, (receiver, sender) = perf_counter(), PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_check, args=(name, sizes, sender), daemon=True)
    process.start()
    sender.close()
    with suppress(EOFError):
        while True:
            yield receiver.recv()
    process.join()
    if process.exitcode:
        late = perf_counter() - started >= sizes.limit_s
        ended = f"not done after {sizes.limit_s} s" if late else f"its process ended with {process.exitcode}"
        yield {"failed": ended}


def _check(name: str, sizes: Sizes, sender: Connection) -> None:
    """Sends the figures of a check, and the error that ended it."""
    inputs.say(name)
    faulthandler.dump_traceback_later(sizes.limit_s, exit=True, file=2)  # tells where it hangs
    try:
        device = choose_device("cuda")
        for number in range(torch.cuda.device_count()):
            cap(GPU_MEMORY_GIB, torch.device("cuda", number))  # so that a large GPU stands for a desktop's
        with redirect_stdout(sys.stderr):
            for found in CHECKS[name](Given(device, sizes)):
                sender.send(found)
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = traceback.format_exception_only(error)[-1].partition("\n")[0]
        sender.send({"failed": f"{said} ({Path(last.filename).name}:{last.lineno})"})
