"""`python -m bench drafts`: what it measures on a tiny model. No time is checked here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import byte_tokenizer, real_text, tiny_target

import bench.__main__ as command_line
from bench import drafts


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """All parts, on a target of five layers whose retrieved cache holds most of the text."""
    folder = tmp_path_factory.mktemp("drafts")
    tiny_target("llama-gqa", seed=3, layers=5).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    text, out = folder / "book.txt", folder / "out.json"
    text.write_bytes(real_text().encode()[:2000])
    arguments = f"--model {folder} --text {text} --out {out} --context 320 --rate 1 --seeds 2 -n 24"
    arguments += " --batch 2 --batch-context 100"
    with pytest.MonkeyPatch.context() as fewer:
        fewer.setattr(drafts, "SHAPES", ("chain@2", "chain@6", "sequences:2@6", "grown:24@6"))
        fewer.setattr(drafts, "LAYERS", ("all", "groups:1", "groups:3", "skip:1a,2a,3a"))
        assert command_line.main(["drafts", *arguments.split()]) == 0
    assert str(folder) not in out.read_text(), "a report goes elsewhere: no paths in it"
    found: dict[str, Any] = json.loads(out.read_text())
    yield found


def test_every_shape_yields_what_is_accepted_of_it(report: dict[str, Any]) -> None:
    rows = {row["draft"]: row for row in report["shapes"]}
    assert list(rows) == ["chain@2", "chain@6", "sequences:2@6", "grown:24@6"]
    for row in rows.values():
        # A pass yields what was accepted of its draft and a token of its own; the last one may be cut.
        accepted = row["accepted"] * row["proposed_per_pass"]
        assert row["tokens_per_pass"] == pytest.approx(1 + accepted, abs=0.5)
        chains = max(rows[f"chain@{depth}"]["tokens_per_pass"] for depth in (2, 6))
        assert row["over_best_chain"] == pytest.approx(row["tokens_per_pass"] / chains)
    proposed = [rows[name]["proposed_per_pass"] for name in ("chain@2", "chain@6", "grown:24@6")]
    assert 1 < proposed[0] <= 2 < proposed[1] <= 6 < proposed[2] <= 24


def test_approximate_layers_cost_acceptance(report: dict[str, Any]) -> None:
    rows = {(row["layers"], row["calibrated"]): row["accepted"] for row in report["layers"]}
    assert rows["groups:1", True] == rows["groups:1", False] == rows["all", True] > 0.2
    assert rows["groups:3", True] < rows["all", True]
    assert rows["skip:1a,2a,3a", True] < rows["all", True]


def test_batches_are_held_against_the_same_prompts_in_turn(report: dict[str, Any]) -> None:
    assert [row["config"] for row in report["batch"]] == list(drafts.BATCH)
    for row in report["batch"]:
        assert row["prompts"] == 2 and row["context"] == 100 and row["ratio"] > 0


def test_a_part_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["drafts", "--parts", "shapes,luck"]) == 2
    assert "'luck' is none of shapes, layers, batch" in capsys.readouterr().err
