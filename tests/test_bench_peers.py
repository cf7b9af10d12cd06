"""Systems side by side: their processes, what becomes of those that fail, pages. No time is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as command_line
from bench import inputs, report, runner, side_by_side
from bench.cases import CASES
from bench.runner import Job, Row, SystemFailed, Worker
from bench.systems import Setup
from offload_rt.model.loading import demo_model, load_tokenizer
from offload_rt.text import encode

SMALL = {"retrieval.budget": 64, "retrieval.recent": 16, "draft.sinks": 4, "draft.window": 28}
FAKE = """
import os, sys, time
from functools import partial
from bench.systems import Run

class Fake:
    notes = ("a fake",)
    def __init__(self, kind, setup):
        if kind == "absent":
            import a_module_that_is_not_there
        bytes(2**27)  # of a conversion: no peak of the system
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
        parts = {"full": 1.0 * new_tokens}
        figures = {"round_ms": 6.0}
        return Run(tokens, 2.0 * new_tokens, new_tokens, 2, {"draft": 0.5}, parts, ("seen",), figures)
    def logits_after(self, tokens):
        return [float(len(tokens))] + 99 * [7.5]
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
    monkeypatch.setattr(runner, "ONE_PROCESS", ())
    monkeypatch.setattr(runner, "PEERS_PYTHON", tmp_path / "none")
    return tmp_path


def measured(folder: Path, systems: Sequence[str], **changes: Any) -> list[Row]:
    job = Job(setup(folder), tuple(systems), [list(range(20))], 6, 2)
    return runner.run(replace(job, **changes), lambda text: None)


