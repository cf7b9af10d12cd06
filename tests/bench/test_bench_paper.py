"""`python -m bench paper`: one run with tiny sizes, and what it computes. No time is checked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.bench_setup import bench_main, records, save_pair
from support.tiny_models import byte_tokenizer, real_text

from bench.studies import paper
from bench.studies.paper import STUDY, Sizes, acceptance_of, expected_of
from offload_rt.config.priors import LATER_CHOICES
from offload_rt.drafting.datastore import build

SHAPES = ("chain@2", "chain@6", "sequences:2@6", "grown:24@6")
FEWER = {
    "LAYERS": ("all", "groups:1", "groups:3", "skip:1a,2a,3a"),
    "TEMPERATURES": {0.0: 2.31},
    "GAMMA_1": {3: 1.6},
    "GAMMA_2": {1: 1.7, 3: 1.8},
    "LENGTHS": {6: None},
    "BUDGETS": (8,),
    "GROWN": ("grown:10",),
}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """All parts, on a target of five layers whose retrieved cache holds most of the text."""
    folder: Path = tmp_path_factory.mktemp("paper")
    given, stored, out = save_pair(folder, layers=5), folder / "store.safetensors", folder / "out.jsonl"
    build([list(real_text().encode()[2000:4000])], byte_tokenizer(), stored)
    sizes = "--context 320 --rate 1 --seeds 2 -n 12"
    small = dataclasses.replace(STUDY, sizes=Sizes(shapes=SHAPES))
    with pytest.MonkeyPatch.context() as fewer:
        for name, values in FEWER.items():
            fewer.setattr(paper, name, values)
        fewer.setattr(paper, "STUDY", small)
        assert bench_main("paper", *given, f"--datastore {stored} --out {out}", sizes) == 0
    assert records(out)[0]["datastore"] == "store.safetensors"
    page = out.with_suffix(".md").read_text()
    assert all(f"## {part.title}\n" in page for part in STUDY.parts.values())
    yield json.loads(out.with_suffix(".summary.json").read_text())


def test_every_table_has_its_rows(tables: dict[str, list[dict[str, Any]]]) -> None:
    assert list(tables) == list(STUDY.parts)
    caches = {row["cache"]: row for row in tables["policies"]}
    assert caches["exact top-k, first layer whole"]["books"] > caches["exact top-k"]["books"] > 0.2
    assert caches["mean keys (TriForce)"]["paper_books"] == 0.9649
    assert all(0 < row["needles"] <= 1 for row in caches.values())
    variants = {name: {row["variant"]: row for row in tables[name]} for name in list(tables)[1:6]}
    assert variants["temperatures"]["triforce, T = 0"]["paper"] == 2.31
    assert list(variants["gammas"]) == ["γ1 = 3, γ2 = 6", "γ1 = 2, γ2 = 1", "γ1 = 2, γ2 = 3"]
    assert list(variants["budgets"]) == ["a 8th: 128 entries"] and list(variants["lengths"]) == ["6 tokens"]
    assert {"REST", "EasySpec", "triforce", "suffixes of the text"} <= set(variants["sources"])
    for row in (row for table in variants.values() for row in table.values()):
        assert row["tokens_per_pass"] >= 1 and row["ms_per_token"] > 0 and row["over_plain"] > 0


def test_shapes_and_theory(tables: dict[str, list[dict[str, Any]]]) -> None:
    rows = {row["draft"]: row for row in tables["shapes"]}
    assert tuple(rows) == SHAPES
    chains = max(rows[f"chain@{depth}"]["tokens_per_pass"] for depth in (2, 6))
    for row in rows.values():
        # A pass yields what is accepted of its draft and a token of its own; the last one may be cut.
        accepted = row["accepted"] * row["proposed_per_pass"]
        assert row["tokens_per_pass"] == pytest.approx(1 + accepted, abs=0.5)
        assert row["over_best_chain"] == pytest.approx(row["tokens_per_pass"] / chains)
    proposed = [rows[name]["proposed_per_pass"] for name in ("chain@2", "chain@6", "grown:24@6")]
    assert 1 < proposed[0] <= 2 < proposed[1] <= 6 < proposed[2] <= 24
    for row in tables["ceiling"]:
        assert row["ceiling"] == pytest.approx(row["pass_ms"] / row["draft_token_ms"])
        assert 0 < row["expected"] < row["ceiling"] + 1
        assert expected_of("chain", 16, row["acceptance"]) == pytest.approx(row["tokens_at_16"], abs=1e-6)
    assert acceptance_of(expected_of("chain", 8, 0.7), 8) == pytest.approx(0.7, abs=1e-9)
    # Of two nodes, a second child where that is likelier than a grandchild.
    assert expected_of("sequoia:2", 2, 0.5) == pytest.approx(1 + 0.5 + max(0.5 * 0.5, 0.5 * LATER_CHOICES[0]))


def test_groups_on_two_devices_compute_the_same(tables: dict[str, list[dict[str, Any]]]) -> None:
    rows = {row["layers"]: row for row in tables["devices"]}
    exchanges = {"groups:2@1": 3, "groups:2": 2, "groups:3": 2, "groups:4": 2}
    assert {name: row["exchanges"] for name, row in rows.items()} == exchanges
    assert rows["groups:2@1"]["groups"] == [[0], [1, 2], [3, 4], [5, 6], [7]]
    assert all(row["difference"] == 0 and row["share"] > 0 for row in rows.values())
    measured = {row["layers"]: (row["one_core_ms"], row["two_cores_ms"]) for row in tables["layers"]}
    assert measured["all"] == measured["groups:1"] == (None, None) and min(measured["groups:3"]) > 0


def test_approximate_layers_cost_acceptance(tables: dict[str, list[dict[str, Any]]]) -> None:
    chains = [row for row in tables["layers"] if row["draft"] == "chain@8"]
    accepted = {(row["layers"], row["calibrated"]): row["accepted"] for row in chains}
    alike = {row["layers"]: row["likeness"] for row in chains}
    assert alike["all"] == pytest.approx(1) == alike["groups:1"]
    assert max(alike["groups:3"], alike["skip:1a,2a,3a"]) < 1
    assert accepted["groups:1", True] == accepted["groups:1", False] == accepted["all", True] > 0.2
    trees = {(row["draft"], row["calibrated"]) for row in tables["layers"] if row["draft"].endswith("@5")}
    assert trees == {("grown:10@5", flag) for flag in (True, False)}
