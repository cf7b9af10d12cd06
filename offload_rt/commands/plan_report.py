"""What `offload-rt plan` prints and writes: the verdict in a line, and with `--verbose` all of the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import offload_rt
from offload_rt.commands.console import duration
from offload_rt.model.shape import ModelShape
from offload_rt.planning.memory import largest
from offload_rt.planning.planner import Plan, Prediction, comparison, plan
from offload_rt.system.hardware import GIB


def lines(plans: Sequence[Plan], notes: Sequence[str], verbose: bool) -> Iterator[str]:
    """Yields the lines on `ranked` plans. Raises UsageError where none fits.

    Args:
        notes: lines on how the plan was made, each with its heading.
        verbose: the placement, the times of a round and what the plan assumes, too.
    """
    planned, *rest = plans
    predicted = planned.check()
    yield verdict(planned, predicted)
    yield _subject(planned)
    if rest:
        yield f"config     {comparison(plans)}"
    if verbose:
        yield from _placement(planned)
        yield from _times(predicted)
        yield from _groups(planned)
    yield from notes
    if verbose:
        yield "assumed"
        yield from (f"  - {sentence}" for sentence in planned.assumptions)


def to_json(plans: Sequence[Plan]) -> dict[str, object]:
    """Returns the first of `ranked` plans as JSON values, with its inputs and the alternatives to it."""
    plan, *rest = plans
    request = plan.request
    inputs = {
        "model": _model(request.target),
        "draft": _model(request.draft) if request.draft is not None else None,
        "context": request.context,
        "new_tokens": request.new_tokens,
        "same_model_acceptance": request.same_model_acceptance,
        "small_model_acceptance": request.small_model_acceptance,
        "hardware": asdict(request.hardware),
    }
    alternatives = [
        {
            "config": plan.request.config.name,
            "fits": plan.fits,
            "ms_per_token": plan.predicted.ms_per_token if plan.predicted else None,
            "refusal": plan.refusal,
        }
        for plan in rest
    ]
    origin = {"version": offload_rt.__version__, "inputs": inputs}
    return origin | plan.to_json() | {"alternatives": alternatives}


def _model(shape: ModelShape) -> dict[str, object]:
    quantization = shape.quantization.name if shape.quantization is not None else None
    dtype = str(shape.dtype)
    return {
        "name": shape.name,
        "dtype": dtype,
        "quantization": quantization,
        "planes": shape.planes,
        "positions": shape.max_positions,
    }


def verdict(planned: Plan, predicted: Prediction) -> str:
    """Returns whether it fits and how fast it is, in a line."""
    request = planned.request
    hardware, memory = request.hardware, list[str]()
    if gpus := hardware.gpus:
        needed, whole = (
            sum(sizes) / GIB
            for sizes in (
                [sum(parts.values()) for parts in planned.gpus],
                [gpu.memory_bytes for gpu in gpus],
            )
        )
        of = "GPU memory" if len(gpus) == 1 else f"the memory of {len(gpus)} GPUs"
        memory.append(f"{needed:.1f} of {whole:.1f} GiB of {of}")
    host = sum(planned.host.values()) / GIB
    memory.append(f"{host:.0f} of {hardware.host.memory_bytes / GIB:.0f} GiB of RAM")
    ms = predicted.ms_per_token
    return (
        f"fits: {', '.join(memory)}; first answer after {duration(predicted.prefill_ms / 1e3)}, then"
        f" {_figure(1e3 / ms)} tokens/s ({_figure(ms)} ms per token, predicted)"
    )


def _figure(value: float) -> str:
    """Returns a number in two digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _subject(planned: Plan) -> str:
    """Returns a line on what was planned."""
    request = planned.request
    draft = f" and {request.draft.name}" if request.draft is not None else ""
    dtype = str(request.target.dtype)
    if request.target.quantized and request.target.quantization is not None:
        dtype += f" with {request.target.quantization.name} weights"
    if request.target.planes:
        dtype += " in two planes"
    new = f"prompt of {request.context:,} tokens, {request.new_tokens:,} new"
    return f"plan       {request.target.name}{draft} in {dtype}, {new}; config {request.config.name}"


