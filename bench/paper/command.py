"""`python -m bench paper`: the papers' tables and figures, in their form, on one model and its texts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench import inputs, texts
from bench.acceptance import CACHES, small_caches
from bench.paper import shapes, tables
from bench.paper.runs import BUDGET_SHARE, Continued
from bench.studies import Part, Study, size


@dataclass(frozen=True)
class Sizes:
    """How much `paper` measures; the last four are those of `model_card.Sizes`."""

    context: int = size(16384, "tokens of the prompt", inputs.count(256))
    rate: float = size(2.0, "of the link", inputs.number(0.01), metavar="GB/s")
    seeds: int = size(12, "texts of each row", inputs.count(1))
    temperature: float = size(0.6, "of sampling", inputs.number(), metavar="T")
    new_tokens: int = size(192, "of each text", inputs.count(8), "-n")
    batch: int = size(4, "prompts at once", inputs.count(2))
    batch_context: int = size(8192, "tokens of each of them", inputs.count(64))
    shapes: tuple[str, ...] = size(shapes.SHAPES, "of drafts", inputs.names(shapes.SHAPES), metavar="A,B")
    positions: int = 192
    divisors: tuple[int, ...] = (1,)
    shares: tuple[int, ...] = (BUDGET_SHARE,)
    caches: tuple[str, ...] = tuple(CACHES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that are no sizes."""
    texts.add_arguments(parser, draft=True)
    parser.add_argument("--datastore", type=Path, metavar="FILE", help="of other texts, for REST")


VARIANT, SPEEDS = ("variant",), ("over_plain", "paper")
PARTS = {
    "policies": Part(small_caches, ("cache",), ("books", "needles")),
    "temperatures": Part(tables.temperatures, VARIANT, SPEEDS),
    "gammas": Part(tables.gammas, VARIANT, SPEEDS),
    "lengths": Part(tables.lengths),
    "budgets": Part(tables.budgets, VARIANT, ("tokens_per_pass",)),
    "sources": Part(tables.sources, VARIANT, ("tokens_per_pass", "over_plain")),
    "shapes": Part(shapes.shapes, ("draft",), ("tokens_per_pass", "expected")),
    "layers": Part(shapes.layers),
    "batch": Part(shapes.batch),
    "ceiling": Part(tables.ceilings, ("context",), ("ceiling", "expected", "measured")),
}
PAPER = Study(
    name="paper",
    about="the papers' tables and figures",
    note="""Drafting is sampled, over a paced link that KV lies behind unless in place; `over plain` is how
    many times as fast as plain decoding over the same link, `error` the standard error of the tokens a pass,
    over the texts. Columns `paper` are the papers' own figures, of other models on other machines.""",
    sizes=Sizes(),
    quick=Sizes(context=4096, seeds=2, new_tokens=48, batch_context=2048, positions=48),
    add_arguments=add_arguments,
    opened=Continued.opened,
    parts=PARTS,
)
