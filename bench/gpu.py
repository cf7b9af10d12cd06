"""`python -m bench gpu`: what only a card can tell, and no test, `doctor` or `bench offload` says.

A check yields flat rows of JSON values; `error` says what is wrong. Each has a process of its own and ten
minutes, for an error of the card outlives the check that met it, and what hangs is ended. The file is
written after every row.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import platform
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from bench import inputs, machine, report
from bench.attention import attended, exact
from bench.cases import GPU_MEMORY_GIB, ON_CUDA
from bench.random_models import random_model, random_prompt
from bench.recorded_text import Text
from bench.report import Row
from bench.rounds import Recorded, busy, figures, length
from bench.worker import cap
from cpu_kv import CudaLink, Event, PageLocking, SlabAllocator, head_major
from cpu_kv.link import RecordingLink
from offload_rt.attention.backends import TorchCudaBackend, choose_backend, fold
from offload_rt.caches.base import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import StoreConfig
from offload_rt.errors import UsageError
from offload_rt.files import check_writable
from offload_rt.graphs import GraphedModel
from offload_rt.host import to_host
from offload_rt.loading import choose_device
from offload_rt.machine.doctor import usable_hardware
from offload_rt.machine.hardware import GIB
from offload_rt.machine.inventory import read_versions
from offload_rt.machine.measuring import CPU, REPEATS, least_seconds, seconds
from offload_rt.model import CausalModel
from offload_rt.parts import Part
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.planner import plan
from offload_rt.planning.shapes import from_config
from offload_rt.toml import load_config

LIMIT_S = 600
PROCESSES = get_context("spawn")
MIB = 2**20
LINK_BYTES = 256 * MIB
PAUSE_S = 1e-4  # between two launches, so that the device's queue stays empty
IDLE_S = 0.5
ALLOWED_ERROR = 0.02  # of attention, over its largest entry: far above rounding, far below a wrong result
SHAPE, HEADS, HEAD_DIM = "llama3.1-8b", ((32, 32), (32, 8), (28, 4)), 128
NOTHING_RESIDENT = {"offload.resident_tokens": 0, "offload.cpu_tokens": 0}
HELD = 0.92  # acceptance
WARM_UP_TOKENS, NEW_TOKENS, ROOM = 51, 48, 128  # three rounds; some five rounds of drafts of 16
ENTRIES, STEPS = 4096, 20

T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """What a check is given: a card, whether to do less of what takes long, and where files of it go."""

    device: torch.device
    quick: bool
    folder: Path


def versions(given: Given) -> list[Row]:
    """Kernel, driver, CUDA, torch and card."""
    kernel = {"kernel": platform.release(), "cuda": torch.version.cuda}
    return [machine.describe(given.device) | read_versions() | kernel]


def beside(device: torch.device, work: Callable[[], T]) -> tuple[T, Row]:
    """Runs `work` in a thread and launches tiny kernels from this one meanwhile; what both took."""
    kernel, spent = torch.zeros(1, device=device), list[float]()
    kernel.add_(1).item()  # loaded before it is timed
    with ThreadPoolExecutor(1) as thread:
        started = perf_counter()
        future = thread.submit(work)
        while not spent or not future.done():
            spent.append(1e3 * seconds(kernel.add_, 1))
            sleep(PAUSE_S)
        taken = perf_counter() - started
    launch_ms = {"launch_ms": median(spent), "longest_launch_ms": max(spent)}
    return future.result(), {"seconds": taken, "launches": len(spent)} | launch_ms


def registration(given: Given, locking: PageLocking | None = None) -> Iterator[Row]:
    """Page-locking 1, 2, 2.1 and 4 GiB, as a slab and at once; launches of a second thread meanwhile."""
    locking = locking or PageLocking()
    yield {"how": "idle"} | beside(given.device, partial(sleep, IDLE_S))[1]
    for gib in (0.25, 0.5) if given.quick else (1, 2, 2.1, 4):
        size = int(gib * GIB)
        with closing(SlabAllocator(True, inputs.say, locking)) as slabs:
            _, took = beside(given.device, slabs.allocate((size,), torch.uint8).result)
            yield {"how": "slab", "gib": gib, "locked_bytes": slabs.bytes_pinned} | took
        with closing(SlabAllocator(pin=False)) as slabs:
            address = slabs.allocate((size,), torch.uint8).result().zero_().data_ptr()
            # A refusal stays behind as the last error of the thread that asked, which ends here.
            code, took = beside(given.device, partial(locking.register, address, size))
            yield {"how": "at once", "gib": gib, "locked_bytes": 0 if code else size} | took
            if code == 0:
                locking.unregister(address)


@contextmanager
def linked(device: torch.device) -> Iterator[tuple[RecordingLink, Callable[[int], Event], Tensor, Tensor]]:
    """A link, points that the device passes after so many cycles, and bytes `[2, 256 Mi]` on both sides."""
    warnings: list[str] = []
    with closing(SlabAllocator(True, warnings.append)) as slabs, closing(CudaLink(device)) as link:
        here = slabs.allocate((2, LINK_BYTES), torch.uint8).result()
        if warnings:
            raise RuntimeError(warnings[0])
        there = torch.zeros_like(here, device=device)
        torch.cuda.synchronize(device)  # the link's streams do not wait for the one that filled it
        stream = torch.cuda.Stream(device)

        def later(cycles: int) -> Event:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
                return link.record_event()

        yield link, later, here, there


def copies(given: Given) -> Iterator[Row]:
    """GB/s of copies in pieces of 1 and 64 MiB, each way."""
    with linked(given.device) as (link, later, here, there):
        link.record()
        for piece, outwards in product((MIB, 64 * MIB), (False, True)):
            to, source = (here[1], there[1]) if outwards else (there[0], here[0])
            pairs = list(zip(to.split(piece), source.split(piece), strict=True))
            for _ in range(REPEATS):  # all pieces are enqueued before the first one begins
                link.copy(pairs, later(60_000_000), to_host=outwards).synchronize()
            gb_s = median(one.byte_count / (one.end - one.start) / 1e9 for one in link.recorded())
            yield {"piece_bytes": piece, "to_host": outwards, "gb_s": gb_s}


def overtaking(given: Given) -> Iterator[Row]:
    """ms of an urgent copy while others wait for an event, and while they run."""
    with linked(given.device) as (link, later, here, there):
        urgent = [(there[1, :MIB], here[1, :MIB])]
        for others, after in (("blocked", later(1_000_000_000)), ("running", None)):
            pairs = zip(there[0].chunk(4), here[0].chunk(4), strict=True)
            events = [link.copy([pair], after) for pair in pairs]
            spent = seconds(lambda: link.copy(urgent, urgent=True).synchronize())
            row: Row = {"others": others, "ms": 1e3 * spent, "overtook": not events[-1].done()}
            late = after is not None and not row["overtook"]
            yield row | ({"error": "an urgent copy waited for blocked ones"} if late else {})
            for copied in events:
                copied.synchronize()


def queue(given: Given) -> Iterator[Row]:
    """5,000 copies behind an event; launches of a second thread meanwhile."""
    with linked(given.device) as (link, later, here, there):
        pairs = [(there[0, :MIB], here[0, :MIB])] * 5000
        # First: to load a kernel may wait for the event.
        yield {"copies": 0} | beside(given.device, partial(sleep, IDLE_S))[1]
        event = later(4_000_000_000)
        copied, took = beside(given.device, partial(link.copy, pairs, event))
        yield {"copies": len(pairs), "enqueued_before_event": not event.done()} | took
        copied.synchronize()


def attention(given: Given) -> Iterator[Row]:
    """Attention over 131,072 keys against float64; GB/s beside the card's memory rate."""
    device, tokens = given.device, 16_384 if given.quick else 131_072
    chosen, page, scale = choose_backend(device), StoreConfig.page, HEAD_DIM**-0.5
    backends = {one.name: one for one in (chosen, *([TorchCudaBackend()] if device.type == "cuda" else []))}
    rate = machine.read_rate(device)
    for (of_queries, of_keys), dtype in product(HEADS, (torch.bfloat16, torch.float16)):
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        pages = draw(tokens // page, 2, of_keys, page, HEAD_DIM)
        keys, values = (head_major(pages[:, part]) for part in range(2))
        layouts = {
            "resident": [(keys[None], values[None])],
            "segments": [(one[:, 0], one[:, 1]) for one in pages.split(16)],
            "pages": [(pages[:, 0], pages[:, 1])],
        }
        for count in (1, 17, 64):
            asked = fold(draw(of_queries, count, HEAD_DIM), of_keys)
            want, want_lse = exact(asked, keys, values, scale)
            for (layout, parts), (name, backend) in product(layouts.items(), backends.items()):
                attend = partial(attended, backend, asked, parts, scale)
                out, lse = attend()
                off = (out - want).abs().max() / want.abs().max(), (lse - want_lse).abs().max()
                gb_s = pages.nbytes / least_seconds(attend, device) / 1e9
                row: Row = {"heads": f"{of_queries}/{of_keys}", "dtype": str(dtype), "queries": count}
                row |= {"layout": layout, "backend": name, "chosen": name == chosen.name, "gb_s": gb_s}
                row |= {"share_of_rate": gb_s / rate, "off": float(torch.stack(off).max())}
                yield row if row["off"] < ALLOWED_ERROR else row | {"error": "differs from float64"}


def text(given: Given, context: int, *, streamed: bool = False) -> Iterator[Row]:
    """A random text on 24 GiB: memory of its prefill beside the plan's; use of the link, calls a round."""
    device, context = given.device, min(context, 32_768) if given.quick else context
    trace = given.folder / f"gpu-{'streamed' if streamed else 'planned'}-{context}-trace.json.gz"
    config = load_config("retrieval", ON_CUDA | (NOTHING_RESIDENT if streamed else {}))
    cap(GPU_MEMORY_GIB, device)
    target = GraphedModel(random_model(SHAPE, device, torch.bfloat16), SHAPE, inputs.say)
    hardware = usable_hardware(device, target.weight_bytes)
    shape = from_config(target.module.config, target.dtype, SHAPE)
    planned = plan(PlanRequest(shape, None, config, context, ROOM, hardware))  # as the engine does
    parts = {f"planned_{name}_gib": size / GIB for name, size in planned.gpus[0].items()}
    with closing(Text(target, None, CudaLink(device), config, context + ROOM)) as opened:
        torch.cuda.reset_peak_memory_stats(device)
        row: Row = {"context": context}
        row["prefill_s"] = opened.read([random_prompt(shape.vocabulary, context)]) / 1e3
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
        row |= parts | {"planned_gib": sum(parts.values()) - parts["planned_reserve_gib"]}
        yield row
        opened.run(config, WARM_UP_TOKENS, HELD)
        _, run = opened.run(config, NEW_TOKENS, HELD)
        yield figures(run) | opened.placed | carried(run, hardware.gpus[0].to_device_rate)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            _, run = opened.run(config, NEW_TOKENS, HELD)
        profiler.export_chrome_trace(str(trace))
    calls = Counter(one.name for one in profiler.events() or () if one.name.startswith("cuda"))
    yield {"trace": trace.name} | {name: times / len(run.rounds) for name, times in calls.most_common()}


def carried(run: Recorded, pinned: float) -> Row:
    """What the link carried, and its gaps.

    Args:
        pinned: GB/s of page-locked copies to the device alone.
    """
    times, rounds = busy(run.copies), len(run.rounds)
    gigabytes = sum(one.byte_count for one in run.copies if not one.to_host) / 1e9
    gaps = [1e3 * (after - before) for (_, before), (after, _) in pairwise(times)]
    rate = gigabytes / (length(times) or 1.0)
    found = {"gb_a_round": gigabytes / rounds, "copy_gb_s": rate, "share_of_pinned": rate / pinned}
    return found | {"longest_gap_ms": max(gaps, default=0.0), "gap_ms_a_round": sum(gaps) / rounds}


@torch.inference_mode()
def graphs(given: Given) -> list[Row]:
    """Passes of 1 and 4 tokens over 4,096 entries, by graph and eagerly."""
    device, notices = given.device, list[str]()
    graphed = GraphedModel(random_model(SHAPE, device, torch.bfloat16), SHAPE, notices.append)
    eager = CausalModel(graphed.module, SHAPE)
    # To a pass all bounded caches are alike, and this one needs no full cache behind it.
    rotary, backend = graphed.rotary_frequencies, choose_backend(device)
    cache = StreamingCache(graphed.kv_layout(), rotary, sinks=4, window=ENTRIES - 4, backend=backend)
    counts = (1, 4)
    graphed.prepare(cache, counts, None)
    eager.forward([Part(cache, NewTokens.chain(ENTRIES), 1)])
    cache.commit(range(ENTRIES))
    cache.settle()
    read_bytes = graphed.weight_bytes + cache.kv[:, :, :, :ENTRIES].nbytes
    found: Row = {"bound_ms": read_bytes / machine.read_rate(device) / 1e6}

    def step(model: CausalModel, count: int) -> None:
        (output,) = model.forward([Part(cache, NewTokens.chain(count), count)])
        to_host(output.logits)

    for (name, model), count in product((("graph", graphed), ("eager", eager)), counts):
        found[f"{name}_{count}_ms"] = median(1e3 * seconds(step, model, count) for _ in range(STEPS))
    return [found | ({"error": notices[0]} if notices else {})]


CHECKS: dict[str, Callable[[Given], Iterable[Row]]] = {
    "versions": versions,
    "registration": registration,
    "copies": copies,
    "overtaking": overtaking,
    "queue": queue,
    "attention": attention,
    "planned-32k": partial(text, context=32_768),
    "planned-128k": partial(text, context=131_072),
    "streamed-128k": partial(text, context=131_072, streamed=True),
    "graphs": graphs,
}


def add_parser(commands: Any) -> None:
    """Declares the command."""
    said = {name: getattr(check, "func", check).__doc__ for name, check in CHECKS.items()}
    parser = inputs.command(commands, "gpu", run, "all that only a CUDA device can tell")
    parser.description = "Checks:\n\n" + "\n".join(f"  {name:14} {about}" for name, about in said.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=inputs.names(CHECKS), default=tuple(CHECKS), metavar="A,B")
    default = inputs.RESULTS / "gpu-checks.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help="JSON")
    parser.add_argument("--quick", action="store_true", help="less of what takes long")


def run(arguments: argparse.Namespace) -> int:
    """Runs the checks; 1 where one failed."""
    if not torch.cuda.is_available():
        raise UsageError("bench gpu: torch sees no CUDA device; install its CUDA build and check nvidia-smi")
    check_writable("--out", arguments.out)
    rows: list[Row] = []
    result = report.envelope("gpu", arguments, machine.describe(CPU))  # of the card: `versions`
    result |= {"quick": arguments.quick, "rows": rows}
    for name in arguments.only:
        for row in _in_a_process(name, arguments):
            rows.append({"check": name} | row)
            report.write_json(arguments.out, result)
            said = (
                f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in row.items()
            )
            print(f"{name}: {', '.join(said)}", flush=True)
    failed = list(dict.fromkeys(row["check"] for row in rows if "error" in row))
    print(json.dumps({"checks": len(arguments.only), "failed": failed}))
    return 1 if failed else 0


def _in_a_process(name: str, arguments: argparse.Namespace) -> Iterator[Row]:
    """The rows of a check as they come, and what ended it before its time."""
    started, (receiver, sender) = perf_counter(), PROCESSES.Pipe(duplex=False)
    given = name, arguments.quick, arguments.out.parent, sender
    process = PROCESSES.Process(target=_check, args=given, daemon=True)
    process.start()
    sender.close()
    with suppress(EOFError):
        while True:
            yield receiver.recv()
    process.join()
    if process.exitcode:
        late = perf_counter() - started >= LIMIT_S
        ended = f"not done after {LIMIT_S} s" if late else f"its process ended with {process.exitcode}"
        yield {"error": ended}


def _check(name: str, quick: bool, folder: Path, sender: Connection) -> None:
    """Sends the rows of a check, and the error that ended it."""
    inputs.say(name)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)  # tells where it hangs
    try:
        with redirect_stdout(sys.stderr):
            for row in CHECKS[name](Given(choose_device("cuda"), quick, folder)):
                sender.send(row)
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = traceback.format_exception_only(error)[-1].partition("\n")[0]
        sender.send({"error": f"{said} ({Path(last.filename).name}:{last.lineno})"})
