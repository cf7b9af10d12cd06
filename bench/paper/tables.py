"""The tables of TriForce, and the systems that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.inputs import say
from bench.paper.runs import STRIDE, Row, Study
from offload_rt.config import load_config, uses_small_model
from offload_rt.loading import DEMO

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


@dataclass(frozen=True)
class Variant:
    """A row of a table: what it is called, what is run, and what the paper has there."""

    label: str
    config: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    temperature: float | None = None
    new_tokens: int | None = None
    paper: float | None = None


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
    variants = [
        Variant(f"triforce, T = {heat:g}", "triforce", temperature=heat, paper=paper)
        for heat, paper in zip(TEMPERATURES, TABLE_2, strict=True)
    ]
    variants += [Variant(name, *given[:2], paper=given[2]) for name, given in ABLATIONS.items()]
    return _sweep(study, variants)


def gammas(study: Study) -> list[Row]:
    depths = [(first, 6, paper) for first, paper in zip(GAMMAS, GAMMA_1, strict=True)]
    depths += [(2, second, paper) for second, paper in zip(GAMMAS, GAMMA_2, strict=True)]
    return _sweep(
        study,
        [
            Variant(
                f"γ1 = {first}, γ2 = {second}",
                "triforce",
                {"speculation.gamma1": first, "speculation.gamma2": second},
                paper=paper,
            )
            for first, second, paper in depths
        ],
    )


def lengths(study: Study) -> list[Row]:
    papers = ((count, 2.28 if count == 256 else None) for count in LENGTHS)
    return _sweep(
        study, [Variant(f"{count} tokens", "triforce", new_tokens=count, paper=one) for count, one in papers]
    )


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
        rest: dict[str, object] = {
            "speculation.levels": [{"model": "datastore", "draft": "grown:64"}],
            "datastore.path": str(study.arguments.datastore),
        }
        variants.append(Variant("REST", "lookup", rest, paper=1.47))
    skipped: dict[str, object] = {"speculation.levels": WITHOUT_LAYERS}
    if study.models.names[0] == DEMO or "head.path" in dict(study.arguments.overrides):
        variants.append(Variant("a head on hidden states", "heads"))
    variants += [
        Variant("without a layer", "retrieval", skipped, paper=1.36),
        Variant("EasySpec", "easyspec"),
        Variant("trees", "trees"),
        Variant("triforce", "triforce", paper=2.19),
    ]
    return _sweep(study, variants)
