"""`offload-rt plan`: predicts placement, memory and speed; loads no model."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.commands.console import Console
from offload_rt.commands.options import (
    SETTING,
    add_dtype,
    add_json,
    add_overrides,
    add_quantize,
    add_rope,
)
from offload_rt.commands.prompts import token_count
from offload_rt.config.priors import DEMO_ACCEPTANCE, SAME_MODEL_ACCEPTANCE, SMALL_MODEL_ACCEPTANCE
from offload_rt.config.schema import AUTO, NO_DRAFT
from offload_rt.config.settings import SettingDefault
from offload_rt.drafting.levels.configs import load_configs, with_head
from offload_rt.errors import UsageError
from offload_rt.system.files import write_json
from offload_rt.system.hardware import NO_GPU, PROCESSORS, Hardware, named_hardware

if TYPE_CHECKING:
    from offload_rt.model.shape import ModelShape
    from offload_rt.planning.planner import Plan

FIGURES = {
    "--link": ("GB/s", "rate of each GPU's link, each way (default: 25, or 12.5 for a card of 8 lanes)"),
    "--dram": ("GB/s", "rate of host memory (default: 70)"),
    "--ram": ("GiB", "size of host memory (default: 96)"),
    "--cpu-attention": ("GB/s", "rate at which the CPU attends to KV (default: by processor and memory)"),
    "--vram": ("GiB", "memory of each GPU to use (default: all but 0.7 GiB, for the driver)"),
}
"""Figures of a machine, by flag: units and meanings."""
NEW_TOKENS = 256
DUAL_CHUNK_TOKENS = 262_144


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    plan = commands.add_parser(
        "plan",
        help="predict whether it fits, and how fast it will be",
        description="Predicts placement, memory and times of a generation; loads no model.",
        allow_abbrev=False,
    )
    plan.set_defaults(run=run)

    names = "list the models and cards known by name, and exit"
    plan.add_argument("--list", action=ListNames, help=names)
    add = plan.add_argument_group("model").add_argument
    meaning = f"e.g. llama2-7b (default: {SETTING}, or the demo pair)"
    add("--model", default=SettingDefault("model", "demo"), metavar="FOLDER|ID|SHAPE", help=meaning)
    drafts = f"small draft model, e.g. jf68m, or auto: as in generate (default: {SETTING}, or none)"
    add("--draft", default=SettingDefault("draft"), metavar="FOLDER|ID|SHAPE|auto|none", help=drafts)
    add_dtype(add)
    add_quantize(add)
    add_rope(add)
    tokens = "prompt and new tokens together, e.g. 100000, 96k or 1M; the prompt alone where both are given"
    add("--context", type=token_count, required=True, metavar="N", help=tokens)
    new = f"tokens to generate (default: {NEW_TOKENS} of the context, at most half of it)"
    add("--new-tokens", type=token_count, metavar="N", help=new)

    configuration = plan.add_argument_group("configuration")
    add = configuration.add_argument
    composition = "a name, a TOML file, or auto: the fastest of all (default: auto)"
    add("--config", default=AUTO, metavar="NAME|FILE", help=composition)
    head = "plan with a head: an EAGLE-3 one, or mtp, that of the checkpoint (default: none, but for heads)"
    add_overrides(configuration, head, "--head", "PATH|ID|mtp", "head.path")
    hint = "speculation.gamma2 is chosen by the plan where it is 0"
    add_overrides(configuration, f"sets any configuration key (default: the config's values); {hint}")
    same, small = (
        "acceptance of tokens that the target drafts over 1/32 of the context (default:"
        f" {SAME_MODEL_ACCEPTANCE}, as TriForce measured for Llama-2-7B, or {DEMO_ACCEPTANCE} for the demo)",
        f"acceptance of the small model's tokens (default: {SMALL_MODEL_ACCEPTANCE})",
    )
    add("--acceptance", type=float, metavar="A", help=same)
    add("--draft-acceptance", type=float, default=SMALL_MODEL_ACCEPTANCE, metavar="A", help=small)
    add("--no-ahead", action="store_true", help="do not draft while a pass streams")

    add = plan.add_argument_group("hardware (default: this machine, as doctor measures it)").add_argument
    gpus = "a card's name, rtx4090, l40s, a100-80, …, or none (default: this machine's GPU)"
    add("--gpu", metavar="NAME", help=gpus)
    add("--gpus", type=int, metavar="N", help="number of GPUs: the first computes, all hold KV (default: 1)")
    for flag, (unit, help) in FIGURES.items():
        add(flag, type=float, metavar=unit, help=help)
    kinds = f"instructions of the processor: {', '.join(PROCESSORS)} (default: avx2)"
    add("--cpu", metavar="NAME", help=kinds)
    verbose = "also print the placement, the times of a round, and what the plan assumes"
    plan.add_argument("--verbose", action="store_true", help=verbose)
    add_json(plan.add_argument, "the plan, its inputs and the alternatives to it")


class ListNames(argparse.Action):
    """Prints what a plan knows by name and exits, whatever else is given, as `--help` does."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from offload_rt.commands.plan_names import known_names

        print("\n".join(known_names()))
        parser.exit()


