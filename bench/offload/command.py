"""`python -m bench offload`: the engine over a link, against its own plain decoding and its lower bounds.

On a CPU the link is paced: copies take what they would take at a bandwidth that is chosen so that carrying
the KV once takes as long as drafting beside a pass (balanced), twice as long, or half. What a draft takes is
measured anew in every turn, for the machine is not alike from minute to minute. Two kinds of rows:

- real: the demo pair continues a text greedily; its tokens must be those of plain decoding;
- synthetic: models with random weights, over random KV, whose acceptance is held by coins. What a round
  costs is real, what is accepted is not.

On a GPU only the latter, in the shapes of 7B and 8B models with memory capped at 24 GiB. All systems of a
case take turns in one run; times are medians, and ratios of two systems medians of those within a turn. On a
CPU torch has one thread: pass, drafting and the link share the cores.

The last line on stdout is one JSON object. `round_over_max`: rounds whose draft had been made while the pass
before ran, over the longer of carrying the KV once and drafting alone (`round_over_max_as_run`: and drafting
as it was, beside the pass). `link_use`: what the link carried within a pass, over what it could have.
`pass_over_bound`: passes of plain decoding over the longer of the stream and their compute. `ahead_speedup`:
ms a token without drafting ahead, over that with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench import inputs, machine, report
from bench.offload import gpu, paced
from bench.offload.cases import (
    ACCEPTANCES,
    BALANCED,
    FULL,
    GPU_CONTEXTS,
    QUICK,
    STREAMED,
    SYNTHETIC_FULL,
    SYNTHETIC_QUICK,
    Sizes,
)
from bench.offload.prediction_accuracy import predict_rows
from bench.offload.random_models import LARGE_SHAPES, SHAPES
from bench.offload.rows import times_as_fast
from offload_rt.config import OffloadConfig
from offload_rt.errors import UsageError
from offload_rt.loading import choose_device
from offload_rt.text import encode


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "offload",
        help="the engine over a link: streams, drafting ahead, shares",
        description="Measures the offload engine against its lower bounds and its own plain decoding.",
        allow_abbrev=False,
    )
    inputs.add_arguments(parser, draft=True)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text to continue")
    parser.add_argument(
        "--config", default="retrieval", metavar="NAME", help="who drafts (default: retrieval)"
    )
    parser.add_argument("--context", type=inputs.count(64), metavar="N", help="of the paced link's cases")
    parser.add_argument("--gamma", type=inputs.count(1), metavar="N", help="tokens drafted for a pass")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(4), metavar="N")
    parser.add_argument("--repeats", type=inputs.count(1), metavar="N")
    parser.add_argument("--shapes", type=inputs.names(SHAPES), metavar="A,B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--contexts", type=inputs.counts(64), default=GPU_CONTEXTS, metavar="N,N")
    parser.add_argument("--acceptances", type=_rates, default=ACCEPTANCES, metavar="A,B")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument(
        "--plot", action=argparse.BooleanOptionalAction, default=True, help="a timeline as PNG"
    )
    parser.set_defaults(run=run)


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: write rates from 0 to 1, e.g. 0.8,0.95")
    return rates


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON and the timeline, prints the table."""
    transformers_logging.set_verbosity_error()
    if arguments.plot:
        report.check_plots()
    if arguments.config == "plain":
        raise UsageError("--config plain: plain decoding is measured anyway; name a config that drafts")
    device = choose_device(arguments.device)
    described = machine.describe(device)
    out = arguments.out
    if out is None:
        kind = "cpu" if device.type == "cpu" else machine.slug(described | {"threads": 1}).rsplit("-1-", 1)[0]
        out = inputs.RESULTS / f"offload-{kind}.json"
        inputs.RESULTS.mkdir(parents=True, exist_ok=True)
    out = inputs.destination(out, "offload", described)
    cases: list[dict[str, Any]]
    picture = out.with_name(f"{out.stem}-timeline.png") if arguments.plot else None
    if device.type == "cpu":
        cases = _on_cpu(arguments, picture)
    else:
        shapes = arguments.shapes or (LARGE_SHAPES[-1:] if arguments.quick else LARGE_SHAPES)
        contexts = arguments.contexts[:1] if arguments.quick else arguments.contexts
        cases = gpu.measure_shapes(shapes, contexts, arguments.acceptances, device, picture)
    if not cases:
        raise UsageError("none of the shapes fits at any of the contexts: see above, and name others")
    for case in cases:
        predict_rows(case)
    summary = headline(cases)
    result = {
        "benchmark": "offload",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(arguments),
        "machine": described | {"threads": torch.get_num_threads() if device.type == "cuda" else 1},
        "measured": " ".join((__doc__ or "").split()),
        "overrides": {key: str(value) for key, value in arguments.overrides},
        "cases": cases,
        "summary": summary,
        "host_peak_bytes": machine.peak_host_bytes(),
    }
    report.write_json(out, result)
    for case in cases:
        print(_table(case), end="\n\n")
    print(json.dumps(summary))


