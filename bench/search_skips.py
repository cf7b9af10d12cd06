"""`python -m bench search-skips`: finds the blocks to skip while the target drafts for itself.

Draft & Verify (arXiv 2309.08168) finds them by Bayesian optimisation; this search adds them greedily. The
speed of a machine drifts with heat and other work, so each layer order is timed right after the one that it
would replace, and at the end the best plans are timed in turn.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from statistics import median

from offload_rt.api.context import Context
from offload_rt.commands import prompts
from offload_rt.commands.console import Console
from offload_rt.commands.exits import status_of
from offload_rt.commands.options import add_distribution, add_model, add_overrides, distribution
from offload_rt.commands.running import machine_errors_in_a_line, open_llm
from offload_rt.config.files import to_toml
from offload_rt.config.schema import AUTO, Config
from offload_rt.config.settings import fill_in
from offload_rt.drafting.levels.configs import load_config
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO
from offload_rt.model.layer_order import EXACT, blocks_of, skipping
from offload_rt.model.named_shapes import find_shape
from offload_rt.sampling.params import SamplingParams
from offload_rt.system.files import check_new, write_whole

PLAIN = "plain"
"""Stands for decoding without drafts, where a layer order is expected."""
Rate = Callable[[str, int], float]
"""Returns tokens per second with a layer order and the seed of a sample."""
FINALISTS = 3
ROUNDS = 5
"""Times that each finalist is timed."""
SHORTEST = 256
"""Fewest tokens of a sample text."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of the command."""
    add_model(parser)
    prompts.add_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    add_distribution(sampling)
    meaning = "tokens to generate for each measurement (default: 64)"
    sampling.add_argument("-n", "--max-new-tokens", type=int, default=64, metavar="N", help=meaning)
    group = parser.add_argument_group("search")
    add = group.add_argument
    meaning = "composition in which the target drafts for itself (default: retrieval)"
    add("--config", default="retrieval", metavar="NAME|FILE", help=meaning)
    add_overrides(group)
    meaning = "time to search for before the final comparison (default: 60)"
    add("--minutes", type=prompts.positive, default=60, metavar="M", help=meaning)
    add("--seed", type=int, default=0, metavar="S", help="seed of the first sample (default: 0)")
    meaning = "the configuration; no file of that name may exist (default: skips.toml)"
    add("-o", "--out", type=Path, default=Path("skips.toml"), metavar="FILE", help=meaning)


def run(arguments: argparse.Namespace) -> int:
    """Searches, writes the configuration, and prints how fast it is; Ctrl-C keeps the best one so far."""
    fill_in(arguments)
    base = _checked(arguments)
    console = Console(quiet=False)
    text = prompts.read(arguments, console)
    params = distribution(arguments, seed=arguments.seed, ignore_eos=True)
    with machine_errors_in_a_line():
        prompt = prompts.tokens(text, arguments, console)
    if len(prompt) < SHORTEST:
        raise UsageError(f"the sample text has {len(prompt)} tokens; give one of at least {SHORTEST}")
    name = arguments.model or DEMO
    layers = find_shape(name, None).layers
    plans, rounds, status = list[str](), list[dict[str, float]](), 0
    seeds = count(arguments.seed)
    sizes = len(prompt), params.max_tokens
    with machine_errors_in_a_line(), open_llm(arguments, console, sizes) as llm:
        measured = partial(rate, llm.read(prompt, params.max_tokens), base, arguments, params)
        start, seconds = time.monotonic(), 60 * arguments.minutes
        try:
            for plans_so_far in search(layers, measured, seeds):
                plans = plans_so_far
                elapsed = min(int(time.monotonic() - start), seconds)
                console.progress("search", elapsed, seconds)
                if elapsed == seconds:
                    break
            for number, seed in enumerate(islice(seeds, ROUNDS), 1):
                rounds.append({plan: measured(plan, seed) for plan in (PLAIN, *finalists(plans))})
                console.progress("compare", number, ROUNDS)
        except KeyboardInterrupt as interrupt:
            if not plans:
                raise
            status = status_of(interrupt)
        finally:
            console.clear()
    fastest, verdict, table = plans[-1], "interrupted before the final comparison", ""
    if rounds:
        fastest, verdict, table = conclusion(rounds)
    sample = f"Model {name}, {layers} layers; sample of {len(prompt):,} tokens"
    comments = (
        f"# By python -m bench search-skips.\n# {sample}, temperature {params.temperature:g}.\n# {verdict}\n"
    )
    try:
        write_whole(arguments.out, comments + to_toml(with_layers(base, fastest)))
    except OSError as error:
        raise UsageError(f"--out {arguments.out}: cannot be written ({error.strerror})") from None
    print(f"{table}{arguments.out}: layers = {fastest}; {verdict}")
    print(f"offload-rt generate --config {arguments.out} …")
    return status