def run(arguments: argparse.Namespace) -> int:
    overrides = dict(arguments.overrides) | ({"offload.ahead": 0} if arguments.no_ahead else {})
    configs = load_configs(arguments.config, overrides)
    head = overrides.get("head.path", NO_DRAFT)
    if arguments.config == AUTO and head != NO_DRAFT:
        configs = with_head(configs, overrides, str(head))
    # What is cheap to refuse comes first: measuring this machine takes a minute once.
    named = None if arguments.gpu is None else _hardware(arguments)

    from offload_rt.commands import plan_report
    from offload_rt.drafting.levels.base import needs_draft_model
    from offload_rt.model.dtypes import choose_element
    from offload_rt.planning.planner import ranked, requests_for, unquantized_experts

    target, tokens, context_note = _target(arguments)
    hardware = named or _hardware(arguments)
    context, new_tokens = _sizes(tokens, arguments.new_tokens)
    dtype = choose_element(arguments.dtype, bool(hardware.gpus), target.dtype)
    target = replace(target, dtype=dtype or target.dtype)

    def planned_with(small: ModelShape | None) -> list[Plan]:
        return ranked(
            requests_for(
                configs,
                target,
                small,
                (context, new_tokens),
                hardware,
                expected_acceptance=arguments.acceptance,
                small_model_acceptance=arguments.draft_acceptance,
            )
        )

    small, draft_note = None, None
    if needs_draft_model(configs):
        small, draft_note = _draft(arguments, target, lambda small: planned_with(small)[0])
    plans = planned_with(small)
    if arguments.json is not None:
        write_json("--json", arguments.json, plan_report.to_json(plans))
    planned, notes = plans[0], list[str]()
    if target.quantization is not None and target.quantization.notice:
        notes.append(target.quantization.notice)
    notes += unquantized_experts(planned.request)
    if target.ignored and context > DUAL_CHUNK_TOKENS:
        notes.append(target.ignored)
    notes += filter(None, (context_note, draft_note))
    lines = [f"note       {note}" for note in notes]
    if len(configs) == 1 and small is not None and len(planned.request.levels) > 1:
        ms = planned_with(None)[0].ms_per_token
        if ms < planned.ms_per_token:
            lines.append(f"draft      makes it slower: {ms:.1f} ms per token without it (--draft none)")
    print("\n".join(plan_report.lines(plans, lines, arguments.verbose)))
    return 0


