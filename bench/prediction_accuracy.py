"""`python -m bench prediction-accuracy`: the planner's predictions beside what `bench offload` measured.

The planner predicts the placements that were run, from figures measured apart from them: on a CPU, the rates
of attention and of memory, a pass with the KV in place, a drafted token and a verdict with nothing drafted
ahead, and the bandwidth of the paced link; on a GPU, those of `offload-rt doctor`. The only figure of a row
that the planner gets is the acceptance of drafted tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bench import machine
from bench.cases import IN_PLACE, Named
from bench.results import RESULTS, Row, envelope, read_lines, table
from bench.rounds import RATIO, alike, worst
from cpu_kv import ElementType, KVLayout, PagedKVStore
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.caches.sizes import GpuTier
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.schema import StoreConfig
from offload_rt.drafting.levels.base import Cost
from offload_rt.errors import UsageError
from offload_rt.machine.devices import DTYPES
from offload_rt.machine.inspection import usable_hardware
from offload_rt.machine.measuring import CPU, compute_rate, seconds
from offload_rt.model.layer_kinds import Recurrence
from offload_rt.model.shape import ModelShape
from offload_rt.planning.cost_model import CostModel, attention_rate
from offload_rt.planning.memory import Placement
from offload_rt.planning.planner import with_budget
from offload_rt.planning.request import PlanRequest
from offload_rt.system.files import check_writable, write_json
from offload_rt.system.hardware import AttentionRate, Gpu, Hardware, Host

AMPLE_BYTES = 2**50  # of memory: what was run did fit
ATTENTION_REPEATS = 7
PREDICTED = {
    "pass_ms": "pass",
    "draft_alone_ms": "draft",
    "round_ms": "round",
    "tokens_per_round": "tokens/round",
    "ms_per_token": "ms/token",
}
"""Figures that are printed, predicted and measured."""
ALIKE = "model", "draft", "texts", "dtype", "context", "new_tokens", "overrides"
"""Fields of a record that are the same in the one with the KV in place."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of the command."""
    default = RESULTS / "offload-cpu.jsonl"
    parser.add_argument("results", type=Path, nargs="?", default=default, help=f"default: {default.name}")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON (default: beside the results)")


def run(arguments: argparse.Namespace) -> None:
    """Predicts every row anew, prints the table, writes the JSON."""
    path: Path = arguments.results
    records = read_lines("results", path)
    out = arguments.out or path.with_name(f"prediction-accuracy-{path.stem}.json")
    check_writable("--out", out)
    if not records or any(record["benchmark"] != "offload" for record in records):
        raise UsageError(f"results {path}: is no result of `bench offload`")
    rows, in_place = list[Row](), dict[str, Sequence[Row]]()
    for record in records:
        of = json.dumps([record.get(key) for key in ALIKE])
        if record["place"] == IN_PLACE.name:
            in_place[of] = record["rows"]
        for row in predict_rows(record, in_place.get(of, ())):
            named = {key: record[key] for key in ("model", "context", "place")}
            measured = {key: row["rounds"].get(key) for key in PREDICTED}
            named |= {"system": row["system"], "synthetic": row["synthetic"], "measured": measured}
            rows.append(named | {"predicted": row["predicted"], "ratio": row["rounds"][RATIO]})
    summary = {"worst": worst([row["ratio"] for row in rows]), "rows": len(rows)}
    result = envelope(arguments, records[0]["machine"]) | summary | {"of": path.name, "rows": rows}
    write_json("--out", out, result, indent=1)
    print(table([_cells(row) for row in rows]), end="\n\n")
    print(json.dumps(summary))


def _cells(row: Row) -> Row:
    cells = {"place, system": f"{row['place']}, {row['system']}"}
    for key, name in PREDICTED.items():
        cells |= {name: row["predicted"][key], f"{name} measured": row["measured"][key]}
    return cells | {"ratio": row["ratio"]}


