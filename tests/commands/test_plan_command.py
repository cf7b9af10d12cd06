"""`offload-rt plan`: flags, report, JSON, mistakes."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.machine_cases import HOST

import offload_rt
from offload_rt.commands import cli
from offload_rt.commands.console import duration
from offload_rt.commands.prompts import token_count
from offload_rt.config.schema import AUTOMATIC
from offload_rt.model.named_shapes import SHAPES
from offload_rt.system.hardware import KNOWN_GPUS, Hardware, named_hardware

Run = Callable[..., tuple[str, dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command; what it prints, and the JSON."""

    def run(flags: str, code: int = 0) -> tuple[str, dict[str, Any]]:
        file = tmp_path / "plan.json"
        assert cli.main(["plan", *shlex.split(flags), "--verbose", "--json", str(file)]) == code
        out, err = capsys.readouterr()
        assert bool(out) == (code == 0) and err.count("\n") == (code != 0)
        return out or err, json.loads(file.read_text())

    return run


PLACEMENT = {
    *("resident_bytes", "streamed_bytes", "cpu_attended_bytes", "ring_bytes"),
    *("resident_tokens", "streamed_tokens", "cpu_attended_tokens", "ring_buffers", "segment_tokens"),
    *("other_gpus", "remote_mlps", "group_devices"),
}
PREDICTED = {
    *("pass_ms", "draft_ms", "round_ms", "ms_per_token", "prefill_ms", "piece_tokens", "plain_ms_per_token"),
    *("tokens_per_round", "bottleneck"),
}


def test_the_command_tells_the_plan(run: Run) -> None:
    out, report = run(
        "--model llama2-7b --draft jf68m --context 130048 --new-tokens 256 --gpu rtx4090 --config triforce"
    )
    predicted, (card,) = report["predicted"], report["memory"]["gpus"]
    for said in (
        "llama2-7b and jf68m in bfloat16, prompt of 130,048 tokens, 256 new; config triforce",
        "KV         63.50 GiB: resident on GPUs",
        "store      48.34 GiB of CPU memory: full pages are packed to 12.2 bits per value",
        f"{predicted['ms_per_token']:.1f} ms per token",
        f"bottleneck {predicted['bottleneck']}",
        f"retrieved  {report['retrieved']['budget']:,} entries of 8 bits in each layer and KV head, ",
        f"of rounds refresh the retrieved cache from the {report['retrieved']['refresh_from']}, ",
        *report["assumptions"],
    ):
        assert said in out
    chosen = {"config", "retrieved", "placement", "layers"}
    made = {"version", "inputs", "alternatives"}
    assert set(report) == {"fits", *chosen, "memory", "predicted", "assumptions", *made}
    assert report["version"] == offload_rt.__version__ and report["alternatives"] == []
    inputs = report["inputs"]
    target = {"name": "llama2-7b", "dtype": "bfloat16", "quantization": None, "positions": 131_072}
    assert inputs["model"] == {**target, "planes": False}
    assert inputs["draft"]["name"] == "jf68m" and (inputs["context"], inputs["new_tokens"]) == (130_048, 256)
    assert Hardware.from_json(inputs["hardware"]) == named_hardware("rtx4090")
    assert set(report["placement"]) == PLACEMENT and set(predicted) == PREDICTED
    assert report["fits"] is True and sum(card.values()) <= 24_564 * 2**20
    assert card["weights"] == 2 * (6_738_415_616 - 32_000 * 4096) and report["memory"]["host"][
        "kv"
    ] == pytest.approx(0.75977 * 63.625 * 2**30, rel=1e-4)
    assert card["staging_ring"] == report["placement"]["ring_bytes"]
    assert all(re.search(r"\d", sentence) for sentence in report["assumptions"])


