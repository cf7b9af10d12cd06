"""The figures that a plan rests on, as sentences with the numbers in them."""

from __future__ import annotations

from collections.abc import Iterator

from offload_rt.config.priors import (
    DRAFT_LENGTHS,
    DRAFT_PLANE_REJECTIONS,
    REJECTIONS_POWER,
    RUNNER_UP_HITS,
    SECOND_CHOICE,
)
from offload_rt.config.validation import shown
from offload_rt.model.quantization import MOST_PAIRS
from offload_rt.model.shape import PLANE_BITS
from offload_rt.planning.cost_model import (
    EXCHANGE_MS,
    FUSED_ROWS,
    PACKED_ATTENTION,
    RoundTime,
    product_rates,
)
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB


def machine(request: PlanRequest) -> Iterator[str]:
    """Yields the figures of the machine."""
    hardware, host = request.hardware, request.hardware.host
    source = "measured" if hardware.measured else "named, not measured"
    rates = ", ".join(f"{rate.rate:.1f} GB/s at {rate.queries}" for rate in host.attention)
    yield (
        f"host ({source}): {host.memory_bytes / GIB:.1f} GiB to use, {host.lockable_bytes / GIB:.1f} GiB of "
        f"it lockable, read at {host.memory_rate:.1f} GB/s; CPU attention by queries a key head {rates}"
    )
    for number, gpu in enumerate(hardware.gpus):
        yield (
            f"GPU {number} ({source}): {gpu.name}, {gpu.memory_bytes / GIB:.1f} GiB read at "
            f"{gpu.memory_rate:.0f} GB/s, {gpu.compute_rate:.0f} TFLOP/s, link {gpu.to_device_rate:.1f} GB/s "
            f"to it and {gpu.to_host_rate:.1f} GB/s back, {gpu.launch_ms:.2f} ms to launch a layer's kernels"
        )
    yield from _quantized(request)
    yield from _planes(request)
    yield from _experts(request)
    memory = MemoryBudget(request)
    if request.store_layout.packed:
        yield (
            f"packed pages take {PACKED_ATTENTION:g} times the time of the CPU's attention; a GPU unpacks"
            f" {'streamed and resident' if memory.resident.packed else 'streamed'} ones in every pass"
        )
    if memory.remote_mlps:
        yield f"MLP blocks of {memory.remote_mlps} of {request.target.layers} layers are on GPU 1"
    if request.other_gpus:
        yield "GPU 0 computes, the others keep and attend KV, each over its own link"


def _quantized(request: PlanRequest) -> Iterator[str]:
    """Yields how the target's weights are quantised, and what their products rest on."""
    target, processor = request.target, next(iter(request.hardware.gpus), request.hardware.host)
    quantization = target.quantization
    if quantization is None:
        return
    if quantization.notice:
        yield quantization.notice
    if quantization.bits is None:
        return
    packed = quantization.nbytes(target.quantized)
    rest = target.weight_bytes - packed
    yield (
        f"weights: {target.quantized:,} in {quantization.name} of {quantization.bits:.2f} bits with their"
        f" scales, {packed / GIB:.2f} GiB, the other {target.parameters - target.quantized:,} as they are,"
        f" {rest / GIB:.2f} GiB"
    )
    if target.expert_parameters and not quantization.experts:
        yield f"experts are not quantized: {quantization.name} is for linear layers only"
    if rates := product_rates(processor.products, quantization):
        figures = ", ".join(f"{rate.rate:.0f} at {rate.rows}" for rate in rates)
        yield f"products with {quantization.name} weights (measured): {figures} rows, in billions a second"
    else:
        yield (
            f"products with {quantization.name} weights (not measured): up to {FUSED_ROWS} rows they read the"
            " weights as they are stored, at the memory's rate; for more, weights are expanded first"
        )


def _planes(request: PlanRequest) -> Iterator[str]:
    """Yields what the target's weights in two planes take, and what that rests on."""
    target = request.target
    if not target.planes:
        return
    yield (
        f"weights: {target.split_parameters:,} in two planes of {PLANE_BITS} bits together, without loss,"
        f" {target.split_parameters * PLANE_BITS / 8 / GIB:.2f} GiB; the target drafts by 8 of them, and"
        f" {DRAFT_PLANE_REJECTIONS:.1%} more of its drafts are rejected"
    )
    if not request.in_place:
        yield "how fast a GPU multiplies with weights in two planes is an estimate that none has confirmed"


