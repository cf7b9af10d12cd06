"""The checks of `python -m bench gpu` that run the engine or a model, with random weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from bench import machine
from bench.gpu_checks import ALLOWED_ERROR, BULK_BYTES, HEAD_DIM, LONGEST_WAIT_MS, Subject, behind, linked
from bench.random_models import SHAPES, random_model, random_prompt
from bench.recorded_text import RecordedText
from bench.results import Row
from bench.rounds import Recorded, busy, figures, length, on_lane
from bench.studies import two_devices
from cpu_kv import CudaLink, ElementType, Event
from cpu_kv.mapped import PeerCopies
from cpu_kv.streams import device_streams
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config.schema import Config
from offload_rt.drafting.levels.configs import load_config
from offload_rt.machine.inspection import usable_hardware
from offload_rt.machine.measuring import seconds
from offload_rt.model.config_shapes import from_config
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.planning.planner import plan
from offload_rt.planning.request import PlanRequest
from offload_rt.system.device_copies import to_host
from offload_rt.system.hardware import GIB

NOTHING_RESIDENT = {"offload.resident_tokens": 0, "offload.cpu_tokens": 0}
HELD = 0.92  # acceptance of drafts, synthetic: weights are random
CALL = re.compile(r"cu(da)?[A-Z]")  # of CUDA's runtime or, by Triton, its driver; not kernels
ROOM = 128  # for decoded tokens


@dataclass(frozen=True)
class Opened:
    """A random model that has read a random prompt."""

    text: RecordedText
    config: Config
    request: PlanRequest
    captures: Sequence[str]  # notices of captures that failed
    prefill_s: float

    def run(self, tokens: int) -> Recorded:
        return self.text.run(self.config, tokens, HELD)[1]


@contextmanager
def opened(subject: Subject, context: int, keys: Mapping[str, object]) -> Iterator[Opened]:
    """Prefills a prompt of `context` tokens, and decodes once to warm up."""
    device, sizes = subject.device, subject.sizes
    config, captures = load_config("retrieval", {**sizes.config, **keys}), list[str]()
    target = open_runner(random_model(sizes.shape, device, torch.bfloat16), sizes.shape, captures.append)
    hardware = usable_hardware(device, target.weight_bytes)
    shape = from_config(target.module.config, ElementType.of(target.dtype), sizes.shape)
    request = PlanRequest(shape, None, config, context, ROOM, hardware)  # as the engine makes it
    with closing(RecordedText(target, None, CudaLink(device), config, context + ROOM)) as text:
        torch.cuda.reset_peak_memory_stats(device)
        prefill_ms = text.prefill([random_prompt(shape.vocabulary, context)])
        opened_text = Opened(text, config, request, captures, prefill_ms / 1e3)
        opened_text.run(sizes.new_tokens)
        yield opened_text


def graphs(subject: Subject) -> Iterator[Row]:
    """Counts launches per round; fails if no CUDA graph is captured and replayed."""
    with opened(subject, subject.sizes.short, {}) as text:
        yield from ({"failed": notice} for notice in text.captures)
        with launches() as calls:
            run = text.run(subject.sizes.new_tokens)
        a_round = {name: times / len(run.rounds) for name, times in calls.most_common()}
        launched = sum(times for name, times in a_round.items() if "Launch" in name)
        yield {"launches_a_round": launched, "calls_a_round": a_round}
        if not calls["cudaGraphLaunch"]:
            yield {"failed": "no CUDA graph was launched"}


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts calls of CUDA's runtime in the block, by name."""
    calls = Counter[str]()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield calls
    calls.update(event.name for event in profiler.events() or () if CALL.match(event.name))


