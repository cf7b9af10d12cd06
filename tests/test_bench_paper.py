"""`python -m bench paper`: what it measures on a tiny model. No time is checked here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import byte_tokenizer, noisy_copy, real_text, tiny_target

import bench.__main__ as command_line
from bench import paper
from bench.paper import PAPER, Sizes, acceptance_of, expected_of
from offload_rt.drafting.datastore import build
from offload_rt.drafting.expectations import LATER_CHOICES, expected_speedup

SHAPES = ("chain@2", "chain@6", "sequences:2@6", "grown:24@6")
GROWN = ("grown:10",)
TABLES = ("temperatures", "gammas", "lengths", "budgets", "sources")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All parts, on a target of five layers whose retrieved cache holds most of the text."""
    folder = tmp_path_factory.mktemp("paper")
    target = tiny_target("llama-gqa", seed=3, layers=5)
    for name, model in (("target", target), ("draft", noisy_copy(target))):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    text, out, stored = folder / "book.txt", folder / "out.json", folder / "store.safetensors"
    text.write_bytes(real_text().encode()[:2000])
    build([list(real_text().encode()[2000:4000])], byte_tokenizer(), stored)
    arguments = f"--model {folder / 'target'} --draft {folder / 'draft'} --text {text} --datastore {stored}"
    arguments += f" --out {out} --context 320 --rate 1 --seeds 2 -n 12"
    with pytest.MonkeyPatch.context() as fewer:
        small = dataclasses.replace(PAPER, sizes=Sizes(shapes=SHAPES))
        fewer.setattr(command_line, "commands", lambda: (small,))
        fewer.setattr(paper, "LAYERS", ("all", "groups:1", "groups:3", "skip:1a,2a,3a"))
        for name, values in (
            ("TEMPERATURES", {0.0: 2.31, 1.0: 2.08}),
            ("GAMMA_1", {1: 1.5, 3: 1.6}),
            ("GAMMA_2", {1: 1.7, 3: 1.8}),
            ("LENGTHS", {6: None, 12: None}),
            ("BUDGETS", (8, 2)),
            ("GROWN", GROWN),
        ):
            fewer.setattr(paper, name, values)
        assert command_line.main(["paper", *arguments.split()]) == 0
    assert str(folder) not in out.read_text(), "a report goes elsewhere: no paths in it"
    found: dict[str, Any] = json.loads(out.read_text())
    page = out.with_suffix(".md").read_text()
    assert all(
        f"## {title}\n" in page for title in ("What a small cache holds", "Who drafts", "Tokens generated")
    )
    assert out.with_suffix(".png").stat().st_size > 10_000
    yield found


def test_policies_are_told_apart(report: dict[str, Any]) -> None:
    rows = {row["cache"]: row for row in report["policies"]}
    assert rows["exact top-k, first layer whole"]["books"] > rows["exact top-k"]["books"] > 0.2
    assert rows["mean keys (TriForce)"]["paper_books"] == 0.9649 and rows["retrieval"]["paper_books"] is None
    assert all(0 < row["needles"] <= 1 for row in rows.values())


def test_theory_stands_beside_measurement(report: dict[str, Any]) -> None:
    for row in report["ceiling"]:
        assert row["ceiling"] == pytest.approx(row["pass_ms"] / row["draft_token_ms"])
        assert 0 < row["expected"] < row["ceiling"] + 1 and 0 < row["acceptance"] <= 1
        assert expected_of("chain", 16, row["acceptance"]) == pytest.approx(row["tokens_at_16"], abs=1e-6)


def test_acceptance_is_what_yields_as_many_tokens() -> None:
    assert acceptance_of(expected_of("chain", 8, 0.7), 8) == pytest.approx(0.7, abs=1e-9)
    assert expected_speedup(10.0, 1.0, 1.0, 10) == pytest.approx(11 * 10 / 20)
    # Of two nodes, a second child where that is likelier than a grandchild.
    assert expected_of("sequoia:2", 2, 0.5) == pytest.approx(1 + 0.5 + max(0.5 * 0.5, 0.5 * LATER_CHOICES[0]))


def test_every_shape_yields_what_is_accepted_of_it(report: dict[str, Any]) -> None:
    rows = {row["draft"]: row for row in report["shapes"]}
    assert tuple(rows) == SHAPES
    for row in rows.values():
        # A pass yields what was accepted of its draft and a token of its own; the last one may be cut.
        accepted = row["accepted"] * row["proposed_per_pass"]
        assert row["tokens_per_pass"] == pytest.approx(1 + accepted, abs=0.5)
        chains = max(rows[f"chain@{depth}"]["tokens_per_pass"] for depth in (2, 6))
        assert row["over_best_chain"] == pytest.approx(row["tokens_per_pass"] / chains)
    proposed = [rows[name]["proposed_per_pass"] for name in ("chain@2", "chain@6", "grown:24@6")]
    assert 1 < proposed[0] <= 2 < proposed[1] <= 6 < proposed[2] <= 24


def test_the_tables_have_the_papers_rows(report: dict[str, Any]) -> None:
    rows = {name: {row["variant"]: row for row in report[name]} for name in TABLES}
    assert list(rows["temperatures"])[:3] == [
        "triforce, T = 0",
        "triforce, T = 1",
        "retrieval without hierarchy",
    ]
    assert rows["temperatures"]["triforce, T = 0"]["paper"] == 2.31
    assert list(rows["gammas"]) == [f"γ1 = {a}, γ2 = {b}" for a, b in ((1, 6), (3, 6), (2, 1), (2, 3))]
    assert list(rows["lengths"]) == ["6 tokens", "12 tokens"]
    assert list(rows["budgets"]) == ["a 8th: 128 entries", "a 2th: 160 entries"]
    assert {"REST", "EasySpec", "triforce", "suffixes of the text"} <= set(rows["sources"])
    for row in (row for table in rows.values() for row in table.values()):
        assert row["tokens_per_pass"] >= 1 and row["ms_per_token"] > 0 and row["over_plain"] > 0
    # What it is drawn from hardly differs where nothing is left out.
    deep = rows["gammas"]
    assert deep["γ1 = 2, γ2 = 3"]["tokens_per_pass"] > deep["γ1 = 2, γ2 = 1"]["tokens_per_pass"] > 1.2


def test_approximate_layers_cost_acceptance(report: dict[str, Any]) -> None:
    chains = [row for row in report["layers"] if row["draft"] == "chain@8"]
    rows = {(row["layers"], row["calibrated"]): row["accepted"] for row in chains}
    alike = {row["layers"]: row["likeness"] for row in chains}
    assert (
        alike["all"] == pytest.approx(1) == alike["groups:1"]
        and max(alike["groups:3"], alike["skip:1a,2a,3a"]) < 1
    )
    trees = {(row["draft"], row["calibrated"]) for row in report["layers"] if row["draft"].endswith("@5")}
    assert trees == {(f"{tree}@5", flag) for tree in GROWN for flag in (True, False)}
    assert rows["groups:1", True] == rows["groups:1", False] == rows["all", True] > 0.2
    assert min(rows["groups:3", True], rows["skip:1a,2a,3a", True]) > 0.1
