"""`python -m bench tokens`: the demo model, in float32 and on real text, writes what transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.studies import equal_tokens
from offload_rt.text.tokenize import common_beginning


def rows(folder: Path) -> list[dict[str, float]]:
    out = folder / "tokens.jsonl"
    given = ["--context", "400", "--passages", "2", "--new-tokens", "24", "--out", str(out)]
    assert main(["tokens", *given]) == 0
    found: list[dict[str, float]] = json.loads(out.read_text().splitlines()[-1])["rows"]
    return found


def test_the_demo_writes_what_transformers_does(tmp_path: Path) -> None:
    for row in rows(tmp_path):
        assert row["tokens"] == 24 and 0 < row["rounding"] < 1e-4
        for system in ("plain", "triforce"):
            # Where two logits are as near as that, either is right.
            assert row[f"{system} equal"] == 24 or row[f"{system} gap"] < row["rounding"]


def test_where_tokens_differ_the_gap_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = equal_tokens.own_tokens

    def others(*given: object) -> tuple[list[int], float]:
        tokens, rounding = own(*given)  # type: ignore[arg-type]
        return [*tokens[:5], tokens[5] + 1, *tokens[6:]], rounding

    monkeypatch.setattr(equal_tokens, "own_tokens", others)
    for row in rows(tmp_path):
        assert row["plain equal"] == row["triforce equal"] == 5
        assert row["plain gap"] == row["triforce gap"] > 1e-4


def test_common() -> None:
    assert [common_beginning([1, 2], found) for found in ([1, 2], [1, 3], [2, 2])] == [2, 1, 0]