def planned(subject: Subject) -> Iterator[Row]:
    """Decodes after 32K tokens as planned: ms per token beside the plan; fails if memory exceeds the plan."""
    device = subject.device
    with opened(subject, subject.sizes.planned, {}) as text:
        memory = {name: size / GIB for name, size in plan(text.request).gpus[0].items()}
        expected = plan(replace(text.request, measured_acceptance=HELD)).check()
        yield {"planned_ms_per_token": expected.ms_per_token} | decoding(text, subject)
        peak = torch.cuda.max_memory_allocated(device) / GIB
        allowed = sum(memory.values())
        yield {"peak_gib": peak, "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB}
        yield {"planned_gib": allowed - memory["reserve"], "planned_parts_gib": memory}
        if peak > allowed:
            yield {"failed": f"the peak is {peak:.2f} GiB, {allowed:.2f} with the reserve were planned"}


def largest(subject: Subject) -> Iterator[Row]:
    """Decodes after 127K tokens of Llama-2-7B, the tightest plan: fails where memory is exhausted."""
    device, sizes = subject.device, subject.sizes
    config = {**sizes.config, "offload.refresh_from": "store", **sizes.largest_config}
    seven = Subject(device, replace(sizes, shape=sizes.largest_shape, config=config))
    with opened(seven, sizes.largest, {}) as text:
        yield decoding(text, seven)
        yield from ({"failed": notice} for notice in text.captures)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    yield {"peak_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB}


def streamed(subject: Subject) -> Iterator[Row]:
    """Decodes after 128K tokens, all streamed: share of the link's rate, gaps per round, ms per token."""
    with opened(subject, subject.sizes.streamed, NOTHING_RESIDENT) as text:
        yield decoding(text, subject)


def decoding(text: Opened, subject: Subject) -> Row:
    """Decodes; returns the tokens of each tier, the times of rounds, and the use of the link."""
    run = text.run(subject.sizes.new_tokens)
    rate = text.request.hardware.gpus[0].to_device_rate
    return {"prefill_s": text.prefill_s} | text.text.placement | figures(run) | carried(run, rate)


def carried(run: Recorded, pinned: float) -> Row:
    """Bytes that the link carried to the device, and gaps between its copies.

    Args:
        pinned: GB/s of page-locked copies to the device, measured alone.
    """
    times, rounds = busy(run.copies), len(run.rounds)
    gigabytes = sum(copy.byte_count for copy in run.copies if not copy.to_host) / 1e9
    gaps = [1e3 * (after - before) for (_, before), (after, _) in pairwise(times)]
    rate = gigabytes / (length(times) or 1.0)
    row = {"gb_a_round": gigabytes / rounds, "copy_gb_s": rate, "share_of_pinned": rate / pinned}
    return row | {"longest_gap_ms": max(gaps, default=0.0), "gap_ms_a_round": sum(gaps) / rounds}


def cpu_share(subject: Subject) -> Iterator[Row]:
    """Lets the CPU attend to a quarter of 32K tokens: ms from its result to the next layer's queries."""
    context, page = subject.sizes.planned, load_config("retrieval", subject.sizes.config).store.page
    keys = {"offload.resident_tokens": 0, "offload.cpu_tokens": context // 4 // page * page}
    with opened(subject, context, keys) as text:
        run = text.run(subject.sizes.new_tokens)
        yield text.text.placement | figures(run)
    exchanges, attending = list[float](), on_lane(run, "cpu")
    for start, end in on_lane(run, "pass"):
        layers = [span for span in attending if start <= span[0] <= end]
        exchanges += [1e3 * (after - before) for (_, before), (after, _) in pairwise(layers)]
    yield {"attention_ms": median(1e3 * (end - start) for start, end in attending)}
    yield {"to_next_queries_ms": median(exchanges), "longest_to_next_queries_ms": max(exchanges)}


@torch.inference_mode()
def drafting(subject: Subject) -> Iterator[Row]:
    """Times a drafted token, alone and beside a stream."""
    device, sizes, entries = subject.device, subject.sizes, subject.sizes.drafted_entries
    model = open_runner(random_model(sizes.shape, device, torch.bfloat16), sizes.shape, lambda notice: None)
    layout, backend = model.kv_layout(), choose_backend(device)
    # All bounded caches cost a pass the same, and this one needs no full cache.
    cache = StreamingCache(layout, model.rotary_frequencies, sinks=4, window=entries - 4, backend=backend)
    model.prepare(cache, (1,), None)
    model.forward([PassInput(cache, NewTokens.chain(entries), 1)])
    cache.commit(range(entries))
    cache.settle()

    def step() -> None:
        (output,) = model.forward([PassInput(cache, NewTokens.chain(1), 1)])
        to_host(output.logits)
        cache.commit([0])
        cache.keep([])

    step()
    yield {"read_ms": model.weight_bytes / machine.read_rate(device) / 1e6}
    yield {"alone_ms": 1e3 * median(seconds(step) for _ in range(sizes.steps))}
    with linked(device) as (link, bulk):
        link.record()
        under_way, times = list[Event](), list[float]()
        for _ in range(sizes.steps):
            under_way = [event for event in under_way if not event.done()]
            under_way += [bulk() for _ in range(16 - len(under_way))]  # 1 GiB: longer than a step
            times.append(1e3 * seconds(step))
        copies = link.recorded()
    carried_s = length(busy(copies))
    yield {"beside_stream_ms": median(times), "copy_gb_s": len(copies) * BULK_BYTES / carried_s / 1e9}


def two_gpus(subject: Subject) -> Iterator[Row]:
    """Compares tokens with one GPU's; fails also if an exchange beside busy links takes over 1 ms."""
    if torch.cuda.device_count() < 2:
        yield {"skipped": "there is one GPU"}
        return
    device = subject.device
    second = next(gpu for number in range(2) if (gpu := torch.device("cuda", number)) != device)
    outward, back = PeerCopies(device, second), PeerCopies(second, device)
    queries = torch.randn(32, 17, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def exchange() -> None:
        home, remote = torch.cuda.current_stream(device), device_streams(second).remote
        back.copy(outward.copy(queries, home, remote), remote, home)

    with linked(device) as (_, ours), linked(second) as (_, theirs):
        ms, _ = behind([ours, theirs], torch.cuda.current_stream(device), exchange)
    yield {"exchange_ms": ms}
    if ms > LONGEST_WAIT_MS:
        yield {"failed": f"queries and results took {ms:.1f} ms there and back behind bulk copies"}
    # In float32: in bfloat16 two logits may be equal.
    config = load_config("retrieval", {**subject.sizes.config, **NOTHING_RESIDENT})
    prompt, runs = random_prompt(1000, subject.sizes.short), list[Any]()
    for other_devices in ((), (second,)):
        target = CausalModel(random_model("tiny", device, torch.float32), "tiny")
        links = [CudaLink(gpu) for gpu in other_devices]
        with closing(
            RecordedText(target, None, CudaLink(device), config, len(prompt) + ROOM, other_links=links)
        ) as text:
            text.prefill([prompt])
            (result,), _ = text.run(config, subject.sizes.new_tokens)
            runs.append(result.tokens)
            yield text.placement
    equal = sum(token == other for token, other in zip(*runs, strict=True))
    yield {"equal_tokens": equal, "tokens": len(runs[0])}
    if equal < len(runs[0]):
        yield {"failed": f"with two GPUs {len(runs[0]) - equal} of {len(runs[0])} tokens differ"}


def groups(subject: Subject) -> Iterator[Row]:
    """Times drafts with groups of layers on one GPU and on two; fails if their logits differ."""
    if torch.cuda.device_count() < 2:
        yield {"skipped": "there is one GPU"}
        return
    sizes = subject.sizes
    model = two_devices.random_draft(subject.device, torch.bfloat16, SHAPES[sizes.shape].hidden)
    case = two_devices.Case(sizes.drafted_entries, repeats=sizes.steps)
    rows = list(two_devices.measured(model, case, ("groups:2@1", "groups:4")))
    yield {"passes": rows, "largest_difference": max(row["difference"] for row in rows)}
    if worst := [row["layers"] for row in rows if not row["difference"] < ALLOWED_ERROR]:
        yield {"failed": f"two GPUs compute other logits than one: {', '.join(worst)}"}