def _sizes(tokens: int, new_tokens: int | None) -> tuple[int, int]:
    """Returns the tokens of the prompt, and new ones; without `new_tokens` they are part of `tokens`."""
    if new_tokens is not None or tokens == 1:
        return tokens, new_tokens or 1
    new = min(NEW_TOKENS, tokens // 2)
    return tokens - new, new


def _target(arguments: argparse.Namespace) -> tuple[ModelShape, int, str | None]:
    """Returns the shape of the target in its own dtype, the tokens to plan for, and a note on its positions.

    A context such as 1M is read in decimal units where the model has no positions for the binary ones.
    """
    from offload_rt.model.named_shapes import find_shape, known_name
    from offload_rt.model.rope import Yarn
    from offload_rt.model.shape import yarn_factor

    name, rope, quantize, context = arguments.model, arguments.rope, arguments.quantize, arguments.context
    target, new = find_shape(name, None, rope, quantize), arguments.new_tokens
    length = sum(_sizes(context, new))
    if length <= target.max_positions:
        return target, context, None
    if sum(_sizes(context.decimal, new)) <= target.max_positions < context:
        return (
            target,
            context.decimal,
            (
                f"planned for {context.decimal:,} tokens: {context:,} are more than the"
                f" {target.max_positions:,} positions of the model"
            ),
        )
    factor = yarn_factor(target, length) if rope is None and known_name(name) is not None else None
    if factor is None:
        return target, context, None
    note = f"more than {target.max_positions:,} positions: run it with --rope yarn:{factor}, as planned here"
    return find_shape(name, None, Yarn(factor), quantize), context, note


def _draft(
    arguments: argparse.Namespace, target: ModelShape, planned: Callable[[ModelShape | None], Plan]
) -> tuple[ModelShape | None, str | None]:
    """Returns the shape of the draft that the flags name, and a note where it was chosen by its plan."""
    from offload_rt.model.embedded import DEMO, DEMO_DRAFT, DEMO_PARTS
    from offload_rt.model.named_shapes import find_shape

    draft = arguments.draft or (DEMO_DRAFT if arguments.model == DEMO else NO_DRAFT)
    if draft != AUTO:
        return None if draft == NO_DRAFT else find_shape(draft, target.dtype), None
    from offload_rt.model.embedded import model_source
    from offload_rt.model.loading import load_tokenizer  # with torch, which takes a second
    from offload_rt.model.local_models import local_drafts
    from offload_rt.planning.local_plans import choose_draft

    source = model_source(arguments.model)
    if arguments.model not in DEMO_PARTS and not Path(source).is_dir() and "/" not in arguments.model:
        return None, f"draft auto: none; {arguments.model} is a shape alone, without a tokenizer"
    best, _, note = choose_draft(local_drafts(target, source, load_tokenizer(source)), planned)
    return None if best is None else best.shape, note


def _hardware(arguments: argparse.Namespace) -> Hardware:
    """Returns the machine that the flags describe, or this one."""
    names = [flag.removeprefix("--").replace("-", "_") for flag in ("--gpus", "--cpu", *FIGURES)]
    values = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.gpu == NO_GPU and (of_gpus := sorted({"gpus", "link", "vram"} & values.keys())):
        raise UsageError(f"--{of_gpus[0]} describes a GPU, and --gpu {NO_GPU} has none: leave it out")
    if arguments.gpu is not None:
        return named_hardware(arguments.gpu, **values)
    count = values.pop("gpus", None)
    if values:
        flag = "--" + next(iter(values)).replace("_", "-")
        raise UsageError(f"{flag} describes another machine: name its GPU with --gpu NAME, or --gpu none")
    from offload_rt.machine.inspection import inspect

    console = Console(quiet=False)
    hardware = inspect(on_progress=console.progress).hardware
    console.clear()
    if count is not None and not 1 <= count <= len(hardware.gpus):
        raise UsageError(
            f"--gpus {count}: this machine has {len(hardware.gpus)}; describe another one with --gpu NAME"
        )
    return replace(hardware, gpus=hardware.gpus[: count or 1])
