"""What the figures of a plan rest on, as sentences with the numbers in them."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.config import DRAFT_STREAMING
from offload_rt.drafting.expectations import DRAFT_LENGTHS, SECOND_CHOICE
from offload_rt.machine.hardware import COMPUTE_SHARE, GIB, MEMORY_SHARE
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.prediction import (
    EXCHANGE_MS,
    GRAPH_LAUNCH_SHARE,
    PREFILL_ATTENTION_SHARE,
    RUNNER_UP_HITS,
    RoundTime,
    attention_rate,
)


def machine(request: PlanRequest) -> Iterator[str]:
    """The figures of the machine."""
    hardware, host = request.hardware, request.hardware.host
    source = "measured" if hardware.measured else "named, not measured"
    rates = ", ".join(f"{one.rate:.1f} GB/s at {one.queries}" for one in host.attention)
    yield (
        f"host ({source}): {host.memory_bytes / GIB:.1f} GiB to use, {host.lockable_bytes / GIB:.1f} GiB of "
        f"it lockable, read at {host.memory_rate:.1f} GB/s; CPU attention by queries a key head {rates}, "
        "beyond them falling as 1/queries"
    )
    for number, gpu in enumerate(hardware.gpus):
        yield (
            f"GPU {number} ({source}): {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB read at "
            f"{gpu.memory_rate:.0f} GB/s, {gpu.compute_rate:.0f} TFLOP/s, link {gpu.to_device_rate:.1f} GB/s "
            f"to it and {gpu.to_host_rate:.1f} GB/s back, {gpu.launch_ms:.2f} ms to launch a layer's "
            "operations"
        )
    if hardware.gpus and not hardware.measured:
        yield (
            f"kernels reach {MEMORY_SHARE:.0%} of a card's data-sheet memory rate and {COMPUTE_SHARE:.0%} of "
            "its compute rate"
        )
    if request.elsewhere:
        yield (
            f"MLP blocks of {request.elsewhere} of {request.target.layers} layers are on GPU 1, "
            f"{EXCHANGE_MS} ms each to go there and back; so no pass of the target is a CUDA graph"
        )
    if request.other_gpus:
        yield (
            "GPU 0 computes, the others keep and attend KV, each over its own link; "
            f"{EXCHANGE_MS} ms a layer to hand over queries and results"
        )


def reckoning(request: PlanRequest, fitting: PlanRequest, best: RoundTime, plain_ms: float) -> Iterator[str]:
    """How times were predicted, and where the plan departs from the request.

    Args:
        request: as it was made.
        fitting: with the retrieval budget that fits.
        plain_ms: a token without speculation.
    """
    asked, given = request.config.retrieval.budget, fitting.config.retrieval.budget
    if given < asked:
        yield (
            f"retrieval.budget is {given} instead of {asked}, which does not fit; acceptance is assumed to "
            "stay the same"
        )
    if request.levels != request.config.speculation.names:
        yield f"no draft model: level {DRAFT_STREAMING} is left out ({len(request.levels)} level left)"
    yield from _speculation(fitting, best, plain_ms) if fitting.levels else ["no speculation: 1 token a pass"]
    yield from _pass(fitting, best)
    share = PREFILL_ATTENTION_SHARE["cpu" if request.in_place else "gpu"]
    yield f"prefill: causal attention runs at {share:.0%} of the rate of matrix products"


def _speculation(request: PlanRequest, best: RoundTime, plain_ms: float) -> Iterator[str]:
    rates = ", ".join(f"{level} {request.acceptance(level):.2f}" for level in request.levels)
    chosen = "as given" if request.config.speculation.gamma2 else f"chosen from 1 to {max(DRAFT_LENGTHS)}"
    shape = best.verification.drafted
    drafted = f"gamma2 {shape.depth} ({chosen}), so that a round of 1 + α + … + α^γ"
    if shape.kind != "chain":
        drafted = f"trees of {shape.size} nodes in {shape.depth} steps, whose siblings save up to "
        drafted += f"{SECOND_CHOICE:.0%} of rejections, so that a round"
    yield f"acceptance of a drafted token: {rates}; {drafted} yields {best.tokens:.2f} tokens"
    if chances := best.chances:
        yield (
            f"while a pass streams the next round is drafted for its likeliest outcomes, {len(chances)} of "
            "them in time (all accepted: α^γ·α; or rejected at one of the first tokens, with the runner-up "
            f"right in {RUNNER_UP_HITS:.0%} of cases): {sum(chances):.0%} of rounds find their draft ready"
        )
    elif not request.in_place:
        yield f"drafts are made between passes: {best.draft.ms:.1f} ms of a round"
    if best.refresh_share:
        place = "stream, into a second buffer" if request.refreshes_from_stream else "store, between passes"
        yield (
            f"{best.refresh_share:.0%} of rounds refresh the retrieved cache from the {place}, and take "
            f"{best.refresh_ms:.1f} ms longer"
        )
    if not (request.in_place or request.elsewhere):
        yield (
            f"levels below the full cache are CUDA graphs: launching takes {GRAPH_LAUNCH_SHARE:.0%} of what "
            "it takes one by one"
        )
    if best.ms_per_token > plain_ms:
        yield (
            f"speculation does not pay here: {best.ms_per_token:.1f} ms a token against {plain_ms:.1f} "
            "without it"
        )


def _pass(request: PlanRequest, best: RoundTime) -> Iterator[str]:
    host, lanes = request.hardware.host, best.verification
    queries = (lanes.gamma + 1) * request.target.group
    attended = f"{queries} queries a key head at {attention_rate(host.attention, queries):.1f} GB/s"
    if request.in_place:
        yield f"the CPU computes and drafts, one after the other, and attends {attended}"
        return
    others = f", other GPUs {lanes.other_gpus:.0f} ms" if lanes.other_gpus else ""
    yield (
        f"lanes of a pass: link {lanes.link:.0f} ms, CPU attention {lanes.cpu_attention:.0f} ms, host memory "
        f"{lanes.host_memory:.0f} ms, GPU {lanes.processor:.0f} ms{others}"
    )
    if lanes.placement.cpu_tokens:
        yield (
            f"the CPU attends {attended}, {host.attention_beside_link:.2f} of it beside the link, whose rate "
            f"is {host.link_beside_attention:.2f} meanwhile; {EXCHANGE_MS} ms a layer to hand over queries "
            "and results"
        )
