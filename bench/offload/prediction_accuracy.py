"""`python -m bench prediction-accuracy`: what the planner predicts, beside what `bench offload` measured.

The planner is asked for the placements that were run, with the figures that were measured apart from them in
the same turn: on a CPU, what attention and memory do alone, what a pass takes with the KV in place, what a
drafted token and a verdict take, and the bandwidth of the paced link; on a GPU, what `offload-rt doctor`
says. Of a row itself it is given the acceptance of a drafted token, and nothing else. Each run is held
against what was measured just before it; medians over runs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import inputs, report
from offload_rt.config import load_config
from offload_rt.errors import UsageError
from offload_rt.machine.hardware import AttentionRate, Gpu, Hardware, Host
from offload_rt.planning.placement import PlanRequest
from offload_rt.planning.prediction import Predictor, attention_rate
from offload_rt.planning.shapes import ModelShape
from offload_rt.planning.times import Work

Values = dict[str, Any]
"""JSON values: of a result, its cases, their rows, and the turns of `References`."""

AMPLE_BYTES = 2**50  # memory that is no limit: what was run did fit
PREDICTED = ("pass_ms", "draft_ms", "round_ms", "tokens_per_round", "outcome_hit_rate", "ms_per_token")
TABLE = {
    "pass_ms": "pass",
    "draft_ms": "draft",
    "round_ms": "round",
    "tokens_per_round": "tokens/round",
    "ms_per_token": "ms/token",
}
"""Figures that are printed, predicted and measured."""


def add_parser(commands: Any) -> None:
    """Declares the command."""
    about = "the planner's predictions beside a result of `bench offload`"
    parser = inputs.command(commands, "prediction-accuracy", run, about)
    default = inputs.RESULTS / "offload-cpu.json"
    parser.add_argument("results", type=Path, nargs="?", default=default, help=f"default: {default.name}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: beside the results)")


def run(arguments: argparse.Namespace) -> None:
    """Predicts every row, prints the table, writes the JSON."""
    measured = _read(arguments.results)
    out = arguments.out or arguments.results.with_name(f"prediction-accuracy-{arguments.results.name}")
    out = inputs.destination(out, "prediction-accuracy", {})
    rows = []
    for case in measured["cases"]:
        predict_rows(case)
        for one in case["rows"]:
            named = {"case": case["case"], "model": case["model"]}
            named |= {key: one[key] for key in ("system", "placement", "context", "gamma", "synthetic")}
            found = {key: one[key] for key in PREDICTED}
            found |= {"draft_ms": one["draft_alone_ms"], "ms_per_token": one["ms_per_token"]["median"]}
            ratio = one["predicted_over_measured"]
            rows.append(named | {"measured": found, "predicted": one["predicted"], "ratio": ratio})
    result = report.envelope("prediction-accuracy", arguments, measured["machine"]) | {
        "of": arguments.results.name,
        "worst": worst([one["ratio"] for one in rows]),
        "rows": rows,
    }
    # Two columns of a figure: predicted, measured.
    header = ["case, system, KV", *(word for name in TABLE.values() for word in (name, "measured")), "ratio"]
    table = report.table(header, [_cells(one) for one in rows])
    report.finish(out, result, [table], {"worst": result["worst"], "rows": len(rows)})


def _read(path: Path) -> Values:
    try:
        result: Values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"results {path}: cannot be read ({error.strerror}); run `python -m bench offload` first"
        ) from None
    except ValueError:
        raise UsageError(f"results {path}: is no JSON; give what `bench offload` has written") from None
    if not isinstance(result, dict) or result.get("benchmark") != "offload":
        raise UsageError(f"results {path}: is no result of `bench offload`")
    if any("turns" not in one for case in result["cases"] for one in case["rows"]):
        raise UsageError(f"results {path}: is of an older version; run `python -m bench offload` again")
    return result


def worst(ratios: list[float]) -> float:
    """The ratio that is furthest from 1, either way."""
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def predict_rows(case: Values) -> None:
    """Adds `predicted` and `predicted_over_measured` (of ms a token) to every row of a case."""
    for one in case["rows"]:
        runs = one["ms_per_token"]["runs"]
        found = [predict(case, one, turn) for turn in one["turns"]] or [predict(case, one)] * len(runs)
        one["predicted"] = {name: median(each[name] for each in found) for name in PREDICTED}
        pairs = zip(found, runs, strict=True)
        one["predicted_over_measured"] = median(each["ms_per_token"] / ms for each, ms in pairs)


def predict(
    case: dict[str, Any], one: dict[str, Any], turn: dict[str, float] | None = None
) -> dict[str, Any]:
    """What the planner says of one row, by the names in `PREDICTED`.

    Args:
        turn: figures of `References.turn`, before one of its runs over a paced link.
    """
    request = _request(case, one, turn)
    predictor = Predictor(request) if turn is None else MeasuredAlone(request, turn)
    ring = request.config.store.ring_buffers
    placement = request.placement(one["resident_tokens"], one["cpu_tokens"], ring)
    placement = replace(placement, streamed_tokens=one["streamed_tokens"])  # full pages alone
    gamma = one["gamma"]
    verification, draft = predictor.verification(placement, gamma), predictor.draft(gamma)
    rounds = (predictor.round(verification, draft, count) for count in predictor.outcomes)
    best = min(rounds, key=lambda found: found.ms)
    values = (verification.ms, draft.ms, best.ms, best.tokens, best.hit_rate, best.ms_per_token)
    return dict(zip(PREDICTED, values, strict=True))


def _request(case: Values, one: Values, turn: Values | None) -> PlanRequest:
    target = _shape(case["shape"])
    if turn is None:
        hardware = Hardware.from_json(case["hardware"])
    else:
        hardware = paced_hardware(case["processor"], target, turn["rate_bytes_per_second"] / 1e9)
    offload: dict[str, object] = {"offload.ahead": one["ahead"] or 0}
    if one["refresh_from"] is not None:
        offload["offload.refresh_from"] = one["refresh_from"]
    return PlanRequest(
        target,
        None if case["draft_shape"] is None else _shape(case["draft_shape"]),
        load_config(one["composition"], case["settings"] | offload),
        context=one["context"],
        new_tokens=0,
        hardware=hardware,
        same_model_acceptance=1.0 if one["acceptance"] is None else one["acceptance"],
    )


def _shape(values: Values) -> ModelShape:
    return ModelShape(**values | {"dtype": getattr(torch, values["dtype"])})


def paced_hardware(figures: Values, target: ModelShape, link: float) -> Hardware:
    """A processor that stands in for a GPU, at the end of a paced link.

    Args:
        figures: of `references.processor`.
        link: GB/s.
    """
    rates = tuple(AttentionRate(**rate) for rate in figures["attention"])
    measured = figures["memory_rate"], figures["compute_rate"], rates
    host = Host(AMPLE_BYTES, AMPLE_BYTES, *measured, 1.0, 1.0, launch_ms=0.0, threads=1)
    # FLOP a byte of KV, at as many queries as a draft has.
    intensity = target.attention_flops * (rates[-1].queries / target.group) / target.layer_token_bytes
    computing = rates[-1].rate * intensity / 1e3
    name = "a processor behind a paced link"
    processor = Gpu(name, AMPLE_BYTES, rates[0].rate, computing, link, link, launch_ms=0.0)
    return Hardware(host, (processor,), True)


class MeasuredAlone(Predictor):
    """What the processor does by itself as it was measured; what comes of it over a link is predicted.

    Args:
        figures: of `References.turn`.
    """

    def __init__(self, request: PlanRequest, figures: dict[str, float]) -> None:
        super().__init__(request)
        self._figures = figures

    def dense(self, queries: int) -> Work:
        target, host = self.request.target, self.request.hardware.host
        rate = attention_rate(host.attention, queries * target.group)
        attention = self.request.context * target.token_bytes / rate / 1e6
        measured = self._figures["plain_pass_ms" if queries == 1 else "pass_ms"]
        return Work(max(0.0, measured - attention) + self._figures["verdict_ms"])

    def draft(self, gamma: int) -> Work:
        return Work(gamma * self._figures["draft_token_ms"] if self.request.levels else 0.0)


def _cells(one: Values) -> list[str]:
    name = ", ".join((one["case"], one["system"], one["placement"]))
    name += "" if one["synthetic"] is None else f", synthetic {one['synthetic']:g}"
    values = [report.number(one[side][key]) for key in TABLE for side in ("predicted", "measured")]
    return [name, *values, report.number(one["ratio"])]
