"""What doctor keeps, warns of and prints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from machine_cases import HEALTHY, assert_positive, changed
from machine_cases import tiny as tiny  # a fixture

from offload_rt import cli
from offload_rt.commands.doctor import table
from offload_rt.errors import UsageError
from offload_rt.machine import advice, doctor
from offload_rt.machine.doctor import Report, inspect
from offload_rt.machine.hardware import GIB, Hardware
from offload_rt.machine.memory import CACHE_FOLDER


def become(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]) -> None:
    """From now on, the machine is the healthy one with these changes."""
    now = changed(HEALTHY, changes)
    for part in ("host", "cards", "versions"):
        monkeypatch.setattr(doctor, f"read_{part}", lambda part=part: getattr(now, part))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache folder of a healthy machine."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    become(monkeypatch, {})
    monkeypatch.setattr(doctor, "lockable_memory", lambda host: host.available_bytes)
    return tmp_path


@pytest.fixture
def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Measurements, as they are made."""
    made: list[str] = []

    def measure(cards: Any, host: Any, on_progress: Any) -> Any:
        made.append("measured")
        forgotten = replace(HEALTHY.hardware.host, memory_bytes=0, lockable_bytes=0)
        gpu = replace(HEALTHY.hardware.gpus[0], memory_bytes=0)
        return Hardware(forgotten, (gpu,), True), HEALTHY.links

    monkeypatch.setattr(doctor, "_measure", measure)
    return made


def test_measures_once_unless_asked_again(
    measured: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inspect()
    assert first.hardware == HEALTHY.hardware
    assert inspect() == first
    assert len(measured) == 1
    assert [path.suffix for path in folder.iterdir()] == [".json"]
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (7.25, 0.0, 0.0))
    assert inspect(refresh=True).load_average == inspect().load_average == 7.25
    assert len(measured) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"{}", b'{"hardware": {}}', None])
def test_a_damaged_or_foreign_file_is_replaced(
    measured: list[str], folder: Path, content: bytes | None
) -> None:
    inspect()
    (path,) = folder.iterdir()
    without_a_figure = path.read_bytes().replace(b'"launch_ms"', b'"lunch_ms"')
    path.write_bytes(without_a_figure if content is None else content)
    inspect()
    inspect()
    assert len(measured) == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("host.processor", "Z80"),
        ("host.cores", 3),
        ("host.threads", 1),
        ("host.attention", "torch-cpu"),
        ("host.total_bytes", 48 * GIB),
        ("cards.0.uuid", "GPU-2"),
        ("cards.0.bus", "0000:02:00.0"),
        ("versions.torch", "2.14.0"),
    ],
)
def test_another_machine_is_measured(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, path: str, value: object
) -> None:
    inspect()
    become(monkeypatch, {path: value})
    inspect()
    assert len(measured) == 2


def test_what_is_free_is_never_old(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inspect()
    become(monkeypatch, {"host.available_bytes": 5 * GIB, "cards.0.free_bytes": 3 * GIB})
    monkeypatch.setattr(doctor, "lockable_memory", lambda host: host.available_bytes // 2)
    report = inspect()
    assert len(measured) == 1
    assert report.hardware.host.memory_bytes == 5 * GIB
    assert report.hardware.host.lockable_bytes == 5 * GIB // 2
    assert report.hardware.gpus[0].memory_bytes == report.cards[0].free_bytes == 3 * GIB
    assert report.host.available_bytes == 5 * GIB


def test_a_folder_that_cannot_be_written_is_a_notice(
    measured: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(CACHE_FOLDER, str(folder / "file" / "below"))
    report = inspect()
    assert report.hardware == HEALTHY.hardware
    assert len(report.notices) == 1 and "OFFLOAD_RT_CACHE" in report.notices[0]
    assert inspect().notices == report.notices
    assert len(measured) == 2


def test_everything_without_a_card(folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, {"cards": ()})
    report = inspect()
    assert_positive(report.hardware.host)
    assert report.hardware.gpus == () and report.links == ()
    assert report.hardware.host.memory_bytes == HEALTHY.host.available_bytes
    assert report.notices == ()
    assert inspect() == report


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), "23.0 GiB of free memory are too few"),
        (RuntimeError("CUDA error: launch failure\nmore"), "launch failure; check it"),
    ],
)
def test_a_card_that_fails_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    monkeypatch.setattr(doctor.measuring, "PinnedCopies", Mock(side_effect=error))
    with pytest.raises(UsageError, match=r"GPU 0 \(NVIDIA GeForce RTX 4090\)") as refusal:
        inspect()
    assert told in str(refusal.value) and "more" not in str(refusal.value)
    assert list(folder.iterdir()) == []


def test_copies_are_given_back_and_serve_the_processors_measurement(
    folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, card = Mock(), (HEALTHY.hardware.gpus[0], HEALTHY.links[0])
    copies = made.PinnedCopies.return_value
    made.measure_gpu.return_value, made.measure_host.return_value = card, HEALTHY.hardware.host
    for name in ("PinnedCopies", "measure_gpu", "measure_host"):
        monkeypatch.setattr(doctor.measuring, name, getattr(made, name))
    report = inspect()
    called = ["PinnedCopies", "measure_gpu", "measure_host", "PinnedCopies().close"]
    assert [name for name, *_ in made.mock_calls] == called
    made.PinnedCopies.assert_called_once_with(torch.device("cuda:0"), 23 * GIB)
    assert made.measure_host.call_args.args[1] == copies.copy
    assert report.hardware == HEALTHY.hardware and report.notices == ()


# Warnings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        # Nothing is wrong.
        ({}, None),
        ({"host.governor": "powersave", "host.energy_preference": "balance_performance"}, None),
        ({"hardware.host.lockable_bytes": 0, "cards": (), "links": (), "hardware.gpus": ()}, None),
        # One thing is.
        ({"links.0.width": 8, "hardware.gpus.0.to_device_rate": 13.0}, ["×8", "×16", "slot"]),
        ({"links.0.generation": 3}, ["PCIe 3", "can do 4", "BIOS"]),
        ({"hardware.gpus.0.to_device_rate": 12.0}, ["12.0 GB/s of the 31.5", "numactl"]),
        ({"hardware.gpus.0.to_host_rate": 12.0}, ["12.0 GB/s of the 31.5"]),
        ({"links.0.pinned": False, "hardware.gpus.0.to_device_rate": 5.0}, ["page-locked", "ulimit -l"]),
        ({"cards.0.power_limit_watts": 200.0}, ["200 W of 450 W", "nvidia-smi -i 0000:01:00.0 -pl 450"]),
        (
            {"cards.0.device": None, "hardware.gpus": (), "links": (), "no_cuda_device": "torch says why"},
            ["cannot use NVIDIA GeForce RTX 4090: torch says why"],
        ),
        ({"load_average": 9.0}, ["load average was 9.0 on 32", "--refresh"]),
        ({"host.governor": "powersave"}, ["governor powersave", "cpupower"]),
        ({"host.governor": "powersave", "host.energy_preference": "power"}, ["preference: power"]),
        ({"host.native_kernel": "no compiler"}, ["native kernel", "install g++"]),
        ({"host.native_kernel": "switched off"}, ["native kernel", "OFFLOAD_RT_NATIVE"]),
        ({"host.native_kernel": "build failed"}, ["native kernel", "build failed"]),
        ({"host.memory_limit_bytes": 40 * GIB}, ["container", "40.0 of 96.0 GiB"]),
        ({"host.available_bytes": 10 * GIB}, ["only 10.0 of 96.0 GiB"]),
        ({"host.swap_used_bytes": 2 * GIB}, ["2.0 GiB", "moved out"]),
        ({"hardware.host.lockable_bytes": 8 * 2**20}, ["0.01 of 90.0 GiB", "ulimit -l", "limits.conf"]),
    ],
)
def test_what_is_wrong_is_told_with_its_remedy(changes: dict[str, object], told: list[str] | None) -> None:
    warnings = advice.warnings(changed(HEALTHY, changes))
    assert len(warnings) == (told is not None)
    assert all(words in warnings[0] for words in told or ())


# The command

NARROW = changed(HEALTHY, {"links.0.width": 8})


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every `refresh` that was asked for; the machine is healthy, but for a ×8 slot."""
    asked: list[bool] = []

    def inspect(refresh: bool, on_progress: Callable[[str, int, int], None] | None) -> Report:
        asked.append(refresh)
        if on_progress is not None:
            on_progress("the moon", 0, 2)
        return NARROW

    monkeypatch.setattr(doctor, "inspect", inspect)
    return asked


def test_the_command_prints_and_writes(
    inspected: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--refresh", "--json", str(path)]) == 0
    assert inspected == [True]
    out, err = capsys.readouterr()
    assert err == "measuring  the moon (1 of 2)\n"
    for words in (
        "AMD Ryzen 9 7950X; 32 of 32 processors, threads: 8, NUMA nodes: 1",
        "90.0 GiB of 96.0 GiB available",
        "50.0 GB/s at 1 query, 40.0 at 16, 30.0 at 32",
        "attention keeps 80% of its rate, the link 90%",
        "23.0 GiB of 24.0 GiB free",
        "PCIe 4 ×8 while copying; the card can do 4 ×16",
        "25.0 GB/s; both ways 20.5",
        "26.5 GB/s; both ways 21.5",
        "attention flash-attn; Triton kernels run",
        "python 3.12.1, torch 2.13.0, transformers 5.23.0, flash-attn 2.8.0, driver 580.1",
        "a note",
    ):
        assert words in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
    _, _, shown = out.partition("\nWarnings\n")
    assert shown.startswith("  - GPU 0: its link is ×8 wide")
    written = json.loads(path.read_text())
    (warning,) = written.pop("warnings")
    assert "×8" in warning
    assert written == json.loads(json.dumps(NARROW.to_json()))


@pytest.mark.parametrize("why", [None, "ModuleNotFoundError: No module named 'triton'"])
def test_the_kernels_that_run_are_told(why: str | None) -> None:
    report = changed(HEALTHY, {"cards.0.triton": why, "cards.0.attention": "torch-cuda"})
    shown = " ".join(" ".join(table(report)).split())
    runs = "run" if why is None else f"do not run ({why})"
    assert f"attention torch-cuda; Triton kernels {runs} " in shown


def test_quiet(inspected: list[bool], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert inspected == [False]
