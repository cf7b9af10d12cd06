"""`bench peers`: systems in processes of their own, and what becomes of those that fail. No time is told."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_ids, noisy_copy, tiny_target
from transformers import AutoModelForCausalLM

import bench.__main__ as command_line
from bench import inputs, runner, side_by_side
from bench.runner import Case, Row, SystemFailed, Worker
from bench.systems import Setup

FAKE = """
import os, sys, time
from functools import partial
from bench.systems import Run

class Fake:
    notes = ("a fake",)
    def __init__(self, kind, setup):
        if kind == "absent":
            import a_module_that_is_not_there
        print("libraries print on stdout")
        self.kind, self.label, self.prompt = kind, f"fake {kind}", []
    def prepare(self, prompt):
        self.prompt = list(prompt)
        return 5.0
    def run(self, new_tokens):
        if self.kind == "fails":
            raise RuntimeError("out of luck\\nat line 2")
        if self.kind == "hangs":
            time.sleep(600)
        if self.kind == "dies":
            os._exit(7)
        tokens = [len(self.prompt) + at for at in range(new_tokens)]
        if self.kind == "differs":
            tokens[3] = 0
        return Run(tokens, 2.0 * new_tokens, new_tokens)
    def close(self):
        pass

SYSTEMS = {kind: partial(Fake, kind) for kind in ("good", "differs", "absent", "fails", "hangs", "dies")}
"""


def setup(folder: Path, **changes: Any) -> Setup:
    given: dict[str, Any] = {
        "model": "none",
        "draft": None,
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "capacity": 400,
        "chunk": 64,
        "work": str(folder / "work"),
    }
    return Setup(**given | changes)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree in which `fake` is an adapter."""
    for name in ("__init__.py", "worker.py", "systems/__init__.py"):
        (tmp_path / "bench" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(runner.ROOT / "bench" / name, tmp_path / "bench" / name)
    (tmp_path / "bench/systems/fake.py").write_text(FAKE)
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "OWN_ENVIRONMENT", ("fake",))
    monkeypatch.setattr(runner, "PEERS_PYTHON", tmp_path / "none")
    return tmp_path


def measured(folder: Path, systems: Sequence[str], patience_s: float = 60.0) -> list[list[Row]]:
    case = Case(setup(folder), tuple(systems), range(50), (10, 20), 6, 2, {}, patience_s)
    return list(runner.run(case, lambda text: None))


