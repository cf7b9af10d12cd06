"""What the figures of a plan rest on, as sentences with the numbers in them."""

from __future__ import annotations

from offload_rt.config import DRAFT_STREAMING
from offload_rt.machine.hardware import GIB, Gpu
from offload_rt.machine.named_hardware import COMPUTE_SHARE, MEMORY_SHARE
from offload_rt.planning.placement import LONGEST_DRAFT, Placement, PlanRequest
from offload_rt.planning.prediction import (
    ALL_REDUCE_MS,
    EXCHANGE_MS,
    GRAPH_LAUNCH_SHARE,
    PREFILL_ATTENTION_SHARE,
    RUNNER_UP_HITS,
    RoundTime,
    attention_rate,
)


def machine(request: PlanRequest) -> tuple[str, ...]:
    """The figures of the machine."""
    hardware, host = request.hardware, request.hardware.host
    source = "measured" if hardware.measured else "named, not measured"
    rates = ", ".join(f"{one.rate:.1f} GB/s at {one.queries}" for one in host.attention)
    said = [
        f"host ({source}): {host.memory_bytes / GIB:.1f} GiB to use, {host.lockable_bytes / GIB:.1f} GiB of "
        f"it lockable, read at {host.memory_rate:.1f} GB/s; CPU attention by queries a key head {rates}, "
        "beyond them falling as 1/queries"
    ]
    for number, gpu in enumerate(hardware.gpus):
        said.append(f"GPU {number} ({source}): {_card(gpu)}")
    if hardware.gpus and not hardware.measured:
        said.append(
            f"kernels reach {MEMORY_SHARE:.0%} of a card's data-sheet memory rate and {COMPUTE_SHARE:.0%} of "
            "its compute rate"
        )
    if len(hardware.gpus) > 1:
        said.append(
            f"{len(hardware.gpus)} GPUs share the heads of weights and KV evenly, each with its own link, "
            f"and 2 all-reduces of {ALL_REDUCE_MS} ms a layer: this version runs on 1 GPU, tensor "
            "parallelism is not built yet"
        )
    return tuple(said)


def reckoning(
    request: PlanRequest, fitting: PlanRequest, placement: Placement, best: RoundTime, plain_ms: float
) -> tuple[str, ...]:
    """How times were reckoned, and where the plan departs from what was asked.

    Args:
        request: as it was asked.
        fitting: with the retrieval budget that fits.
        plain_ms: a token without speculation.
    """
    said = [*_departures(request, fitting), *_speculation(fitting, best, plain_ms)]
    said += _pass(fitting, placement, best)
    where = "cpu" if request.in_place else "gpu"
    share = PREFILL_ATTENTION_SHARE[where]
    return (*said, f"prefill: causal attention runs at {share:.0%} of the rate of matrix products")


def _card(gpu: Gpu) -> str:
    return (
        f"{gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB read at {gpu.memory_rate:.0f} GB/s, "
        f"{gpu.compute_rate:.0f} TFLOP/s, link {gpu.to_device_rate:.1f} GB/s to it and "
        f"{gpu.to_host_rate:.1f} GB/s back, {gpu.launch_ms:.2f} ms to launch a layer's operations"
    )


def _departures(request: PlanRequest, fitting: PlanRequest) -> list[str]:
    said = []
    asked, given = request.config.retrieval.budget, fitting.config.retrieval.budget
    if given < asked:
        said.append(
            f"retrieval.budget is {given} instead of {asked}, which does not fit; acceptance is assumed to "
            "stay the same"
        )
    if request.levels != request.config.speculation.names:
        said.append(f"no draft model: level {DRAFT_STREAMING} is left out ({len(request.levels)} level left)")
    total, limit = request.context + request.new_tokens, request.target.max_positions
    if total > limit:
        said.append(
            f"{request.context} tokens and {request.new_tokens} new ones are more than the {limit} positions "
            f"of {request.target.name}: generate will refuse more than {limit} in all"
        )
    return said


def _speculation(request: PlanRequest, best: RoundTime, plain_ms: float) -> list[str]:
    levels = request.levels
    if not levels:
        return ["no speculation: 1 token a pass"]
    rates = ", ".join(f"{level} {request.acceptance(level):.2f}" for level in levels)
    chosen = "as given" if request.fixed_draft else f"chosen from 1 to {LONGEST_DRAFT}"
    said = [
        f"acceptance of a drafted token: {rates}; gamma2 {best.gamma} ({chosen}), so that a round of "
        f"1 + α + … + α^γ yields {best.tokens:.2f} tokens"
    ]
    if best.outcomes:
        said.append(
            f"while a pass streams the next round is drafted for its likeliest outcomes, {best.outcomes} of "
            "them in time (all accepted: α^γ·α; or rejected at one of the first tokens, with the runner-up "
            f"right in {RUNNER_UP_HITS:.0%} of cases): {best.hit_rate:.0%} of rounds find their draft ready"
        )
    elif not request.in_place:
        said.append(f"drafts are made between passes: {best.draft.ms:.1f} ms of a round")
    if best.refresh_share:
        said.append(
            f"{best.refresh_share:.0%} of rounds refresh the retrieved cache, and take "
            f"{best.refresh_ms:.1f} ms longer"
        )
    if request.graphs and not request.in_place:
        said.append(
            f"levels below the full cache are CUDA graphs: launching takes {GRAPH_LAUNCH_SHARE:.0%} of what "
            "it takes one by one"
        )
    if best.ms_per_token > plain_ms:
        said.append(
            f"speculation does not pay here: {best.ms_per_token:.1f} ms a token against {plain_ms:.1f} "
            "without it"
        )
    return said


def _pass(request: PlanRequest, placement: Placement, best: RoundTime) -> list[str]:
    host, lanes = request.hardware.host, best.verification
    queries = (best.gamma + 1) * request.target.group
    rate = attention_rate(host.attention, queries)
    if request.in_place:
        return [
            f"the CPU computes and drafts, one after the other, and attends {queries} queries a key head at "
            f"{rate:.1f} GB/s"
        ]
    said = [
        f"lanes of a pass: link {lanes.link:.0f} ms, CPU attention {lanes.cpu_attention:.0f} ms, host memory "
        f"{lanes.host_memory:.0f} ms, GPU {lanes.processor:.0f} ms"
    ]
    if placement.cpu_tokens:
        said.append(
            f"the CPU attends {queries} queries a key head at {rate:.1f} GB/s, "
            f"{host.attention_beside_link:.2f} of it beside the link, whose rate is "
            f"{host.link_beside_attention:.2f} meanwhile; {EXCHANGE_MS} ms a layer to hand over queries and "
            "results"
        )
    return said