@pytest.mark.parametrize(
    ("machine", "memory"),
    [
        ("--gpu rtx4090", r"[\d.]+ of 23\.3 GiB of GPU memory, \d+ of 92 GiB of RAM"),
        (
            "--gpu rtx3090 --gpus 2 --ram 128",
            r"[\d.]+ of 46\.6 GiB of the memory of 2 GPUs, \d+ of 124 GiB of RAM",
        ),
        ("--gpu none", r"\d+ of 92 GiB of RAM"),
    ],
)
def test_the_first_line_is_the_verdict(
    run: Run, capsys: pytest.CaptureFixture[str], machine: str, memory: str
) -> None:
    flags = f"--model llama3.1-8b --context 120000 {machine}"
    out, report = run(flags)
    ms, seconds = report["predicted"]["ms_per_token"], report["predicted"]["prefill_ms"] / 1e3
    times = rf"first answer after {duration(seconds)}, then (\S+) tokens/s \((\S+) ms per token, predicted\)"
    (rates,) = re.findall(rf"^fits: {memory}; {times}$", out.splitlines()[0])
    assert [float(rate) for rate in rates] == pytest.approx([1e3 / ms, ms], rel=0.05)
    # The rest is printed on request.
    assert cli.main(["plan", *flags.split()]) == 0
    short = capsys.readouterr().out
    assert out.startswith(short) and short.count("\n") == 3
    assert not re.search("^(KV|ring|store|round|assumed)", short, re.M)


@pytest.mark.parametrize(
    "flags",
    [
        "--model llama3.1-8b --context 22k --gpu rtx4060ti-16 --vram 17",
        "--model qwen3-14b --context 32k --gpu rtx3060 --quantize nf4",
        "--model llama2-7b --draft jf68m --context 60000 --gpu rtx3090 --vram 18",
    ],
)
def test_plain_decoding_has_one_figure(run: Run, flags: str) -> None:
    """Where drafts leave plain decoding less memory, it is compared as it would run without them."""
    reports = [run(f"{flags} --config {config}")[1] for config in ("plain", "retrieval", "lookup")]
    plain = reports[0]["predicted"]["ms_per_token"]
    assert {one["predicted"]["plain_ms_per_token"] for one in reports} == {plain}


def test_the_command_tells_of_groups_on_one_device_and_on_two(run: Run) -> None:
    flags = "--model llama2-7b --context 16000 --gpu rtx4090 --config retrieval --set speculation.gamma2=4"
    level = """--set 'speculation.levels=[{ model = "target", cache = "retrieved", layers = "groups:4" }]'"""
    out, report = run(f"{flags} {level} --gpus 2")
    numbers = r"draft [\d.]+ ms, [\d.]+ ms per token"
    (planned,) = re.findall(
        rf"groups +on (one GPU|two) as planned; on one: {numbers}; on two: {numbers}", out
    )
    assert "(8 exchanges a pass)" in out
    assert report["placement"]["group_devices"] == {"one GPU": 1, "two": 2}[planned]
    out, report = run(f"{flags} {level}")
    assert "exchanges" not in out and report["placement"]["group_devices"] == 0


def test_the_command_refuses_with_the_nearest_plan(run: Run) -> None:
    flags = "--model llama2-7b --gpu rtx4090 --ram 48 --new-tokens 256"
    err, report = run(f"{flags} --context 130048", code=2)
    assert "llama2-7b at 130048 tokens does not fit: host memory has 44.0 GiB" in err
    assert report["fits"] is False and report["refusal"] in err
    assert report["predicted"] == dict.fromkeys(PREDICTED)
    (nearest,) = re.findall(r"the longest context that fits is (\d+) tokens", err)
    run(f"{flags} --context {nearest}")


def test_a_draft_that_makes_it_slower_is_named(run: Run) -> None:
    flags = "--model llama3.1-8b --context 80000 --gpu rtx4090 --set store.code=raw --acceptance 0.92"
    plain, with_draft, without = (
        run(f"{flags} {more}")
        for more in (
            "--config plain",
            "--config triforce --draft llama3.2-1b",
            "--config triforce --draft none",
        )
    )
    ms = without[1]["predicted"]["ms_per_token"]
    assert f"draft      makes it slower: {ms:.1f} ms per token without it" in with_draft[0]
    assert "makes it slower" not in without[0]
    bases = {report["predicted"]["plain_ms_per_token"] for _, report in (plain, without)}
    assert bases == {plain[1]["predicted"]["ms_per_token"]}, "one basis: the fastest plan"
    assert "1.00 times as fast as without" in plain[0]