@pytest.mark.parametrize("together", [False, True])
def test_rows_of_what_works_and_of_what_does_not(
    fakes: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    systems = ["fake:good", "fake:differs", "fake:absent", "fake:fails", "fake:other", "peer:missing"]
    if together:  # one that dies would take the others with it
        monkeypatch.setattr(runner, "ONE_PROCESS", ("fake",))
    else:
        systems.insert(4, "fake:dies")
    good, differs, *failed = rows = measured(fakes, systems, answers=[[20, 21, 0, 23]])
    assert [row["system"] for row in rows] == systems
    assert good["tokens"] == [20 + at for at in range(6)] and good["first_difference"] is None
    assert good["ms_per_token"] == {"median": 2.0, "min": 2.0, "max": 2.0, "runs": [2.0, 2.0]}
    assert (good["prefill_ms"], good["notes"], good["steady"]) == (5.0, ["a fake", "seen"], True)
    assert (good["tokens_per_round"], good["accepted"], good["parts_ms"]) == (3, {"draft": 0.5}, {"full": 1})
    assert good["figures"] == [{"round_ms": 6.0}] * 2
    assert 2**20 < good["peak_bytes"] < 2**27 and good["device_bytes"] == 0
    assert good["answered"] == 0.75
    # The logit of token 0 tells how long the text before it was.
    assert differs["first_difference"] == 3 and differs["logit_gap"] == 7.5 - 3
    reasons = [row["error"] for row in failed]
    assert "a_module_that_is_not_there" in reasons[0]
    assert reasons[1:] == [
        "RuntimeError: at line 2",
        *([] if together else ["its process ended (code 7) in run"]),
        "ValueError: fake has no system other; there are good, differs, absent, fails, hangs, dies",
        "not installed: make bench-peers",
    ]
    assert "libraries print" in (fakes / "work/fake.log").read_text()


def test_what_cannot_fit_is_not_opened(fakes: Path) -> None:
    for row in measured(fakes, ["fake:good", "fake:differs"], setup=setup(fakes, kv_token_bytes=2**50)):
        assert row["error"].startswith("its weights and KV take 419430400.0 GiB, and ")  # of 400 tokens


def test_what_a_link_means_nothing_to_is_not_opened_over_one(fakes: Path) -> None:
    (row,) = measured(fakes, ["fake:good"], setup=setup(fakes, link_gb_s=1.0))
    assert row["error"] == "has no link_gb_s: leave it 0"


def test_drawn_tokens_are_not_compared(fakes: Path) -> None:
    good, differs = measured(fakes, ["fake:good", "fake:differs"], setup=setup(fakes, temperature=0.5))
    assert "first_difference" not in good and "first_difference" not in differs


def test_what_does_not_use_torch_is_not_kept_to_a_part_of_a_gpu(fakes: Path) -> None:
    (row,) = measured(fakes, ["fake:good"], setup=setup(fakes, device="cuda:7", gpu_memory_gib=24.0))
    assert "error" not in row


def test_what_hangs_is_ended(fakes: Path) -> None:
    worker = Worker("fake", setup(fakes), patience_s=20.0)
    worker.ask("open", "hangs", setup(fakes))
    worker._patience_s = 0.2
    with pytest.raises(SystemFailed, match=r"no answer to run in 0\.2 s"):
        worker.ask("run", "hangs", 3)
    assert worker._process.poll() is not None
    with pytest.raises(SystemFailed, match="ended"):
        worker.ask("run", "hangs", 3)


def test_ours_are_opened_in_a_process_of_their_own(tmp_path: Path) -> None:
    refused = pytest.raises(SystemFailed, match="ours has no system fastest; there are easyspec, heads")
    with closing(Worker("ours", setup(tmp_path))) as worker, refused:
        worker.ask("open", "fastest", setup(tmp_path))


# The command


def rows_of(job: Job) -> list[Row]:
    spread = {"median": 2.0, "min": 1.0, "max": 3.0, "runs": [1.0, 2.0, 3.0]}
    good = {
        "label": "a peer",
        "notes": ["8-bit KV"],
        "prefill_ms": 1500.0,
        "ms_per_token": spread,
        "tokens_per_round": None,
        "accepted": {},
        "parts_ms": {},
        "answered": 0.5,
        "tokens": len(job.prompt) * [1, 2],
        "steady": True,
        "peak_bytes": 2**30,
        "first_difference": None,
    }
    faster = good | {
        "label": "ours",
        "notes": [],
        "ms_per_token": spread | {"median": 0.5},
        "tokens_per_round": 4.0,
        "accepted": {"retrieved": 0.75},
        "parts_ms": {"retrieved": 0.2, "full": 0.3},
        "first_difference": 1,
        "logit_gap": 0.00002,
    }
    rows = [good, faster, {"error": "not installed: make bench-peers"}]
    return [{"system": name, "synthetic": None} | row for name, row in zip(job.systems, rows, strict=True)]


class Stub:
    """In the place of the runner.

    Attributes:
        jobs: what it was asked for.
        rows: what it answers.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.rows: Callable[[Job], list[Row]] = rows_of

    def run(self, job: Job, say: Any) -> list[Row]:
        self.jobs.append(job)
        return self.rows(job)


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """No peers are installed, and memory is read at 10 GB/s."""
    stub = Stub()
    monkeypatch.setattr(runner, "run", stub.run)
    monkeypatch.setattr(runner, "PEERS_PYTHON", tmp_path / "python")
    monkeypatch.setattr(side_by_side.machine, "read_rate", lambda device: 10.0)
    return stub


def test_results_are_appended_and_not_measured_again(stub: Stub, tmp_path: Path) -> None:
    def asked() -> list[int]:
        return [len(job.prompt[0]) for job in stub.jobs]

    out = tmp_path / "peers.jsonl"
    common = ["peers", "--systems", "transformers:static,ours:plain,ours:lookup", "--out", str(out)]
    assert command_line.main([*common, "--contexts", "64"]) == 0
    with out.open("a") as lines:  # an interrupt in the middle of a line
        lines.write('{"benchmark": "peers", "sch')
    assert command_line.main([*common, "--contexts", "32,64"]) == 0
    assert command_line.main([*common, "--contexts", "32,64"]) == 0
    assert asked() == [64, 32]
    assert [json.loads(line)["context"] for line in out.read_text().splitlines()] == [64, 32]
    page = (tmp_path / "peers.md").read_text()
    ours, peer = page.index("| ours"), page.index("| a peer; 8-bit KV")
    assert ours < peer, "the fastest first"
    assert " 4.00 |" in page and " 75% |" in page and "- ours:lookup: not installed: make bench-peers" in page
    assert "differ at 1, gap 2.0e-05" in page
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert page.index("## 32 tokens") < page.index("## 64 tokens")
    for other in (["-n", "9"], ["--turns", "2"], ["--systems", "transformers:static,ours:plain,ours:trees"]):
        assert command_line.main([*common, "--contexts", "32", "--no-plot", *other]) == 0
    assert asked() == [64, 32, 32, 32, 32], "what was measured in another way is not taken"
    (tmp_path / "python").touch()
    assert command_line.main([*common, "--contexts", "32", "--no-plot"]) == 0
    assert asked() == [64, 32, 32, 32, 32, 32], "what was not installed may be measured now"


def test_a_page_says_the_best_batch_of_each_system(stub: Stub, tmp_path: Path) -> None:
    times = {"transformers:static": {1: 8.0, 2: 5.0, 4: 6.0}, "ours:plain": {1: 4.0, 2: 3.0, 4: 2.0}}

    def answer(job: Job) -> list[Row]:
        rows = dict(zip(job.systems, rows_of(job), strict=True))
        for name, of in times.items():
            rows[name]["ms_per_token"]["median"] = of[len(job.prompt)]
        return list(rows.values())

    stub.rows = answer
    out = tmp_path / "batch.jsonl"
    given = ["batch", "--systems", "transformers:static,ours:plain,ours:lookup", "--out", str(out)]
    given += ["--contexts", "40", "--no-plot"]
    assert command_line.main([*given, "--batches", "1,4"]) == 0
    assert command_line.main([*given, "--batches", "2,4"]) == 0, "another one is added"
    assert [len(job.prompt) for job in stub.jobs] == [1, 4, 2]
    (tokens,), several, pair = (job.prompt for job in stub.jobs)
    assert several[0] == pair[0] == tokens and pair[1] == several[1] != tokens
    assert {len(text) for text in several} == {40}
    assert all(job.setup.batch == len(job.prompt) for job in stub.jobs)
    bounds = [json.loads(line)["bound_ms"] for line in out.read_text().splitlines()]
    assert bounds[2] - bounds[0] == pytest.approx((bounds[1] - bounds[0]) / 3)  # of KV, beside weights
    assert command_line.main([*given, "--batches", "1,2,4"]) == 0 and len(stub.jobs) == 3
    page = out.with_suffix(".md").read_text()
    best = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["ours:plain", "4", "2.00", "2.00", "2.50", "1.00"] in best
    assert ["transformers:static", "2", "5.00", "1.60", "1.00", "0.40"] in best
    assert page.index("## 40 tokens") < page.index("## 2 texts of 40 tokens")
    assert command_line.main(["compare", str(out), str(out)]) == 0


def test_what_has_been_installed_since_is_there_by_now(stub: Stub, tmp_path: Path) -> None:
    missing = "ModuleNotFoundError: No module named "
    assert runner.there_by_now("ours:plain", f"{missing}'json.decoder'")
    assert not runner.there_by_now("ours:plain", f"{missing}'a_module_that_is_not_there'")
    assert not runner.there_by_now("ours:plain", "ValueError: 'json'")
    assert not runner.there_by_now("vllm:resident", f"{missing}'json'"), "no environment of its own"


def test_a_difference_is_told_by_text() -> None:
    row = {"synthetic": None, "steady": True, "first_difference": 10, "tokens": 16 * [0], "logit_gap": 0.5}
    assert report._agreement(row, 1) == "differ at 10, gap 5.0e-01"
    assert report._agreement(row, 2) == "text 2 differs at 2"


def test_what_failed_as_a_whole_is_measured_again(stub: Stub, tmp_path: Path) -> None:
    failed = {"synthetic": None, "error": "out of luck"}
    stub.rows = lambda job: [{"system": name} | failed for name in job.systems]
    given = ["peers", "--systems", "ours:plain", "--contexts", "32", "--no-plot"]
    for _ in range(2):
        assert command_line.main([*given, "--out", str(tmp_path / "peers.jsonl")]) == 2
    assert len(stub.jobs) == 2


def test_the_built_in_prompt_is_as_long_as_every_declared_context() -> None:
    tokenizer = load_tokenizer(demo_model("target"))
    assert tokenizer is not None
    ((name, text),) = inputs.read_texts(None)
    assert name == "Moby-Dick, chapters 1 to 48"
    assert len(encode(tokenizer, text)) >= max(case.contexts[-1] * case.batches[-1] for case in CASES)


def test_needles_are_asked_for(stub: Stub, tmp_path: Path) -> None:
    """Texts end with the beginning of a passage that their middle holds; the rest of it is the answer."""
    given = "peers --needles --no-plot --contexts 1000 --batches 2"
    given += " --systems transformers:dynamic,ours:plain,ours:lookup"
    assert command_line.main([*given.split(), "--out", str(tmp_path / "out.jsonl")]) == 0
    page = (tmp_path / "out.md").read_text()
    assert "| answered |" in page and " 50% |" in page
    (job,) = stub.jobs
    passages = []
    for text, answer in zip(job.prompt, job.answers, strict=True):
        assert len(text) == 1000 and len(answer) == 24
        passages.append([*text[-8:], *answer])
        assert any(text[at : at + 32] == passages[-1] for at in range(300, 700))
    assert passages[0] != passages[1]


def test_results_are_compared_with_noise_in_mind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def results(name: str, settings: Row, **systems: tuple[float, float, float]) -> str:
        rows: list[Row] = [
            {"system": system, "ms_per_token": dict(zip(("min", "median", "max"), spread, strict=True))}
            for system, spread in systems.items()
        ]
        record = {
            "schema": report.SCHEMA,
            "context": 4096,
            "prompt": "",
            "rows": [*rows, {"error": "absent"}],
        } | settings
        (tmp_path / name).write_text(json.dumps(record) + "\n")
        return str(tmp_path / name)

    now = {"place": "", "gpu_memory_gib": 0.0, "link_rate_gb_s": 0.0}  # what older records do not have
    old = results("old", {}, a=(1, 2, 3), b=(4, 5, 6), c=(1, 2, 3), gone=(1, 1, 1))
    new = results("new", now, a=(3.5, 4, 5), b=(1, 2.5, 3.9), c=(2, 3, 4))
    assert command_line.main(["compare", old, new]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all((row["place"], row["context"]) == ("", 4096) for row in rows)
    assert [(row["system"], row["verdict"], row["ratio"]) for row in rows] == [
        ("a", "slower", 2.0),
        ("b", "faster", 0.5),
        ("c", "within noise", 1.5),
    ]
    paced = {"place": "streamed", "processor": {}, "link_rate_gb_s": 2.5}
    there = results("there", paced, a=(1, 2, 3))
    assert command_line.main(["compare", there, results("again", paced, a=(1, 2, 3))]) == 0
    table, last = capsys.readouterr().out.rsplit("\n\n", 1)
    assert "| streamed |" in table and json.loads(last)[0]["place"] == "streamed"
    faster_link = results("faster", paced | {"link_rate_gb_s": 2.6}, a=(1, 2, 3))
    capped = results("capped", now | {"gpu_memory_gib": 24.0}, a=(1, 2, 3))
    for arguments, message in (
        ([old, results("other", {}, d=(1, 2, 3))], "have no system in common at the same prompt"),
        ([there, faster_link], "have no system in common"),
        ([old, capped], "have no system in common"),
        ([old, str(tmp_path / "none")], "cannot be read"),
        ([old, __file__], "line 1 is no result of a side-by-side run"),
    ):
        assert command_line.main(["compare", *arguments]) == 2
        assert message in capsys.readouterr().err
