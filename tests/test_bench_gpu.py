"""`bench gpu`: its runner, and what can be told of its checks without a CUDA device. No time is checked."""

from __future__ import annotations

import dataclasses
import gzip
import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_offload import SMALLER, TINY_KEYS, Inside, copies, times

import bench.__main__ as command_line
from bench import gpu, machine, prediction_accuracy, runner, side_by_side, worker
from bench.cases import CASES
from bench.gpu import Given
from bench.random_models import SHAPES
from bench.rounds import Recorded
from bench.studies import Row
from bench.systems import ours
from cpu_kv import CpuLink, PacedLink, PageLocking, SlabAllocator
from cpu_kv.link import CopyRecord, Pairs
from offload_rt.graphs import GraphedModel
from offload_rt.loading import load_model
from offload_rt.machine import doctor
from offload_rt.machine.hardware import Hardware, named_hardware

CPU = torch.device("cpu")
GIB = 2**30
GIVEN = Given(CPU, False, Path())

# ------------------------------------------------------------------------------------------------ the runner


def full(given: Given) -> Iterator[Row]:
    yield {"rate": 0.5}
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")


def dies(given: Given) -> Iterator[Row]:
    yield {"rate": 1.5}
    os._exit(7)


FOUND: dict[str, Callable[[Given], Any]] = {
    "first": lambda given: [{"rate": 2.5}, {"quick": given.quick}],
    "full": full,
    "dies": dies,
    "hangs": lambda given: time.sleep(60),
    "wrong": lambda given: [{"error": "the result is wrong"}],
    "last": lambda given: [{"folder": given.folder.name}],
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results go of checks that take the place of all; their processes are copies of this one."""
    monkeypatch.setattr(gpu, "CHECKS", FOUND)
    monkeypatch.setattr(gpu, "LIMIT_S", 2)
    monkeypatch.setattr(gpu, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(gpu, "choose_device", lambda name: CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return tmp_path / "checks.json"


def test_whatever_fails_the_others_run_and_all_is_written_as_it_is_done(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[int] = []
    write = gpu.report.write_json
    monkeypatch.setattr(
        gpu.report, "write_json", lambda path, found: (write(path, found), written.append(len(found["rows"])))
    )
    assert command_line.main(["gpu", "--out", str(out)]) == 1
    rows = json.loads(out.read_text())["rows"]
    assert re.fullmatch(
        r"torch.OutOfMemoryError: CUDA out of memory. \(test_bench_gpu.py:\d+\)", rows[3].pop("error")
    )
    assert rows == [
        {"check": "first", "rate": 2.5},
        {"check": "first", "quick": False},
        {"check": "full", "rate": 0.5},
        {"check": "full"},
        {"check": "dies", "rate": 1.5},
        {"check": "dies", "error": "its process ended with 7"},
        {"check": "hangs", "error": "not done after 2 s"},
        {"check": "wrong", "error": "the result is wrong"},
        {"check": "last", "folder": out.parent.name},
    ]
    assert written == list(range(1, len(rows) + 1))
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0] == "first: rate 2.5" and len(lines) == len(rows)
    assert json.loads(last) == {"checks": 6, "failed": ["full", "dies", "hangs", "wrong"]}


def test_some_checks_and_a_quick_look(out: Path) -> None:
    assert command_line.main(["gpu", "--only", "last,first", "--quick", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["check"] for row in rows] == ["last", "first", "first"] and rows[2]["quick"]


def test_mistakes_are_told_in_a_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in (
        (["--only", "first,second", "--out", str(out)], "'second' is none of first, full, dies, hangs"),
        (["--out", str(out.parent)], "is a folder"),
        (["--out", str(out)], "torch sees no CUDA device"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found="CUDA" not in message: found)
        assert command_line.main(["gpu", *given]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not out.exists()


def test_the_help_lists_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gpu", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, check in gpu.CHECKS.items():
        assert any(
            line.split(maxsplit=1) == [name, getattr(check, "func", check).__doc__] for line in lines
        ), name


# -------------------------------------------------------------------------------------- a card and its link


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "IDLE_S", 0.0)
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)


def test_versions_tell_the_kernel() -> None:
    (row,) = gpu.versions(GIVEN)
    assert (row["kernel"], row["torch"]) == (platform.release(), torch.__version__)


def test_a_slab_is_locked_where_as_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpu_kv.pinned.PIECE_BYTES", 2**18)
    monkeypatch.setattr(gpu, "GIB", 2**20)  # so that a quick look locks 2**18 and 2**19 bytes
    locked: list[int] = []

    def register(address: int, size: int) -> int:
        locked.extend([address] if size <= 2**18 else [])
        return int(size > 2**18)

    def unregister(address: int) -> int:
        locked.remove(address)
        return 0

    quick = dataclasses.replace(GIVEN, quick=True)
    idle, *rows = gpu.registration(quick, PageLocking(register, unregister))
    assert idle["how"] == "idle" and idle["launches"] > 0
    assert [(row["how"], row["locked_bytes"]) for row in rows] == [
        ("slab", 2**18),
        ("at once", 2**18),
        ("slab", 2**19),
        ("at once", 0),
    ]
    assert all(row["longest_launch_ms"] >= row["launch_ms"] > 0 for row in rows)
    assert not locked


class Point:
    """An event that happens once somebody has waited for it."""

    def __init__(self, before: tuple[Point, ...] = ()) -> None:
        self.before, self.passed = before, False

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        for point in self.before:
            point.synchronize()
        self.passed = True

    def done(self) -> bool:
        return self.passed


class NotingLink(CpuLink):
    """Notes what it is asked to copy; a byte takes a second to the device and two to the host."""

    urgent_last = False  # an urgent copy waits for all that were asked for before it

    def __init__(self) -> None:
        self.asked: list[tuple[bool, Any, int]] = []
        self.point = Point()  # that the device passes some cycles later
        self._copies: list[Point] = []
        self._records: list[CopyRecord] = []

    def copy(self, pairs: Pairs, after: Any = None, *, to_host: bool = False, urgent: bool = False) -> Point:
        super().copy(pairs)
        size = sum(source.nbytes for _, source in pairs)
        self.asked.append((to_host, after, len(pairs)))
        self._records.append(CopyRecord(to_host, size, 1.0, 1.0 + size * (2 if to_host else 1)))
        self._copies.append(Point(tuple(self._copies) if urgent and self.urgent_last else ()))
        return self._copies[-1]

    def record_event(self) -> Point:
        return Point()

    def record(self) -> None:
        self._records = []

    def recorded(self) -> list[CopyRecord]:
        records, self._records = self._records, []
        return records


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> NotingLink:
    """A link over 256 bytes, of which a MiB has one."""
    noting = NotingLink()
    here = torch.arange(512, dtype=torch.int).to(torch.uint8).view(2, 256)

    @contextmanager
    def linked(device: torch.device) -> Iterator[Any]:
        there = torch.full_like(here, 255)
        yield noting, lambda cycles: noting.point, here, there
        assert torch.equal(there[0, :1], here[0, :1]), "what is sent arrives"

    monkeypatch.setattr(gpu, "linked", linked)
    monkeypatch.setattr(gpu, "MIB", 1)
    return noting


def test_rates_of_copies_by_size_and_direction(link: NotingLink) -> None:
    assert list(gpu.copies(GIVEN)) == [
        {"piece_bytes": piece, "to_host": to_host, "gb_s": pytest.approx(1e-9 / (2 if to_host else 1))}
        for piece in (1, 64)
        for to_host in (False, True)
    ]
    assert link.asked == [
        (to_host, link.point, 256 // piece)
        for piece in (1, 64)
        for to_host in (False, True)
        for _ in range(gpu.REPEATS)
    ]


@pytest.mark.parametrize("urgent_last", [False, True])
def test_an_urgent_copy_that_waits_for_blocked_ones_is_an_error(link: NotingLink, urgent_last: bool) -> None:
    link.urgent_last = urgent_last
    blocked, running = gpu.overtaking(GIVEN)
    # The urgent ones wait for nothing.
    assert [after for _, after, _ in link.asked] == [link.point] * 4 + [None] * 6
    assert blocked["overtook"] == running["overtook"] == (not urgent_last)
    assert ("error" in blocked) == urgent_last and "error" not in running


@pytest.mark.parametrize("fired", [False, True])
def test_a_queue_of_copies_behind_an_event(link: NotingLink, fired: bool) -> None:
    link.point.passed = fired
    idle, row = gpu.queue(GIVEN)
    assert link.asked == [(False, link.point, 5000)]
    assert (idle["copies"], row["copies"], row["enqueued_before_event"]) == (0, 5000, not fired)
    assert row["longest_launch_ms"] > 0


def test_checks_over_a_link_have_memory_on_both_sides_and_points(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    monkeypatch.setattr(gpu, "CudaLink", lambda device: NotingLink())
    monkeypatch.setattr(gpu, "LINK_BYTES", 2**10)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: torch.Stream(CPU))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    with gpu.linked(CPU) as (_, later, here, there):
        assert here.shape == there.shape == (2, 2**10) and not later(7).done()
    assert slept == [7]
    refusing = PageLocking(lambda address, size: 2, lambda address: 0)
    monkeypatch.setattr(gpu, "SlabAllocator", lambda pin, warn: SlabAllocator(pin, warn, refusing))
    with pytest.raises(RuntimeError, match="page-lock"), gpu.linked(CPU):
        pass


def test_attention_is_held_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "HEADS", ((4, 2),))
    monkeypatch.setattr(gpu, "HEAD_DIM", 64)
    monkeypatch.setattr(gpu, "least_seconds", lambda work, device: 0.5)
    quick = dataclasses.replace(GIVEN, quick=True)
    rows = list(gpu.attention(quick))
    assert [(row["layout"], row["queries"], row["dtype"]) for row in rows] == [
        (layout, count, dtype)
        for dtype in ("torch.bfloat16", "torch.float16")
        for count in (1, 17, 64)
        for layout in ("resident", "segments", "pages")
    ]
    for row in rows:
        assert "error" not in row and row["chosen"]
        assert row["gb_s"] == pytest.approx(2 * 16_384 * 2 * 64 * 2 / 0.5 / 1e9)
        assert row["share_of_rate"] == pytest.approx(row["gb_s"] / 10)
    attended = gpu.attended
    monkeypatch.setattr(
        gpu, "attended", lambda backend, asked, parts, scale: attended(backend, asked, parts[:1], scale)
    )
    wrong = [row["layout"] for row in gpu.attention(quick) if "error" in row]
    assert set(wrong) == {"segments"}, "half of the keys"


# ------------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A tiny model on a card that a processor and a paced link stand for."""
    measured = named_hardware("rtx4090")
    card = dataclasses.replace(measured.gpus[0], memory_bytes=GIB)
    hardware = dataclasses.replace(measured, gpus=(card,))
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    monkeypatch.setattr(gpu, "SHAPE", "tiny")
    monkeypatch.setattr(gpu, "ON_CUDA", TINY_KEYS)
    monkeypatch.setattr(gpu, "NEW_TOKENS", 14)
    monkeypatch.setattr(gpu, "usable_hardware", lambda device, loaded: hardware)
    monkeypatch.setattr(gpu, "cap", lambda gib, device: None)
    monkeypatch.setattr(gpu, "CudaLink", lambda device: PacedLink(1e9))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4 * GIB)
    return hardware


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("streamed", [True, False])
def test_a_text_is_read_and_continued(
    small: Hardware, streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an engine would plan on a card.
    monkeypatch.setattr(gpu, "ON_CUDA", TINY_KEYS | {"offload.resident_tokens": 192})
    given = dataclasses.replace(GIVEN, folder=tmp_path)
    read, found, calls = gpu.text(given, 200, streamed=streamed)
    assert (read["context"], read["peak_gib"], read["reserved_gib"]) == (200, 3, 4) and read["prefill_s"] > 0
    *parts, total = (size for name, size in read.items() if name.startswith("planned_"))
    assert 0 < total == pytest.approx(sum(parts) - read["planned_reserve_gib"])
    assert found["resident_tokens"] == (0 if streamed else 192)
    kv = 192 * 2 * 2 * 2 * 16 * 2 / 1e9  # 2 layers of 2 key heads of 16
    assert (found["gb_a_round"] >= kv) == streamed and found["verdict_ms"] > 0
    assert found["copy_gb_s"] == pytest.approx(1.0)
    assert found["share_of_pinned"] == pytest.approx(1 / small.gpus[0].to_device_rate)
    with gzip.open(tmp_path / calls["trace"]) as written:
        assert json.load(written)["traceEvents"]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("memory_bytes", [GIB, 2**20])
def test_ours_is_measured_streamed_and_as_planned(
    small: Hardware, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `bench offload` does on a card."""
    card = dataclasses.replace(small.gpus[0], memory_bytes=memory_bytes)
    hardware = dataclasses.replace(small, gpus=(card,))
    describe, caps = machine.describe, list[float]()

    def refuse(step: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("no graph today")

    declared = CASES[-1]
    case = dataclasses.replace(declared, on_cuda={**declared.on_cuda, "options": TINY_KEYS})
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(side_by_side, "CASES", (case,))
    monkeypatch.setattr(side_by_side, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "describe", lambda device: describe(CPU))
    monkeypatch.setattr(machine, "read_rate", lambda device: 1000.0)
    monkeypatch.setattr(prediction_accuracy, "usable_hardware", lambda device: hardware)
    monkeypatch.setattr(runner, "Worker", Inside)
    monkeypatch.setattr(worker, "cap", lambda gib, device: caps.append(gib))
    monkeypatch.setattr(ours, "usable_hardware", lambda device: hardware)
    monkeypatch.setattr(ours, "load_model", lambda path, device, dtype: load_model(path, CPU, dtype))
    monkeypatch.setattr(ours, "CudaLink", lambda device: PacedLink(25e9))
    monkeypatch.setattr(ours, "GraphedModel", lambda *given: GraphedModel(*given, capture=refuse))
    given = ["offload", "--model", "random:tiny", "--device", "cuda", "--acceptance", "1"]
    out = tmp_path / "out.jsonl"
    given += ["--contexts", "160", "--turns", "1", "--no-plot", "--out", str(out)]
    assert command_line.main(given) == (0 if memory_bytes == GIB else 2)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["place"] for one in records] == ["streamed", "planned"]
    assert records[0]["options"] == TINY_KEYS | {"offload.resident_tokens": 0, "offload.cpu_tokens": 0}
    assert records[1]["options"] == TINY_KEYS and set(caps) == {24.0}
    for record in records:
        assert record["new_tokens"] == 48 and record["gpu_memory_gib"] == 24
        assert record["link_rate_gb_s"] == card.to_device_rate
        assert [row["system"].partition("+")[0] for row in record["rows"]] == ["ours:plain"] + 4 * [
            "ours:retrieval"
        ]
        for row in record["rows"]:
            if memory_bytes == GIB:
                assert "error" not in row and row["rounds"]["predicted_over_measured"] > 0
                assert "no CUDA graphs" in row["notes"][-1]
            else:
                assert "GPU" in row["error"], "refused before its weights are loaded"


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
    # A gap in each pass, which takes 0.8 s from its begin to its last copy; then none before the next one.
    gaps = (0.6, 0.4, 0.2, 0.1)
    carried = [
        copy for at, gap in enumerate(gaps) for copy in copies((at, at + 0.1), (at + 0.1 + gap, at + 0.8))
    ]
    carried = [dataclasses.replace(copy, byte_count=10**9) for copy in carried]
    found = gpu.carried(Recorded(rounds, [], [*carried, *copies((0.15, 0.5), to_host=True)]), pinned=4.0)
    assert found["copy_gb_s"] == pytest.approx(8 / (4 * 0.8 - sum(gaps)))
    assert found["share_of_pinned"] == pytest.approx(found["copy_gb_s"] / 4)
    assert found["longest_gap_ms"] == pytest.approx(600)
    assert found["gap_ms_a_round"] == pytest.approx((1300 + 3 * 200) / 4)
    assert found["gb_a_round"] == 2.0
    assert gpu.carried(Recorded(rounds, [], []), pinned=4.0)["longest_gap_ms"] == 0


@pytest.mark.usefixtures("small")
def test_a_middle_step_that_cannot_be_recorded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", 1)
    monkeypatch.setattr(gpu, "ENTRIES", 64)
    (found,) = gpu.graphs(GIVEN)
    assert set(found) == {"bound_ms", "graph_1_ms", "graph_4_ms", "eager_1_ms", "eager_4_ms"}
    graphed = gpu.GraphedModel

    def refuse(step: Callable[[], torch.Tensor]) -> Any:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(gpu, "GraphedModel", lambda *given: graphed(*given, capture=refuse))
    assert "no graph today" in gpu.graphs(GIVEN)[0]["error"]
