"""The tables of TriForce, the systems that it is compared with, and what theory expects of them."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps

from bench.inputs import say
from bench.paper.runs import Continued
from bench.studies import Row
from offload_rt.config import load_config, uses_small_model
from offload_rt.drafting.sequoia import Plan
from offload_rt.expectations import DRAFT_LENGTHS, LATER_CHOICES, ceiling, expected_speedup, expected_tokens
from offload_rt.loading import DEMO

PLAIN_TOKENS, CEILING_PLAIN_TOKENS = 8, 16
TEMPERATURES = {0.0: 2.31, 0.2: 2.25, 0.4: 2.20, 0.6: 2.19, 0.8: 2.08, 1.0: 2.08, 1.2: 2.02}
GAMMA_1 = dict(enumerate((2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83), 1))  # with γ2 = 6
GAMMA_2 = dict(enumerate((1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20), 1))  # with γ1 = 2
LENGTHS = {64: None, 128: None, 256: 2.28, 512: None}
"""What varies, and the paper's speed-up."""
BUDGETS = (128, 64, 32, 16, 8)
"""One over the share of the text that the retrieved cache holds."""
DEPTH = 16  # of the chains that theory starts from
PAPER_CEILING = 13.1


@dataclass(frozen=True)
class Variant:
    """A row of a table: what it is called, what is run, and the paper's speed-up over plain decoding."""

    label: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    temperature: float | None = None
    new_tokens: int | None = None
    paper: float | None = None


def sweep(variants: Callable[[Continued], Iterable[Variant]]) -> Callable[[Continued], list[Row]]:
    """A part with a row for each variant, over the link; one that drafts with a small model needs one."""

    @wraps(variants)
    def measure(study: Continued) -> list[Row]:
        rows, given = [], dict(study.arguments.overrides)
        with study.llm() as llm:
            for one in variants(study):
                overrides = study.keys | dict(one.overrides) | given
                if study.models.draft is None and uses_small_model([load_config(one.config, overrides)]):
                    continue
                say(one.label)
                plain_ms = study.plain_ms(llm, PLAIN_TOKENS)
                row = study.measured(llm, overrides, one.config, one.temperature, one.new_tokens)
                over = {"over_plain": plain_ms / row["ms_per_token"], "paper": one.paper}
                rows.append({"variant": one.label} | row | over)
        return rows

    return measure


@sweep
def temperatures(study: Continued) -> Iterator[Variant]:
    """Temperatures, and without parts of the hierarchy.

    TriForce, table 2; on chip there.
    """
    for heat, paper in TEMPERATURES.items():
        yield Variant(f"triforce, T = {heat:g}", "triforce", temperature=heat, paper=paper)
    hierarchy = {"speculation.levels": ["draft:streaming", "target:streaming"]}
    yield Variant("retrieval without hierarchy", "retrieval", paper=1.80)
    yield Variant("StreamingLLM without hierarchy", "streaming", paper=1.75)
    yield Variant("StreamingLLM with hierarchy", "triforce", hierarchy, paper=1.90)
    yield Variant("small model alone", "naive", paper=1.42)


@sweep
def gammas(study: Continued) -> Iterator[Variant]:
    """How far each level drafts.

    TriForce, table 8.
    """
    depths = [(first, 6, paper) for first, paper in GAMMA_1.items()]
    for first, second, paper in [*depths, *((2, second, paper) for second, paper in GAMMA_2.items())]:
        keys = {"speculation.gamma1": first, "speculation.gamma2": second}
        yield Variant(f"γ1 = {first}, γ2 = {second}", "triforce", keys, paper=paper)


@sweep
def lengths(study: Continued) -> Iterator[Variant]:
    """Tokens generated.

    TriForce, table 7.
    """
    for count, paper in LENGTHS.items():
        yield Variant(f"{count} tokens", "triforce", new_tokens=count, paper=paper)


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
    """Who drafts.

    TriForce, table 5, and the systems of other papers: look-up in the text and in a datastore of other texts,
    a head on hidden states, a target without some of its layers, layers in groups.
    """
    yield Variant("n-grams of the text", "lookup")
    yield Variant("suffixes of the text", "suffix")
    if study.arguments.datastore is not None:
        levels = [{"model": "datastore", "draft": "grown:64"}]
        rest = {"speculation.levels": levels, "datastore.path": str(study.arguments.datastore)}
        yield Variant("REST", "lookup", rest, paper=1.47)
    if study.models.names[0] == DEMO or "head.path" in dict(study.arguments.overrides):
        yield Variant("a head on hidden states", "heads")
    for cache, name, paper in (("retrieved", "retrieved KV", None), ("shared", "all KV", 1.36)):
        skipping = {"speculation.levels": [{"model": "target", "cache": cache, "layers": "skip:2"}]}
        yield Variant(f"without a layer, {name}", "retrieval", skipping, paper=paper)
    yield Variant("EasySpec", "easyspec")
    yield Variant("trees", "trees")
    yield Variant("triforce", "triforce", paper=2.19)


def acceptance_of(tokens: float, depth: int) -> float:
    """The acceptance of each drafted token at which chains of `depth` yield so many tokens a pass."""
    steps = 2**40
    return bisect(range(steps), tokens, key=lambda step: expected_tokens(step / steps, depth)) / steps


def expected_of(shape: str, depth: int, acceptance: float) -> float:
    """Tokens that a chain or a Sequoia tree yields by the acceptance of first children."""
    kind, _, nodes = shape.partition(":")
    if kind == "chain":
        return expected_tokens(acceptance, depth)
    return Plan((acceptance, *LATER_CHOICES), int(nodes)).tokens(depth)


def ceilings(study: Continued) -> list[Row]:
    """Theory and measurement.

    TriForce, figure 5. `ceiling`: every drafted token stands, and every pass hides behind drafting.
    `expected`: by the measured parts, with nothing drafted ahead; drafting ahead may exceed it.
    """
    longest, rows = study.sizes.context, list[Row]()
    for context in (longest // 4, longest // 2, longest):
        say(f"ceiling at {context} tokens")
        with study.llm(context) as llm:
            deep = study.measured(llm, study.keys | {"speculation.gamma2": DEPTH})
            pass_ms = study.plain_ms(llm, CEILING_PLAIN_TOKENS)
            token_ms = deep["draft_ms_per_pass"] / deep["proposed_per_pass"]
            accepted = acceptance_of(deep["tokens_per_pass"], DEPTH)
            expected = {n: expected_speedup(pass_ms, token_ms, accepted, n) for n in DRAFT_LENGTHS}
            best = max(expected, key=expected.__getitem__)
            found = study.measured(llm, study.keys | {"speculation.gamma2": best})
        row = {"context": context, "pass_ms": pass_ms, "draft_token_ms": token_ms}
        row |= {"tokens_at_16": deep["tokens_per_pass"], "acceptance": accepted}
        row |= {"ceiling": ceiling(pass_ms, token_ms), "best_depth": best, "expected": expected[best]}
        rows.append(row | {"measured": pass_ms / found["ms_per_token"], "paper_ceiling": PAPER_CEILING})
    return rows