def _experts(request: PlanRequest) -> Iterator[str]:
    """Yields how many experts a pass reads, where the target is a mixture."""
    target, processor = request.target, "GPU" if request.hardware.gpus else "CPU"
    if not target.experts:
        return
    counts = ", ".join(f"{target.distinct_experts(rows):.0f} for {rows}" for rows in (1, 8, 64))
    yield (
        f"experts: a token goes through {target.chosen_experts} of {target.experts} in a layer, and a pass of"
        f" several tokens through {counts}, as if each token chose by itself at random"
    )
    if target.gathers_experts and target.quantization:
        yield (
            f"experts in {target.quantization.name} (not measured): up to {MOST_PAIRS} pairs of a token and"
            f" an expert, the {processor} reads the weights of each pair twice and writes them once, as they"
            " are stored; for more, each expert is expanded once"
        )


def predictions(
    request: PlanRequest, fitting: PlanRequest, best: RoundTime, plain_ms: float
) -> Iterator[str]:
    """Yields the assumptions behind predicted times, and departures of the plan from the request.

    Args:
        request: as it was made.
        fitting: with the retrieval budget that fits.
        plain_ms: ms per token without speculation.
    """
    for key in ("store.segment_bytes", "prefill.chunk", "retrieval.rest", "retrieval.budget"):
        configured, value = request.config.value(key), fitting.config.value(key)
        if value < configured:
            yield f"{key} is {shown(value)} instead of {shown(configured)}, which does not fit"
    if absent := {level.name for level in request.config.speculation.levels} - {
        level.name for level in request.levels
    }:
        yield f"no draft model: level {', '.join(absent)} is left out ({len(request.levels)} level left)"
    if not fitting.levels:
        yield "no speculation: 1 token a pass"
        return
    if fitting.config.offload.group_devices == 2:
        exchanges = ", ".join(str(plan.exchanges) for plan in fitting.groups)
        yield (
            "GPU 1 runs its share of the attention blocks of groups, by copies of their weights: a pass has "
            f"{exchanges} exchanges of {EXCHANGE_MS:.2f} ms, and is no CUDA graph"
        )
    rates = ", ".join(f"{level.name} {level.acceptance(fitting):.2f}" for level in fitting.levels)
    shape, configured = best.verification.shape, fitting.speculation.shapes[-1]
    fixed = fitting.config.speculation.gamma2 and shape.kind == configured.kind
    source = "as given" if fixed else f"chosen from 1 to {max(DRAFT_LENGTHS)}"
    if configured.kind not in ("auto", shape.kind):
        yield f"a chain is drafted instead of {configured}: recurrent states follow one path of tokens"
    drafted = f"gamma2 {shape.depth} ({source}), so that a round of 1 + α + … + α^γ"
    if shape.kind != "chain":
        drafted = f"trees of {shape.size} nodes in {shape.depth} steps, whose siblings save up to "
        drafted += f"{SECOND_CHOICE:.0%} of rejections, so that a round"
    yield f"acceptance of a drafted token: {rates}; {drafted} yields {best.tokens:.2f} tokens"
    if fitting.retrieves:
        usual, share = fitting.same_model_acceptance, fitting.retrieved_share
        yield (
            f"of tokens that the target drafts over 1/32 of the context {usual:.0%} are accepted, and"
            f" rejections fall with the share retrieved, {share:.1%}, to the power of {REJECTIONS_POWER:g}"
        )
    if chances := best.chances:
        yield (
            f"while a pass streams, the next round is drafted for its {len(chances)} likeliest outcomes "
            f"(after a rejection the runner-up is right in {RUNNER_UP_HITS:.0%} of cases): "
            f"{sum(chances):.0%} of rounds find their draft ready"
        )
    if best.refresh_share:
        place = "stream, into a second buffer" if fitting.refreshes_from_stream else "store, between passes"
        yield (
            f"{best.refresh_share:.0%} of rounds refresh the retrieved cache from the {place}, and take "
            f"{best.refresh_ms:.1f} ms longer"
        )
    if best.ms_per_token > plain_ms:
        yield (
            f"speculation does not pay here: {best.ms_per_token:.1f} ms per token against {plain_ms:.1f} "
            "without it"
        )
