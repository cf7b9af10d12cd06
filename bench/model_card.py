"""`python -m bench model-card`: whether a target behaves like a long-context model.

Per text: a reading of its first `--context` tokens gives the loss along it, and it and shorter ones the
acceptance of small caches; prompts cut to their last tokens give the loss of the same tail with less context
before it; and prompts with planted passages give the needle score.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from bench import acceptance, inputs, loss, machine, needles, report
from bench.context import ContextReader
from bench.inputs import say
from bench.report import tokens_name
from offload_rt.config import Config, load_config
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.text import encode

PARTS = ("loss", "needle", "acceptance")


@dataclasses.dataclass(frozen=True)
class ModelCardCase:
    """How much `model-card` measures.

    Attributes:
        context: longest prompt.
        step: the loss is told by steps of so many tokens.
        windows: prompts cut to their last tokens, whose tails' losses are compared.
        tail: how many of the last tokens those losses are of.
        needle_contexts: lengths of the prompts that needles are planted in.
        depths: how many depths, from the beginning to the end.
        needles: passages a depth, in one prompt.
        acceptance_contexts: contexts below `context` at which acceptance is measured too.
        shares: sizes of the bounded caches, one over the context.
        positions: how many positions the acceptance is a mean of.
    """

    context: int = 131072
    step: int = 8192
    windows: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    tail: int = 2048
    needle_contexts: tuple[int, ...] = (8192, 32768, 65536, 131072)
    depths: int = 9
    needles: int = 4
    acceptance_contexts: tuple[int, ...] = (32768,)
    shares: tuple[int, ...] = (32, 8)
    positions: int = 256


MODEL_CARD = ModelCardCase()


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = commands.add_parser(
        "model-card",
        help="loss along a long prompt, needle score, acceptance of small caches",
        description="Measures whether a target behaves like a long-context model.",
        allow_abbrev=False,
    )
    inputs.add_arguments(parser, draft=False)
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="UTF-8; may be repeated",
    )
    case = MODEL_CARD
    parser.add_argument("--context", type=inputs.count(64), default=case.context, metavar="N")
    parser.add_argument(
        "--step", type=inputs.count(1), metavar="N", help=f"of the loss (default: {case.step})"
    )
    parser.add_argument(
        "--positions", type=inputs.count(1), default=case.positions, metavar="N", help="of acceptance"
    )
    parser.add_argument(
        "--parts", type=inputs.names(PARTS), default=PARTS, metavar="A,B", help=f"default: {','.join(PARTS)}"
    )
    parser.add_argument("--seed", type=inputs.count(0), default=0, metavar="S", help="of the passages")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON, prints the tables."""
    transformers_logging.set_verbosity_error()
    config = load_config("retrieval", dict(arguments.overrides))
    case = fitted(arguments.context, arguments.step, arguments.positions, config.retrieval.chunk)
    texts = inputs.read_texts(arguments.text)
    models = inputs.load(arguments)
    described = machine.describe(models.target.device)
    out = inputs.destination(arguments.out, f"model-card-{models.names[0]}", described)
    encoded = {text.name: encode(models.tokenizer, text.text) for text in texts}
    needed = case.context + (case.positions if "acceptance" in arguments.parts else 0)
    short = next((name for name, tokens in encoded.items() if len(tokens) < needed), None)
    if short is not None:
        raise UsageError(
            f"text {short}: has {len(encoded[short])} tokens, and {needed} are needed; leave it out, or "
            "use a shorter --context"
        )
    special = set(models.tokenizer.all_special_ids)
    model = CausalModel(models.target, models.names[0])
    alphabet = [token for token in range(model.vocabulary) if token not in special]
    measurement = Measurement(
        model, config, case, models.tokenizer.bos_token_id, alphabet, arguments.parts, arguments.seed
    )
    for name, tokens in encoded.items():
        measurement.add(name, tokens)
    result = {
        "benchmark": "model-card",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": described,
        "model": models.names[0],
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in models.target.parameters()),
        "texts": list(encoded),
        "case": dataclasses.asdict(case),
        "config": {key: str(value) for key, value in dataclasses.asdict(config.retrieval).items()},
        **measurement.result(),
        "host_peak_bytes": machine.peak_host_bytes(),
    }
    report.write_json(out, result)
    print(tables(result))
    print(json.dumps(result))


