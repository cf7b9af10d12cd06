"""`offload-rt models`: which models lie on this machine, which run, how far, and which draft for which."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.commands.options import SETTING, add_dtype, add_json
from offload_rt.commands.prompts import token_count
from offload_rt.config.schema import AUTO
from offload_rt.config.settings import SettingDefault
from offload_rt.drafting.levels.configs import load_configs
from offload_rt.errors import UsageError
from offload_rt.system.files import write_json
from offload_rt.system.hardware import GIB

if TYPE_CHECKING:
    from offload_rt.planning.local_plans import LocalPlan

WIDE = 10_000
"""Columns of a table that is not written to a terminal: no line of it is broken."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    models = commands.add_parser(
        "models",
        help="the models on this machine: which run, and how far",
        description="Lists the models in the hub's cache, in folders, and the embedded pair: which run, the"
        " longest context that fits this machine, how fast it is by the plan, and which model and which"
        " head draft for which target. Loads no model and uses no network.",
        allow_abbrev=False,
    )
    models.set_defaults(run=run)
    add = models.add_argument
    meaning = f"a model's folder, or one of models, or of folders of models (default: {SETTING} folders)"
    add("folders", nargs="*", default=SettingDefault("folders", ()), metavar="FOLDER", help=meaning)
    meaning = "predict the speed at N tokens, e.g. 96k (default: at the longest context that fits)"
    add("--context", type=token_count, metavar="N", help=meaning)
    add_dtype(add)
    add_json(add, "the same facts")


def run(arguments: argparse.Namespace) -> int:
    folders = [Path(folder) for folder in arguments.folders]
    named = [folder for folder in arguments.folders if isinstance(folder, str)]  # not by the settings
    for folder in named:
        if not Path(folder).is_dir():
            raise UsageError(f"{folder}: there is no such folder; name one that holds models")
    from dataclasses import replace
    from functools import partial

    from offload_rt.machine.inspection import inspect
    from offload_rt.model.dtypes import choose_element
    from offload_rt.model.local_models import local_models
    from offload_rt.planning.local_plans import local_plans

    console = Console(quiet=False)
    hardware = inspect(on_progress=console.progress).hardware
    hardware = replace(hardware, gpus=hardware.gpus[:1])
    dtype = partial(choose_element, arguments.dtype, bool(hardware.gpus))
    console.working("models", "reading configurations")
    models = local_models(folders, console.notice)
    plans = local_plans(models, load_configs(AUTO), hardware, dtype, arguments.context)
    console.clear()
    heads = {plan.model.name: _head(plan) for plan in plans if plan.refusal is None}
    if arguments.json is not None:
        listed = [plan.to_json() | {"head": heads.get(plan.model.name)} for plan in plans]
        write_json("--json", arguments.json, {"models": listed})
    _show(plans, heads, arguments.context)
    return 0


def _head(local: LocalPlan) -> str | None:
    """Returns the draft head for a model that runs; None: there is none."""
    from offload_rt.model.checkpoint_config import model_config
    from offload_rt.model.local_heads import find_head

    return find_head(local.model.name, model_config(local.model.folder))


def _show(plans: Sequence[LocalPlan], heads: Mapping[str, str | None], context: int | None) -> None:
    """Prints two tables: the models that run, and the others with the reasons."""
    from rich import console, table

    stdout = console.Console(highlight=False, markup=False, emoji=False)
    if not sys.stdout.isatty():
        stdout.width = WIDE
    speed = "ms/token" if context is None else f"ms/token at {context:,}"
    columns = (
        "model",
        "architecture",
        "parameters",
        "weights",
        "longest context",
        speed,
        "drafts (ms/token)",
        "head",
    )
    shown = table.Table(*columns, box=None, pad_edge=False)
    for plan in plans:
        if plan.refusal is None:
            shown.add_row(*_cells(plan), heads[plan.model.name] or "none")
    stdout.print(shown)
    if refused := [plan for plan in plans if plan.refusal is not None]:
        refusals = table.Table("does not run", "architecture", "weights", "why", box=None, pad_edge=False)
        for plan in refused:
            refusals.add_row(plan.model.name, plan.model.architecture, _weights(plan), plan.refusal)
        stdout.print("", refusals)


def _cells(local: LocalPlan) -> list[str]:
    """Returns the row of a model that runs."""
    from offload_rt.planning.local_plans import tokens

    shape, longest_plan, plan = local.model.shape, local.longest, local.plan
    assert shape is not None and longest_plan is not None
    longest = tokens(longest_plan)
    return [
        local.model.name,
        local.model.architecture,
        _parameters(shape.parameters),
        _weights(local),
        f"all of its {longest:,}" if longest == shape.max_positions else f"{longest:,}",
        f"{plan.ms_per_token:.1f}" if plan is not None and plan.fits else "does not fit",
        ", ".join(f"{draft.name} ({plan.ms_per_token:.1f})" for draft, plan in local.drafts) or "none",
    ]


def _parameters(count: int) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def _weights(local: LocalPlan) -> str:
    return f"{local.model.weight_bytes / GIB:.2f} GiB"
