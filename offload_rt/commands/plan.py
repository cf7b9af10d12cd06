"""`offload-rt plan`: what goes where and how fast it will be, before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.commands.generate import add_dtype, add_json, add_overrides
from offload_rt.config import AUTO, possible, uses_small_model
from offload_rt.drafting.expectations import SAME_MODEL_ACCEPTANCE, SMALL_MODEL_ACCEPTANCE
from offload_rt.errors import UsageError
from offload_rt.files import write_json
from offload_rt.machine.hardware import GIB, NO_GPU, Hardware, named_hardware
from offload_rt.toml import load_configs

if TYPE_CHECKING:
    from offload_rt.planning.planner import Plan, Prediction

NO_DRAFT = "none"
FIGURES = {
    "--link": ("GB/s", "of each card, each way (default: 25)"),
    "--dram": ("GB/s", "host memory (default: 70)"),
    "--ram": ("GiB", "host memory (default: 96)"),
    "--cpu-attention": ("GB/s", "KV that the CPU attends (default: 0.7 of the memory's)"),
    "--vram": ("GiB", "of a card to use (default: all)"),
}
"""Of a machine, by flag: units and meanings."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    plan = commands.add_parser(
        "plan",
        help="what fits where, and how fast it will be",
        description="Predicts placement, memory and times of a generation; loads no model.",
        allow_abbrev=False,
    )
    plan.set_defaults(run=run)

    add = plan.add_argument_group("model").add_argument
    add("--model", default="demo", metavar="FOLDER|ID|SHAPE", help="e.g. llama2-7b (default: the demo pair)")
    drafts = "small model that may draft, e.g. jf68m (default: none)"
    add("--draft", metavar="FOLDER|ID|SHAPE|none", help=drafts)
    add_dtype(add)
    tokens = "tokens of the prompt, e.g. 100000 or 96k"
    add("--context", type=_tokens, required=True, metavar="N", help=tokens)
    add("--new-tokens", type=int, default=256, metavar="N", help="tokens to generate (default: 256)")

    configuration = plan.add_argument_group("configuration")
    add = configuration.add_argument
    composition = "a name, a TOML file, or auto: the fastest of all (default: auto)"
    add("--config", default=AUTO, metavar="NAME|FILE", help=composition)
    chosen = "speculation.gamma2 is chosen by the plan where it is 0"
    add_overrides(configuration, f"sets any configuration key (default: the config's values); {chosen}")
    same, small = "of tokens the target drafts itself", "of the small model's tokens"
    for flag, default, help in (
        ("--acceptance", SAME_MODEL_ACCEPTANCE, same),
        ("--draft-acceptance", SMALL_MODEL_ACCEPTANCE, small),
    ):
        add(flag, type=float, default=default, metavar="A", help=f"{help} (default: {default})")
    add("--no-ahead", action="store_true", help="do not draft while a pass streams")

    add = plan.add_argument_group("hardware (default: this machine, as doctor measures it)").add_argument
    cards = "rtx4090, rtx3090, l40, a100-80, h100, … or none (default: this machine)"
    add("--gpu", metavar="NAME", help=cards)
    add("--gpus", type=int, metavar="N", help="how many: the first computes, all keep KV (default: 1)")
    for flag, (unit, help) in FIGURES.items():
        add(flag, type=float, metavar=unit, help=help)
    add_json(plan.add_argument, "the plan")


def _tokens(text: str) -> int:
    """A number of tokens; "96k" is 96 × 1,024."""
    number, unit = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, like 100000 or 96k")
    return unit * int(number)


