"""`bench gpu`: its runner, and what can be told of its checks without a CUDA device. No time is checked."""

from __future__ import annotations

import dataclasses
import gzip
import json
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_offload import SMALLER, TINY_KEYS, copies, times

import bench.__main__ as command_line
from bench import gpu, machine
from bench.random_models import SHAPES
from bench.rounds import Recorded
from cpu_kv import PacedLink, PageLocking
from cpu_kv.link import CopyRecord, Pairs
from offload_rt.machine import doctor
from offload_rt.machine.hardware import Hardware, named_hardware
from offload_rt.timeline import Span

CPU = torch.device("cpu")
GIB = 2**30

# ------------------------------------------------------------------------------------------------ the runner


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "checks.json"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch, out: Path) -> dict[str, dict[str, Any]]:
    """Makes checks of its own take the place of all; returns the rows that stood in the file at each one."""
    stood: dict[str, dict[str, Any]] = {}

    def noted(name: str, found: dict[str, Any] | Exception) -> Callable[..., dict[str, Any]]:
        def run(device: torch.device, **given: Any) -> dict[str, Any]:
            stood[name] = json.loads(out.read_text())["checks"] if out.exists() else {}
            if isinstance(found, Exception):
                raise found
            return found | given

        run.__doc__ = f"What {name} is."
        return run

    def process(command: list[str], timeout: float, **_: Any) -> SimpleNamespace:
        """In the place of `subprocess.run`."""
        name = command[command.index("--only") + 1]
        assert command[1:4] == ["-m", "bench", "gpu"] and timeout <= 600
        if name == "dies":
            return SimpleNamespace(returncode=-11)
        if name == "hangs":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=command_line.main(command[3:]))

    found: dict[str, dict[str, Any] | Exception] = {
        "first": {"rate": 2.5, "rows": [1, 2]},
        "full": torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB"),
        "dies": {},
        "hangs": {},
        "wrong": {"error": "the result is wrong", "rate": 1.0},
        "last": {"rate": 0.5},
    }
    monkeypatch.setattr(gpu, "CHECKS", {name: noted(name, one) for name, one in found.items()})
    monkeypatch.setattr(gpu, "QUICK", {"last": {"size": 3}})
    monkeypatch.setattr(gpu, "choose_device", lambda name: CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", process)
    return stood


def test_whatever_fails_the_others_run_and_all_is_written_as_it_is_done(
    checks: dict[str, dict[str, Any]], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["gpu", "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["checks"]
    assert list(rows) == ["first", "full", "dies", "hangs", "wrong", "last"]
    assert all(row.pop("wall_s") >= 0 for row in rows.values())
    said = r"torch.OutOfMemoryError: CUDA out of memory. \(test_bench_gpu.py:\d+\)"
    assert re.fullmatch(said, rows["full"]["error"])
    assert "ended with -11" in rows["dies"]["error"] and "not done after 600 s" in rows["hangs"]["error"]
    assert rows["first"] == {"rate": 2.5, "rows": [1, 2]} and rows["last"] == {"rate": 0.5}
    assert {name: list(stood) for name, stood in checks.items()} == {
        "first": [],
        "full": ["first"],
        "wrong": ["first", "full", "dies", "hangs"],
        "last": ["first", "full", "dies", "hangs", "wrong"],
    }
    assert list(out.parent.iterdir()) == [out]
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == {"checks": 6, "failed": ["full", "dies", "hangs", "wrong"]}
    assert [line for line in printed if line.startswith("last: ")][-1].endswith(", rate 0.5")
    assert not any("[1, 2]" in line for line in printed), "tables are in the file"


def test_some_checks_or_one_and_a_quick_look(
    checks: dict[str, dict[str, Any]], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command_line.main(["gpu", "--only", "last,first", "--quick", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["checks"]
    assert list(rows) == list(checks) == ["last", "first"]
    assert rows["last"]["size"] == 3
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("one check needs no other process"))
    assert command_line.main(["gpu", "--only", "last", "--out", str(out)]) == 0
    assert "size" not in json.loads(out.read_text())["checks"]["last"]
    monkeypatch.setitem(gpu.CHECKS, "rounds", lambda device, trace: {"trace": str(trace)})
    assert command_line.main(["gpu", "--only", "rounds", "--out", str(out)]) == 0
    traced = json.loads(out.read_text())["checks"]["rounds"]["trace"]
    assert traced == str(out.with_name("gpu-rounds-trace.json.gz"))


def test_mistakes_are_told_in_a_line(
    checks: dict[str, dict[str, Any]],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command_line.main(["gpu", "--only", "first,second", "--out", str(out)]) == 2
    assert "'second' is none of first, full, dies, hangs, wrong, last" in capsys.readouterr().err
    assert command_line.main(["gpu", "--out", str(out.parent)]) == 2
    assert "is a folder" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command_line.main(["gpu", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "torch sees no CUDA device" in error and error.count("\n") == 1
    assert not checks and not out.exists()


def test_the_help_lists_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["gpu", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, check in gpu.CHECKS.items():
        said = getattr(check, "func", check).__doc__
        assert any(line.split(maxsplit=1) == [name, said] for line in lines)
    assert set(gpu.QUICK) < set(gpu.CHECKS)


# -------------------------------------------------------------------------------------- a card and its link


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "IDLE_S", 0.0)
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)


def test_versions_tell_the_kernel() -> None:
    found = gpu.versions(CPU)
    assert (found["kernel"], found["torch"]) == (platform.release(), torch.__version__)


@pytest.mark.usefixtures("at_once")
def test_a_slab_is_locked_where_as_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_kv.pinned.PIECE_BYTES", 2**18)
    locked: list[int] = []

    def register(address: int, size: int) -> int:
        if size > 2**19:
            return 1
        locked.append(address)
        return 0

    def unregister(address: int) -> int:
        locked.remove(address)
        return 0

    found = gpu.registration(CPU, (2**18 / GIB, 2**20 / GIB), PageLocking(register, unregister))
    idle, *rows = found["rows"]
    assert idle["how"] == "idle" and idle["launches"] > 0
    assert [(row["how"], row["gib"] * GIB, row["locked_bytes"]) for row in rows] == [
        ("slab", 2**18, 2**18),
        ("at once", 2**18, 2**18),
        ("slab", 2**20, 2**20),
        ("at once", 2**20, 0),
    ]
    assert found["longest_launch_ms"] == max(row["launch_ms"]["max"] for row in rows)
    assert not locked


class Point:
    """A ticket that is passed once somebody has waited for it."""

    def __init__(self, before: tuple[Point, ...] = ()) -> None:
        self.before = before
        self.passed = False

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        for point in self.before:
            point.synchronize()
        self.passed = True

    def done(self) -> bool:
        return self.passed


class NotingLink:
    """Notes what it is asked to copy; a byte takes a second to the device and two to the host.

    Args:
        urgent_last: an urgent copy waits for all that were asked for before it.
    """

    device = CPU
    in_place = False
    bytes_per_second = None

    def __init__(self, urgent_last: bool = False) -> None:
        self.asked: list[tuple[bool, Any, int]] = []
        self._urgent_last = urgent_last
        self._tickets: list[Point] = []
        self._records: list[CopyRecord] = []

    def copy(self, pairs: Pairs, after: Any = None, *, to_host: bool = False, urgent: bool = False) -> Point:
        for destination, source in pairs:
            destination.copy_(source)
        size = sum(source.nbytes for _, source in pairs)
        self.asked.append((to_host, after, len(pairs)))
        self._records.append(CopyRecord(to_host, size, 1.0, 1.0 + size * (2 if to_host else 1)))
        self._tickets.append(Point(tuple(self._tickets) if urgent and self._urgent_last else ()))
        return self._tickets[-1]

    def mark(self) -> Point:
        return Point()

    def record(self) -> None:
        self._records = []

    def recorded(self) -> list[CopyRecord]:
        records, self._records = self._records, []
        return records

    def close(self) -> None:
        pass


def memory(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    here = torch.arange(2 * size, dtype=torch.uint8).view(2, size)
    return here, torch.full_like(here, 255)


def test_rates_of_copies_that_begin_together() -> None:
    link, (here, there) = NotingLink(), memory(64)
    sent, held = here[0].clone(), there[1].clone()
    found = gpu.copies(link, link.mark, here, there, pieces=(4, 32))
    assert found["rows"] == [
        {"piece_bytes": piece, "to_host": ways, "gb_s": [1e-9 / (2 if way else 1) for way in ways]}
        for piece in (4, 32)
        for ways in ((False,), (True,), (False, True))
    ]
    assert {count for *_, count in link.asked} == {16, 2}
    last_to_device, last_to_host = link.asked[-2:]
    assert last_to_device[1] is last_to_host[1], "both directions behind one point"
    assert len({id(after) for _, after, _ in link.asked}) == 6 * gpu.REPEATS, "a new one each time"
    assert torch.equal(there[0], sent) and torch.equal(here[1], held)


@pytest.mark.parametrize("urgent_last", [False, True])
def test_an_urgent_copy_that_waits_for_blocked_ones_is_an_error(urgent_last: bool) -> None:
    link, later = NotingLink(urgent_last), Point()
    found = gpu.overtaking(link, lambda: later, *memory(64), piece=8)
    assert [after for _, after, _ in link.asked] == [later] * 4 + [None] * 6, (
        "the urgent ones wait for nothing"
    )
    assert found["overtook_blocked"] == found["overtook_running"] == (not urgent_last)
    assert ("error" in found) == urgent_last


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("fired", [False, True])
def test_a_queue_of_copies_behind_an_event(fired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "MIB", 16)
    link, event = NotingLink(), Point()
    event.passed = fired
    found = gpu.queue(link, lambda: event, *memory(64), count=50)
    assert link.asked == [(False, event, 50)]
    assert found["enqueued_before_event"] == (not fired)
    assert found["longest_launch_ms"] == found["launch_ms"]["max"] > 0


def test_checks_over_a_link_are_given_memory_and_points(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(gpu, "CudaLink", lambda device: NotingLink())
    monkeypatch.setattr(gpu, "MIB", 2**10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: torch.Stream(CPU))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)

    def check(link: Any, later: Any, here: torch.Tensor, there: torch.Tensor) -> dict[str, Any]:
        """What it is."""
        return {"done": later().done(), "shape": (*here.shape, *there.shape)}

    run = gpu.over_link(check, 7)
    assert run.__doc__ == "What it is."
    assert run(CPU) == {"pinned": True, "done": False, "shape": (2, 2**18, 2, 2**18)}
    assert slept == [7]


@pytest.mark.usefixtures("at_once")
def test_attention_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"tokens": 8192, "heads": ((4, 2),), "queries": (1, 3), "dim": 64}
    monkeypatch.setattr(gpu, "least_seconds", lambda work, device: 0.5)
    found = gpu.attention(CPU, **sizes)
    assert "error" not in found and found["read_gb_s"] == 10.0
    assert [(row["layout"], row["queries"], row["dtype"]) for row in found["rows"]] == [
        (layout, count, dtype)
        for dtype in ("torch.bfloat16", "torch.float16")
        for count in (1, 3)
        for layout in ("resident", "segments", "pages")
    ]
    for row in found["rows"]:
        assert row["ms"] == pytest.approx(500)
        assert row["gb_s"] == pytest.approx(2 * 8192 * 2 * 64 * 2 / 0.5 / 1e9)
        assert row["share_of_rate"] == pytest.approx(row["gb_s"] / 10)
    attended = gpu.attended
    monkeypatch.setattr(
        gpu, "attended", lambda backend, asked, parts, scale: attended(backend, asked, parts[:1], scale)
    )
    assert "'layout': 'segments'" in gpu.attention(CPU, **sizes)["error"], "half of the keys"


# ------------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A tiny model on a card that a processor and a paced link stand for."""
    measured = named_hardware("rtx4090")
    card = dataclasses.replace(measured.gpus[0], memory_bytes=GIB)
    hardware = dataclasses.replace(measured, gpus=(card,))
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    monkeypatch.setattr(gpu, "SHAPE", "tiny")
    monkeypatch.setattr(gpu, "OPTIONS", TINY_KEYS)
    monkeypatch.setattr(gpu, "NEW_TOKENS", 14)
    monkeypatch.setattr(gpu, "usable_hardware", lambda device, loaded: hardware)
    monkeypatch.setattr(gpu, "cap", lambda gib, device: None)
    monkeypatch.setattr(gpu, "CudaLink", lambda device: PacedLink(1e9))
    return hardware


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("streamed", [True, False])
def test_rounds_are_measured_and_traced(small: Hardware, streamed: bool, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    found = gpu.rounds(CPU, 200, streamed=streamed, trace=trace)
    assert found["rounds"] >= 4 and found["pinned_gb_s"] == small.gpus[0].to_device_rate
    assert found["planned"]["resident_tokens"] == 192, "all that was full when it was planned"
    kv = 192 * 2 * 2 * 2 * 16 * 2 / 1e9  # 2 layers of 2 key heads of 16
    assert (found["gb_a_round"] >= kv) == streamed
    assert found["copy_gb_s"] == pytest.approx(1.0)
    assert found["link_use"] == pytest.approx(found["link_busy"] / small.gpus[0].to_device_rate)
    with gzip.open(trace) as written:
        assert found["trace"] == trace.name and json.load(written)["traceEvents"]


def test_memory_of_a_prefill_beside_the_plan(small: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * GIB)
    found = gpu.prefill(CPU, 200)
    assert (found["context"], found["peak_gib"], found["reserved_gib"]) == (200, 3, 4)
    parts = sum(found["planned"].values())
    assert 0 < found["planned_gib"] < parts
    assert found["planned_gib"] == pytest.approx(parts - found["planned"]["reserve"])
    assert found["seconds"] > 0


def test_a_capped_card_is_planned_with_what_is_left_of_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [1.0]
    told: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device: SimpleNamespace(total_memory=96 * GIB),
        "set_per_process_memory_fraction": lambda share, device: shares.append(share),
        "get_per_process_memory_fraction": lambda device: shares[-1],
        "mem_get_info": lambda device: (80 * GIB, 96 * GIB),
        "memory_reserved": lambda device: 5 * GIB,
        "memory_allocated": lambda device: 4 * GIB,
    }
    for name, tell in told.items():
        monkeypatch.setattr(torch.cuda, name, tell)
    machine = SimpleNamespace(hardware=named_hardware("rtx4090"))
    monkeypatch.setattr(doctor, "inspect", lambda on_progress: machine)

    def usable() -> float:
        return doctor.usable_hardware(torch.device("cuda", 0), 3 * GIB).gpus[0].memory_bytes / GIB

    assert usable() == 80 + 1 + 3, "free, reserved and not handed out, loaded"
    gpu.cap(24.0, "cuda:0")
    assert usable() == 24 - 5 + 1 + 3
    gpu.cap(200.0, "cuda:0")
    assert shares == [1.0, 0.25, 1.0]


def test_what_a_run_says_of_its_link() -> None:
    rounds = [times(float(at), ms, None) for at, ms in enumerate((900.0, 800.0, 500.0, 800.0))]
    spans = [Span("pass", "verify", one.started, one.started + 0.9) for one in rounds]
    # A gap in each pass, which takes 0.8 s from its begin to its last copy; then none before the next one.
    breaks = (0.6, 0.4, 0.2, 0.1)
    carried = [
        copy for at, gap in enumerate(breaks) for copy in copies((at, at + 0.1), (at + 0.1 + gap, at + 0.8))
    ]
    carried = [dataclasses.replace(copy, byte_count=10**9) for copy in carried]
    carried += copies((0.15, 0.5), to_host=True)
    found = gpu.link_figures(Recorded(rounds, spans, carried), pinned=4.0)
    assert found["link_busy"] == pytest.approx(0.6 / 0.8), (
        "without the first pass: the median of 0.5, 0.75, 0.875"
    )
    assert found["copy_gb_s"] == pytest.approx(8 / (4 * 0.8 - sum(breaks)))
    assert found["link_use"] == pytest.approx(found["link_busy"] * found["copy_gb_s"] / 4)
    assert found["longest_gap_ms"] == pytest.approx(600)
    assert found["gap_ms_a_round"] == pytest.approx((1300 + 3 * 200) / 4)
    assert (found["round_ms"], found["rounds"], found["gb_a_round"]) == (650.0, 4, 2.0)
    assert (found["link_use_target"], found["link_use_goal"]) == (0.9, 0.95)
    none = gpu.link_figures(Recorded(rounds, spans, []), pinned=4.0)
    assert none["link_use"] is none["link_busy"] is None and none["longest_gap_ms"] == 0


def test_calls_of_the_runtime_a_round() -> None:
    names = ["cudaMemcpyAsync"] * 10 + ["aten::add", "cudaStreamSynchronize"] + ["cudaLaunchKernel"] * 40
    assert gpu.calls_a_round(names, 5) == {
        "cudaLaunchKernel": 8.0,
        "cudaMemcpyAsync": 2.0,
        "cudaStreamSynchronize": 0.2,
    }


@pytest.mark.usefixtures("at_once", "small")
def test_a_middle_step_that_cannot_be_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", 1)
    found = gpu.middle(CPU, "tiny", entries=64)
    assert set(found) == {"bound_ms", "graph_1_ms", "graph_4_ms", "eager_1_ms", "eager_4_ms"}
    graphed = gpu.GraphedModel

    def refuse(step: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(gpu, "GraphedModel", lambda *given: graphed(*given, capture=refuse))
    assert "no graph today" in gpu.middle(CPU, "tiny", entries=64)["error"]
