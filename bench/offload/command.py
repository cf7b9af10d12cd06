"""`python -m bench offload`: the engine over a link, against its own plain decoding and its lower bounds.

On a CPU the link is paced: copies take what they would take at a bandwidth that is chosen so that carrying
the KV once takes as long as drafting beside a pass (balanced), twice as long, or half. What a draft takes is
measured anew in every turn, for the machine is not alike from minute to minute. Two kinds of rows:

- real: the demo pair continues a text greedily; its tokens must be those of plain decoding;
- synthetic: models with random weights, whose acceptance is held by coins. What a round costs is real, what
  is accepted is not.

On a GPU only the latter, in the shapes of 7B and 8B models with memory capped at 24 GiB. All systems of a
placement take turns in one run; times are medians, and ratios of two systems medians of those within a turn.
On a CPU torch has one thread: pass, drafting and the link share the cores.

The last line on stdout is one JSON object. `round_over_max`: rounds whose draft had been made while the pass
before ran, over the longer of carrying the KV once and drafting alone. `link_use`: what the link carried
within a pass, over what it could have. `pass_over_bound`: passes of plain decoding over the longer of the
stream and their compute. `ahead_speedup`: ms a token without drafting ahead, over that with it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench import inputs, machine, report
from bench.inputs import say
from bench.offload import cases
from bench.offload.cases import AHEAD, BALANCED, LINK_CASES, STREAMED, SYNTHETIC, Sizes
from bench.offload.gpu import cases_on_gpu
from bench.offload.measure import Measured, paced_cases
from bench.offload.prediction_accuracy import predict_rows, worst
from bench.offload.random_models import SHAPES, random_model
from bench.offload.rows import times_as_fast
from bench.offload.text import Subject
from bench.offload.timeline_plot import draw
from offload_rt.errors import UsageError
from offload_rt.graphs import GraphedModel
from offload_rt.loading import choose_device
from offload_rt.machine.measuring import CPU

COLUMNS = {
    "tokens/round": ("tokens_per_round", 2),
    "pass": ("pass_ms", 1),
    "draft": ("draft_ms", 1),
    "ahead": ("ahead_ms", 1),
    "round": ("round_ms", 1),
    "hits": ("outcome_hit_rate", 2),
    "link use": ("link_use", 2),
    "pass/bound": ("pass_over_bound", 2),
    "round/max": ("round_over_max", 2),
    "× plain": ("ratio_over_plain", 2),
    "predicted/measured": ("predicted_over_measured", 2),
}
"""Of the table: keys of a row, and digits."""


def add_parser(commands: Any) -> None:
    """Declares the command."""
    about = "the engine over a link, against its lower bounds and its own plain decoding"
    parser = inputs.command(commands, "offload", run, about)
    inputs.add_arguments(parser, draft=True)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text to continue")
    parser.add_argument(
        "--config", dest="composition", metavar="NAME", help="who drafts (default: retrieval)"
    )
    parser.add_argument("--context", type=inputs.count(64), metavar="N", help="of the paced link's cases")
    parser.add_argument("--gamma", type=inputs.count(1), metavar="N", help="tokens drafted for a pass")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(4), metavar="N")
    parser.add_argument("--repeats", type=inputs.count(1), metavar="N")
    parser.add_argument("--shapes", type=inputs.names(SHAPES), metavar="A,B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--contexts", type=inputs.counts(64), default=cases.GPU_CONTEXTS, metavar="N,N")
    rates = inputs.several(inputs.number(most=1.0))
    parser.add_argument("--acceptances", type=rates, default=cases.ACCEPTANCES, metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="a timeline as PNG"
    )


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON and the timeline, prints the table."""
    transformers_logging.set_verbosity_error()
    if arguments.plot:
        report.pyplot()  # or refuses
    if arguments.composition == "plain":
        raise UsageError("--config plain: plain decoding is measured anyway; name a config that drafts")
    device = choose_device(arguments.device)
    described = machine.describe(device)
    described |= {"threads": 1} if device.type == "cpu" else {}
    default = inputs.RESULTS / f"offload-{device.type}.json"
    out = inputs.destination(arguments.out or default, "offload", described)
    measured: list[dict[str, Any]] = []
    for case, runs in _on_cpu(arguments) if device.type == "cpu" else cases_on_gpu(arguments, device):
        predict_rows(case)
        if arguments.plot and not measured:
            # The last placement has all shares, so that every resource is at work.
            last = max(at for at, one in enumerate(case["rows"]) if one["ahead"] == AHEAD)
            draw(runs[last], case["rows"][last], case["model"], out.with_name(f"{out.stem}-timeline.png"))
        measured.append(case)
    if not measured:
        raise UsageError("none of the shapes fits at any of the contexts: see above, and name others")
    summary = headline(measured)
    result = report.envelope("offload", arguments, described) | {
        "measured": " ".join((__doc__ or "").split()),
        "overrides": {key: str(value) for key, value in arguments.overrides},
        "cases": measured,
        "summary": summary,
    }
    report.finish(out, result, map(_table, measured), summary)


