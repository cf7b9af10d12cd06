"""The tables of TriForce, and the systems that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.inputs import say
from bench.paper.runs import STRIDE, Row, Study
from offload_rt.config import load_config, uses_small_model
from offload_rt.loading import DEMO

PLAIN_TOKENS = 8
BUDGETS = (128, 64, 32, 16, 8)
"""One over the share of the text that the retrieved cache holds."""


@dataclass(frozen=True)
class Variant:
    """A row of a table: what it is called, what is run, and the paper's speed-up over plain decoding."""

    label: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    temperature: float | None = None
    new_tokens: int | None = None
    paper: float | None = None


TEMPERATURES = {0.0: 2.31, 0.2: 2.25, 0.4: 2.20, 0.6: 2.19, 0.8: 2.08, 1.0: 2.08, 1.2: 2.02}
GAMMA_1 = dict(enumerate((2.30, 2.31, 2.24, 2.17, 2.09, 2.01, 1.92, 1.83), 1))  # with γ2 = 6
GAMMA_2 = dict(enumerate((1.62, 1.90, 2.13, 2.22, 2.26, 2.31, 2.24, 2.20), 1))  # with γ1 = 2
LENGTHS = {64: None, 128: None, 256: 2.28, 512: None}
"""What varies, and the paper's speed-up."""

STREAMING_HIERARCHY = {"speculation.levels": ["draft:streaming", "target:streaming"]}
ABLATIONS = (
    Variant("retrieval without hierarchy", "retrieval", paper=1.80),
    Variant("StreamingLLM without hierarchy", "streaming", paper=1.75),
    Variant("StreamingLLM with hierarchy", "triforce", STREAMING_HIERARCHY, paper=1.90),
    Variant("small model alone", "naive", paper=1.42),
)


def _sweep(study: Study, variants: Sequence[Variant]) -> list[Row]:
    """A row for each variant, over the link; those that need a small model only where there is one."""
    given = dict(study.arguments.overrides)
    rows = []
    with study.reader() as llm:
        for one in variants:
            overrides = study.keys | STRIDE | dict(one.overrides) | given
            if study.models.draft is None and uses_small_model([load_config(one.config, overrides)]):
                continue
            say(one.label)
            plain_ms = study.plain_ms(llm, PLAIN_TOKENS)
            row = study.measured(llm, overrides, one.config, one.temperature, one.new_tokens)
            kept = {key: row[key] for key in ("tokens_per_pass", "accepted", "ms_per_token")}
            over = {"over_plain": plain_ms / row["ms_per_token"], "paper": one.paper}
            rows.append({"variant": one.label} | kept | over)
    return rows


def temperatures(study: Study) -> list[Row]:
    heated = [
        Variant(f"triforce, T = {heat:g}", "triforce", temperature=heat, paper=paper)
        for heat, paper in TEMPERATURES.items()
    ]
    return _sweep(study, [*heated, *ABLATIONS])


def gammas(study: Study) -> list[Row]:
    depths = [(first, 6, paper) for first, paper in GAMMA_1.items()]
    depths += [(2, second, paper) for second, paper in GAMMA_2.items()]
    variants = []
    for first, second, paper in depths:
        keys = {"speculation.gamma1": first, "speculation.gamma2": second}
        variants.append(Variant(f"γ1 = {first}, γ2 = {second}", "triforce", keys, paper=paper))
    return _sweep(study, variants)


def lengths(study: Study) -> list[Row]:
    variants = [
        Variant(f"{count} tokens", "triforce", new_tokens=count, paper=paper)
        for count, paper in LENGTHS.items()
    ]
    return _sweep(study, variants)


def budgets(study: Study) -> list[Row]:
    variants = []
    for share in BUDGETS:
        budget = max(128, study.arguments.context // share)
        sizes = {"retrieval.budget": budget, "retrieval.recent": budget // 4}
        variants.append(Variant(f"a {share}th: {budget} entries", "retrieval", sizes))
    return _sweep(study, variants)


def sources(study: Study) -> list[Row]:
    variants = [Variant("n-grams of the text", "lookup"), Variant("suffixes of the text", "suffix")]
    if study.arguments.datastore is not None:
        rest = {
            "speculation.levels": [{"model": "datastore", "draft": "grown:64"}],
            "datastore.path": str(study.arguments.datastore),
        }
        variants.append(Variant("REST", "lookup", rest, paper=1.47))
    if study.models.names[0] == DEMO or "head.path" in dict(study.arguments.overrides):
        variants.append(Variant("a head on hidden states", "heads"))
    variants += [
        Variant("without a layer, retrieved KV", "retrieval", _skipping("retrieved")),
        Variant("without a layer, all KV", "retrieval", _skipping("shared"), paper=1.36),
        Variant("EasySpec", "easyspec"),
        Variant("trees", "trees"),
        Variant("triforce", "triforce", paper=2.19),
    ]
    return _sweep(study, variants)


def _skipping(cache: str) -> dict[str, object]:
    return {"speculation.levels": [{"model": "target", "cache": cache, "layers": "skip:2"}]}
