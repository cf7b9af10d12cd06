"""Why torch finds no CUDA device, as all that needs one says it; `make gpu` without an install."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machine_cases import NVMLError, use_driver

import bench.__main__ as bench_line
from offload_rt.commands import cli
from offload_rt.machine.cuda import no_cuda_device

ROOT = Path(__file__).resolve().parents[2]
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
    """Makes torch that build, whose initialisation raises `error`, with that NVIDIA driver."""

    def init() -> None:
        if error is not None:
            raise error

    missing = {} if driver else {"nvmlInit": NVMLError("driver not loaded")}
    use_driver(monkeypatch, nvmlSystemGetDriverVersion=driver, **missing)
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


CPU_BUILD = ["a build for CPUs only", "+cpu builds", "--force-reinstall --index-url"]
OLD = ["580 or", "driver 550.54 is installed and lists NVIDIA GeForce RTX 4090", "update the driver"]


@pytest.mark.parametrize(
    ("version", "cuda", "error", "driver", "words", "others"),
    [
        ("2.13.0+cpu", None, NO_BUILD, "580.65", [*CPU_BUILD, "cu130", "driver 580.65 is installed"], []),
        ("2.13.0", None, NO_BUILD, None, [*CPU_BUILD, "cu130", "no NVIDIA driver was found"], []),
        ("2.11.0+cpu", "12.6", NO_BUILD, "550.54", [*CPU_BUILD, "cu126", "525 or newer"], ["cu130"]),
        ("2.13.0+cu130", "13.0", NO_DRIVER, None, ["cuda is 13.0", "580", "install the driver"], ["more"]),
        ("2.13.0+cu130", "13.0", OLD_DRIVER, "550.54", [*OLD, "CUDA 12: ", "cu126"], ["VISIBLE"]),
        ("2.11.0", "12.8", HIDDEN, "550.54", ["525 or newer, 550", "nvidia-smi", "does not hide"], ["pip "]),
        ("2.11.0", "12.8", None, "550.54", ["it counts 0 devices", "nvidia-smi"], ["pip "]),
        ("2.20.0", "14.1", HIDDEN, "600.1", ["cuda is 14.1", "CUDA's release notes"], ["pip "]),
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
    said, out = no_cuda_device(), tmp_path / "out.jsonl"
    for main, words in (
        (bench_line.main, ["gpu", "--out", str(out)]),
        (cli.main, ["generate", "--device", "cuda", "--prompt", "a"]),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert said is not None and said in error and error.count("\n") == 1
    assert not out.exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_uses_an_existing_environment_as_it_is(tmp_path: Path) -> None:
    """Nothing is installed, not even where the checkout has no environment of its own."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    # As if no other make had started this one.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}

    def planned(target: str, *given: str) -> str:
        line = ["make", "-n", target, *given]
        return subprocess.run(
            line, cwd=tmp_path, capture_output=True, text=True, check=True, env=alone
        ).stdout

    for target, first in (
        ("gpu-quick", "bench gpu --quick"),
        ("gpu-7b", "--only largest"),
        ("gpu", "bench gpu"),
    ):
        lines = planned(target, "BIN=/some/env/bin", "INSTALLED=")
        assert "pip" not in lines and "venv" not in lines
        assert "/some/env/bin/python " in lines and first in lines
        assert target == "gpu-7b" or lines.index("bench gpu") < lines.index("pytest")
    assert "no_cuda_device" in lines.splitlines()[0]
    assert "pip install" in planned("gpu")


def test_a_checkout_that_is_not_installed_has_commands(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **given: iter(()))
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "offload-rt not installed\n"
