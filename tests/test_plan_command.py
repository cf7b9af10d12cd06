"""`offload-rt plan`: flags, report, JSON, mistakes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from machine_cases import HOST
from plan_cases import nearest_context

from offload_rt import cli
from offload_rt.config import AUTOMATIC
from offload_rt.machine.hardware import Hardware


def run(arguments: str, *more: str) -> int:
    return cli.main(["plan", *arguments.split(), *more])


SIZES = ("resident_bytes", "streamed_bytes", "cpu_attended_bytes", "ring_bytes")
COUNTS = ("resident_tokens", "streamed_tokens", "cpu_attended_tokens", "ring_buffers", "segment_tokens")
TIMES = ("pass_ms", "draft_ms", "round_ms", "ms_per_token", "prefill_ms", "plain_ms_per_token")


def test_the_command_tells_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    flags = "--model llama2-7b --draft jf68m --context 130048 --gpu rtx4090 --config triforce --json"
    assert run(flags, str(file)) == 0
    out, err = capsys.readouterr()
    report = json.loads(file.read_text())
    predicted, (card,) = report["predicted"], report["memory"]["gpus"]
    assert not err
    for said in (
        "llama2-7b and jf68m in bfloat16, 130,048 tokens of context, 256 new; config triforce",
        "KV         63.50 GiB: resident on the GPU",
        f"{predicted['ms_per_token']:.1f} ms a token",
        f"bottleneck {predicted['bottleneck']}",
        *report["assumptions"],
    ):
        assert said in out
    chosen = {"config", "refresh_from", "placement"}
    assert set(report) == {"fits", *chosen, "memory", "predicted", "assumptions"}
    assert f"of rounds refresh the retrieved cache from the {report['refresh_from']}, " in out
    assert set(report["placement"]) == {*SIZES, *COUNTS}
    assert set(predicted) == {*TIMES, "tokens_per_round", "bottleneck"}
    assert report["fits"] is True and sum(card.values()) <= 24_564 * 2**20
    assert card["weights"] == 2 * 6_738_415_616 and report["memory"]["host"]["kv"] >= 63.5 * 2**30
    assert card["staging_ring"] == report["placement"]["ring_bytes"]
    assert all(re.search(r"\d", sentence) for sentence in report["assumptions"])


def test_the_command_refuses_with_the_nearest_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert run("--model llama2-7b --context 130048 --gpu rtx4090 --ram 48 --json", str(file)) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert "llama2-7b at 130048 tokens does not fit: host memory has 44.0 GiB" in err
    report = json.loads(file.read_text())
    assert report["fits"] is False and report["refusal"] in err
    assert report["predicted"] == dict.fromkeys((*TIMES, "tokens_per_round", "bottleneck"))
    assert run(f"--model llama2-7b --context {nearest_context(err)} --gpu rtx4090 --ram 48") == 0


@pytest.mark.parametrize("card", ["rtx4090", "4090", "RTX-4090", "RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_a_card_may_be_written_in_any_usual_way(card: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model qwen2.5-7b --draft qwen2.5-0.5b --context 8k --gpu", card) == 0
    out = capsys.readouterr().out
    assert "rtx4090, 24.0 GiB" in out and "8,192 tokens of context" in out


def test_a_draft_that_makes_it_slower_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model llama3.1-8b --context 80000 --gpu rtx4090"
    found = {}
    for draft in ("llama3.2-1b", "none"):
        assert run(flags, "--config", "triforce", "--draft", draft) == 0
        out = capsys.readouterr().out
        ms, plain_ms = re.search(r"([0-9.]+) ms a token; .* without speculation \(([0-9.]+)\)", out).groups()
        found[draft] = ms, plain_ms, out
    assert f"draft      makes it slower: {found['none'][0]} ms a token without it" in found["llama3.2-1b"][2]
    assert "makes it slower" not in found["none"][2]
    assert run(flags, "--config", "plain") == 0
    plain = capsys.readouterr().out
    assert f"predicted  {found['none'][1]} ms a token; 1.00 times" in plain, "one basis: the fastest plan"


def test_auto_is_the_fastest_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, file = "--model llama3.1-8b --draft llama3.2-1b --context 120000 --gpu rtx4090", tmp_path / "plan"
    each = {}
    for config in AUTOMATIC:
        assert run(flags, "--config", config, "--json", str(file)) == 0
        each[config] = json.loads(file.read_text())["predicted"]["ms_per_token"]
    capsys.readouterr()
    assert run(flags, "--json", str(file)) == 0
    report, out = json.loads(file.read_text()), capsys.readouterr().out
    best, *others = sorted(each, key=lambda config: each[config])
    assert report["config"] == best and report["predicted"]["ms_per_token"] == each[best]
    told = ", ".join(f"{config} {each[config]:.1f}" for config in others)
    assert f"config     {best} {each[best]:.1f} ms a token, as predicted ({told})" in out
    # Without a draft, what needs one is not among them.
    assert run("--model llama3.1-8b --context 120000 --gpu rtx4090") == 0
    out = capsys.readouterr().out
    assert "triforce" not in out and "naive" not in out and "lookup" in out


def test_flags_reach_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--model llama3.1-8b --draft llama3.2-1b --context 60000 --new-tokens 100 --gpu rtx3090 --gpus 2"
        " --link 12.5 --dram 60 --ram 128 --cpu-attention 33 --vram 20 --acceptance 0.85"
        " --draft-acceptance 0.6 --config triforce --set speculation.gamma2=7 --dtype float16 --no-ahead"
    )
    assert run(flags) == 0
    out = capsys.readouterr().out
    for said in (
        *("float16, 60,000 tokens of context, 100 new", "link 12.5 GB/s", "124.0 GiB", "read at 60.0 GB/s"),
        *("33.0 GB/s at 16", "target:retrieved 0.85", "draft:streaming 0.60", "gamma2 7 (as given)"),
        *("of 20.00 GiB", "2 GPUs share", "drafts are made between passes"),
    ):
        assert said in out


def test_without_a_named_machine_it_is_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor: Any = ModuleType("offload_rt.machine.doctor")
    doctor.inspect = lambda on_progress: SimpleNamespace(hardware=Hardware(HOST, (), measured=True))
    monkeypatch.setitem(sys.modules, "offload_rt.machine.doctor", doctor)
    assert run("--context 32768") == 0
    out = capsys.readouterr().out
    assert "demo and demo-draft in float32" in out and "host (measured)" in out


def test_a_reader_that_is_gone_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m offload_rt plan --context 1000 --gpu none | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (141, b"")