def _checked(arguments: argparse.Namespace) -> Config:
    """Returns the configuration, in which the target drafts for itself; checks all that needs no model."""
    check_new("--out", arguments.out)
    named = "name one in which the target drafts for itself, such as retrieval, trees or triforce"
    if arguments.config == AUTO:
        raise UsageError(f"--config {AUTO}: selects among several configurations; {named}")
    base = load_config(arguments.config, dict(arguments.overrides))
    levels = base.speculation.levels
    if not levels or levels[-1].model != "target":
        raise UsageError(f"--config {arguments.config}: has no level in which the target drafts; {named}")
    return base


def with_layers(base: Config, layers: str) -> Config:
    """Returns `base` with another layer order in its last level."""
    *below, last = base.speculation.levels
    return base.having("speculation.levels", (*below, replace(last, layers=layers)))


def rate(
    context: Context,
    base: Config,
    arguments: argparse.Namespace,
    params: SamplingParams,
    layers: str,
    seed: int,
) -> float:
    """Continues the sample text with a layer order, or `PLAIN`; returns tokens per second."""
    config, overrides = PLAIN, dict[str, object]()
    if layers != PLAIN:
        levels = with_layers(base, layers).speculation.levels
        # Plain decoding must not rescue a plan that drafts badly.
        config, overrides = arguments.config, dict(arguments.overrides)
        overrides |= {"speculation.levels": levels, "speculation.step_down": False}
    result = context.generate((), replace(params, seed=seed), config, overrides)
    context.rewind(result.prompt_tokens)
    return result.timings.tokens_per_second


def search(layers: int, rate: Rate, seeds: Iterator[int]) -> Iterator[list[str]]:
    """Searches greedily; yields the plans found so far after each measurement, each faster than the last.

    A step adds the block whose skipping gains most. Gains shrink as blocks are added, so a block whose gain
    beside the newest plan exceeds the older gains of all others is added without measuring those again
    ("accelerated greedy", Minoux 1978).
    """
    skipped, plans, fresh = list[str](), [EXACT], set[str]()
    gains = dict.fromkeys(blocks_of(layers), math.inf)
    while True:
        attention = [block for block in gains if block.endswith("a")]
        if len(attention) == 1:
            del gains[attention[0]]  # a plan keeps some attention
        block = max(gains, key=gains.__getitem__, default=None)
        if block is None or gains[block] <= 1:
            return
        plan = skipping([*skipped, block])
        if block in fresh:
            skipped.append(block)
            plans.append(plan)
            fresh.clear()
            del gains[block]
        else:
            seed = next(seeds)
            gains[block] = rate(plan, seed) / rate(plans[-1], seed)
            fresh.add(block)
            best = max(fresh, key=gains.__getitem__)
            yield [*plans, skipping([*skipped, best])] if gains[best] > 1 else list(plans)


def finalists(plans: Sequence[str]) -> list[str]:
    """Returns the first plan and `FINALISTS` more, evenly up to the last.

    Each plan was chosen for a measurement that was high also by luck, so the longest need not be the fastest.
    """
    spread = (plans[at * (len(plans) - 1) // FINALISTS] for at in range(FINALISTS + 1))
    return list(dict.fromkeys(spread))


def conclusion(rounds: Sequence[dict[str, float]]) -> tuple[str, str, str]:
    """Returns the plan that is fastest by the median of the rounds, a verdict on it, and a table of all."""
    medians = {layers: median(rates[layers] for rates in rounds) for layers in rounds[0]}
    best = max((layers for layers in medians if layers != PLAIN), key=medians.__getitem__)
    speed, plain = medians[best], medians[PLAIN]
    width = max(map(len, medians))
    lines = [f"{'layers':{width}}  tokens/s  over plain"]
    lines += [f"{layers:{width}}  {ms:8.1f}  {ms / plain:10.2f}" for layers, ms in medians.items()]
    gain = f"{speed / medians[EXACT]:.2f} times as fast as all layers"
    if best == EXACT:
        gain = "nothing is gained by skipping"
    verdict = f"{speed:.1f} tokens/s, {speed / plain:.2f} times as fast as plain decoding; {gain}"
    return best, verdict, "\n".join(lines) + "\n\n"