def test_auto_is_the_fastest_of_all(run: Run) -> None:
    flags = "--model llama3.1-8b --draft llama3.2-1b --context 120000 --gpu rtx4090 --acceptance 0.92"
    reports = {config: run(f"{flags} --config {config}")[1] for config in AUTOMATIC}
    each = {config: report["predicted"]["ms_per_token"] for config, report in reports.items()}
    best, *others = sorted(each, key=lambda config: each[config])
    out, report = run(flags)
    alternatives = report.pop("alternatives")
    assert {one["config"]: one["ms_per_token"] for one in alternatives} == {
        name: each[name] for name in others
    }
    assert reports[best].pop("alternatives") == []
    assert report.pop("inputs")["draft"]
    assert bool(reports[best].pop("inputs")["draft"]) == (best in ("triforce", "naive")), "others need none"
    assert report == reports[best]
    told = ", ".join(f"{config} {each[config]:.1f}" for config in others)
    assert f"config     {best} {each[best]:.1f} ms per token, as predicted ({told})" in out
    # Without a draft, what needs one is not among them.
    out, _ = run("--model llama3.1-8b --context 120000 --gpu rtx4090")
    assert "triforce" not in out and "naive" not in out and "lookup" in out


def test_flags_reach_the_plan(run: Run) -> None:
    out, _ = run(
        "--model llama3.1-8b --draft llama3.2-1b --context 60k --new-tokens 100 --gpu rtx3090 --gpus 2"
        " --link 12.5 --dram 60 --ram 128 --cpu-attention 33 --vram 20 --acceptance 0.85"
        " --draft-acceptance 0.6 --config triforce --set speculation.gamma2=7 --dtype float16 --no-ahead"
    )
    for said in (
        *("float16, prompt of 61,440 tokens, 100 new", "link 12.5 GB/s", "124.0 GiB", "read at 60.0 GB/s"),
        *(
            "33.0 GB/s at 16",
            "over 1/32 of the context 85% are accepted",
            "draft:streaming 0.60",
            "gamma2 7 (as given)",
        ),
        *("of 20.00 GiB", "GPU 0 computes, the others keep and attend KV"),
    ):
        assert said in out


def test_without_a_named_machine_it_is_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Run
) -> None:
    inspection: Any = ModuleType("offload_rt.machine.inspection")
    inspection.inspect = lambda on_progress: SimpleNamespace(hardware=Hardware(HOST, (), measured=True))
    monkeypatch.setitem(sys.modules, "offload_rt.machine.inspection", inspection)
    monkeypatch.setattr("offload_rt.kernels.native.load_kernel", lambda: None)
    out, _ = run("--context 32768")
    assert "demo and demo-draft in float32" in out and "host (measured)" in out
    assert cli.main(["plan", "--context", "32768", "--gpus", "1"]) == 2
    assert "--gpus 1: this machine has 0; describe another one with --gpu" in capsys.readouterr().err