def _on_cpu(arguments: argparse.Namespace, picture: Path | None) -> list[dict[str, Any]]:
    real, synthetic = (QUICK, SYNTHETIC_QUICK) if arguments.quick else (FULL, SYNTHETIC_FULL)
    real, synthetic = _given(real, arguments), _given(synthetic, arguments)
    models = inputs.load(arguments)
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    tokens = encode(models.tokenizer, "\n".join(text.text for text in texts))
    if real.context > len(tokens):
        raise UsageError(f"--context {real.context}: the text has {len(tokens)} tokens; give a longer --text")
    cases = paced.measure_pair(models, tokens[: real.context], real, arguments.config, picture)
    for shape in arguments.shapes or ("tiny",):
        cases.append(paced.measure_shape(shape, synthetic, arguments.acceptances))
    return cases


def _given(sizes: Sizes, arguments: argparse.Namespace) -> Sizes:
    given = {
        key: value
        for key in ("context", "gamma", "new_tokens", "repeats")
        if (value := getattr(arguments, key)) is not None
    }
    return dataclasses.replace(sizes, settings={**sizes.settings, **dict(arguments.overrides)}, **given)


def _command(arguments: argparse.Namespace) -> str:
    """What to type for the same sizes, without the paths of this machine."""
    words = ["python -m bench offload"]
    for name in ("context", "gamma", "new_tokens", "repeats"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name.replace('_', '-')} {value}"]
    return " ".join([*words, *(["--quick"] if arguments.quick else [])])


def headline(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The acceptance values: of the balanced case with all KV streamed, drafting ahead as by default.

    Where nothing is real or balanced, of the first case's highest acceptance. `predicted_over_measured` is
    the worst of all rows.
    """
    case = next((case for case in cases if case["case"] == BALANCED), cases[0])
    rows = [one for one in case["rows"] if one["placement"] == STREAMED]
    plain = next(one for one in rows if one["system"] == "plain")
    held = max((one["synthetic"] for one in rows if one["synthetic"] is not None), default=None)
    rows = [one for one in rows if one["synthetic"] == held]
    ahead = next(one for one in rows if one["system"] == f"ahead {OffloadConfig().ahead}")
    without = next(one for one in rows if one["system"] == "ahead 0")
    predictions = [one["predicted_over_measured"] for every in cases for one in every["rows"]]
    known = [ratio for ratio in predictions if ratio is not None]
    return {
        "round_over_max": ahead["round_over_max"],
        "round_over_max_as_run": ahead["round_over_max_as_run"],
        "link_use": ahead["link_use"],
        "pass_over_bound": plain["pass_over_bound"],
        "ahead_speedup": times_as_fast(ahead, without),
        "outcome_hit_rate": ahead["outcome_hit_rate"],
        "ratio_over_plain": ahead["ratio_over_plain"],
        "ms_per_token": ahead["ms_per_token"]["median"],
        "predicted_over_measured": max(known, key=lambda ratio: max(ratio, 1 / ratio), default=None),
        "synthetic": held,
    }


def _table(case: dict[str, Any]) -> str:
    """One case as markdown."""
    rows = []
    for one in case["rows"]:
        held = "real" if one["synthetic"] is None else f"synthetic {one['synthetic']:g}"
        rows.append(
            [
                one["system"],
                one["placement"],
                "–" if one["system"] == "plain" else held,
                *(
                    report.number(one[key] if key != "ms_per_token" else one[key]["median"])
                    for key in ("ms_per_token", "tokens_per_round")
                ),
                *(
                    report.number(one[key], 1)
                    for key in ("pass_ms", "draft_ms", "ahead_ms", "round_ms", "lost_ms_per_round")
                ),
                *(
                    report.number(one[key])
                    for key in (
                        "outcome_hit_rate",
                        "link_use",
                        "overlap",
                        "pass_over_bound",
                        "round_over_max",
                        "ratio_over_plain",
                        "predicted_over_measured",
                    )
                ),
            ]
        )
    header = [
        "system",
        "KV",
        "accepted",
        "ms/token",
        "tokens/round",
        "pass",
        "draft",
        "ahead",
        "round",
        "lost",
    ]
    header += ["hits", "link use", "overlap", "pass/bound", "round/max", "× plain", "predicted/measured"]
    first = case["rows"][0]
    unlimited = " over a link without limit" if first["turns"] else ""
    return (
        f"{case['model']}, {case['case']}, {first['context']:,} tokens: carrying the KV once takes "
        f"{first['stream_ms']:.1f} ms at {first['rate_bytes_per_second'] / 1e9:.2f} GB/s. Prefill "
        f"{first['prefill_ms'] / 1e3:.1f} s{unlimited}, {first['prefill_bytes'] / 1e6:,.0f} MB to the "
        "host.\n\n"
        f"{report.table(header, rows)}"
    )
