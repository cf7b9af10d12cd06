"""`python -m bench model-card`: whether a target behaves like a long-context model.

Per text: a reading of its first `--context` tokens gives the loss along it, and it and shorter ones the
acceptance of small caches; prompts cut to their last tokens give the loss of the same tail with less context
before it; and prompts with planted passages give the needle score.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
BIN = 16  # tokens behind a refresh that are told together where they are many


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
    about = "loss along a long prompt, needle score, acceptance of small caches"
    parser, case = inputs.command(commands, "model-card", run, about), MODEL_CARD
    inputs.add_arguments(parser, draft=False)
    texts = {"action": "append", "required": True, "metavar": "FILE", "help": "UTF-8; may be repeated"}
    parser.add_argument("--text", type=Path, **texts)
    parser.add_argument("--context", type=inputs.count(64), default=case.context, metavar="N")
    parser.add_argument("--step", type=inputs.count(1), metavar="N", help=f"of the loss: {case.step}")
    parser.add_argument("--positions", type=inputs.count(1), default=case.positions, metavar="N")
    parser.add_argument("--parts", type=inputs.names(PARTS), default=PARTS, metavar="A,B")
    parser.add_argument("--seed", type=inputs.count(0), default=0, metavar="S", help="of the passages")


def run(arguments: argparse.Namespace) -> None:
    """Measures, writes the JSON, prints the tables."""
    transformers_logging.set_verbosity_error()
    config, parts = load_config("retrieval", dict(arguments.overrides)), arguments.parts
    case = fitted(arguments.context, arguments.step, arguments.positions, config.retrieval.chunk)
    texts = inputs.read_texts(arguments.text)
    models = inputs.load(arguments)
    described = machine.describe(models.target.device)
    out = inputs.destination(arguments.out, f"model-card-{models.names[0]}", described)
    encoded = {name: encode(models.tokenizer, text) for name, text in texts}
    needed = case.context + (case.positions if "acceptance" in parts else 0)
    for name, tokens in encoded.items():
        if len(tokens) < needed:
            raise UsageError(
                f"text {name}: has {len(tokens)} tokens, and {needed} are needed; leave it out, or use a "
                "shorter --context"
            )
    model = CausalModel(models.target, models.names[0])
    generator = torch.Generator().manual_seed(arguments.seed)
    alphabet = needles.alphabet(models.tokenizer, model.vocabulary)
    result = report.envelope("model-card", arguments, described) | {
        "model": models.names[0],
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in models.target.parameters()),
        "texts": list(encoded),
        "case": dataclasses.asdict(case),
        "config": {key: str(value) for key, value in dataclasses.asdict(config.retrieval).items()},
    }
    readings = [Reading(name, tokens, model, config, case) for name, tokens in encoded.items()]
    for one in readings:
        one.along(losing="loss" in parts, accepting="acceptance" in parts)
        if "loss" in parts:
            one.shorter_windows(models.tokenizer.bos_token_id)
        if "needle" in parts:
            one.needles(alphabet, generator)
    if "loss" in parts:
        result["loss"] = loss_result(case, readings)
    if "needle" in parts:
        result["needle"] = needle_result(case, readings, model.vocabulary)
    if "acceptance" in parts:
        result["acceptance"] = [acceptance_result(n, case, readings) for n in case.acceptance_contexts]
    report.finish(out, result, tables(result), result)


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


@dataclasses.dataclass
class Reading:
    """What is measured of one text.

    Attributes:
        losses: of the tokens along the longest prompt; `tails` of its last ones, by window.
        recall: by needle context and depth.
        accepted: by context.
    """

    name: str
    tokens: Sequence[int]
    model: CausalModel
    config: Config
    case: ModelCardCase
    losses: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    tails: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    recall: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    accepted: dict[int, dict[tuple[str, str], Tensor]] = dataclasses.field(default_factory=dict)

    @contextmanager
    def _reader(self, what: str, room: int) -> Iterator[ContextReader]:
        say(f"{self.name}: {what}")
        with ContextReader(self.model, self.config, room) as reader:
            yield reader
        inputs.free(self.model.device)

    def along(self, *, losing: bool, accepting: bool) -> None:
        """Loss and acceptance, by one reading of the prompt for both."""
        case = self.case
        for context in case.acceptance_contexts:
            last = losing and context == case.context
            if not (last or accepting):
                continue
            prompt = self.tokens[:context]
            with self._reader(f"reading {tokens_name(context)} tokens", context + case.positions) as reader:
                hidden = reader.read(prompt, outputs=last)
                if hidden is not None:
                    self.losses = loss.token_losses(self.model, hidden, prompt)
                    self.tails[context] = self.losses[-case.tail :]
                    del hidden
                if accepting:
                    budgets = {f"1/{share}": context // share for share in case.shares}
                    following = self.tokens[context : context + case.positions]
                    self.accepted[context] = acceptance.acceptance(reader, following, budgets)

    def shorter_windows(self, beginning: int | None) -> None:
        """Loss of the same tail with less before it, behind a beginning-of-text token."""
        for window in self.case.windows[:-1]:
            prompt = loss.window_of(self.tokens[: self.case.context], window, beginning)
            with self._reader(f"loss with {tokens_name(window)} tokens", len(prompt)) as reader:
                hidden = reader.read(prompt, outputs=True)
                assert hidden is not None
                rows = self.case.tail + 1  # no others: the head is dear
                self.tails[window] = loss.token_losses(self.model, hidden[:, -rows:], prompt[-rows:])

    def needles(self, alphabet: Sequence[int], generator: torch.Generator) -> None:
        """Recall of passages that are drawn from an alphabet."""
        case = self.case
        for length in case.needle_contexts:
            numbers = length, case.depths, case.needles
            prompt, passages = needles.plant(self.tokens, *numbers, alphabet, generator)
            with self._reader(f"needles in {tokens_name(length)} tokens", length) as reader:
                reader.read(prompt)
                self.recall[length] = needles.recall(reader, passages, case.needles)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [mean(column) for column in zip(*rows, strict=True)]


def loss_result(case: ModelCardCase, readings: Sequence[Reading]) -> dict[str, Any]:
    """Loss by steps along the prompt, and of its tail by window."""
    ends = range(case.step, case.context + 1, case.step)
    by_text = {one.name: loss.step_means(one.losses, case.step) for one in readings}
    means = _means(list(by_text.values()))
    along = {"ends": list(ends), "mean": means, "by_text": by_text}
    along["without_rise"] = loss.without_rise(ends, [value > means[0] for value in means])
    tails = [torch.cat([one.tails[window] for one in readings]) for window in case.windows]
    return {"along": along, "paired": loss.paired(case.windows, tails) | {"tail": case.tail}}


def needle_result(case: ModelCardCase, readings: Sequence[Reading], vocabulary: int) -> dict[str, Any]:
    """Recall by context and depth."""
    by_text = {length: [one.recall[length] for one in readings] for length in case.needle_contexts}
    return {
        "depths": [i / max(case.depths - 1, 1) for i in range(case.depths)],
        "chance": 1 / vocabulary,
        "contexts": [
            {"context": length, "score": _means(scores), "by_text": scores}
            for length, scores in by_text.items()
        ],
    }


def acceptance_result(context: int, case: ModelCardCase, readings: Sequence[Reading]) -> dict[str, Any]:
    """Acceptance of every small cache, in the mean and behind a refresh."""
    rows = []
    for kind, budget in readings[0].accepted[context]:
        values = torch.stack([one.accepted[context][kind, budget] for one in readings])
        row = {"cache": kind, "budget": budget, "entries": context // int(budget.removeprefix("1/"))}
        row |= {"mean": float(values.mean()), "by_text": values.mean(dim=1).tolist()}
        stride = kind == acceptance.RETRIEVAL_STRIDE
        period, width = (acceptance.STRIDE, BIN) if stride else (acceptance.ROUND, 1)
        if values.shape[1] >= period:
            row |= {"by_distance": acceptance.by_distance(values, period, width), "distance_width": width}
        rows.append(row)
    return {"context": context, "positions": case.positions, "caches": rows}


def tables(result: dict[str, Any]) -> list[str]:
    """The result as markdown, ready for a README."""
    parts = _loss_tables(result["loss"]) if "loss" in result else []
    parts += [_needle_table(result["needle"])] if "needle" in result else []
    return parts + [table for case in result.get("acceptance", []) for table in _acceptance_tables(case)]


def _loss_tables(found: dict[str, Any]) -> list[str]:
    along, paired = found["along"], found["paired"]
    columns = {"mean": along["mean"], **along["by_text"]}
    steps = zip(along["ends"], *columns.values(), strict=True)
    rows = [[f"to {tokens_name(end)}", *(f"{value:.3f}" for value in values)] for end, *values in steps]
    windows = zip(paired["windows"], paired["means"], paired["changes"], paired["errors"], strict=True)
    return [
        "Loss along a prompt, nats a token; no step exceeds the first one up to "
        f"**{tokens_name(along['without_rise'])}**.",
        report.table(["tokens", *columns], rows),
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
    places = range(1, acceptance.ROUND + 1)
    ends = range(BIN, acceptance.STRIDE + 1, BIN)
    rows, along = list[list[object]](), list[list[object]]()
    for cache in case["caches"]:
        stride = cache["cache"] == acceptance.RETRIEVAL_STRIDE
        distances = cache.get("by_distance", [None] * len(ends if stride else places))
        row = [f"{cache['cache']}, {cache['budget']}", cache["entries"]]
        row += [report.number(value, 3) for value in (cache["mean"], *distances)]
        (along if stride else rows).append(row)
    header = ["cache", "entries", "mean"]
    return [
        f"Acceptance at {tokens_name(case['context'])} (T = 1, mean over {case['positions']} positions a "
        f"text); behind a refresh by 1 … {acceptance.ROUND} tokens.",
        report.table([*header, *map(str, places)], rows),
        f"The same with a refresh every {acceptance.STRIDE} tokens; behind it by up to so many tokens.",
        report.table([*header, *(f"–{end}" for end in ends)], along),
    ]
