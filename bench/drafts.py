"""`python -m bench drafts`: shapes of drafts, orders of layers and batches, on one text in one run.

- Shapes: tokens that a pass over the full cache yields, for chains and trees that the target drafts over its
  retrieved cache (a 32nd of the context), sampled, over a paced link.
- Layers: acceptance of what the target drafts with its layers in groups or with some left out, and the time
  of a drafted token; `own_devices_ms` is a prediction: the time that is left where the attention blocks of a
  group run side by side, from the measured time of one attention block.
- Batch: tokens a second of several prompts at once and in turn, in place, plain and with look-up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench import inputs, machine, report
from bench.inputs import Models, say
from cpu_kv import PacedLink
from offload_rt.api import LLM
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
    "chain@24+suffix",
    "grown:128@32+suffix",
)
"""Shapes, their depths, and what joins them."""
LAYERS = ("all", "groups:1", "groups:2", "groups:3", "groups:4", "skip:2", "skip:2,3", "skip:1a,2a,3a")
BATCH = ("plain", "lookup")
BUDGET_SHARE = 32


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "drafts",
        help="shapes of drafts, orders of layers, batches",
        description="Measures shapes of drafts, orders of layers and batches.",
        allow_abbrev=False,
    )
    inputs.add_arguments(parser, draft=False)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text")
    parser.add_argument("--context", type=inputs.count(256), default=16384, metavar="N")
    parser.add_argument("--rate", type=float, default=2.0, metavar="GB/s", help="of the link (default: 2)")
    parser.add_argument("--seeds", type=inputs.count(1), default=24, metavar="N", help="texts of each shape")
    parser.add_argument("--temperature", type=float, default=0.6, metavar="T")
    parser.add_argument("-n", "--new-tokens", type=inputs.count(8), default=192, metavar="N")
    parser.add_argument("--batch", type=inputs.count(2), default=4, metavar="N", help="prompts at once")
    parser.add_argument("--batch-context", type=inputs.count(64), default=8192, metavar="N")
    parser.add_argument("--shapes", type=inputs.names(SHAPES), default=SHAPES, metavar="A,B")
    parser.add_argument(
        "--parts", type=inputs.names(PARTS), default=tuple(PARTS), metavar="A,B", help="default: all"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    texts = inputs.read_texts(arguments.text) if arguments.text else [inputs.demo_text()]
    models = inputs.load(arguments)
    described = machine.describe(models.target.device)
    path = inputs.destination(arguments.out, "drafts", described)
    tokens = encode(models.tokenizer, "\n".join(text.text for text in texts))
    found: dict[str, Any] = {
        "benchmark": "drafts",
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


def _settings(arguments: argparse.Namespace, **level: object) -> dict[str, object]:
    budget = max(256, arguments.context // BUDGET_SHARE)
    return {
        "speculation.levels": [{"model": "target", "cache": "retrieved", **level}],
        "speculation.step_down": False,
        "retrieval.budget": budget,
        "retrieval.recent": budget // 4,
        "retrieval.refresh": "every",
        **dict(arguments.overrides),
    }


def _runs(llm: LLM, arguments: argparse.Namespace, overrides: Mapping[str, object]) -> list[GenerationResult]:
    """A text of each seed, from the end of the prompt that was read last."""
    return [
        llm.rerun(
            SamplingParams(
                arguments.temperature, max_tokens=arguments.new_tokens, seed=seed, ignore_eos=True
            ),
            "retrieval",
            overrides,
        )
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
    """An LLM that has read the beginning of the text."""
    llm = LLM.from_models(models.target, None, models.tokenizer, "retrieval", _settings(arguments), **options)
    llm.generate(tokens[: arguments.context], SamplingParams(max_tokens=2, seed=0, ignore_eos=True))
    return llm


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


PARTS = {"shapes": _shapes, "layers": _layers, "batch": _batch}