def test_new_tokens_count_inside_the_context_unless_both_are_given(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model llama3.1-8b --gpu h100 --config plain"
    assert "prompt of 130,816 tokens, 256 new" in run(f"{flags} --context 128k")[0]
    assert "prompt of 5 tokens, 5 new" in run(f"{flags} --context 10")[0]
    assert "prompt of 1 tokens, 1 new" in run(f"{flags} --context 1")[0]
    assert "prompt of 1,000 tokens, 24 new" in run(f"{flags} --context 1000 --new-tokens 24")[0]
    assert cli.main(["plan", *flags.split(), "--context", "128k", "--new-tokens", "256"]) == 2
    assert "131072 prompt tokens and 256 new ones are more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        *(("1", 1), ("100000", 100_000), ("100,000", 100_000), ("1,000,000", 1_000_000), ("1e5", 100_000)),
        *(("96k", 98_304), ("1M", 2**20), ("1m", 2**20), ("1.5K", 1536), ("0.5M", 2**19)),
    ],
)
def test_numbers_of_tokens(text: str, tokens: int) -> None:
    assert token_count(text) == tokens


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "10kk", "1,00", "1,0000", "k", "1e", "1e-3", "0.0001k", "nan", "inf", "¹"]
)
def test_what_is_no_number_of_tokens(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of tokens"):
        token_count(text)


def test_yarn_gives_a_model_its_positions(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model Qwen3-32B --context 128k --gpu h100 --gpus 2 --config plain"
    out, _ = run(f"{flags} --rope yarn:4")
    assert "plan       qwen3-32b in bfloat16, prompt of 130,816 tokens, 256 new" in out
    # 32,768 positions were trained, not the 40,960 of the config.
    assert cli.main(["plan", *flags.split(), "--rope", "yarn:3.9"]) == 2
    assert "more than the 127795 positions of qwen3-32b" in capsys.readouterr().err
    run(f"{flags} --rope yarn:3.2:40960")


def test_ignored_attention_is_told_where_it_matters(run: Run) -> None:
    flags = "--model Qwen2.5-7B-Instruct-1M --gpu h100 --config plain"
    assert "note       dual-chunk attention is ignored" in run(f"{flags} --context 512k")[0]
    assert "dual-chunk" not in run(f"{flags} --context 128k")[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model qwen2.5-7b-1m --context 1M", "prompt of 999,744 tokens, 256 new"),
        ("--model qwen2.5-7b-1m --context 1M --new-tokens 9000", "prompt of 1,000,000 tokens, 9,000 new"),
        ("--model qwen2.5-7b-1m --context 1000k", "prompt of 999,744 tokens, 256 new"),
    ],
)
def test_a_unit_is_decimal_where_only_that_fits_the_positions(run: Run, flags: str, said: str) -> None:
    out, _ = run(f"{flags} --gpu rtxa6000 --config plain")
    assert said in out
    assert "planned for 1,000,000 tokens: 1,0" in out and "more than the 1,010,000 positions" in out


def test_a_unit_is_binary_where_it_fits(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert "planned for" not in run("--model qwen2.5-7b-1m --context 900k --gpu rtxa6000 --config plain")[0]
    refused = "plan --model qwen2.5-7b-1m --context 1M --new-tokens 20000 --gpu rtxa6000"
    assert cli.main(refused.split()) == 2
    assert "1048576 prompt tokens and 20000 new ones are more than" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "microsoft/phi-4"])
def test_a_hub_id_that_is_known_by_name_needs_no_network(
    run: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("offload_rt.model.checkpoint_config.located", asked)
    _, report = run(f"--model {name} --context 8k --gpu rtx5090 --config plain")
    assert report["inputs"]["model"]["name"] in ("qwen3-8b", "llama3.1-8b", "phi-4")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *(
            ("RTX 5060 Ti 8 GB", "rtx5060ti-8"),
            ("5060ti-16", "rtx5060ti-16"),
            ("GeForce RTX 5070", "rtx5070"),
        ),
        *(("5070 Ti", "rtx5070ti"), ("RTX 4070", "rtx4070"), ("RTX 4070 SUPER", "rtx4070super")),
        *(("rtx4070ti super", "rtx4070tisuper"), ("4080 Super", "rtx4080super"), ("RTX 3080", "rtx3080")),
        *(("RTX 3080 10GB", "rtx3080"), ("RTX 3080 12 GB", "rtx3080-12"), ("RTX 3060 12GB", "rtx3060")),
        *(("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"), ("RTX A6000", "rtxa6000"), ("L40S", "l40s")),
        *(("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"), ("A100 80GB", "a100-80")),
    ],
)
def test_names_of_cards(written: str, name: str) -> None:
    (card,) = named_hardware(written).gpus
    assert card.name == name
    # Half the lanes of a slot carry half its rate; a rate that is given is taken as it is.
    assert card.to_device_rate == (12.5 if "60ti" in name else 25.0)
    assert named_hardware(written, link=20.0).gpus[0].to_device_rate == 20.0


def test_the_list_names_models_and_cards(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli._parser().parse_args(["plan", "--list"])
    assert ended.value.code == 0
    listed = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert {*KNOWN_GPUS, *SHAPES} <= set(listed)
    assert listed["rtx4090"] == ["24.0", "1,008", "165", "4.0", "×16"]
    assert listed["llama3.1-8b"] == ["8.03", "B", "15.0", "0.125", "131,072"]


def test_a_plan_says_which_experts_stay_as_they_are(run: Run) -> None:
    flags = "--model qwen3-30b-a3b --context 8k --gpu h100 --config plain"
    assert "note       int8 leaves the experts in bfloat16, 54.0 GiB" in run(f"{flags} --quantize int8")[0]
    assert "leaves the experts" not in run(flags)[0] + run(f"{flags} --quantize nf4")[0]
