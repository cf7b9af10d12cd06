"""`python -m bench paper`: the tables and figures of the papers, measured on one model and its texts."""

from __future__ import annotations

import argparse
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from bench import arguments as args
from bench.arguments import say
from bench.results import Row
from bench.studies import two_devices
from bench.studies.acceptance import CACHES, small_caches
from bench.studies.continued import BUDGET_SHARE, Continued
from bench.studies.study import Part, Study
from bench.studies.texts import passed, recompose, take
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import (
    DRAFT_LENGTHS,
    LATER_CHOICES,
    ceiling,
    expected_speedup,
    expected_tokens,
)
from offload_rt.config.schema import LevelConfig
from offload_rt.config.sequoia import TreePlan
from offload_rt.drafting.levels.base import needs_draft_model
from offload_rt.drafting.levels.configs import load_config
from offload_rt.drafting.levels.sources import DatastoreLevel
from offload_rt.drafting.model_drafter import ModelDrafter
from offload_rt.model.embedded import DEMO
from offload_rt.model.layer_order import LayerOrder

TEMPERATURES = {0.0: 2.31, 0.2: 2.25, 0.4: 2.20, 0.6: 2.19, 0.8: 2.08, 1.0: 2.08, 1.2: 2.02}
GAMMA_1 = dict(enumerate((2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83), 1))  # with γ2 = 6
GAMMA_2 = dict(enumerate((1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20), 1))  # with γ1 = 2
LENGTHS = {64: None, 128: None, 256: 2.28, 512: None}
"""Values of a setting, and the paper's speed-up."""
BUDGETS = (128, 64, 32, 16, 8)
"""The retrieved cache holds one over these of the context."""
DEPTH = 16  # of the chains whose acceptance the theory starts from
PAPER_CEILING = 13.1
TRIFORCE: Mapping[str, object] = {"speculation.levels": ["draft:streaming", "target:retrieved"]}
"""The paper's levels: the config `triforce` also looks up what followed the end of the text before."""


@dataclass(frozen=True)
class Variant:
    """A row of a table: its label, its configuration, and the paper's speed-up over plain decoding."""

    label: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    paper: float | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def sweep(variants: Callable[[Continued], Iterable[Variant]]) -> Callable[[Continued], Iterator[Row]]:
    """Makes a part with a row for each variant, over the link; those that lack a small model are left out."""

    @wraps(variants)
    def measure(study: Continued) -> Iterator[Row]:
        with study.read() as context:
            for variant in variants(study):
                overrides = study.keys(variant.overrides)
                if study.draft is None and needs_draft_model([load_config(variant.config, overrides)]):
                    continue
                say(variant.label)
                plain_ms = study.plain_ms(context)
                row = study.measured(context, overrides, variant.config, **variant.sampling)
                over = {"over_plain": plain_ms / row["ms_per_token"], "paper": variant.paper}
                yield {"variant": variant.label} | row | over

    return measure


@sweep
def temperatures(study: Continued) -> Iterator[Variant]:
    """Temperatures, and without parts of the hierarchy.

    TriForce, table 2; on chip there.
    """
    for heat, paper in TEMPERATURES.items():
        yield Variant(f"triforce, T = {heat:g}", "triforce", TRIFORCE, paper, {"temperature": heat})
    hierarchy = {"speculation.levels": ["draft:streaming", "target:streaming"]}
    yield Variant("retrieval without hierarchy", "retrieval", paper=1.80)
    yield Variant("StreamingLLM without hierarchy", "streaming", paper=1.75)
    yield Variant("StreamingLLM with hierarchy", "triforce", hierarchy, 1.90)
    yield Variant("small model alone", "naive", paper=1.42)


@sweep
def gammas(study: Continued) -> Iterator[Variant]:
    """Draft lengths of each level.

    TriForce, table 8.
    """
    depths = [(first, 6, paper) for first, paper in GAMMA_1.items()]
    for first, second, paper in [*depths, *((2, second, paper) for second, paper in GAMMA_2.items())]:
        keys = {**TRIFORCE, "speculation.gamma1": first, "speculation.gamma2": second}
        yield Variant(f"γ1 = {first}, γ2 = {second}", "triforce", keys, paper)