def _on_cpu(arguments: argparse.Namespace) -> Iterator[Measured]:
    declared = (cases.QUICK, cases.SYNTHETIC_QUICK) if arguments.quick else (cases.FULL, cases.SYNTHETIC_FULL)
    real, synthetic = (_given(sizes, arguments) for sizes in declared)
    models = inputs.load(arguments)
    _, tokens = inputs.read_tokens(arguments.text, models.tokenizer)
    if real.context > len(tokens):
        raise UsageError(f"--context {real.context}: the text has {len(tokens)} tokens; give a longer --text")
    target = GraphedModel(models.target, models.names[0], say)
    draft = None if models.draft is None else GraphedModel(models.draft, models.names[1] or "", say)
    links = {name: cases.paced_systems(name) for name in LINK_CASES if name != SYNTHETIC}
    yield from paced_cases(Subject(target, draft, tokens[: real.context]), real, links)
    held = dict.fromkeys((STREAMED, "both"), cases.held_systems(arguments.acceptances))
    for shape in arguments.shapes or ("tiny",):
        random = GraphedModel(random_model(shape, CPU, torch.float32), shape, say)
        subject = Subject.random(random, synthetic.context)
        yield from paced_cases(subject, synthetic, {SYNTHETIC: held})


def _given(sizes: Sizes, arguments: argparse.Namespace) -> Sizes:
    given = inputs.fitted(sizes, arguments)
    return dataclasses.replace(given, settings={**sizes.settings, **dict(arguments.overrides)})


def headline(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The acceptance values: of the balanced case with all KV streamed, drafting ahead as by default.

    Where nothing is real or balanced, of the first case's highest acceptance. `predicted_over_measured` is
    the worst of all rows.
    """
    case = next((case for case in measured if case["case"] == BALANCED), measured[0])
    rows = [one for one in case["rows"] if one["placement"] == STREAMED]
    held = max((one["synthetic"] for one in rows if one["synthetic"] is not None), default=None)
    named = {one["system"]: one for one in rows if one["synthetic"] in (held, None)}
    plain, without, ahead = (named[system] for system in ("plain", "ahead 0", f"ahead {AHEAD}"))
    ratios = [one["predicted_over_measured"] for every in measured for one in every["rows"]]
    keys = ("round_over_max", "link_use", "outcome_hit_rate", "ratio_over_plain")
    return {key: ahead[key] for key in keys} | {
        "pass_over_bound": plain["pass_over_bound"],
        "ahead_speedup": times_as_fast(*(one["ms_per_token"]["runs"] for one in (ahead, without))),
        "ms_per_token": ahead["ms_per_token"]["median"],
        "predicted_over_measured": worst(ratios),
        "synthetic": held,
    }


def _table(case: dict[str, Any]) -> str:
    """One case as markdown."""
    rows = []
    for one in case["rows"]:
        held = "real" if one["synthetic"] is None else f"synthetic {one['synthetic']:g}"
        cells = [one["system"], one["placement"], "–" if one["system"] == "plain" else held]
        cells.append(report.number(one["ms_per_token"]["median"]))
        rows.append([*cells, *(report.number(one[key], digits) for key, digits in COLUMNS.values())])
    first = case["rows"][0]
    return (
        f"{case['model']}, {case['case']}, {first['context']:,} tokens: carrying the KV once takes "
        f"{first['stream_ms']:.1f} ms at {first['rate_bytes_per_second'] / 1e9:.2f} GB/s. "
        f"Prefill {first['prefill_ms'] / 1e3:.1f} s.\n\n"
        f"{report.table(['system', 'KV', 'accepted', 'ms/token', *COLUMNS], rows)}"
    )
