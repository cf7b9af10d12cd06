"""`python -m bench paper`: the papers' tables and figures, in their form, on one model and one text.

Drafting is sampled, over a paced link that KV lies behind; `over_plain` is how many times as fast as plain
decoding over the same link. `paper` is what a paper has in that place: on its machine, with its model, never
the same thing. Parts:

- temperatures: TriForce's table 2, with its ablations.
- gammas: its table 8, how many tokens each level drafts.
- lengths: its table 7, by tokens generated.
- budgets: its figure 6, by the size of the retrieved cache.
- sources: its table 5, look-up in the text and in a datastore, and a target without some of its layers.
- shapes: its figure 6c, tokens that a pass yields by shape and size of the draft.
- layers: EasySpec's figure 4 and Draft & Verify: acceptance with layers in groups or left out, and the time
  of a drafted token. `own_devices_ms` is a prediction: what is left where the attention blocks of a group run
  side by side, from the measured time of one.
- batch: table 4, tokens a second of several prompts at once and in turn, in place, plain and with look-up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench import inputs, machine, report
from bench.inputs import Models, say
from cpu_kv import PacedLink
from offload_rt.api import LLM
from offload_rt.config import load_config, uses_small_model
from offload_rt.layers import LayerPlan
from offload_rt.results import GenerationResult, SamplingParams
from offload_rt.text import encode

SHAPES = (
    "chain@8",
    "chain@16",
    "chain@24",
    "chain@32",
    "chain@48",
    "sequences:4@24",
    "tree:2,2,2@16",
    "grown:32@16",
    "grown:64@16",
    "grown:128@32",
    "sequoia:32@16",
    "sequoia:64@16",
    "sequoia:128@24",
    "chain@24+suffix",
    "grown:128@32+suffix",
)
"""Shapes, their depths, and what joins them."""
LAYERS = ("all", "groups:1", "groups:2", "groups:3", "groups:4", "skip:2", "skip:2,3", "skip:1a,2a,3a")
BATCH = ("plain", "lookup")
BUDGET_SHARE = 32
PLAIN_TOKENS = 8
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
GAMMAS = range(1, 9)
LENGTHS = (64, 128, 256, 512)
BUDGETS = (128, 64, 32, 16, 8)
"""One over the share of the text that the retrieved cache holds."""

STREAMING_HIERARCHY = ["draft:streaming", "target:streaming"]
WITHOUT_LAYERS = [{"model": "target", "cache": "retrieved", "layers": "skip:2"}]
TABLE_2 = (2.31, 2.25, 2.20, 2.19, 2.08, 2.08, 2.02)
ABLATIONS: dict[str, tuple[str, dict[str, object], float]] = {
    "retrieval without hierarchy": ("retrieval", {}, 1.80),
    "StreamingLLM without hierarchy": ("streaming", {}, 1.75),
    "StreamingLLM with hierarchy": ("triforce", {"speculation.levels": STREAMING_HIERARCHY}, 1.90),
    "small model alone": ("naive", {}, 1.42),
}
"""A composition, its keys, and the paper's speed-up over plain decoding at T = 0.6."""

