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
from bench.gpu_checks import ALLOWED_ERROR, BULK_BYTES, HEAD_DIM, LONGEST_WAIT_MS, Given, behind, linked
from bench.random_models import SHAPES, random_model, random_prompt
from bench.recorded_text import RecordedText
from bench.results import Row
from bench.rounds import Recorded, busy, figures, length, on_lane
from bench.studies import two_devices
from cpu_kv import CudaLink, ElementType, Event
from cpu_kv.mapped import PeerCopies
from cpu_kv.streams import device_streams
from offload_rt.attention.backends import choose_backend
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.config.schema import Config
from offload_rt.drafting.levels.configs import load_config
from offload_rt.machine.inspection import usable_hardware
from offload_rt.machine.measuring import seconds
from offload_rt.model.config_shapes import from_config
from offload_rt.model.cuda_graphs import GraphedModel
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel
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
def opened(given: Given, context: int, keys: Mapping[str, object]) -> Iterator[Opened]:
    """Reads a prompt of `context` tokens, and decodes once to warm up."""
    device, sizes = given.device, given.sizes
    config, captures = load_config("retrieval", {**sizes.config, **keys}), list[str]()
    target = GraphedModel(random_model(sizes.shape, device, torch.bfloat16), sizes.shape, captures.append)
    hardware = usable_hardware(device, target.weight_bytes)
    shape = from_config(target.module.config, ElementType.of(target.dtype), sizes.shape)
    request = PlanRequest(shape, None, config, context, ROOM, hardware)  # as the engine makes it
    with closing(RecordedText(target, None, CudaLink(device), config, context + ROOM)) as text:
        torch.cuda.reset_peak_memory_stats(device)
        prefill_ms = text.prefill([random_prompt(shape.vocabulary, context)])
        found = Opened(text, config, request, captures, prefill_ms / 1e3)
        found.run(sizes.new_tokens)
        yield found


def graphs(given: Given) -> Iterator[Row]:
    """Counts launches per round; fails if no CUDA graph is captured and replayed."""
    with opened(given, given.sizes.short, {}) as text:
        yield from ({"failed": notice} for notice in text.captures)
        with launches() as calls:
            run = text.run(given.sizes.new_tokens)
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
    calls.update(one.name for one in profiler.events() or () if CALL.match(one.name))


def planned(given: Given) -> Iterator[Row]:
    """Decodes after 32K tokens as planned: ms per token beside the plan; fails if memory exceeds the plan."""
    device = given.device
    with opened(given, given.sizes.planned, {}) as text:
        memory = {name: size / GIB for name, size in plan(text.request).gpus[0].items()}
        expected = plan(replace(text.request, measured_acceptance=HELD)).check()
        yield {"planned_ms_per_token": expected.ms_per_token} | told(text, given)
        peak = torch.cuda.max_memory_allocated(device) / GIB
        allowed = sum(memory.values())
        yield {"peak_gib": peak, "reserved_gib": torch.cuda.max_memory_reserved(device) / GIB}
        yield {"planned_gib": allowed - memory["reserve"], "planned_parts_gib": memory}
        if peak > allowed:
            yield {"failed": f"the peak is {peak:.2f} GiB, {allowed:.2f} with the reserve were planned"}


def largest(given: Given) -> Iterator[Row]:
    """Decodes after 127K tokens of Llama-2-7B, the tightest plan: fails where memory is exhausted."""
    device, sizes = given.device, given.sizes
    config = {**sizes.config, "offload.refresh_from": "store", **sizes.largest_config}
    seven = Given(device, replace(sizes, shape=sizes.largest_shape, config=config))
    with opened(seven, sizes.largest, {}) as text:
        yield told(text, seven)
        yield from ({"failed": notice} for notice in text.captures)
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    yield {"peak_gib": peaks[0] / GIB, "reserved_gib": peaks[1] / GIB}


def streamed(given: Given) -> Iterator[Row]:
    """Decodes after 128K tokens, all streamed: share of the link's rate, gaps per round, ms per token."""
    with opened(given, given.sizes.streamed, NOTHING_RESIDENT) as text:
        yield told(text, given)


def told(text: Opened, given: Given) -> Row:
    """Decodes; returns the tokens of each tier, the times of rounds, and the use of the link."""
    run = text.run(given.sizes.new_tokens)
    rate = text.request.hardware.gpus[0].to_device_rate
    return {"prefill_s": text.prefill_s} | text.text.placed | figures(run) | carried(run, rate)


def carried(run: Recorded, pinned: float) -> Row:
    """Bytes that the link carried to the device, and gaps between its copies.

    Args:
        pinned: GB/s of page-locked copies to the device, measured alone.
    """
    times, rounds = busy(run.copies), len(run.rounds)
    gigabytes = sum(one.byte_count for one in run.copies if not one.to_host) / 1e9
    gaps = [1e3 * (after - before) for (_, before), (after, _) in pairwise(times)]
    rate = gigabytes / (length(times) or 1.0)
    found = {"gb_a_round": gigabytes / rounds, "copy_gb_s": rate, "share_of_pinned": rate / pinned}
    return found | {"longest_gap_ms": max(gaps, default=0.0), "gap_ms_a_round": sum(gaps) / rounds}


