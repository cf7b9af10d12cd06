"""`python -m bench gpu`: all that only a card can tell, checked and measured in one run.

Each check has a process of its own and ten minutes: an error of the card outlives the check that met it, and
what hangs is ended. One that is named alone runs in this process. The JSON is written after every check.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import platform
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial, wraps
from itertools import pairwise, product
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
from bench.rounds import Recorded, busy, length, link_use, steady
from bench.systems.ours import Text
from bench.worker import cap
from cpu_kv import CudaLink, PageLocking, SlabAllocator, Ticket, head_major
from cpu_kv.link import RecordingLink
from offload_rt.attention import TorchCudaBackend, choose_backend, fold
from offload_rt.caches.base import NewTokens
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config import StoreConfig, load_config
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
from offload_rt.planning.planner import Plan, plan
from offload_rt.planning.shapes import from_config

LIMIT_S = 600
MIB = 2**20
PAUSE_S = 1e-4  # between two launches, so that the device's queue stays empty
IDLE_S = 0.5
ALLOWED_ERROR = 0.02  # of attention, over its largest entry: far above rounding, far below a wrong result
SHAPE, CONTEXT = "llama3.1-8b", 131_072
HELD = 0.92  # acceptance
NEW_TOKENS = 48  # some five rounds of drafts of 16 at that acceptance
STEPS = 20
OPTIONS = ON_CUDA
WARM_UP_TOKENS = 51  # three rounds
ROOM = 128

T = TypeVar("T")
Found = dict[str, Any]
"""What a check says, as JSON values; under `error`, what is wrong."""


def versions(device: torch.device) -> Found:
    """Kernel, driver, CUDA, torch and card."""
    kernel = {"kernel": platform.release(), "cuda": torch.version.cuda}
    return machine.describe(device) | read_versions() | kernel


def beside(device: torch.device, work: Callable[[], T]) -> tuple[T, Found]:
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
    spent.sort()
    launch_ms = {"median": median(spent), "p99": spent[99 * len(spent) // 100], "max": spent[-1]}
    return future.result(), {"seconds": taken, "launches": len(spent), "launch_ms": launch_ms}


def registration(
    device: torch.device, gib: Sequence[float] = (1, 2, 2.1, 4), locking: PageLocking | None = None
) -> Found:
    """Page-locking 1, 2, 2.1 and 4 GiB, as a slab and at once; launches of a second thread meanwhile."""
    locking, warnings = locking or PageLocking(), list[str]()
    rows: list[Found] = [{"how": "idle"} | beside(device, partial(sleep, IDLE_S))[1]]
    for count in gib:
        size = int(count * GIB)
        with closing(SlabAllocator(True, warnings.append, locking)) as slabs:
            _, took = beside(device, slabs.allocate((size,), torch.uint8).result)
            rows.append({"how": "slab", "gib": count, "locked_bytes": slabs.bytes_pinned} | took)
        with closing(SlabAllocator(pin=False)) as slabs:
            address = slabs.allocate((size,), torch.uint8).result().zero_().data_ptr()
            # A refusal stays behind as the last error of the thread that asked, which ends here.
            code, took = beside(device, partial(locking.register, address, size))
            rows.append({"how": "at once", "gib": count, "locked_bytes": 0 if code else size} | took)
            if code == 0:
                locking.unregister(address)
    return {"longest_launch_ms": max(row["launch_ms"]["max"] for row in rows[1:]), "rows": rows}


Point = Callable[[], Ticket]
"""A point that the device passes a while later."""


def over_link(check: Callable[..., Found], cycles: int) -> Callable[..., Found]:
    """A check of a device, from one of a link.

    It is given a link, points that the device passes after so many cycles, and bytes `[2, 256 Mi]` in
    page-locked memory and on the device.
    """

    @wraps(check)
    def run(device: torch.device) -> Found:
        warnings: list[str] = []
        with closing(SlabAllocator(True, warnings.append)) as slabs, closing(CudaLink(device)) as link:
            here = slabs.allocate((2, 256 * MIB), torch.uint8).result()
            there = torch.zeros_like(here, device=device)
            torch.cuda.synchronize(device)  # the link's streams do not wait for the one that filled it
            stream = torch.cuda.Stream(device)

            def later() -> Ticket:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(cycles)
                    return link.mark()

            return {"pinned": not warnings} | check(link, later, here, there)

    return run


def copies(
    link: RecordingLink, later: Point, here: Tensor, there: Tensor, pieces: Sequence[int] = (MIB, 64 * MIB)
) -> Found:
    """GB/s of copies in pieces of 1 and 64 MiB, each way alone and both at once."""
    rows = []
    link.record()
    for piece, ways in product(pieces, ((False,), (True,), (False, True))):
        turns = []
        for _ in range(REPEATS):
            begin, tickets = later(), []  # all are enqueued before the first one begins
            for outwards in ways:
                to, source = (here[1], there[1]) if outwards else (there[0], here[0])
                pairs = list(zip(to.split(piece), source.split(piece), strict=True))
                tickets.append(link.copy(pairs, begin, to_host=outwards))
            for ticket in tickets:
                ticket.synchronize()
            turns.append([one.byte_count / (one.end - one.start) / 1e9 for one in link.recorded()])
        rates = [median(rates) for rates in zip(*turns, strict=True)]
        rows.append({"piece_bytes": piece, "to_host": ways, "gb_s": rates})
    return {"rows": rows}


def overtaking(link: RecordingLink, later: Point, here: Tensor, there: Tensor, piece: int = MIB) -> Found:
    """ms of an urgent copy while others wait for an event, and while they run."""
    found: Found = {}
    urgent = [(there[1, :piece], here[1, :piece])]
    for name, after in (("blocked", later()), ("running", None)):
        others = [link.copy([pair], after) for pair in zip(there[0].chunk(4), here[0].chunk(4), strict=True)]
        spent = seconds(lambda: link.copy(urgent, urgent=True).synchronize())
        found |= {f"{name}_ms": 1e3 * spent, f"overtook_{name}": not others[-1].done()}
        for ticket in others:
            ticket.synchronize()
    return found if found["overtook_blocked"] else found | {"error": "an urgent copy waited for blocked ones"}


def queue(link: RecordingLink, later: Point, here: Tensor, there: Tensor, count: int = 5000) -> Found:
    """5,000 copies behind an event; launches of a second thread meanwhile."""
    pair = there[0, :MIB], here[0, :MIB]
    _, idle = beside(link.device, partial(sleep, IDLE_S))  # first: to load a kernel may wait for the event
    event = later()
    ticket, took = beside(link.device, lambda: link.copy([pair] * count, event))
    took |= {"enqueued_before_event": not event.done(), "longest_launch_ms": took["launch_ms"]["max"]}
    ticket.synchronize()
    return took | {"idle": idle}


def attention(
    device: torch.device,
    tokens: int = CONTEXT,
    heads: Sequence[tuple[int, int]] = ((32, 32), (32, 8), (28, 4)),
    queries: Sequence[int] = (1, 17, 64),
    dim: int = 128,
) -> Found:
    """Attention over 131,072 keys against float64; GB/s beside the card's memory rate."""
    # As the resident share has them; their pages in one call; and merged, as a pass reads the staging ring.
    chosen, page, scale = choose_backend(device), StoreConfig.page, dim**-0.5
    backends = [chosen]
    if device.type == "cuda" and chosen.name != TorchCudaBackend.name:
        backends.append(TorchCudaBackend())
    rows, rate = list[Found](), machine.read_rate(device)
    for (of_queries, of_keys), dtype in product(heads, (torch.bfloat16, torch.float16)):
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=device, dtype=dtype)
        pages = draw(tokens // page, 2, of_keys, page, dim)
        resident = torch.stack([head_major(pages[:, part]) for part in range(2)])
        segments = [(one[:, 0], one[:, 1]) for one in pages.split(StoreConfig.segment_tokens // page)]
        layouts = {"resident": [(resident[0][None], resident[1][None])], "segments": segments}
        layouts["pages"] = [(pages[:, 0], pages[:, 1])]
        for count in queries:
            asked = fold(draw(of_queries, count, dim), of_keys)
            want, want_lse = exact(asked, resident[0], resident[1], scale)
            row: Found = {"heads": (of_queries, of_keys), "dtype": str(dtype), "queries": count}
            for (layout, parts), backend in product(layouts.items(), backends):
                attend = partial(attended, backend, asked, parts, scale)
                out, lse = attend()
                gb_s = pages.nbytes / least_seconds(attend, device) / 1e9
                errors = (out - want).abs().max() / want.abs().max(), (lse - want_lse).abs().max()
                found = {"layout": layout, "backend": backend.name, "error": float(torch.stack(errors).max())}
                took = {"ms": pages.nbytes / gb_s / 1e6, "gb_s": gb_s, "share_of_rate": gb_s / rate}
                rows.append(row | found | took)
    wrong = [row for row in rows if not row["error"] < ALLOWED_ERROR]
    found = {"error": f"differs from float64: {wrong[0]}"} if wrong else {}
    return {"backend": chosen.name, "read_gb_s": rate, "rows": rows} | found


@contextmanager
def opened(
    device: torch.device, context: int, shares: Shares | None = None, room: int = ROOM
) -> Iterator[tuple[Text, Plan, Shares]]:
    """A random text on a card capped at 24 GiB, with such shares or as planned; nothing is read yet."""
    cap(GPU_MEMORY_GIB, device)
    target = GraphedModel(random_model(SHAPE, device, torch.bfloat16), SHAPE, inputs.say)
    hardware = usable_hardware(device, target.weight_bytes)
    shape = from_config(target.module.config, target.dtype, SHAPE)
    planned = plan(PlanRequest(shape, None, load_config("retrieval", OPTIONS), context, room, hardware))
    planned.check()
    placement, config = planned.placement, planned.request.config
    page = config.store.page  # the planner lets the last share end with the text
    chosen = Shares(placement.resident_tokens // page * page, placement.cpu_tokens // page * page)
    config = config.having("store.ring_buffers", placement.ring_buffers)
    link, capacity = CudaLink(device), context + room
    with closing(Text(target, None, link, config, capacity, chosen if shares is None else shares)) as text:
        yield text, planned, chosen


def prefill(device: torch.device, context: int) -> Found:
    """Peak device memory of a prefill at 32K and 128K beside the plan's, of 24 GiB."""
    with opened(device, context) as (text, plan, _):
        torch.cuda.reset_peak_memory_stats(device)
        milliseconds = text.read(random_prompt(plan.request.target.vocabulary, context))
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    planned = {name: size / GIB for name, size in plan.gpus[0].items()}
    found = {"context": context, "seconds": milliseconds / 1e3, "planned": planned}
    expected = sum(planned.values()) - planned["reserve"]
    return found | {"peak_gib": peak / GIB, "reserved_gib": reserved / GIB, "planned_gib": expected}


def rounds(device: torch.device, context: int, *, streamed: bool, trace: Path) -> Found:
    """Link use, gaps, verdicts and calls of some rounds at 128K, with a trace of them beside the JSON."""
    with opened(device, context, EVERYTHING_STREAMED if streamed else None) as (text, plan, planned):
        text.read(random_prompt(plan.request.target.vocabulary, context))
        config = plan.request.config
        text.run(config, WARM_UP_TOKENS, HELD)
        _, run = text.run(config, NEW_TOKENS, HELD)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            _, traced = text.run(config, NEW_TOKENS, HELD)
        profiler.export_chrome_trace(str(trace))
    names = (event.name for event in profiler.events() or ())
    found = {"context": context, "trace": trace.name, "planned": dataclasses.asdict(planned)}
    found |= link_figures(run, plan.request.hardware.gpus[0].to_device_rate)
    return found | {"calls_a_round": calls_a_round(names, len(traced.rounds))}


def link_figures(run: Recorded, pinned: float) -> Found:
    """What a run says of its link and its verdicts; times in ms.

    Args:
        pinned: GB/s of page-locked copies to the device alone.
    """
    carried, count, share = busy(run.copies), len(run.rounds), link_use(run)
    gigabytes = sum(one.byte_count for one in run.copies if not one.to_host) / 1e9
    rate = gigabytes / (length(carried) or 1.0)
    rounds = steady(run.rounds)
    gaps = [1e3 * (after - before) for (_, before), (after, _) in pairwise(carried)]
    return {
        "link_use": share and share * rate / pinned,
        "link_use_target": 0.90,
        "link_use_goal": 0.95,
        "link_busy": share,
        "copy_gb_s": rate,
        "pinned_gb_s": pinned,
        "longest_gap_ms": max(gaps, default=0.0),
        "gap_ms_a_round": sum(gaps) / count,
        "round_ms": median(one.ms for one in rounds),
        "round_pass_ms": median(one.pass_ms for one in rounds),
        "round_verdict_ms": median(one.verdict_ms for one in rounds),
        "rounds": count,
        "gb_a_round": gigabytes / count,
    }


def calls_a_round(names: Iterable[str], rounds: int) -> dict[str, float]:
    """How often each function of the CUDA runtime was called, the most frequent first."""
    calls = Counter(name for name in names if name.startswith("cuda"))
    return {name: count / rounds for name, count in calls.most_common()}


@torch.inference_mode()
def middle(device: torch.device, shape: str = SHAPE, entries: int = 4096) -> Found:
    """Passes of 1 and 4 tokens over 4,096 entries, by graph and eagerly."""
    notices: list[str] = []
    graphed = GraphedModel(random_model(shape, device, torch.bfloat16), shape, notices.append)
    eager = CausalModel(graphed.module, shape)
    # To a pass all bounded caches are alike, and this one needs no full cache behind it.
    rotary, backend = graphed.rotary_frequencies, choose_backend(device)
    cache = StreamingCache(graphed.kv_layout(), rotary, sinks=4, window=entries - 4, backend=backend)
    counts = (1, 4)
    graphed.prepare(cache, counts, None)
    eager.forward([Part(cache, NewTokens.chain(entries), 1)])
    cache.commit(range(entries))
    cache.settle()
    read_bytes = graphed.weight_bytes + 2 * cache.keys[:, :, :entries].nbytes
    found: Found = {"bound_ms": read_bytes / machine.read_rate(device) / 1e6}

    def step(model: CausalModel, count: int) -> None:
        (output,) = model.forward([Part(cache, NewTokens.chain(count), count)])
        to_host(output.logits)

    for (name, model), count in product((("graph", graphed), ("eager", eager)), counts):
        times = [1e3 * seconds(step, model, count) for _ in range(STEPS)]
        found[f"{name}_{count}_ms"] = median(times)
    return found | ({"error": notices[0]} if notices else {})


CHECKS: dict[str, Callable[..., Found]] = {
    "versions": versions,
    "registration": registration,
    "copies": over_link(copies, 60_000_000),
    "overtaking": over_link(overtaking, 1_000_000_000),
    "queue": over_link(queue, 4_000_000_000),
    "attention": attention,
    "prefill-32k": partial(prefill, context=32_768),
    "prefill-128k": partial(prefill, context=CONTEXT),
    "rounds-streamed": partial(rounds, context=CONTEXT, streamed=True),
    "rounds-planned": partial(rounds, context=CONTEXT, streamed=False),
    "middle": middle,
}
QUICK: dict[str, Found] = {"registration": {"gib": (0.25, 0.5)}, "attention": {"tokens": 16_384}}
QUICK |= {name: {"context": 32_768} for name in ("prefill-128k", "rounds-streamed", "rounds-planned")}


def add_parser(commands: Any) -> None:
    """Declares the command."""
    said = {name: getattr(check, "func", check).__doc__ for name, check in CHECKS.items()}
    parser = inputs.command(commands, "gpu", run, "all that only a CUDA device can tell")
    parser.description = "Checks:\n\n" + "\n".join(f"  {name:16} {text}" for name, text in said.items())
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
    rows: dict[str, Found] = {}
    envelope = report.envelope("gpu", arguments, machine.describe(CPU))  # of the card: `versions`
    for name in arguments.only:
        started = perf_counter()
        found = (_in_a_process if len(arguments.only) > 1 else _here)(name, arguments)
        rows[name] = {"wall_s": perf_counter() - started} | found
        report.write_json(arguments.out, envelope | {"quick": arguments.quick, "checks": rows})
        print(f"{name}: {_headline(rows[name])}", flush=True)
    failed = [name for name, row in rows.items() if "error" in row]
    print(json.dumps({"checks": len(rows), "failed": failed}))
    return 1 if failed else 0


def _here(name: str, arguments: argparse.Namespace) -> Found:
    """What a check says, or the error that ended it."""
    inputs.say(name)
    given = dict(QUICK.get(name, {})) if arguments.quick else {}
    if name.startswith("rounds"):
        given["trace"] = arguments.out.with_name(f"gpu-{name}-trace.json.gz")
    faulthandler.dump_traceback_later(LIMIT_S - 30, file=2)  # tells where it hangs
    try:
        return CHECKS[name](choose_device("cuda"), **given)
    except Exception as error:
        traceback.print_exc()
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = traceback.format_exception_only(error)[-1].partition("\n")[0]
        return {"error": f"{said} ({Path(last.filename).name}:{last.lineno})"}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _in_a_process(name: str, arguments: argparse.Namespace) -> Found:
    part = arguments.out.with_name(f".{name}-{arguments.out.name}")
    command = [sys.executable, "-m", "bench", "gpu", "--only", name, "--out", str(part)]
    command += ["--quick"] if arguments.quick else []
    try:
        done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
        found: Found = json.loads(part.read_text())["checks"][name]
        return found
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {LIMIT_S} s"}
    except FileNotFoundError:
        return {"error": f"its process ended with {done.returncode} and left no result"}
    finally:
        part.unlink(missing_ok=True)


def _headline(row: Mapping[str, Any]) -> str:
    """The figures without tables, or what is wrong."""
    shown = {key: value for key, value in row.items() if not isinstance(value, dict | list | tuple)}
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )
