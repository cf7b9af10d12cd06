"""Inspection of a machine, recommendations, and the command that prints them."""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.machine_cases import HEALTHY, assert_positive, changed

from offload_rt.commands import cli
from offload_rt.errors import UsageError
from offload_rt.machine import inspection, inventory, measuring
from offload_rt.machine.inspection import Report, inspect
from offload_rt.machine.recommendations import recommendations
from offload_rt.system.hardware import GIB
from offload_rt.system.memory import CACHE_FOLDER

Become = Callable[[dict[str, object]], None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Become:
    """Makes this the healthy machine with some changes; its cache folder is `tmp_path`."""

    def become(changes: dict[str, object]) -> None:
        machine = changed(HEALTHY, changes)
        for part in ("host", "gpus", "versions"):
            monkeypatch.setattr(inventory, f"read_{part}", lambda part=part: getattr(machine, part))

    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(inventory, "lockable_memory", lambda host: host.available_bytes)
    monkeypatch.setattr(inspection, "no_cuda_device", lambda: None)
    become({})
    return become


@pytest.fixture
def measure(become: Become, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Measures nothing, and leaves memory sizes at 0 as measurements do."""
    sizes = ("host.memory_bytes", "host.lockable_bytes", "gpus.0.memory_bytes")
    rates = changed(HEALTHY.hardware, dict.fromkeys(sizes, 0))
    measure = Mock(return_value=(rates, HEALTHY.links))
    monkeypatch.setattr(inspection, "_measure", measure)
    return measure


def test_it_is_measured_once_unless_asked_again(measure: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    first = inspect()
    assert first.hardware == HEALTHY.hardware and first.links == HEALTHY.links
    assert inspect() == first and measure.call_count == 1
    monkeypatch.setattr("os.getloadavg", lambda: (7.25, 0.0, 0.0))
    assert inspect(refresh=True).load_average == inspect().load_average == 7.25
    assert measure.call_count == 2


def test_who_comes_while_another_measures_takes_what_it_finds(
    measure: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that measured at once would find half of the rates."""
    first, began, other = inspect(), threading.Event(), list[Report]()
    (path,) = tmp_path.glob("*.json")
    content = path.read_bytes()
    path.unlink()
    with (tmp_path / "measuring.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        read = inspection._load

        def load(name: str) -> Any:
            began.set()
            return read(name)

        monkeypatch.setattr(inspection, "_load", load)
        waiting = threading.Thread(target=lambda: other.append(inspect()))
        waiting.start()
        assert began.wait(10) and not other
        path.write_bytes(content)
        fcntl.flock(lock, fcntl.LOCK_UN)
    waiting.join(10)
    assert other == [first] and measure.call_count == 1


def test_inference_mode_of_the_caller_is_left_while_it_is_measured(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of the measurements are not in it, and could not write to its tensors."""
    become({"gpus": ()})
    modes = list[bool]()

    def measured(*given: object) -> object:
        modes.append(torch.is_inference_mode_enabled())
        return HEALTHY.hardware.host

    monkeypatch.setattr(measuring, "measure_host", measured)
    with torch.inference_mode():
        inspect()
    assert modes == [False]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"hardware": {}}', None])
def test_a_corrupt_or_foreign_file_is_replaced(measure: Mock, tmp_path: Path, content: bytes | None) -> None:
    inspect()
    (path,) = tmp_path.glob("*.json")
    without_a_rate = path.read_bytes().replace(b'"launch_ms"', b'"lunch_ms"')
    path.write_bytes(without_a_rate if content is None else content)
    inspect()
    inspect()
    assert measure.call_count == 2


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("host.processor", "Z80"),
        ("host.threads", 1),
        ("host.attention", "torch-cpu"),
        ("host.total_bytes", 48 * GIB),
        ("gpus.0.uuid", "GPU-2"),
        ("gpus.0.bus", "0000:02:00.0"),
        ("versions.torch", "2.14.0"),
    ],
)
def test_another_machine_is_measured(measure: Mock, become: Become, path: str, value: object) -> None:
    inspect()
    become({path: value})
    inspect()
    assert measure.call_count == 2


def test_free_memory_is_read_each_time(measure: Mock, become: Become) -> None:
    inspect()
    become({"host.available_bytes": 5 * GIB, "gpus.0.free_bytes": 3 * GIB})
    hardware = inspect().hardware
    assert (hardware.host.memory_bytes, hardware.host.lockable_bytes) == (5 * GIB, 5 * GIB)
    assert hardware.gpus[0].memory_bytes == 3 * GIB and measure.call_count == 1


def test_a_folder_that_cannot_be_written_is_a_notice(
    measure: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "file" / "below"))
    (notice,) = inspect().notices
    assert CACHE_FOLDER in notice
    inspect()
    assert measure.call_count == 2


def test_a_machine_without_a_gpu_is_measured(become: Become, tiny: None) -> None:
    become({"gpus": ()})
    report = inspect()
    assert_positive(report.hardware.host)
    assert (*report.hardware.gpus, *report.links, *report.notices) == ()
    assert inspect() == report


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_a_gpu_that_fails_is_named(
    become: Become, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(measuring, "PinnedCopies", Mock(side_effect=error("it failed\nmore")))
    with pytest.raises(UsageError, match=r"^GPU 0 \(NVIDIA .* 4090, 23.0 GiB free\) .*: it failed; end"):
        inspect()
    assert not list(tmp_path.glob("*.json"))


def test_copies_serve_the_processors_measurement_and_are_closed(
    become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock()
    made.measure_gpu.return_value = HEALTHY.hardware.gpus[0], HEALTHY.links[0]
    made.measure_host.return_value = HEALTHY.hardware.host
    for name in ("PinnedCopies", "measure_gpu", "measure_host"):
        monkeypatch.setattr(measuring, name, getattr(made, name))
    told = Mock()
    assert inspect(on_progress=told).hardware == HEALTHY.hardware
    told.assert_called_once_with("measure GPU 0", 0, 1)
    called = ["PinnedCopies", "measure_gpu", "measure_host", "PinnedCopies().close"]
    assert [name for name, *_ in made.mock_calls] == called
    assert made.measure_host.call_args.args[1] == made.PinnedCopies.return_value.copy


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"hardware.host.lockable_bytes": 0, "gpus": (), "links": (), "hardware.gpus": ()}, None),
        ({"links.0": (None, None)}, None),
        ({"links.0": (4, 8), "hardware.gpus.0.to_device_rate": 13.0}, ["PCIe 4 ×8, the GPU", "4 ×16; use"]),
        ({"links.0": (3, 16), "hardware.gpus.0.to_device_rate": 13.0}, ["PCIe 3 ×16", "BIOS"]),
        ({"hardware.gpus.0.to_host_rate": 12.0}, ["12.0 GB/s of the 31.5", "PCIe 4 ×16", "numactl"]),
        ({"load_average": 9.0}, ["load average was 9.0 on 32", "--refresh"]),
        ({"host.native_kernel": "no compiler"}, ["native kernel", "install g++"]),
        ({"host.native_kernel": "switched off"}, ["native kernel", "unset OFFLOAD_RT_NATIVE"]),
        ({"host.native_kernel": "build failed"}, ["native kernel", "build failed", CACHE_FOLDER]),
        ({"gpus.0.triton": "ImportError: no"}, ["GPU 0: without Triton", "gcc", "python3-dev", "no)"]),
        (
            {"host.wsl": True, "hardware.host.lockable_bytes": GIB},
            ["only 1.00 of 90.0 GiB", "under WSL2", "boot Linux"],
        ),
        ({"hardware.host.lockable_bytes": 8 * 2**20}, ["0.01 of 90.0 GiB", "ulimit -l", "limits.conf"]),
    ],
)
def test_what_is_wrong_is_recommended_against(changes: dict[str, object], words: list[str] | None) -> None:
    found = recommendations(changed(HEALTHY, changes))
    assert len(found) == (words is not None)
    assert all(word in found[0] for word in words or ())


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each `refresh` that was asked for; the machine is healthy, but for a ×8 slot."""
    asked: list[bool] = []

    def inspect(refresh: bool, on_progress: Callable[[str, int, int], None]) -> Report:
        asked.append(refresh)
        on_progress("measure GPU 1", 1, 4)
        return changed(HEALTHY, {"links.0": (4, 8)})

    monkeypatch.setattr(inspection, "inspect", inspect)
    return asked


def test_the_command_prints_and_writes(
    inspected: list[bool], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    path = tmp_path / "out.json"
    assert cli.main(["doctor", "--refresh", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # progress is for terminals
    found = " ".join(out.split())
    for words in (
        "AMD Ryzen 9 7950X; 32 of 32 cores, 8 threads",
        "memory 90.0 GiB of 96.0 GiB available lockable memory 90.0 GiB (`ulimit -l`: none)",
        "native-cpu (native kernel: built)",
        "50.0 GB/s of bfloat16 KV at 1 query a key head, 40.0 at 16, 30.0 at 32",
        "attention keeps 80% of its rate, the link 90%",
        "GPU 0 name NVIDIA GeForce RTX 4090 memory 23.0 GiB of 24.0 GiB free",
        "PCIe 4 ×8 while copying; the GPU supports PCIe 4 ×16",
        "25.0 GB/s to the GPU, 26.5 GB/s to the host",
        "flash-attn; Triton kernels run",
        "python 3.12.1, torch 2.13.0, flash-attn 2.8.0, driver 580.1 notes a note",
        "Recommendations 1 GPU 0: its link runs as PCIe 4 ×8",
    ):
        assert words in found, words
    written = json.loads(path.read_text())
    (advised,) = written.pop("recommendations")
    assert "×8" in advised
    assert written == json.loads(json.dumps(changed(HEALTHY, {"links.0": (4, 8)}).to_json()))
    assert cli.main(["doctor", "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    assert inspected == [True, False]


def test_what_does_not_run_is_said_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")  # narrow: rows are wrapped, not cut
    failed = "CompilationError: [red]x[/blue] :warning:"  # as markup it would be an error
    without_gpu = {"hardware.gpus": (), "links": (), "gpus": (), "no_cuda_device": "it is " + "hidden " * 20}
    for changes, words in (
        ({"gpus.0.triton": failed}, f"do not run ({failed})"),
        (without_gpu, "hidden " * 20),
    ):
        report = changed(HEALTHY, changes)
        monkeypatch.setattr(inspection, "inspect", lambda *given, report=report: report)
        assert cli.main(["doctor"]) == 0
        out = capsys.readouterr().out
        assert words in " ".join(out.split()) + " " and max(map(len, out.splitlines())) <= 70