def measure_alone(
    device: torch.device, target: ModelShape, draft: ModelShape | None, context: int, gamma: int
) -> Row:
    """Measures what `predict_rows` needs and rows do not tell; JSON values."""
    shapes = {"shape": _values(target), "draft_shape": draft and _values(draft)}
    if device.type == "cuda":
        return shapes | {"hardware": asdict(usable_hardware(device))}
    queries = sorted({target.group * (1 + drafted) for drafted in (0, gamma // 2, gamma)})
    return shapes | {
        "processor": {
            "attention": [asdict(rate) for rate in attention_rates(target, context, queries)],
            "memory_rate": machine.read_rate(CPU),
            "compute_rate": compute_rate(CPU, torch.float32, 128, 1024),
        }
    }


def attention_rates(shape: ModelShape, context: int, queries: Sequence[int]) -> list[AttentionRate]:
    """GB/s of attention on the CPU over pages of the store, by how many queries share a key head.

    The KV of all layers counts as one layer's, so that the processor cannot cache it.
    """
    tokens, heads, dim = shape.layers * context, shape.kv_heads, shape.head_dim
    dtype = DTYPES[str(shape.dtype)]
    keys, values = torch.randn(2, heads, tokens, dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    backend, rates = choose_backend(CPU), list[AttentionRate]()
    with closing(PagedKVStore(KVLayout(1, heads, dim, dtype, StoreConfig.page), slab_tokens=tokens)) as store:
        sequence = store.new_sequence()
        sequence.append(0, keys, values)
        for count in queries:
            query_rows = torch.randn(heads, count, dim).to(dtype)

            def attend(query_rows: Tensor = query_rows) -> Tensor:
                total = AttentionSum(backend, query_rows, heads, dim**-0.5)
                for pages in sequence.views(0):
                    total.attend(pages)
                return total.result()

            attend()
            elapsed = median(seconds(attend) for _ in range(ATTENTION_REPEATS))
            rates.append(AttentionRate(count, (keys.nbytes + values.nbytes) / elapsed / 1e9))
    return rates


def _values(shape: ModelShape) -> Row:
    """A shape as JSON values, without paths of the machine."""
    return asdict(shape) | {"name": Path(shape.name).name, "dtype": str(shape.dtype)}


def _shape(values: Row) -> ModelShape:
    arguments = values | {"dtype": ElementType(values["dtype"])}
    if "kinds" in values:  # older records are of models with full attention alone
        arguments["kinds"] = LayerKinds(tuple(LayerKind(**kind) for kind in values["kinds"]["kinds"]))
        arguments["recurrence"] = values["recurrence"] and Recurrence(**values["recurrence"])
    return ModelShape(**arguments)


def predict_rows(record: Row, in_place: Sequence[Row]) -> list[Row]:
    """Adds `predicted` to rows, and the ratio to their `rounds`, where it is possible; returns these rows."""
    predictions = []
    for row in record["rows"] if record["link_rate_gb_s"] else ():
        if "rounds" in row and (predicted := predict(record, in_place, row)):
            row["predicted"] = predicted
            ratio = predicted["ms_per_token"] / row["rounds"]["ms_per_token"]
            row["rounds"][RATIO] = ratio
            predictions.append(row)
    return predictions


def predict(record: Row, in_place: Sequence[Row], row: Row) -> dict[str, float] | None:
    """The planner's prediction of a row, by the names in `PREDICTED`; None if figures are missing."""
    system, rounds = row["system"], row["rounds"]
    config = Named.parse(system).config(record["options"])
    request = PlanRequest(
        _shape(record["shape"]),
        record["draft_shape"] and _shape(record["draft_shape"]),
        config,
        context=record["context"],
        new_tokens=0,
        hardware=_hardware(record),
        measured_acceptance=rounds.get("acceptance", 1.0),
    )
    request = with_budget(request)
    costs = CostModel(request)
    if "processor" in record:
        alone = alike(in_place, system)
        late = alike(record["rows"], system, late=True)
        if not config.speculation.levels:  # only the verdict counts
            late = next((row for row in record["rows"] if "draft_token_ms" in row.get("rounds", ())), None)
        if alone is None or late is None:
            return None
        costs = MeasuredAlone(request, alone["rounds"]["pass_ms"], late["rounds"])
    # Earlier versions wrote `cards` for other GPUs.
    gpus: Any = record.get("gpus", record.get("cards", 0))
    others = rounds.get("other_gpus_tokens", rounds.get("other_cards_tokens", 0))
    placement = Placement(
        resident_tokens=int(rounds["resident_tokens"]),
        cpu_tokens=int(rounds["cpu_tokens"]),
        streamed_tokens=int(rounds["streamed_tokens"]),  # full pages only
        shape=request.target,
        gpus=(GpuTier(0, int(others) // max(1, gpus)),) * gpus,
    )
    drafted = request.drafts[-1]
    verification, draft = costs.verification(placement, drafted), costs.draft(drafted)
    best = costs.round(verification, draft)
    values = (verification.ms, draft.ms, best.ms, best.tokens, best.ms_per_token)
    return dict(zip(PREDICTED, values, strict=True))


def _hardware(record: Row) -> Hardware:
    """The GPU's figures, or those of a processor that stands for one behind a paced link."""
    if "hardware" in record:
        return Hardware.from_json(record["hardware"])
    figures, link, target = record["processor"], record["link_rate_gb_s"], _shape(record["shape"])
    rates = tuple(AttentionRate(**rate) for rate in figures["attention"])
    measured = figures["memory_rate"], figures["compute_rate"], rates
    host = Host(AMPLE_BYTES, AMPLE_BYTES, *measured, 1.0, 1.0, launch_ms=0.0)
    # FLOP a byte of KV, at as many queries as a draft has.
    intensity = target.attention_flops * (rates[-1].queries / target.group) / target.layer_token_bytes
    computing = rates[-1].rate * intensity / 1e3
    others: Any = record.get("gpus", record.get("cards", 0))
    name = "a processor behind a paced link"
    processor = Gpu(name, AMPLE_BYTES, rates[0].rate, computing, link, link, launch_ms=0.0, verdict_ms=0.0)
    return Hardware(host, (processor,) * (1 + others), True)


class MeasuredAlone(CostModel):
    """Takes the processor's own times as measured, and predicts what they come to over a link.

    Args:
        pass_ms: of a pass with the KV in place.
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

    def ahead_ms(self, shape: DraftShape, outcomes: int) -> list[float]:
        """Drafts for several outcomes take as many times the measured time as is predicted."""
        (single,) = super().ahead_ms(shape, 1)
        return [time / single * self.draft(shape).ms for time in super().ahead_ms(shape, outcomes)]