GAMMA_1 = (2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83)  # with γ2 = 6
GAMMA_2 = (1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20)  # with γ1 = 2


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "paper",
        help="the papers' tables and figures",
        description="Measures what the papers' tables and figures show.",
        allow_abbrev=False,
    )
    inputs.add_arguments(parser, draft=True)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text")
    parser.add_argument("--context", type=inputs.count(256), default=16384, metavar="N")
    parser.add_argument("--rate", type=float, default=2.0, metavar="GB/s", help="of the link (default: 2)")
    parser.add_argument("--seeds", type=inputs.count(1), default=24, metavar="N", help="texts of each row")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(8), default=192, metavar="N")
    parser.add_argument("--batch", type=inputs.count(2), default=4, metavar="N", help="prompts at once")
    parser.add_argument("--batch-context", type=inputs.count(64), default=8192, metavar="N")
    parser.add_argument("--datastore", type=Path, metavar="FILE", help="of other texts, for REST")
    parser.add_argument("--shapes", type=inputs.names(SHAPES), default=SHAPES, metavar="A,B")
    parser.add_argument(
        "--parts", type=inputs.names(PARTS), default=tuple(PARTS), metavar="A,B", help="default: all"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    models = inputs.load(arguments)
    described = machine.describe(models.target.device)
    path = inputs.destination(arguments.out, "paper", described)
    tokens = encode(models.tokenizer, "\n".join(text.text for text in texts))
    found: dict[str, Any] = {
        "benchmark": "paper",
        "machine": described,
        "model": models.names[0],
        "text": [text.name for text in texts],
        "context": min(arguments.context, len(tokens)),
        "temperature": arguments.temperature,
        "new_tokens": arguments.new_tokens,
        "seeds": arguments.seeds,
        "link_gb_s": arguments.rate,
    }
    for name in arguments.parts:
        found[name] = rows = PARTS[name](models, tokens, arguments)
        report.write_json(path, found)  # each part as it is done: all of them take an hour
        print(report.table(list(rows[0]), [[_cell(value) for value in row.values()] for row in rows]), "\n")
    print(json.dumps(found))


def _cell(value: object) -> str:
    return report.number(value) if isinstance(value, float) else str(value)


def _base(arguments: argparse.Namespace) -> dict[str, object]:
    """Keys of every composition."""
    budget = max(256, arguments.context // BUDGET_SHARE)
    return {
        "speculation.step_down": False,
        "retrieval.budget": budget,
        "retrieval.recent": budget // 4,
        "retrieval.refresh": "every",
        **dict(arguments.overrides),
    }


def _settings(arguments: argparse.Namespace, **level: object) -> dict[str, object]:
    """The same, with the target over its retrieved cache as the one level."""
    levels = [{"model": "target", "cache": "retrieved", **level}]
    return {"speculation.levels": levels, **_base(arguments)}


def _runs(
    llm: LLM,
    arguments: argparse.Namespace,
    overrides: Mapping[str, object],
    config: str = "retrieval",
    temperature: float | None = None,
    new_tokens: int | None = None,
) -> list[GenerationResult]:
    """A text of each seed, from the end of the prompt that was read last."""
    heat = arguments.temperature if temperature is None else temperature
    count = new_tokens or arguments.new_tokens
    return [
        llm.rerun(SamplingParams(heat, max_tokens=count, seed=seed, ignore_eos=True), config, overrides)
        for seed in range(1, arguments.seeds + 1)
    ]


def _row(results: Sequence[GenerationResult]) -> dict[str, Any]:
    tokens, rounds = sum(len(one.tokens) for one in results), sum(one.rounds for one in results)
    proposed = sum(one.timings.draft_n for one in results)
    return {
        "tokens_per_pass": tokens / rounds,
        "proposed_per_pass": proposed / rounds,
        "accepted": sum(one.timings.draft_n_accepted for one in results) / max(1, proposed),
        "draft_ms_per_pass": sum(one.levels[0].ms for one in results) / rounds,
        "ms_per_token": median(one.timings.predicted_ms / len(one.tokens) for one in results),
    }


def _reader(models: Models, tokens: list[int], arguments: argparse.Namespace, **options: Any) -> LLM:
    """An LLM that has read the beginning of the text, for every composition to go on from."""
    config = "retrieval" if models.draft is None else "triforce"
    llm = LLM.from_models(models.target, models.draft, models.tokenizer, config, _base(arguments), **options)
    llm.generate(tokens[: arguments.context], SamplingParams(max_tokens=2, seed=0, ignore_eos=True))
    return llm


@dataclass(frozen=True)
class Variant:
    """A row of a table: what it is called, what is run, and what the paper has there."""

    label: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    temperature: float | None = None
    new_tokens: int | None = None
    paper: float | None = None


def _sweep(
    models: Models, tokens: list[int], arguments: argparse.Namespace, variants: Sequence[Variant]
) -> list[dict[str, Any]]:
    """A row for each variant, over the link; those that need a small model only where there is one."""
    base = _base(arguments) | {"retrieval.refresh": "stride:32"}
    rows = []
    with _reader(models, tokens, arguments, link=PacedLink(arguments.rate * 1e9)) as llm:
        for variant in variants:
            overrides = base | dict(variant.overrides) | dict(arguments.overrides)
            if models.draft is None and uses_small_model([load_config(variant.config, overrides)]):
                continue
            say(variant.label)
            plain = [llm.rerun(SamplingParams(max_tokens=PLAIN_TOKENS, ignore_eos=True), "plain", base)]
            results = _runs(
                llm, arguments, overrides, variant.config, variant.temperature, variant.new_tokens
            )
            row, plain_ms = _row(results), _row(plain)["ms_per_token"]
            kept = {key: row[key] for key in ("tokens_per_pass", "accepted", "ms_per_token")}
            over = {"over_plain": plain_ms / row["ms_per_token"], "paper": variant.paper}
            rows.append({"variant": variant.label} | kept | over)
    return rows


Part = Callable[[Models, list[int], argparse.Namespace], list[dict[str, Any]]]


def _temperatures(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    variants = [
        Variant(f"triforce, T = {heat:g}", "triforce", temperature=heat, paper=paper)
        for heat, paper in zip(TEMPERATURES, TABLE_2, strict=True)
    ]
    variants += [Variant(name, *given[:2], paper=given[2]) for name, given in ABLATIONS.items()]
    return _sweep(models, tokens, arguments, variants)


def _gammas(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    def variant(first: int, second: int, paper: float) -> Variant:
        depths = {"speculation.gamma1": first, "speculation.gamma2": second}
        return Variant(f"γ1 = {first}, γ2 = {second}", "triforce", depths, paper=paper)

    variants = [variant(first, 6, paper) for first, paper in zip(GAMMAS, GAMMA_1, strict=True)]
    variants += [variant(2, second, paper) for second, paper in zip(GAMMAS, GAMMA_2, strict=True)]
    return _sweep(models, tokens, arguments, variants)


def _lengths(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    paper = {256: 2.28}
    variants = [
        Variant(f"{count} tokens", "triforce", new_tokens=count, paper=paper.get(count)) for count in LENGTHS
    ]
    return _sweep(models, tokens, arguments, variants)


def _budgets(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    variants = []
    for share in BUDGETS:
        budget = max(128, arguments.context // share)
        sizes = {"retrieval.budget": budget, "retrieval.recent": budget // 4}
        variants.append(Variant(f"a {share}th: {budget} entries", "retrieval", sizes))
    return _sweep(models, tokens, arguments, variants)


def _sources(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    variants = [Variant("n-grams of the text", "lookup"), Variant("suffixes of the text", "suffix")]
    if arguments.datastore is not None:
        rest: dict[str, object] = {
            "speculation.levels": [{"model": "datastore", "draft": "grown:64"}],
            "datastore.path": str(arguments.datastore),
        }
        variants.append(Variant("REST", "lookup", rest, paper=1.47))
    skipped: dict[str, object] = {"speculation.levels": WITHOUT_LAYERS}
    variants += [
        Variant("without a layer", "retrieval", skipped, paper=1.36),
        Variant("EasySpec", "easyspec"),
        Variant("trees", "trees"),
        Variant("triforce", "triforce", paper=2.19),
    ]
    return _sweep(models, tokens, arguments, variants)


def _shapes(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with _reader(models, tokens, arguments, link=PacedLink(arguments.rate * 1e9)) as llm:
        for name in arguments.shapes:
            say(f"shape {name}")
            shape, _, rest = name.partition("@")
            depth, _, source = rest.partition("+")
            overrides = _settings(arguments, draft=shape, merge=source) | {"speculation.gamma2": int(depth)}
            rows.append({"draft": name, **_row(_runs(llm, arguments, overrides))})
    chains = [row for row in rows if row["draft"].startswith("chain@") and "+" not in row["draft"]]
    best = max((row["tokens_per_pass"] for row in chains), default=None)
    return [row | {"over_best_chain": best and row["tokens_per_pass"] / best} for row in rows]


def _layers(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    count = models.target.config.num_hidden_layers
    with _reader(models, tokens, arguments) as llm:
        for name in LAYERS:
            for calibrate in (True, False) if name.startswith("groups:") else (True,):
                say(f"layers {name}{'' if calibrate else ', not calibrated'}")
                overrides = _settings(arguments, layers=name, calibrate=calibrate) | {"speculation.gamma2": 8}
                row = _row(_runs(llm, arguments, overrides))
                token_ms = row["draft_ms_per_pass"] / row["proposed_per_pass"]
                rows.append(
                    {
                        "layers": name,
                        "calibrated": calibrate,
                        "accepted": row["accepted"],
                        "draft_token_ms": token_ms,
                    }
                )
    by_name = {row["layers"]: row["draft_token_ms"] for row in rows}
    attention_ms = max(0.0, by_name["all"] - by_name["skip:1a,2a,3a"]) / 3
    for row in rows:
        plan = LayerPlan.parse(row["layers"], count)
        spared = 0 if plan is None else sum(len(group) - 1 for group in plan.groups)
        row["own_devices_ms"] = row["draft_token_ms"] - attention_ms * spared
    return rows


def _batch(models: Models, tokens: list[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    count, length = arguments.batch, arguments.batch_context
    step = max(1, (len(tokens) - length) // count)
    prompts = [tokens[at * step : at * step + length] for at in range(count)]
    params = SamplingParams(max_tokens=arguments.new_tokens, seed=0, ignore_eos=True)
    rows = []
    for config in BATCH:
        say(f"batch of {count}, {config}")
        with LLM.from_models(models.target, None, models.tokenizer, config) as llm:
            turns = []
            for _ in range(3):
                alone = [llm.generate(prompt, params) for prompt in prompts]
                together = llm.generate(prompts, params)
                assert [one.tokens for one in alone] == [one.tokens for one in together]
                made = sum(len(one.tokens) for one in alone)
                turn_ms = sum(one.timings.predicted_ms for one in alone)
                # Members of a batch end together but for the last rounds.
                batch_ms = max(one.timings.predicted_ms for one in together)
                turns.append((1e3 * made / turn_ms, 1e3 * made / batch_ms))
        rows.append(
            {
                "config": config,
                "prompts": count,
                "context": length,
                "in_turn_tokens_per_s": median(one for one, _ in turns),
                "batch_tokens_per_s": median(one for _, one in turns),
                "ratio": median(batch / alone for alone, batch in turns),
            }
        )
    return rows


PARTS: dict[str, Part] = {
    "temperatures": _temperatures,
    "gammas": _gammas,
    "lengths": _lengths,
    "budgets": _budgets,
    "sources": _sources,
    "shapes": _shapes,
    "layers": _layers,
    "batch": _batch,
}