def test_rows_of_what_works_and_of_what_does_not(fakes: Path) -> None:
    systems = ["fake:good", "fake:differs", "fake:absent", "fake:fails", "fake:dies"]
    systems += ["peer:missing", "fake:other"]
    short, long = measured(fakes, systems)
    for rows, context in ((short, 10), (long, 20)):
        good, differs, *failed = rows
        assert [row["system"] for row in rows] == systems
        assert good["tokens"] == [context + at for at in range(6)] and good["first_difference"] is None
        assert good["ms_per_token"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": [2.0, 2.0]}
        assert (good["prefill_ms"], good["notes"], good["steady"]) == (5.0, ["a fake"], True)
        assert good["peak_bytes"] > 2**20
        assert differs["first_difference"] == 3
        reasons = [row["error"] for row in failed]
        assert "a_module_that_is_not_there" in reasons[0]
        assert reasons[1:] == [
            "RuntimeError: at line 2",
            "its process ended (code 7) in run",
            "not installed: make bench-peers",
            "ValueError: fake has no system other; there are good, differs, absent, fails, hangs, dies",
        ]
    assert "libraries print" in (fakes / "work/fake-good.log").read_text()


def test_what_hangs_is_ended(fakes: Path) -> None:
    worker = Worker("fake:hangs", setup(fakes), patience_s=20.0)
    worker._patience_s = 0.2
    with pytest.raises(SystemFailed, match=r"no answer to run in 0\.2 s"):
        worker.ask("run", 3)
    assert worker._process.poll() is not None
    with pytest.raises(SystemFailed, match="ended"):
        worker.ask("run", 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and its draft, as transformers saves them."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target("llama-gqa")
    target.save_pretrained(folder / "target")
    noisy_copy(target).save_pretrained(folder / "draft")
    return folder


OWN = ("transformers:dynamic", "transformers:static", "transformers:lookup", "transformers:assisted")


@pytest.mark.parametrize("system", [*OWN, "ours:plain", "ours:triforce"])
def test_systems_continue_a_prompt_from_its_end(system: str, models: Path, tmp_path: Path) -> None:
    """The same tokens in every run, whatever was asked before; and those of a model run plainly."""
    adapter, _, name = system.partition(":")
    opened = setup(tmp_path, model=str(models / "target"), draft=str(models / "draft"))
    subject = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS[name](opened)
    try:
        for prompt in (byte_ids(200), byte_ids(90, start=7), byte_ids(200)):
            assert subject.prepare(prompt) > 0
            runs = [subject.run(count) for count in (12, 5, 12)]
            expected = tiny_greedy(models, prompt, 12)
            assert [one.tokens for one in runs] == [expected, expected[:5], expected]
            assert all(0 < one.timed <= len(one.tokens) and one.ms > 0 for one in runs)
    finally:
        subject.close()


def tiny_greedy(models: Path, prompt: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(models / "target")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# The command


def rows_of(case: Case, contexts: Sequence[int]) -> list[list[Row]]:
    spread = {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [1.0, 2.0, 3.0]}
    good = {
        "label": "a peer",
        "notes": ["8-bit KV"],
        "prefill_ms": 1500.0,
        "ms_per_token": spread,
        "tokens": [1, 2],
        "steady": True,
        "peak_bytes": 2**30,
        "first_difference": None,
    }
    faster = good | {
        "label": "ours",
        "notes": [],
        "ms_per_token": spread | {"median": 0.5},
        "first_difference": 1,
    }
    rows = [good, faster, {"error": "not installed: make bench-peers"}]
    return [
        [{"system": name, "context": context} | row for name, row in zip(case.systems, rows, strict=True)]
        for context in contexts
    ]


def test_results_are_appended_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[int, ...]] = []

    def run(case: Case, say: Any) -> list[list[Row]]:
        asked.append(case.contexts)
        return rows_of(case, case.contexts)

    monkeypatch.setattr(side_by_side, "run_case", run)
    monkeypatch.setattr(side_by_side.machine, "read_rate", lambda device: 10.0)
    out = tmp_path / "peers.jsonl"
    common = ["peers", "--systems", "transformers:dynamic,ours:plain,ours:lookup", "--out", str(out)]
    assert command_line.main([*common, "--contexts", "64"]) == 0
    assert command_line.main([*common, "--contexts", "32,64"]) == 0
    assert command_line.main([*common, "--contexts", "32,64"]) == 0
    assert asked == [(64,), (32,)]
    assert [json.loads(line)["context"] for line in out.read_text().splitlines()] == [64, 32]
    page = (tmp_path / "peers.md").read_text()
    ours, peer = page.index("| ours"), page.index("| a peer; 8-bit KV")
    assert ours < peer, "the fastest first"
    assert (
        "4.00" in page and "differ at 1" in page and "- ours:lookup: not installed: make bench-peers" in page
    )
    assert page.index("## 32 tokens") < page.index("## 64 tokens")
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--systems vllm:plain", "--systems vllm:plain: write adapter:system; adapters are"),
        ("--systems ours", "--systems ours: write adapter:system"),
        ("--systems ours:plain --contexts 100000000", "the text has"),
        ("--systems ours:plain --out {torn}", "line 2 is no result of bench peers; use another file"),
        ("--turns 0", "'0' is not a whole number of at least 1"),
    ],
)
def test_bad_input(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inputs, "RESULTS", tmp_path)
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"benchmark": "other"}\n{"benchmark": "pee')
    given = arguments.format(torn=torn).split()
    assert command_line.main(["peers", "--quick", *given]) == 2
    out, err = capsys.readouterr()
    assert message in err and out == ""