def cpu_share(given: Given) -> Iterator[Row]:
    """Lets the CPU attend to a quarter of 32K tokens: ms from its result to the next layer's queries."""
    context, page = given.sizes.planned, load_config("retrieval", given.sizes.config).store.page
    keys = {"offload.resident_tokens": 0, "offload.cpu_tokens": context // 4 // page * page}
    with opened(given, context, keys) as text:
        run = text.run(given.sizes.new_tokens)
        yield text.text.placed | figures(run)
    exchanges, attending = list[float](), on_lane(run, "cpu")
    for start, end in on_lane(run, "pass"):
        layers = [one for one in attending if start <= one[0] <= end]
        exchanges += [1e3 * (after - before) for (_, before), (after, _) in pairwise(layers)]
    yield {"attention_ms": median(1e3 * (end - start) for start, end in attending)}
    yield {"to_next_queries_ms": median(exchanges), "longest_to_next_queries_ms": max(exchanges)}


@torch.inference_mode()
def drafting(given: Given) -> Iterator[Row]:
    """Times a drafted token, alone and beside a stream."""
    device, sizes, entries = given.device, given.sizes, given.sizes.drafted_entries
    model = GraphedModel(random_model(sizes.shape, device, torch.bfloat16), sizes.shape, lambda notice: None)
    layout, backend = model.kv_layout(), choose_backend(device)
    # All bounded caches cost a pass the same, and this one needs no full cache.
    cache = StreamingCache(layout, model.rotary_frequencies, sinks=4, window=entries - 4, backend=backend)
    model.prepare(cache, (1,), None)
    CausalModel.forward(model, [PassInput(cache, NewTokens.chain(entries), 1)])
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
        under_way, spent = list[Event](), list[float]()
        for _ in range(sizes.steps):
            under_way = [one for one in under_way if not one.done()]
            under_way += [bulk() for _ in range(16 - len(under_way))]  # 1 GiB: longer than a step
            spent.append(1e3 * seconds(step))
        copies = link.recorded()
    carried_s = length(busy(copies))
    yield {"beside_stream_ms": median(spent), "copy_gb_s": len(copies) * BULK_BYTES / carried_s / 1e9}


def two_gpus(given: Given) -> Iterator[Row]:
    """Compares tokens with one GPU's; fails also if an exchange beside busy links takes over 1 ms."""
    if torch.cuda.device_count() < 2:
        yield {"skipped": "there is one GPU"}
        return
    device = given.device
    other = next(one for number in range(2) if (one := torch.device("cuda", number)) != device)
    there, back = PeerCopies(device, other), PeerCopies(other, device)
    queries = torch.randn(32, 17, HEAD_DIM, dtype=torch.bfloat16, device=device)

    def exchange() -> None:
        home, remote = torch.cuda.current_stream(device), device_streams(other).remote
        back.copy(there.copy(queries, home, remote), remote, home)

    with linked(device) as (_, ours), linked(other) as (_, theirs):
        ms, _ = behind([ours, theirs], torch.cuda.current_stream(device), exchange)
    yield {"exchange_ms": ms}
    if ms > LONGEST_WAIT_MS:
        yield {"failed": f"queries and results took {ms:.1f} ms there and back behind bulk copies"}
    # In float32: in bfloat16 two logits may be equal.
    config = load_config("retrieval", {**given.sizes.config, **NOTHING_RESIDENT})
    prompt, found = random_prompt(1000, given.sizes.short), list[Any]()
    for others in ((), (other,)):
        target = CausalModel(random_model("tiny", device, torch.float32), "tiny")
        links = [CudaLink(one) for one in others]
        with closing(
            RecordedText(target, None, CudaLink(device), config, len(prompt) + ROOM, other_links=links)
        ) as text:
            text.prefill([prompt])
            (result,), _ = text.run(config, given.sizes.new_tokens)
            found.append(result.tokens)
            yield text.placed
    equal = sum(one == other for one, other in zip(*found, strict=True))
    yield {"equal_tokens": equal, "tokens": len(found[0])}
    if equal < len(found[0]):
        yield {"failed": f"with two GPUs {len(found[0]) - equal} of {len(found[0])} tokens differ"}


def groups(given: Given) -> Iterator[Row]:
    """Times drafts with groups of layers on one GPU and on two; fails if their logits differ."""
    if torch.cuda.device_count() < 2:
        yield {"skipped": "there is one GPU"}
        return
    sizes = given.sizes
    model = two_devices.random_draft(given.device, torch.bfloat16, SHAPES[sizes.shape].hidden)
    case = two_devices.Case(sizes.drafted_entries, repeats=sizes.steps)
    rows = list(two_devices.measured(model, case, ("groups:2@1", "groups:4")))
    yield {"passes": rows, "largest_difference": max(row["difference"] for row in rows)}
    if worst := [row["layers"] for row in rows if not row["difference"] < ALLOWED_ERROR]:
        yield {"failed": f"two GPUs compute other logits than one: {', '.join(worst)}"}
