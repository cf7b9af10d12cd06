"""The tables of TriForce, and the systems that it is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.inputs import say
from bench.paper.runs import Row, Study, base, reader, runs, summary
from cpu_kv import PacedLink
from offload_rt.config import load_config, uses_small_model
from offload_rt.loading import DEMO
from offload_rt.results import SamplingParams

PLAIN_TOKENS = 8
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2)
GAMMAS = range(1, 9)
LENGTHS = (64, 128, 256, 512)
BUDGETS = (128, 64, 32, 16, 8)
"""One over the share of the text that the retrieved cache holds."""

STREAMING_HIERARCHY = ["draft:streaming", "target:streaming"]
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
    models, arguments = study.models, study.arguments
    common = base(arguments) | {"retrieval.refresh": "stride:32"}
    rows = []
    with reader(study, link=PacedLink(arguments.rate * 1e9)) as llm:
        for variant in variants:
            overrides = common | dict(variant.overrides) | dict(arguments.overrides)
            if models.draft is None and uses_small_model([load_config(variant.config, overrides)]):
                continue
            say(variant.label)
            plain = [llm.rerun(SamplingParams(max_tokens=PLAIN_TOKENS, ignore_eos=True), "plain", common)]
            results = runs(llm, arguments, overrides, variant.config, variant.temperature, variant.new_tokens)
            row, plain_ms = summary(results), summary(plain)["ms_per_token"]
            kept = {key: row[key] for key in ("tokens_per_pass", "accepted", "ms_per_token")}
            over = {"over_plain": plain_ms / row["ms_per_token"], "paper": variant.paper}
            rows.append({"variant": variant.label} | kept | over)
    return rows


def temperatures(study: Study) -> list[Row]:
    variants = [
        Variant(f"triforce, T = {heat:g}", "triforce", temperature=heat, paper=paper)
        for heat, paper in zip(TEMPERATURES, TABLE_2, strict=True)
    ]
    variants += [Variant(name, *given[:2], paper=given[2]) for name, given in ABLATIONS.items()]
    return _sweep(study, variants)


def gammas(study: Study) -> list[Row]:
    def variant(first: int, second: int, paper: float) -> Variant:
        depths = {"speculation.gamma1": first, "speculation.gamma2": second}
        return Variant(f"γ1 = {first}, γ2 = {second}", "triforce", depths, paper=paper)

    variants = [variant(first, 6, paper) for first, paper in zip(GAMMAS, GAMMA_1, strict=True)]
    variants += [variant(2, second, paper) for second, paper in zip(GAMMAS, GAMMA_2, strict=True)]
    return _sweep(study, variants)


def lengths(study: Study) -> list[Row]:
    paper = {256: 2.28}
    variants = [
        Variant(f"{count} tokens", "triforce", new_tokens=count, paper=paper.get(count)) for count in LENGTHS
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
        rest: dict[str, object] = {
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