def fitted(context: int, step: int | None, positions: int, chunk: int) -> ModelCardCase:
    """The declared case, cut to a context.

    Raises:
        UsageError: the numbers do not go together.
    """
    declared = MODEL_CARD
    step = min(declared.step, context) if step is None else step
    if context % step:
        raise UsageError(f"--context {context} is no multiple of --step {step}")
    if positions % acceptance.ROUND:
        raise UsageError(
            f"--positions {positions} is no multiple of {acceptance.ROUND}, the tokens of a round"
        )
    contexts = (*(n for n in declared.acceptance_contexts if n < context), context)
    least = acceptance.SINKS + 2 * chunk
    if contexts[0] // max(declared.shares) < least:
        raise UsageError(
            f"--context {context} is too short: it must be at least {max(declared.shares) * least} tokens"
        )
    needle_contexts = tuple(n for n in declared.needle_contexts if n <= context) or (context,)
    each = declared.needles
    while each > 1 and needle_contexts[0] < 2 * declared.depths * each * (needles.PASSAGE + needles.SPACING):
        each //= 2
    return dataclasses.replace(
        declared,
        context=context,
        step=step,
        windows=(*(n for n in declared.windows if n < context), context),
        tail=min(declared.tail, context // 2),
        needle_contexts=needle_contexts,
        needles=each,
        acceptance_contexts=contexts,
        positions=positions,
    )


class Measurement:
    """What is measured, text by text.

    Args:
        beginning: the beginning-of-text token.
        alphabet: tokens that passages are drawn from.
    """

    def __init__(
        self,
        model: CausalModel,
        config: Config,
        case: ModelCardCase,
        beginning: int | None,
        alphabet: Sequence[int],
        parts: Sequence[str],
        seed: int,
    ) -> None:
        self.model = model
        self.config = config
        self.case = case
        self.parts = parts
        self._beginning = beginning
        self._alphabet = alphabet
        self._generator = torch.Generator().manual_seed(seed)
        self._steps: dict[str, list[float]] = {}
        self._tails: dict[int, list[Tensor]] = {window: [] for window in case.windows}
        self._recall: dict[int, list[list[float]]] = {length: [] for length in case.needle_contexts}
        self._accepted: dict[int, list[dict[tuple[str, str], Tensor]]] = {
            n: [] for n in case.acceptance_contexts
        }

    def add(self, name: str, tokens: Sequence[int]) -> None:
        """Measures one text."""
        if "loss" in self.parts or "acceptance" in self.parts:
            self._along(name, tokens)
        if "loss" in self.parts:
            self._shorter_windows(name, tokens)
        if "needle" in self.parts:
            self._needles(name, tokens)

    def _reader(self, room: int) -> ContextReader:
        return ContextReader(self.model, self.config, room)

    def _along(self, name: str, tokens: Sequence[int]) -> None:
        case, accepting = self.case, "acceptance" in self.parts
        for context in case.acceptance_contexts if accepting else (case.context,):
            say(f"{name}: reading {tokens_name(context)} tokens")
            losing = "loss" in self.parts and context == case.context
            with self._reader(context + case.positions) as reader:
                hidden = reader.read(tokens[:context], outputs=losing)
                if hidden is not None:
                    losses = loss.token_losses(self.model, hidden, tokens[:context])
                    self._steps[name] = loss.step_means(losses, case.step)
                    self._tails[context].append(losses[-case.tail :])
                    say(f"{name}: loss by step {' '.join(f'{value:.3f}' for value in self._steps[name])}")
                    del hidden
                if accepting:
                    say(f"{name}: acceptance at {tokens_name(context)}")
                    budgets = {f"1/{share}": context // share for share in case.shares}
                    following = tokens[context : context + case.positions]
                    self._accepted[context].append(acceptance.acceptance(reader, following, budgets))
            inputs.free(self.model.device)

    def _shorter_windows(self, name: str, tokens: Sequence[int]) -> None:
        for window in self.case.windows[:-1]:
            say(f"{name}: loss with {tokens_name(window)} tokens")
            prompt = loss.window_of(tokens[: self.case.context], window, self._beginning)
            with self._reader(len(prompt)) as reader:
                hidden = reader.read(prompt, outputs=True)
                assert hidden is not None
                # Only the tail's rows: the head is dear.
                rows = self.case.tail + 1
                losses = loss.token_losses(self.model, hidden[:, -rows:], prompt[-rows:])
            self._tails[window].append(losses)

    def _needles(self, name: str, tokens: Sequence[int]) -> None:
        case = self.case
        for length in case.needle_contexts:
            say(f"{name}: needles in {tokens_name(length)} tokens")
            planted = needles.plant(
                tokens, length, case.depths, case.needles, self._alphabet, self._generator
            )
            with self._reader(length) as reader:
                reader.read(planted.tokens)
                self._recall[length].append(needles.recall(reader, planted))
        inputs.free(self.model.device)

    def result(self) -> dict[str, Any]:
        """Means over the texts, as JSON values."""
        found: dict[str, Any] = {}
        if "loss" in self.parts:
            found["loss"] = self._loss_result()
        if "needle" in self.parts:
            found["needle"] = {
                "depths": [i / max(self.case.depths - 1, 1) for i in range(self.case.depths)],
                "chance": 1 / self.model.vocabulary,
                "contexts": [
                    {"context": length, "score": _means(scores), "by_text": scores}
                    for length, scores in self._recall.items()
                ],
            }
        if "acceptance" in self.parts:
            found["acceptance"] = [
                self._acceptance_result(context, texts) for context, texts in self._accepted.items()
            ]
        return found

    def _loss_result(self) -> dict[str, Any]:
        case = self.case
        ends = range(case.step, case.context + 1, case.step)
        means = _means(list(self._steps.values()))
        paired = loss.PairedLoss.of(case.windows, [torch.cat(self._tails[window]) for window in case.windows])
        return {
            "along": {
                "ends": list(ends),
                "mean": means,
                "by_text": self._steps,
                "without_rise": loss.without_rise(means, ends),
            },
            "paired": {**dataclasses.asdict(paired), "tail": case.tail, "without_rise": paired.without_rise},
        }

    def _acceptance_result(
        self, context: int, texts: Sequence[dict[tuple[str, str], Tensor]]
    ) -> dict[str, Any]:
        rows = []
        for kind, budget in texts[0]:
            values = torch.stack([text[kind, budget] for text in texts])
            row = {
                "cache": kind,
                "budget": budget,
                "entries": context // int(budget.removeprefix("1/")),
                "mean": float(values.mean()),
                "by_text": [float(value) for value in values.mean(dim=1)],
            }
            stride = kind == acceptance.RETRIEVAL_STRIDE
            period, width = (acceptance.STRIDE, 16) if stride else (acceptance.ROUND, 1)
            if values.shape[1] >= period:
                whole = values[:, : values.shape[1] // period * period].flatten()
                row["by_distance"] = acceptance.by_distance(whole, period, width)
                row["distance_width"] = width
            rows.append(row)
        return {"context": context, "positions": self.case.positions, "caches": rows}


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def tables(result: dict[str, Any]) -> str:
    """The result as markdown, ready for a README."""
    parts = []
    if "loss" in result:
        parts += _loss_tables(result["loss"])
    if "needle" in result:
        parts.append(_needle_table(result["needle"]))
    for case in result.get("acceptance", []):
        parts += _acceptance_tables(case)
    return "\n\n".join(parts) + "\n"


def _loss_tables(found: dict[str, Any]) -> list[str]:
    along, paired = found["along"], found["paired"]
    names = list(along["by_text"])
    rows = [
        [
            f"to {tokens_name(end)}",
            report.number(value, 3),
            *(report.number(along["by_text"][n][i], 3) for n in names),
        ]
        for i, (end, value) in enumerate(zip(along["ends"], along["mean"], strict=True))
    ]
    windows = zip(paired["windows"], paired["means"], paired["changes"], paired["errors"], strict=True)
    return [
        "Loss along a prompt, nats a token; no step exceeds the first one up to "
        f"**{tokens_name(along['without_rise'])}**.",
        report.table(["tokens", "mean", *names], rows),
        f"Loss of the same {paired['tail']:,} tokens at the end of prompts of different length; it does not "
        f"rise with the context up to **{tokens_name(paired['without_rise'])}**.",
        report.table(
            ["prompt", "loss", "change", "± error"],
            [
                [tokens_name(window), f"{value:.3f}", f"{change:+.4f}", f"{error:.4f}"]
                for window, value, change, error in windows
            ],
        ),
    ]


def _needle_table(found: dict[str, Any]) -> str:
    rows = [
        [tokens_name(case["context"]), *(f"{score:.0%}" for score in case["score"])]
        for case in found["contexts"]
    ]
    header = ["context", *(f"{depth:.3g}" for depth in found["depths"])]
    return f"Needle score by depth (chance {found['chance']:.2%}).\n\n{report.table(header, rows)}"


def _acceptance_tables(case: dict[str, Any]) -> list[str]:
    context = tokens_name(case["context"])
    rows, along = [], []
    for cache in case["caches"]:
        distances = [report.number(value, 3) for value in cache.get("by_distance", [])]
        row = [f"{cache['cache']}, {cache['budget']}", cache["entries"], report.number(cache["mean"], 3)]
        if cache["cache"] == acceptance.RETRIEVAL_STRIDE:
            along.append([*row, *(distances or ["–"] * (acceptance.STRIDE // 16))])
        else:
            rows.append([*row, *(distances or ["–"] * acceptance.ROUND)])
    bins = [f"–{end}" for end in range(16, acceptance.STRIDE + 1, 16)]
    return [
        f"Acceptance at {context} (T = 1, mean over {case['positions']} positions a text); behind a refresh "
        f"by 1 … {acceptance.ROUND} tokens.",
        report.table(["cache", "entries", "mean", *map(str, range(1, acceptance.ROUND + 1))], rows),
        f"The same with a refresh every {acceptance.STRIDE} tokens; behind it by up to so many tokens.",
        report.table(["cache", "entries", "mean", *bins], along),
    ]
