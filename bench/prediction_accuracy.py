"""`python -m bench prediction-accuracy`: what the planner predicts, beside what `bench offload` measured.

The planner is asked for the placements that were run, with figures that were measured apart from them in the
same run: on a CPU, what attention and memory do alone, what a pass takes with the KV in place, what a drafted
token and a verdict take where nothing is drafted ahead, and the bandwidth of the paced link; on a GPU, what
`offload-rt doctor` says. Of a row itself it is given the acceptance of a drafted token, and nothing else.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import attention, inputs, report
from bench.cases import IN_PLACE, Named
from bench.report import Row
from bench.rounds import RATIO, alike, worst
from offload_rt.attention.backends import choose_backend
from offload_rt.caches.tiers import GpuTier
from offload_rt.drafting.shapes import DraftShape
from offload_rt.errors import UsageError
from offload_rt.levels.base import Cost
from offload_rt.machine.hardware import AttentionRate, Gpu, Hardware, Host
from offload_rt.machine.inspection import usable_hardware
from offload_rt.machine.measuring import CPU, compute_rate
from offload_rt.model.shape import ModelShape
from offload_rt.planning.placement import Placement, PlanRequest
from offload_rt.planning.prediction import Predictor, attention_rate

AMPLE_BYTES = 2**50  # memory that is no limit: what was run did fit
ATTENTION_REPEATS = 7
PREDICTED = {
    "pass_ms": "pass",
    "draft_alone_ms": "draft",
    "round_ms": "round",
    "tokens_per_round": "tokens/round",
    "ms_per_token": "ms/token",
}
"""Figures that are printed, predicted and measured."""


def add_parser(commands: Any) -> None:
    """Declares the command."""
    about = "the planner's predictions beside a result of `bench offload`"
    parser = inputs.command(commands, "prediction-accuracy", run, about)
    default = inputs.RESULTS / "offload-cpu.jsonl"
    parser.add_argument("results", type=Path, nargs="?", default=default, help=f"default: {default.name}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: beside the results)")


def run(arguments: argparse.Namespace) -> None:
    """Predicts every row anew, prints the table, writes the JSON."""
    path: Path = arguments.results
    records = report.read_lines("results", path)
    name = f"prediction-accuracy-{path.stem}.json"
    out = inputs.destination(arguments.out or path.with_name(name), name)
    if not records or any(one["benchmark"] != "offload" for one in records):
        raise UsageError(f"results {path}: is no result of `bench offload`")
    rows, in_place = list[Row](), dict[str, Sequence[Row]]()
    for record in records:
        of = json.dumps([record.get(key) for key in (*report.SETTINGS, "machine", "overrides")])
        if record["place"] == IN_PLACE.name:
            in_place[of] = record["rows"]
        for row in predict_rows(record, in_place.get(of, ())):
            named = {key: record[key] for key in ("model", "context", "place")}
            measured = {key: row["rounds"].get(key) for key in PREDICTED}
            named |= {"system": row["system"], "synthetic": row["synthetic"], "measured": measured}
            rows.append(named | {"predicted": row["predicted"], "ratio": row["rounds"][RATIO]})
    result = report.envelope("prediction-accuracy", arguments, records[0]["machine"]) | {
        "of": path.name,
        "worst": worst([one["ratio"] for one in rows]),
        "rows": rows,
    }
    # Two columns of a figure: predicted, measured.
    header = ["place, system", *(word for name in PREDICTED.values() for word in (name, "measured")), "ratio"]
    table = report.table(header, [_cells(one) for one in rows])
    report.finish(out, result, [table], {"worst": result["worst"], "rows": len(rows)})


def _cells(one: Row) -> list[str]:
    values = [report.number(one[side][key]) for key in PREDICTED for side in ("predicted", "measured")]
    return [f"{one['place']}, {one['system']}", *values, report.number(one["ratio"])]


def measure_alone(
    device: torch.device, target: ModelShape, draft: ModelShape | None, context: int, gamma: int
) -> Row:
    """What `predict_rows` goes by and rows do not tell, as JSON values."""
    shapes = {"shape": _values(target), "draft_shape": draft and _values(draft)}
    if device.type == "cuda":
        return shapes | {"hardware": asdict(usable_hardware(device))}
    queries = tuple(sorted({target.group * (1 + drafted) for drafted in (0, gamma // 2, gamma)}))
    sized = (target.kv_heads, target.head_dim)
    # The KV of all layers in one, so that no cache of the processor holds it.
    case = attention.AttentionCase((sized,), target.layers * context, queries, ATTENTION_REPEATS)
    rows = attention.measure(choose_backend(CPU), *sized, target.dtype, case)
    return shapes | {
        "processor": {
            "attention": [{"queries": one["queries"], "rate": one["gb_s"]} for one in rows],
            "memory_rate": rows[0]["read_gb_s"],
            "compute_rate": compute_rate(CPU, torch.float32, 128, 1024),
        }
    }


def _values(shape: ModelShape) -> Row:
    """As JSON values; of a folder the end alone, for a result goes elsewhere."""
    return asdict(shape) | {"name": Path(shape.name).name, "dtype": str(shape.dtype).removeprefix("torch.")}


def _shape(values: Row) -> ModelShape:
    return ModelShape(**values | {"dtype": getattr(torch, values["dtype"])})


def predict_rows(record: Row, in_place: Sequence[Row]) -> list[Row]:
    """Adds `predicted`, and `predicted_over_measured` to the `rounds`, where it can be told; those rows."""
    found = []
    for row in record["rows"] if record["link_rate_gb_s"] else ():
        if "rounds" in row and (predicted := predict(record, in_place, row)):
            row["predicted"] = predicted
            ratio = predicted["ms_per_token"] / row["rounds"]["ms_per_token"]
            row["rounds"][RATIO] = ratio
            found.append(row)
    return found


def predict(record: Row, in_place: Sequence[Row], row: Row) -> dict[str, float] | None:
    """What the planner says of one row, by the names in `PREDICTED`; None without its figures."""
    system, found = row["system"], row["rounds"]
    config = Named.parse(system).config(record["options"])
    request = PlanRequest(
        _shape(record["shape"]),
        record["draft_shape"] and _shape(record["draft_shape"]),
        config,
        context=record["context"],
        new_tokens=0,
        hardware=_hardware(record),
        same_model_acceptance=found.get("acceptance", 1.0),
    )
    predictor = Predictor(request)
    if "processor" in record:
        alone = alike(in_place, system)
        drafts = bool(config.speculation.levels)  # of one that does not, only the verdict counts
        late = alike(record["rows"], system if drafts else None, late=True)
        if alone is None or late is None:
            return None
        predictor = MeasuredAlone(request, alone["rounds"]["pass_ms"], late["rounds"])
    cards, others = record.get("cards", 0), found.get("other_gpus_tokens", 0)
    placement = Placement(
        resident_tokens=int(found["resident_tokens"]),
        cpu_tokens=int(found["cpu_tokens"]),
        streamed_tokens=int(found["streamed_tokens"]),  # full pages alone
        shape=request.target,
        gpus=(GpuTier(0, int(others) // max(1, cards)),) * cards,
    )
    drafted = request.drafts[-1]
    verification, draft = predictor.verification(placement, drafted), predictor.draft(drafted)
    best = predictor.round(verification, draft)
    values = (verification.ms, draft.ms, best.ms, best.tokens, best.ms_per_token)
    return dict(zip(PREDICTED, values, strict=True))


def _hardware(record: Row) -> Hardware:
    """A GPU's; or a processor that stands in for one, at the end of a paced link."""
    if "hardware" in record:
        return Hardware.from_json(record["hardware"])
    figures, link, target = record["processor"], record["link_rate_gb_s"], _shape(record["shape"])
    rates = tuple(AttentionRate(**rate) for rate in figures["attention"])
    measured = figures["memory_rate"], figures["compute_rate"], rates
    host = Host(AMPLE_BYTES, AMPLE_BYTES, *measured, 1.0, 1.0, launch_ms=0.0)
    # FLOP a byte of KV, at as many queries as a draft has.
    intensity = target.attention_flops * (rates[-1].queries / target.group) / target.layer_token_bytes
    computing = rates[-1].rate * intensity / 1e3
    name = "a processor behind a paced link"
    processor = Gpu(name, AMPLE_BYTES, rates[0].rate, computing, link, link, launch_ms=0.0)
    return Hardware(host, (processor,) * (1 + record.get("cards", 0)), True)


class MeasuredAlone(Predictor):
    """What the processor does by itself as it was measured; what comes of it over a link is predicted.

    Args:
        pass_ms: with the KV in place.
        late: figures of rounds that draft first and pass then.
    """

    def __init__(self, request: PlanRequest, pass_ms: float, late: Row) -> None:
        super().__init__(request)
        self._pass_ms, self._late = pass_ms, late

    def dense(self, queries: int) -> Cost:
        target, host = self.request.target, self.request.hardware.host
        rate = attention_rate(host.attention, queries * target.group)
        attention = self.request.context * target.token_bytes / rate / 1e6
        return Cost(max(0.0, self._pass_ms - attention) + self._late["verdict_ms"])

    def draft(self, shape: DraftShape) -> Cost:
        return Cost(shape.size * self._late["draft_token_ms"] if self.request.levels else 0.0)
