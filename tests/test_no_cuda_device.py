"""What is said where torch finds no CUDA device, by all that needs one; `make gpu` without an install."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from machine_cases import HEALTHY
from test_inventory import DRIVER, NVMLError

import bench.__main__ as bench_line
from offload_rt import cli
from offload_rt.machine import doctor
from offload_rt.machine.cuda import no_cuda_device

ROOT = Path(__file__).resolve().parent.parent
NO_BUILD = AssertionError("Torch not compiled with CUDA enabled")
NO_DRIVER = RuntimeError("Found no NVIDIA driver on your system.\nmore")
OLD_DRIVER = RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")
HIDDEN = RuntimeError("No CUDA GPUs are available")


def become(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    cuda: str | None,
    error: Exception | None,
    driver: str | None,
) -> None:
    """From now on torch is that build, its initialisation raises `error`, and that driver is installed."""

    def init() -> None:
        if error is not None:
            raise error

    def answer(name: str, *_: object) -> Any:
        if driver is None:
            raise NVMLError("driver not loaded")
        return driver if name == "nvmlSystemGetDriverVersion" else 0

    functions = {name: lambda *given, name=name: answer(name, *given) for name in DRIVER}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError, **functions))
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


CPU_BUILD = ["a build for CPUs alone", "pip prefers", "+cpu builds", "--force-reinstall --index-url"]


@pytest.mark.parametrize(
    ("version", "cuda", "error", "driver", "words", "others"),
    [
        ("2.13.0+cpu", None, NO_BUILD, "580.65", [*CPU_BUILD, "cu130", "driver 580.65 is installed"], []),
        ("2.13.0", None, NO_BUILD, None, [*CPU_BUILD, "cu130", "no NVIDIA driver was found"], []),
        ("2.11.0+cpu", "12.6", NO_BUILD, "550.54", [*CPU_BUILD, "cu126", "525 or newer"], ["cu130"]),
        (
            "2.13.0+cu130",
            "13.0",
            NO_DRIVER,
            None,
            ["CUDA 13.0", "580 or newer", "install the driver"],
            ["more"],
        ),
        (
            *("2.13.0+cu130", "13.0", OLD_DRIVER, "550.54"),
            ["580 or newer", "driver 550.54 is installed", "update the driver", "CUDA 12: pip", "cu126"],
            ["CUDA_VISIBLE_DEVICES"],
        ),
        ("2.11.0", "12.8", HIDDEN, "550.54", ["525 or newer, 550", "nvidia-smi", "does not hide"], ["pip "]),
        ("2.11.0", "12.8", None, "550.54", ["it counts 0 devices", "nvidia-smi"], ["pip "]),
        ("2.20.0", "14.1", HIDDEN, "600.1", ["CUDA 14.1", "CUDA's release notes"], ["pip "]),
    ],
)
def test_the_reason_is_torchs_own_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    cuda: str | None,
    error: Exception | None,
    driver: str | None,
    words: list[str],
    others: list[str],
) -> None:
    become(monkeypatch, version, cuda, error, driver)
    said = no_cuda_device()
    assert said is not None and "\n" not in said
    reason = "it counts" if error is None else str(error).partition("\n")[0]
    for word in (f'torch {version} finds no CUDA device ("{reason}', *words):
        assert word in said, said
    for word in others:
        assert word not in said, said


def test_a_device_that_the_environment_hides_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, "2.13.0", "13.0", HIDDEN, "580.1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert (no_cuda_device() or "").endswith("does not hide the GPU (it is '7')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert no_cuda_device() is None


def test_commands_that_need_a_device_say_why_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    become(monkeypatch, "2.13.0+cu130", "13.0", OLD_DRIVER, "550.54")
    said = no_cuda_device()
    out = tmp_path / "out.jsonl"
    for line, words in ((bench_line, ["gpu", "--out", str(out)]), (cli, ["generate", "--device", "cuda"])):
        assert line.main(words if line is bench_line else [*words, "--prompt", "a"]) == 2
        error = capsys.readouterr().err
        assert said is not None and said in error and error.count("\n") == 1
    assert not out.exists()
    # Where the driver lists GPUs it is a warning, else a line.
    for cards in ((), HEALTHY.cards):
        hardware = replace(HEALTHY.hardware, gpus=())
        report = replace(HEALTHY, hardware=hardware, links=(), cards=cards, no_cuda_device=said)
        monkeypatch.setattr(doctor, "inspect", lambda *given, report=report: report)
        assert cli.main(["doctor"]) == 0
        table, _, warnings = capsys.readouterr().out.partition("\nWarnings\n")
        place, other = (warnings, table) if cards else (table, warnings)
        assert said in " ".join(place.split()) and "too old" not in other


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_uses_an_existing_environment_as_it_is(tmp_path: Path) -> None:
    """Nothing is installed, not even where the checkout has no environment of its own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for target, first in (("gpu-quick", "bench gpu --quick"), ("gpu", "no_cuda_device")):
        given = ["make", "-n", target, "BIN=/some/env/bin", "INSTALLED="]
        # As if no other make had started this one.
        alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True, check=True, env=alone)
        assert "pip" not in done.stdout and "venv" not in done.stdout and ".venv" not in done.stderr
        assert done.stdout.startswith("/some/env/bin/python ") and first in done.stdout.splitlines()[0]
    checks = [line for line in done.stdout.splitlines() if "'" in line and "bench gpu" in line]
    assert done.stdout.index("bench gpu") < done.stdout.index("pytest") and len(checks) == 1
    done = subprocess.run(["make", "-n", "gpu"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install" in done.stdout


def test_a_checkout_that_is_not_installed_has_commands(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **given: iter(()))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "offload-rt not installed\n"