@sweep
def lengths(study: Continued) -> Iterator[Variant]:
    """Tokens generated.

    TriForce, table 7.
    """
    for count, paper in LENGTHS.items():
        yield Variant(f"{count} tokens", "triforce", TRIFORCE, paper, {"max_tokens": count})


@sweep
def budgets(study: Continued) -> Iterator[Variant]:
    """Size of the retrieved cache.

    TriForce, figure 6.
    """
    for share in BUDGETS:
        budget = max(128, study.sizes.context // share)
        sizes = {"retrieval.budget": budget, "retrieval.recent": budget // 4}
        yield Variant(f"a {share}th: {budget} entries", "retrieval", sizes)


@sweep
def sources(study: Continued) -> Iterator[Variant]:
    """Drafters.

    TriForce, table 5, and the systems of other papers: look-up in the context and in a datastore of other
        texts,
    a head on hidden states, a target without some of its layers, layers in groups.
    """
    yield Variant("n-grams of the text", "lookup")
    yield Variant("suffixes of the text", "suffix")
    if study.arguments.datastore is not None:
        yield Variant("REST", "lookup", datastore_keys(study.arguments.datastore), 1.47)
    if study.name == DEMO or "head.path" in dict(study.arguments.overrides):
        yield Variant("a head on hidden states", "heads")
    for cache, name, paper in (("retrieved", "retrieved KV", None), ("shared", "all KV", 1.36)):
        skipping = {"speculation.levels": [{"model": "target", "cache": cache, "layers": "skip:2"}]}
        yield Variant(f"without a layer, {name}", "retrieval", skipping, paper)
    yield Variant("EasySpec", "easyspec")
    yield Variant("trees", "trees")
    yield Variant("triforce", "triforce", TRIFORCE, 2.19)
    yield Variant("triforce, suffixes of the text first", "triforce")


def acceptance_of(tokens: float, depth: int) -> float:
    """The acceptance rate at which chains of `depth` yield `tokens` tokens per pass."""
    steps = 2**40
    return bisect(range(steps), tokens, key=lambda step: expected_tokens(step / steps, depth)) / steps


def expected_of(shape: str, depth: int, acceptance: float) -> float:
    """Tokens per pass that a chain or a Sequoia tree yields, given the acceptance of first children."""
    kind, _, nodes = shape.partition(":")
    if kind == "chain":
        return expected_tokens(acceptance, depth)
    return TreePlan((acceptance, *LATER_CHOICES), int(nodes)).tokens(depth)


def ceilings(study: Continued) -> Iterator[Row]:
    """Theory and measurement.

    TriForce, figure 5. `ceiling` is the speed-up if every drafted token is accepted and drafting hides every
    pass; `expected` is the one that the measured parts give without drafting ahead, which may exceed it.
    """
    longest = study.sizes.context
    for context in (longest // 4, longest // 2, longest):
        say(f"ceiling at {context} tokens")
        with study.read(context) as text:
            deep = study.measured(text, study.keys() | {"speculation.gamma2": DEPTH})
            pass_ms = study.plain_ms(text)
            token_ms = deep["draft_ms_per_pass"] / deep["proposed_per_pass"]
            accepted = acceptance_of(deep["tokens_per_pass"], DEPTH)
            expected = {n: expected_speedup(pass_ms, token_ms, accepted, n) for n in DRAFT_LENGTHS}
            best = max(expected, key=expected.__getitem__)
            measured = study.measured(text, study.keys() | {"speculation.gamma2": best})
        row = {"context": context, "pass_ms": pass_ms, "draft_token_ms": token_ms}
        row |= {"tokens_at_16": deep["tokens_per_pass"], "acceptance": accepted}
        row |= {"ceiling": ceiling(pass_ms, token_ms), "best_depth": best, "expected": expected[best]}
        yield row | {"measured": pass_ms / measured["ms_per_token"], "paper_ceiling": PAPER_CEILING}


CHAINS = tuple(f"chain@{depth}" for depth in (8, 16, 24, 32, 48))
TREES = "sequences:4@24", "tree:2,2,2@16", "grown:64@16", "grown:128@32"
SEQUOIA = "sequoia:64@16", "sequoia:128@32", "sequoia:256@32"
SHAPES = (*CHAINS, *TREES, *SEQUOIA, "chain@32+suffix", "sequoia:256@32+suffix")
"""Shapes, their depths, and drafts that are merged into them."""
GROUPS = tuple(f"groups:{count}" for count in range(1, 6))
LAYERS = ("all", *GROUPS, "skip:2", "skip:2,3", "skip:1a,2a,3a")
GROWN = ("grown:10", "grown:20", "grown:40")
"""Trees of depth 5, so 2, 4 and 8 nodes wide."""
PROBED = 64


def shapes(study: Continued) -> list[Row]:
    """Shapes of drafts.

    TriForce, figure 6c. `expected` are the tokens per pass that the acceptance of the first chain predicts.
    """
    rows: list[Row] = []
    alpha: float | None = None
    with study.read() as context:
        for name in study.sizes.shapes:
            say(f"shape {name}")
            shape, _, depth_and_source = name.partition("@")
            depth, _, source = depth_and_source.partition("+")
            row = study.measured(context, study.drafting(int(depth), draft=shape, merge=source))
            if not source and shape == "chain" and alpha is None:
                alpha = acceptance_of(row["tokens_per_pass"], int(depth))
            predictable = alpha is not None and not source and shape.startswith(("chain", "sequoia"))
            expected = expected_of(shape, int(depth), alpha or 0.0) if predictable else None
            rows.append({"draft": name, **row, "expected": expected})
    chains = [row for row in rows if row["draft"].startswith("chain@") and "+" not in row["draft"]]
    best = max((row["tokens_per_pass"] for row in chains), default=None)
    return [row | {"over_best_chain": best and row["tokens_per_pass"] / best} for row in rows]


def layers(study: Continued) -> list[Row]:
    """Layers in groups or left out.

    EasySpec, figure 4 and table 4, and Draft & Verify; without the link. `likeness` is the cosine similarity
    of the last hidden states to the exact ones. `own devices ms` is a prediction: the time per drafted token
    if the attention blocks of a group run on devices of their own, from the measured time of one block.
    `one core ms` and `two cores ms` are measured, per drafted token too: a pass over as many entries by one
    core, and with the attention blocks of its groups shared out over two.
    """
    alike = _likeness(study)
    rows: list[Row] = []
    plans = [(name, flag, "chain", 8) for name in LAYERS for flag in (True, False)[: 1 + ("groups" in name)]]
    plans += [("groups:3", flag, tree, 5) for tree in GROWN for flag in (True, False)]
    with study.read(linked=False) as context:
        for name, calibrate, draft, depth in plans:
            say(f"layers {name}, {draft}{'' if calibrate else ', not calibrated'}")
            measured = study.measured(
                context, study.drafting(depth, layers=name, calibrate=calibrate, draft=draft)
            )
            row: Row = {"layers": name, "draft": f"{draft}@{depth}", "calibrated": calibrate}
            row |= {key: measured[key] for key in ("tokens_per_pass", "accepted")} | {"likeness": alike[name]}
            rows.append(
                row | {"draft_token_ms": measured["draft_ms_per_pass"] / measured["proposed_per_pass"]}
            )
    by_name = {row["layers"]: row["draft_token_ms"] for row in rows if row["draft"] == "chain@8"}
    attention_ms = max(0.0, by_name["all"] - by_name["skip:1a,2a,3a"]) / 3
    for row, (name, _, draft, depth) in zip(rows, plans, strict=True):
        plan = LayerOrder.parse(name, study.target.config.num_hidden_layers)
        spared = 0 if plan is None else sum(len(group) - 1 for group in plan.groups)
        width = DraftShape.parse(draft).deep(depth).per_pass  # tokens that a pass drafts
        row["own_devices_ms"] = row["draft_token_ms"] - attention_ms * spared / width
        case = _case(study, load_config("retrieval", study.keys()).retrieval.budget, width)
        measured = dict(*two_devices.measured(study.target, case, [name] if spared else []))
        row["one_core_ms"], row["two_cores_ms"] = (
            measured.get(f"{form}_ms", 0.0) / width or None for form in ("one_device", "two_devices")
        )
    return rows


def devices(study: Continued) -> Iterator[Row]:
    """Layers in groups on two devices.

    EasySpec, with a random model of 8 layers (hidden states of 256, MLPs of 512, 4 heads) that drafts 8
    tokens a pass over as many entries as the context has, so that attention takes most of the time: all
    layers in turn, groups on one device, and their attention blocks shared out over two, which are two cores
    or two GPUs; `share` is two over one. CPU times are those of the calling thread, and of the second device.
    """
    model = two_devices.random_draft(study.target.device)
    yield from two_devices.measured(model, _case(study, study.sizes.context))


def _case(study: Continued, entries: int, tokens: int = 8) -> two_devices.Case:
    quick = study.sizes.context < Sizes.context
    return two_devices.Case(entries, tokens, 2 if quick else two_devices.Case.repeats)


@torch.inference_mode()
def _likeness(study: Continued) -> dict[str, float]:
    """Mean cosine similarity of the last hidden states to the exact ones, by order of layers."""
    context, hidden_of = study.sizes.context, dict[str, Tensor]()
    prompt, probed = study.tokens[:context], study.tokens[context : context + PROBED]
    with study.sequence("likeness of orders of layers", prompt, PROBED, "retrieval") as sequence:
        take(sequence, prompt)
        for name in LAYERS:
            recompose(sequence, load_config("retrieval", study.drafting(PROBED, layers=name)))
            drafter = sequence.verifier.drafter
            assert isinstance(drafter, ModelDrafter)
            hidden = passed(drafter, probed, PROBED, states=True).states
            assert hidden is not None
            hidden_of[name] = hidden.float()
    cosine = torch.cosine_similarity
    return {
        name: float(cosine(hidden_states, hidden_of["all"], dim=-1).mean())
        for name, hidden_states in hidden_of.items()
    }


@dataclass(frozen=True)
class Sizes:
    """Sizes of `paper`; the last four are those of `model_card.Sizes`.

    Attributes:
        rate: of the link, GB/s.
        seeds: continuations of each row.
        new_tokens: of each continuation.
    """

    context: int = 16384
    rate: float = 2.0
    seeds: int = 12
    temperature: float = 0.6
    new_tokens: int = 192
    shapes: tuple[str, ...] = SHAPES
    positions: int = 192
    divisors: tuple[int, ...] = (1,)
    shares: tuple[int, ...] = (BUDGET_SHARE,)
    caches: tuple[str, ...] = tuple(CACHES)


def datastore_keys(path: str) -> dict[str, object]:
    """Configuration keys for drafting from a datastore."""
    levels = [{"model": "datastore", "draft": "grown:64"}]
    return {"speculation.levels": levels, "datastore.path": path}


PARTS = {
    "policies": small_caches,
    "temperatures": temperatures,
    "gammas": gammas,
    "lengths": lengths,
    "budgets": budgets,
    "sources": sources,
    "shapes": shapes,
    "layers": layers,
    "devices": devices,
    "ceiling": ceilings,
}


def opened(arguments: argparse.Namespace, sizes: Sizes) -> Continued:
    """Opens models and texts; a datastore that cannot be drafted from is refused before any work."""
    if arguments.datastore is not None:
        config = load_config("lookup", datastore_keys(arguments.datastore))
        DatastoreLevel(config, LevelConfig("datastore")).source()
    return Continued.opened(arguments, sizes)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the study's own."""
    args.add_models(parser)
    parser.add_argument("--datastore", metavar="FILE", help="of other texts, for the row REST")
    args.add_numbers(
        parser,
        Sizes,
        ("context", int, 256, "tokens of the prompt"),
        ("rate", float, 0.01, "of the link, GB/s"),
        ("seeds", int, 1, "continuations of each row"),
        ("temperature", float, 0, "of sampling"),
    )
    meaning = f"of each continuation (default: {Sizes.new_tokens})"
    parser.add_argument("-n", "--new-tokens", type=args.number(int, 8), metavar="N", help=meaning)
    kind = args.listed(args.one_of(SHAPES))
    parser.add_argument(
        "--shapes", type=kind, metavar="A,B", help=f"of drafts (default: {args.shown(SHAPES)})"
    )


STUDY = Study(
    note="""Drafts are sampled. KV is behind a paced link unless a table says otherwise. `over plain` is the
    speed-up over plain decoding over the same link, `error` the standard error of the tokens per pass over
    the seeds. Columns `paper` are the papers' own figures, of other models on other machines.""",
    sizes=Sizes(),
    quick={"context": 4096, "seeds": 2, "new_tokens": 48, "positions": PROBED},
    minutes=(60, 5),
    opened=opened,
    parts={name: Part(measure) for name, measure in PARTS.items()},
    options=options,
)
