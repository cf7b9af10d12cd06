"""Systems side by side: their processes, those that fail, and result files. No time is checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench_setup import bench_main, records, setup

from bench import arguments, machine, runner
from bench.cases import CASES
from bench.results import Row, spread
from bench.runner import Job, SystemFailed, Worker
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_tokenizer
from offload_rt.text.tokenize import encode

FAKE = """
import os, sys, time
from functools import partial
from bench.systems import Run

class Fake:
    notes = ("a fake",)
    def __init__(self, kind, setup):
        if kind == "absent":
            import a_module_that_is_not_there
        bytes(2**27)  # of a conversion: not counted in the peak
        print("libraries print on stdout")
        self.kind, self.label, self.prompt = kind, f"fake {kind}", []
    def prepare(self, prompt):
        (self.prompt,) = prompt
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
        return Run(tokens, 2.0 * new_tokens, new_tokens, 2, {"draft": 0.5}, ("seen",), {"round_ms": 6.0})
    def logits_after(self, tokens):
        return [float(len(tokens))] + 99 * [7.5]
    def close(self):
        pass

SYSTEMS = {kind: partial(Fake, kind) for kind in ("good", "differs", "absent", "fails", "hangs", "dies")}
"""


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


def measured(folder: Path, systems: Sequence[str], **changes: Any) -> list[Row]:
    job = Job(setup(folder), tuple(systems), [list(range(20))], 6, 2)
    return runner.run(replace(job, **changes), lambda text: None)


def test_rows_of_systems_that_work_and_that_fail(fakes: Path) -> None:
    systems = [f"fake:{kind}" for kind in ("good", "differs", "absent", "fails", "dies", "other")]
    good, differs, *failed = rows = measured(fakes, [*systems, "peer:missing"])
    assert [row["system"] for row in rows] == [*systems, "peer:missing"]
    assert good["tokens"] == [20 + at for at in range(6)] and good["first_difference"] is None
    assert good["ms_per_token"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": [2.0, 2.0]}
    assert (good["prefill_ms"], good["notes"], good["steady"]) == (5.0, ["a fake", "seen"], True)
    assert (good["tokens_per_round"], good["accepted"]) == (3, {"draft": 0.5})
    assert good["figures"] == [{"round_ms": 6.0}] * 2
    assert 2**20 < good["peak_bytes"] < 2**27 and good["device_bytes"] == 0
    # The logit of token 0 tells how long the text before it was.
    assert differs["first_difference"] == 3 and differs["logit_gap"] == 7.5 - 3
    reasons = [row["error"] for row in failed]
    assert "a_module_that_is_not_there" in reasons[0]
    assert reasons[1:] == [
        "RuntimeError: at line 2",
        "its process ended (code 7) in run",
        "ValueError: fake has no system other; there are good, differs, absent, fails, hangs, dies",
        "not installed: make bench-peers",
    ]
    assert "libraries print" in (fakes / "work/fake.log").read_text()


def test_systems_that_cannot_run_are_not_opened(fakes: Path) -> None:
    (row,) = measured(fakes, ["fake:good"], setup=setup(fakes, kv_token_bytes=2**50))
    assert row["error"].startswith("its weights and KV take 419430400.0 GiB, and ")  # of 400 tokens
    (row,) = measured(fakes, ["fake:good"], setup=setup(fakes, link_gb_s=1.0))
    assert row["error"] == "an emulated link does not apply to it"


def test_a_system_that_hangs_is_ended(fakes: Path) -> None:
    worker = Worker("fake", setup(fakes), patience_s=20.0)
    worker.ask("open", "hangs", setup(fakes))
    worker._patience_s = 0.2
    with pytest.raises(SystemFailed, match=r"no answer to run in 0\.2 s"):
        worker.ask("run", "hangs", 3)
    assert worker._process.poll() is not None
    with pytest.raises(SystemFailed, match="ended"):
        worker.ask("run", "hangs", 3)


class Stub:
    """In the place of the runner: two systems that ran and one that is not installed."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.fails = False

    def run(self, job: Job, say: Any) -> list[Row]:
        self.jobs.append(job)
        same = {"notes": [], "prefill_ms": 1500.0, "steady": True, "peak_bytes": 2**30, "synthetic": None}
        same |= {"tokens": 4 * len(job.prompt) * [1], "accepted": {}, "tokens_per_round": None}
        slow = same | {"label": "a peer", "ms_per_token": spread([1.0, 2.0, 3.0]), "first_difference": None}
        fast = same | {
            "label": "ours",
            "ms_per_token": spread([0.5]),
            "first_difference": 1,
            "logit_gap": 2e-5,
        }
        rows = [slow, fast | {"accepted": {"retrieved": 0.75}, "tokens_per_round": 4.0}]
        absent: Row = {"error": "not installed: make bench-peers", "synthetic": None}
        rows = [absent] * 3 if self.fails else [*rows, absent]
        return [{"system": name} | row for name, row in zip(job.systems, rows, strict=True)]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(runner, "run", stub.run)
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)
    return stub


def test_points_are_appended_and_not_measured_again(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch.jsonl"
    given = f"batch --systems transformers:static,ours:plain,ours:lookup --out {out} --contexts 40"
    assert bench_main(given, "--batches 1,4") == 0
    with out.open("a") as lines:  # an interrupt in the middle of a line
        lines.write('{"benchmark": "batch", "sch')
    assert bench_main(given, "--batches 4,2,1") == 0
    assert [len(job.prompt) for job in stub.jobs] == [1, 4, 2]
    (tokens,), several, pair = (job.prompt for job in stub.jobs)
    assert several[0] == pair[0] == tokens and pair[1] == several[1] != tokens
    assert [job.setup.batch for job in stub.jobs] == [1, 4, 2] and {len(one) for one in several} == {40}
    found = records(out)
    assert [one["batch"] for one in found] == [1, 4, 2]
    bounds = [one["bound_ms"] for one in found]
    assert bounds[2] - bounds[0] == pytest.approx((bounds[1] - bounds[0]) / 3), "of KV, beside weights"
    page, printed = out.with_suffix(".md").read_text(), capsys.readouterr().out
    assert page.index("| ours ") < page.index("| a peer "), "the fastest first"
    assert " 4.00 |" in page and " 75% |" in page and "- ours:lookup: not installed: make bench-peers" in page
    assert "differ at 1, gap 2.0e-05 |" in page and "differ at 1 of sequence 1, gap" in page
    overview = "| system              | 40 tokens | 2 × 40 tokens | 4 × 40 tokens |"
    assert overview in page and overview in printed
    summary = json.loads(printed.splitlines()[-1])
    assert summary == json.loads(out.with_suffix(".summary.json").read_text())
    assert summary["ms_per_token"]["ours:plain"]["2 × 40 tokens"] == 0.5
    for other in ("-n 9", "--turns 2", "--set speculation.gamma2=3"):
        assert bench_main(given, "--batches 1", other) == 0
    assert len(stub.jobs) == 6, "points measured with other settings do not count"


def test_an_error_if_no_system_ran(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stub.fails = True
    given = f"peers --systems ours:plain,ours:lookup,ours:retrieval --contexts 32 --out {tmp_path}/a.jsonl"
    assert bench_main(given) == 2
    assert "no system ran; not installed: make bench-peers" in capsys.readouterr().err


def test_the_built_in_book_is_as_long_as_every_declared_context() -> None:
    tokenizer = load_tokenizer(demo_model("target"))
    assert tokenizer is not None
    (text,) = arguments.read_texts(None).values()
    assert len(encode(tokenizer, text)) >= max(max(c.contexts) * max(c.batches) for c in CASES.values())