def _placement(plan: Plan) -> Iterator[str]:
    """Yields lines on where KV and everything else is stored."""
    request, placement = plan.request, plan.placement
    shares = {
        "resident on GPUs": placement.resident_bytes,
        "attended by the CPU": placement.cpu_attended_bytes,
        "streamed": placement.streamed_bytes,
    }
    whole, target = sum(shares.values()), request.target
    figures = (f"{name} {size / GIB:.2f} GiB ({size / whole:.0%})" for name, size in shares.items() if size)
    paged = f" in {target.paged_layers} of {target.layers} layers" if target.kinds.local else ""
    if target.paged_layers:
        yield f"KV         {whole / GIB:.2f} GiB{paged}: {'; '.join(figures)}"
        if (layout := plan.request.store_layout).packed:
            size, bits = plan.host["kv"] / GIB, 16 * layout.stored_share
            packed = f"full pages are packed to {bits:.1f} bits per value"
            yield f"store      {size:.2f} GiB of CPU memory: {packed}"
        if request.retrieves:
            retrieval, share = request.config.retrieval, request.retrieved_share
            yield (
                f"retrieved  {retrieval.budget:,} entries of {retrieval.entry_bits} bits in each layer and KV"
                f" head, {share:.0%} of the context"
            )
    else:
        yield f"KV         nothing is paged: all {target.layers} layers keep only a window or a state"
    yield from _local(target, plan.host if request.in_place else plan.gpus[0])
    if not request.in_place and target.paged_layers:
        store, size = request.config.store, plan.gpus[0]["staging_ring"]
        ring = f"{store.ring_buffers} buffers of {plan.request.segment_tokens:,} tokens"
        yield f"ring       {size / GIB:.2f} GiB: {ring}"
    for number, (parts, gpu) in enumerate(zip(plan.gpus, request.hardware.gpus, strict=True)):
        yield _memory(f"GPU {number}", parts, gpu.memory_bytes)
    yield _memory("host", plan.host, request.hardware.host.memory_bytes)


def _times(predicted: Prediction) -> Iterator[str]:
    """Yields lines on predicted times."""
    ms, plain_ms = predicted.ms_per_token, predicted.plain_ms_per_token
    yield (
        f"predicted  {ms:.1f} ms per token; {plain_ms / ms:.2f} times as fast as without speculation "
        f"({plain_ms:.1f})"
    )
    yield (
        f"round      {predicted.round_ms:.1f} ms: pass {predicted.pass_ms:.1f}, draft "
        f"{predicted.draft_ms:.1f}; {predicted.tokens_per_round:.2f} tokens"
    )
    pieces = f"pieces of {predicted.piece_tokens:,} tokens" if predicted.piece_tokens else "one piece"
    yield f"prefill    {predicted.prefill_ms / 1e3:.1f} s, in {pieces}"
    yield f"bottleneck {predicted.bottleneck}"


def _groups(planned: Plan) -> Iterator[str]:
    """Yields a line on the attention blocks of groups of layers, on one device and on two."""
    if not planned.group_devices:
        return
    request = planned.request
    forms = [plan(request.having("offload.group_devices", devices)) for devices in (1, 2)]
    figures = [
        f"draft {form.predicted.draft_ms:.1f} ms, {form.ms_per_token:.1f} ms per token"
        if form.predicted
        else "does not fit"
        for form in forms
    ]
    names, exchanges = ("one GPU", "two"), "+".join(str(groups.exchanges) for groups in request.groups)
    yield (
        f"groups     on {names[planned.group_devices - 1]} as planned; on one: {figures[0]}; on two:"
        f" {figures[1]} ({exchanges} exchanges a pass)"
    )


def _local(target: ModelShape, parts: dict[str, int]) -> Iterator[str]:
    """Yields lines on what layers without paged KV keep on the processor that computes."""
    kinds = target.kinds
    if kinds.windowed:
        windows = sorted({kinds.kinds[layer].window or 0 for layer in kinds.windowed})
        last = " or ".join(f"{window:,}" for window in windows)
        size, layers = parts["sliding_windows"] / GIB, len(kinds.windowed)
        yield f"windows    {size:.2f} GiB: the last {last} tokens in {layers} layers, and slack"
    if kinds.recurrent:
        size, copies = parts["recurrent_states"] / GIB, parts["recurrent_states"] // target.state_bytes
        yield f"states     {size:.2f} GiB: {copies} copies, in {len(kinds.recurrent)} layers"


def _memory(place: str, parts: dict[str, int], available: int) -> str:
    """Returns a line on the memory of one place: the sum and its two largest parts."""
    return f"{place:10} {sum(parts.values()) / GIB:.2f} of {available / GIB:.2f} GiB: {largest(parts, 2)}"
