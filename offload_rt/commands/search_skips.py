"""`offload-rt search-skips`: which blocks the target should leave out while it drafts (Draft & Verify)."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from offload_rt.commands import prompts
from offload_rt.commands.console import Console
from offload_rt.commands.exits import status_of
from offload_rt.commands.generate import (
    add_distribution,
    add_model,
    add_overrides,
    distribution,
    machine_errors_in_a_line,
    open_llm,
)
from offload_rt.config import AUTO, Config
from offload_rt.errors import UsageError
from offload_rt.files import check_writable, write_whole
from offload_rt.layers import EXACT
from offload_rt.skips import PLAIN, Rate, Trial, compare, fastest, search
from offload_rt.toml import load_config, to_toml

if TYPE_CHECKING:
    from offload_rt.api import LLM
    from offload_rt.results import SamplingParams

LIBRARIES = {"optuna": "optuna", "tomli_w": "tomli-w"}
TRIALS_A_LAYER = 12
ROUNDS = 5
"""How often the fastest plans are compared in the end."""
SHORTEST = 256
"""Tokens of the shortest sample from which anything is concluded."""
FASTER = "times as fast as all layers"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "search-skips",
        help="find the layers to skip while drafting (Draft & Verify)",
        description="Measures on a sample text how fast the target drafts for itself with some of its"
        " attention and MLP blocks left out, and writes the fastest composition as a configuration. Ctrl-C"
        f" keeps the best so far. Needs {' and '.join(LIBRARIES.values())}.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_model(parser)
    prompts.add_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    add_distribution(sampling)
    sampling.add_argument(
        "-n", "--max-new-tokens", type=int, default=64, metavar="N", help="tokens of a text (default: 64)"
    )
    group = parser.add_argument_group("search")
    add = group.add_argument
    meaning = "composition in which the target drafts for itself (default: retrieval)"
    add("--config", default="retrieval", metavar="NAME|FILE", help=meaning)
    add_overrides(group)
    meaning = f"plans to measure (default: {TRIALS_A_LAYER} for each layer of the model)"
    add("--trials", type=prompts.positive, metavar="N", help=meaning)
    add("--seed", type=int, default=0, metavar="S", help="of the search and of its texts (default: 0)")
    meaning = "the configuration; no file of that name may exist (default: skips.toml)"
    add("-o", "--out", type=Path, default=Path("skips.toml"), metavar="FILE", help=meaning)


def run(arguments: argparse.Namespace) -> int:
    """Searches, writes the configuration, and prints how fast it is."""
    base = _checked(arguments)
    text = prompts.read(arguments)
    from offload_rt.loading import DEMO
    from offload_rt.planning.shapes import find_shape

    params = distribution(arguments, seed=arguments.seed, ignore_eos=True)
    console = Console(quiet=False)
    with machine_errors_in_a_line():
        prompt = prompts.tokens(text, arguments, console)
    if len(prompt) < SHORTEST:
        raise UsageError(f"the sample text has {len(prompt)} tokens; give one of at least {SHORTEST}")
    name = arguments.model or DEMO
    layers = find_shape(name, None).layers
    trials = arguments.trials or TRIALS_A_LAYER * layers
    with machine_errors_in_a_line(), open_llm(arguments, console, len(prompt)) as llm:
        llm.generate(prompt, params)
        measured = partial(rate, llm, base, arguments, params)
        found = _search(measured, layers, trials, arguments.seed, console)
    source = f"{name}, {layers} layers; sample of {len(prompt):,} tokens, temperature {params.temperature:g}"
    comments = (f"# {line}\n" for line in ("By offload-rt search-skips.", f"Model {source}.", found.verdict))
    try:
        write_whole(arguments.out, "".join(comments) + to_toml(with_layers(base, found.layers)))
    except OSError as error:
        raise UsageError(f"--out {arguments.out}: cannot be written ({error.strerror})") from None
    print(f"{found.table}{arguments.out}: layers = {found.layers}; {found.verdict}")
    print(f"offload-rt generate --config {arguments.out} …")
    return found.status


def _checked(arguments: argparse.Namespace) -> Config:
    """The configuration, in which the target drafts for itself; checks all that needs no model."""
    missing = [package for module, package in LIBRARIES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise UsageError(f"search-skips needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    check_writable("--out", arguments.out)
    if arguments.out.exists():
        raise UsageError(f"--out {arguments.out}: exists; name another file, or remove it")
    named = "name one in which the target drafts for itself, such as retrieval, trees or triforce"
    if arguments.config == AUTO:
        raise UsageError(f"--config {AUTO}: stands for several; {named}")
    base = load_config(arguments.config, dict(arguments.overrides))
    levels = base.speculation.levels
    if not levels or levels[-1].model != "target":
        raise UsageError(f"--config {arguments.config}: has no layers of the target to skip; {named}")
    return base


def with_layers(base: Config, layers: str) -> Config:
    """`base`, whose last level drafts with other `layers`."""
    *below, last = base.speculation.levels
    return base.having("speculation.levels", (*below, replace(last, layers=layers)))


def rate(
    llm: LLM, base: Config, arguments: argparse.Namespace, params: SamplingParams, layers: str, seed: int
) -> float:
    """Tokens a second of the last prompt, continued by `base` with other `layers` in its last level."""
    params = replace(params, seed=seed)
    if layers == PLAIN:
        return llm.plain(params).timings.predicted_per_second
    levels = with_layers(base, layers).speculation.levels
    # What drafts badly must not be saved by plain decoding.
    given = {"speculation.levels": levels, "speculation.step_down": False}
    overrides = dict(arguments.overrides) | given
    return llm.rerun(params, arguments.config, overrides).timings.predicted_per_second


@dataclass(frozen=True)
class Found:
    """What a search found, how fast that is, what it was compared with, and how the command ends."""

    layers: str
    verdict: str
    table: str = ""
    status: int = 0


def _search(measured: Rate, layers: int, trials: int, seed: int, console: Console) -> Found:
    made: list[Trial] = []
    rounds: list[dict[str, float]] = []
    try:
        for trial in search(layers, trials, seed, measured):
            made.append(trial)
            console.progress("search", len(made), trials)
        for rates in islice(compare(made, seed, measured), ROUNDS):
            rounds.append(rates)
            console.progress("compare", len(rounds), ROUNDS)
    except KeyboardInterrupt as interrupt:
        if not made:
            raise
        best = max([Trial(EXACT, 1.0), *fastest(made, 1)], key=lambda trial: trial.speed)
        when, gain = f"interrupted after {len(made)} of {trials} trials", f"{best.speed:.2f} {FASTER}"
        return Found(best.layers, f"{when}, {gain}", status=status_of(interrupt))
    finally:
        console.clear()
    return _compared(rounds)


def _compared(rounds: Sequence[dict[str, float]]) -> Found:
    """The fastest by the median of all rounds."""
    medians = {layers: median(rates[layers] for rates in rounds) for layers in rounds[0]}
    best = max((layers for layers in medians if layers != PLAIN), key=lambda layers: medians[layers])
    rate, plain, whole = medians[best], medians[PLAIN], medians[EXACT]
    width = max(map(len, medians))
    lines = [f"{'layers':{width}}  tokens/s  over plain"]
    lines += [f"{layers:{width}}  {it:8.1f}  {it / plain:10.2f}" for layers, it in medians.items()]
    gain = "nothing is gained by skipping" if best == EXACT else f"{rate / whole:.2f} {FASTER}"
    verdict = f"{rate:.1f} tokens/s, {rate / plain:.2f} times as fast as plain decoding; {gain}"
    return Found(best, verdict, "\n".join(lines) + "\n\n")