def run(arguments: argparse.Namespace) -> int:
    # What needs no model is checked before torch is imported: that alone takes seconds.
    overrides = dict(arguments.overrides) | ({"offload.ahead": 0} if arguments.no_ahead else {})
    configs = load_configs(arguments.config, overrides)
    hardware = _hardware(arguments)

    import torch

    from offload_rt.model.loading import DEMO, choose_dtype
    from offload_rt.planning.placement import PlanRequest
    from offload_rt.planning.planner import comparison, plan, ranked
    from offload_rt.planning.shapes import DEMO_DRAFT, find_shape

    dtype = choose_dtype(arguments.dtype, torch.device("cuda" if hardware.gpus else "cpu"))
    target = find_shape(arguments.model, dtype)
    draft = arguments.draft or (DEMO_DRAFT if arguments.model == DEMO else NO_DRAFT)
    if not uses_small_model(configs):
        draft = NO_DRAFT
    small = None if draft == NO_DRAFT else find_shape(draft, target.dtype)
    requests = [
        PlanRequest(
            *(target, small, config, arguments.context, arguments.new_tokens, hardware),
            same_model_acceptance=arguments.acceptance,
            small_model_acceptance=arguments.draft_acceptance,
        )
        for config in possible(configs, small is not None)
    ]
    planned, *others = plans = ranked(requests)
    if arguments.json is not None:
        write_json("--json", arguments.json, planned.to_json())
    lines = list(_report(planned, planned.check()))
    if others:
        lines.insert(1, f"config     {comparison(plans)}")
    elif small is not None and len(planned.request.levels) > 1:
        ms = plan(replace(requests[0], draft=None)).ms_per_token
        if ms < planned.ms_per_token:
            lines.append(f"draft      makes it slower: {ms:.1f} ms a token without it (--draft none)")
    print("\n".join([*lines, "assumed", *(f"  - {sentence}" for sentence in planned.assumptions)]))
    return 0


def _hardware(arguments: argparse.Namespace) -> Hardware:
    """The machine that the flags describe, or this one."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in ("--gpus", *FIGURES)]
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.gpu == NO_GPU and (of_cards := sorted({"gpus", "link", "vram"} & given.keys())):
        raise UsageError(f"--{of_cards[0]} describes a card, and --gpu {NO_GPU} has none: leave it out")
    if arguments.gpu is not None:
        return named_hardware(arguments.gpu, **given)
    count = given.pop("gpus", None)
    if given:
        flag = "--" + next(iter(given)).replace("_", "-")
        raise UsageError(f"{flag} describes a machine: name its card with --gpu NAME, or --gpu none")
    from offload_rt.machine.inspection import inspect

    console = Console(quiet=False)
    hardware = inspect(on_progress=console.progress).hardware
    console.clear()
    if count is not None and not 1 <= count <= len(hardware.gpus):
        raise UsageError(
            f"--gpus {count}: this machine has {len(hardware.gpus)}; name others with --gpu NAME"
        )
    return replace(hardware, gpus=hardware.gpus[: count or 1])


def _report(plan: Plan, predicted: Prediction) -> Iterator[str]:
    """Lines for people."""
    request, placement = plan.request, plan.placement
    draft = f" and {request.draft.name}" if request.draft is not None else ""
    dtype = str(request.target.dtype).removeprefix("torch.")
    new = f"{request.context:,} tokens of context, {request.new_tokens:,} new"
    yield f"plan       {request.target.name}{draft} in {dtype}, {new}; config {request.config.name}"
    shares = {
        "resident on GPUs": placement.resident_bytes,
        "attended by the CPU": placement.cpu_attended_bytes,
        "streamed": placement.streamed_bytes,
    }
    whole = sum(shares.values())
    told = (f"{name} {size / GIB:.2f} GiB ({size / whole:.0%})" for name, size in shares.items() if size)
    yield f"KV         {whole / GIB:.2f} GiB: {'; '.join(told)}"
    if not request.in_place:
        store, size = request.config.store, plan.gpus[0]["staging_ring"]
        ring = f"{store.ring_buffers} buffers of {plan.request.segment_tokens:,} tokens"
        yield f"ring       {size / GIB:.2f} GiB: {ring}"
    for number, (parts, gpu) in enumerate(zip(plan.gpus, request.hardware.gpus, strict=True)):
        yield _memory(f"GPU {number}", parts, gpu.memory_bytes)
    yield _memory("host", plan.host, request.hardware.host.memory_bytes)
    ms, plain_ms = predicted.ms_per_token, predicted.plain_ms_per_token
    yield (
        f"predicted  {ms:.1f} ms a token; {plain_ms / ms:.2f} times as fast as without speculation "
        f"({plain_ms:.1f})"
    )
    yield (
        f"round      {predicted.round_ms:.1f} ms: pass {predicted.pass_ms:.1f}, draft "
        f"{predicted.draft_ms:.1f}; {predicted.tokens_per_round:.2f} tokens"
    )
    yield f"prefill    {predicted.prefill_ms / 1e3:.1f} s"
    yield f"bottleneck {predicted.bottleneck}"


def _memory(where: str, parts: dict[str, int], available: int) -> str:
    """The sum and the parts, the largest first."""
    from offload_rt.planning.placement import largest

    return f"{where:10} {sum(parts.values()) / GIB:.2f} of {available / GIB:.2f} GiB: {largest(parts, 2)}"
