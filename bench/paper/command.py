"""`python -m bench paper`: the papers' tables and figures, in their form, on one model and its texts.

Drafting is sampled, over a paced link that KV lies behind; `over_plain` is how many times as fast as plain
decoding over the same link. `paper` is what a paper has in that place: on its machine, with its model, never
the same thing. The result is JSON, a page of tables and plots, all beside each other.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bench import inputs, machine, report
from bench.paper import page, policies, shapes, tables, theory
from bench.paper.page import Part, bars
from bench.paper.runs import Study
from offload_rt.text import encode

PARTS = {
    "policies": Part(
        "What a small cache holds",
        "TriForce, table 1. Acceptance of what a cache of a 32nd of the text would draft, teacher forced, "
        "T = 1: on the books' own text, and on passages of random tokens that were hidden in it and are "
        "asked for again. Exact top-k chooses by the very queries that it serves; the demo target's first "
        "layer attends evenly, where the heaviest entries stand for nothing but themselves, so it is also "
        "shown with that layer whole.",
        policies.policies,
        bars("acceptance by what a cache holds", "cache", books="books", needles="needles"),
    ),
    "temperatures": Part(
        "Temperatures, and without parts of the hierarchy",
        "TriForce, table 2.",
        tables.temperatures,
        bars(
            "times as fast as plain decoding",
            "variant",
            over_plain="measured, over the link",
            paper="paper, on chip",
        ),
    ),
    "gammas": Part("How far each level drafts", "TriForce, table 8.", tables.gammas, page.depths),
    "lengths": Part("Tokens generated", "TriForce, table 7.", tables.lengths),
    "budgets": Part("Size of the retrieved cache", "TriForce, figure 6.", tables.budgets, page.sizes),
    "sources": Part(
        "Who drafts",
        "TriForce, table 5, and the systems of other papers: look-up in the text and in a datastore of other "
        "texts, a head on hidden states, a target without some of its layers, layers in groups.",
        tables.sources,
        bars(
            "by who drafts",
            "variant",
            tokens_per_pass="tokens a pass",
            over_plain="times plain, over the link",
        ),
    ),
    "shapes": Part(
        "Shapes of drafts",
        "TriForce, figure 6c. Tokens that a pass yields; `expected` is what the acceptance of the first "
        "chain promises.",
        shapes.shapes,
        bars(
            "tokens a pass, by shape of the draft", "draft", tokens_per_pass="measured", expected="expected"
        ),
    ),
    "layers": Part(
        "Layers in groups or left out",
        "EasySpec, figure 4 and table 4, and Draft & Verify; in place. `likeness` is the cosine of the last "
        "hidden states to the exact ones. `own devices ms` is a prediction: what is left of a drafted "
        "token's time where the attention blocks of a group run side by side, from the measured time of one.",
        shapes.layers,
    ),
    "batch": Part(
        "Several texts at once",
        "TriForce, table 4; in place, tokens a second together and in turn.",
        shapes.batch,
    ),
    "ceiling": Part(
        "Theory and measurement",
        "TriForce, figure 5. `ceiling`: every drafted token stands, and every pass hides behind drafting. "
        "`expected`: by the measured parts, with nothing drafted ahead; drafting ahead may exceed it.",
        theory.ceilings,
        page.ceiling,
    ),
}


def add_parser(commands: Any) -> None:
    """Declares the command."""
    parser = inputs.command(commands, "paper", run, "the papers' tables and figures")
    count = inputs.count
    inputs.add_arguments(parser, draft=True)
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text")
    parser.add_argument("--context", type=count(256), metavar="N", help="default: 16384")
    parser.add_argument("--rate", type=inputs.number(0.01), default=2.0, metavar="GB/s", help="of the link")
    parser.add_argument("--seeds", type=count(1), metavar="N", help="texts of each row (default: 12)")
    parser.add_argument("--temperature", type=inputs.number(), default=0.6, metavar="T")
    parser.add_argument("-n", "--new-tokens", type=count(8), metavar="N", help="default: 192")
    parser.add_argument("--batch", type=count(2), default=4, metavar="N", help="prompts at once")
    parser.add_argument("--batch-context", type=count(64), metavar="N", help="default: 8192")
    parser.add_argument("--datastore", type=Path, metavar="FILE", help="of other texts, for REST")
    parser.add_argument("--shapes", type=inputs.names(shapes.SHAPES), default=shapes.SHAPES, metavar="A,B")
    parser.add_argument(
        "--parts", type=inputs.names(PARTS), default=tuple(PARTS), metavar="A,B", help="default: all"
    )
    parser.add_argument("--quick", action="store_true", help="4K tokens, 2 short texts of each row")
    parser.add_argument("--no-plot", action="store_true")


SIZES = {"context": (16384, 4096), "seeds": (12, 2), "new_tokens": (192, 48), "batch_context": (8192, 2048)}
"""By argument: whole, and quick."""


def run(arguments: argparse.Namespace) -> None:
    for name, (whole, quick) in SIZES.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else whole)
    if not arguments.no_plot:
        report.pyplot()
    texts = inputs.read_texts(arguments.text)
    models = inputs.load(arguments)
    described = machine.describe(models.target.device)
    path = inputs.destination(arguments.out, "paper", described)
    study = Study(models, [encode(models.tokenizer, text) for _, text in texts], arguments)
    found = report.envelope("paper", arguments, described) | {
        "model": models.names[0],
        "text": [name for name, _ in texts],
        "context": min(arguments.context, len(study.tokens)),
        "temperature": arguments.temperature,
        "new_tokens": arguments.new_tokens,
        "seeds": arguments.seeds,
        "link_gb_s": arguments.rate,
    }
    parts = {name: PARTS[name] for name in arguments.parts}
    for name, part in parts.items():
        found[name] = part.measure(study)
        report.write_json(path, found)  # each part as it is done: all of them take an hour
    plotted = None if arguments.no_plot else path.with_suffix(".png")
    if plotted is not None:
        page.plot(found, parts, plotted)
    path.with_suffix(".md").write_text(page.page(found, parts, plotted), encoding="utf-8")
    report.finish(path, found, [page.table(found[name]) for name in parts], found)
