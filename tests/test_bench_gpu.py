"""`bench gpu`: its runner, and its checks on the emulated device. No time of a clock is checked."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated_gpu import EMULATED, GPUS, PINNED
from test_bench_offload import SMALLER, TINY_KEYS, Inside, copies, times

import bench.__main__ as command_line
from bench import (
    gpu,
    gpu_checks,
    gpu_engine_checks,
    machine,
    prediction_accuracy,
    runner,
    side_by_side,
    worker,
)
from bench.cases import CASES
from bench.gpu_checks import TINY, Given
from bench.random_models import SHAPES
from bench.rounds import Recorded
from bench.studies import Row
from bench.systems import ours
from cpu_kv import PacedLink
from offload_rt.attention.backends import TorchCudaBackend
from offload_rt.caches.remote import GpuAttention
from offload_rt.machine import inspection
from offload_rt.machine.hardware import Hardware, named_hardware
from offload_rt.model.cuda_graphs import CudaCapture, GraphedModel
from offload_rt.model.loading import load_model

CPU = torch.device("cpu")
GIB = 2**30

# ------------------------------------------------------------------------------------------------ the runner


def full(given: Given) -> Iterator[Row]:
    yield {"rate": 0.5}
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")


def dies(given: Given) -> Iterator[Row]:
    yield {"rate": 1.5}
    os._exit(7)


FOUND: dict[str, Callable[[Given], Any]] = {
    "first": lambda given: [{"rate": 2.5}, {"sizes": given.sizes.name}],
    "full": full,
    "dies": dies,
    "hangs": lambda given: time.sleep(60),
    "wrong": lambda given: [{"failed": "the result is wrong"}, {"failed": "another too"}, {"rate": 1}],
    "alone": lambda given: [{"skipped": "there is one GPU"}],
    "last": lambda given: [{"cases": [{"rate": 1}], "rate": 3.5}],
}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results go of checks that take the place of all; their processes are copies of this one."""
    limited = dataclasses.replace(TINY, limit_s=2)
    monkeypatch.setattr(gpu, "TINY", limited)
    monkeypatch.setattr(gpu, "CHECKS", FOUND)
    monkeypatch.setattr(gpu, "PROCESSES", multiprocessing.get_context("fork"))
    monkeypatch.setattr(gpu, "choose_device", lambda name: CPU)
    monkeypatch.setattr(gpu, "no_cuda_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path / "checks.jsonl"


def read(path: Path) -> tuple[Row, list[Row]]:
    head, *rows = map(json.loads, path.read_text().splitlines())
    return head, rows


def test_whatever_fails_the_others_run_and_a_line_is_written_when_a_check_is_done(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FOUND, "first", lambda given: [{"lines": len(read(out)[1])}])
    monkeypatch.setitem(FOUND, "last", lambda given: [{"lines": len(read(out)[1])}])
    assert command_line.main(["gpu", "--tiny", "--out", str(out)]) == 1
    head, rows = read(out)
    assert head["command"] == "python -m bench gpu --tiny --out checks.jsonl"
    assert head["versions"]["torch"] == torch.__version__ and head["versions"]["kernel"] == platform.release()
    assert head["machine"]["cores"] > 0 and head["sizes"]["name"] == "tiny"
    written = [row.pop("lines") for row in rows if "lines" in row]
    assert written == [0, len(FOUND) - 1], "all lines before it, when it runs"
    assert all(row.pop("seconds") >= 0 for row in rows)
    out_of_memory = rows[1].pop("why")[0]
    assert re.fullmatch(
        r"torch.OutOfMemoryError: CUDA out of memory. \(test_bench_gpu.py:\d+\)", out_of_memory
    )
    assert rows == [
        {"check": "first", "status": "ok"},
        {"check": "full", "status": "failed", "rate": 0.5},
        {"check": "dies", "status": "failed", "why": ["its process ended with 7"], "rate": 1.5},
        {"check": "hangs", "status": "failed", "why": ["not done after 2 s"]},
        {"check": "wrong", "status": "failed", "why": ["the result is wrong", "another too"], "rate": 1},
        {"check": "alone", "status": "skipped", "why": ["there is one GPU"]},
        {"check": "last", "status": "ok"},
    ]
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[row["status"], f"{row['check']}:"] for row in rows]
    assert json.loads(last) == {
        "ok": ["first", "last"],
        "failed": ["full", "dies", "hangs", "wrong"],
        "skipped": ["alone"],
    }


def test_some_checks_and_a_quick_look(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gpu", "--only", "last,alone,first", "--quick", "--out", str(out)]) == 0
    _, rows = read(out)
    assert [row["check"] for row in rows] == ["last", "alone", "first"] and rows[2]["sizes"] == "quick"
    shown = capsys.readouterr().out.splitlines()[0]
    assert "rate 3.5" in shown and "cases" not in shown


def test_results_go_to_a_file_by_default(out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu.inputs, "RESULTS", tmp_path / "results")
    assert command_line.main(["gpu", "--only", "first"]) == 0
    assert command_line.main(["gpu", "--only", "first", "--quick"]) == 0
    names = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert names == ["gpu-checks.jsonl", "gpu-quick.jsonl"]


def test_mistakes_are_told_in_a_line(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for given, message in (
        (["--only", "first,second", "--out", str(out)], "'second' is none of first, full, dies, hangs"),
        (["--out", str(out.parent)], "is a folder"),
        (["--out", str(out)], "bench gpu: torch finds none"),
    ):
        missing = "torch finds none" if "torch" in message else None
        monkeypatch.setattr(gpu, "no_cuda_device", lambda missing=missing: missing)
        assert command_line.main(["gpu", *given]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1 and not out.exists()


def test_the_help_lists_every_check_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["gpu", "--help"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    told = [line for line in lines if line and line[0] in gpu.CHECKS]
    assert told == [[name, check.__doc__] for name, check in gpu.CHECKS.items()]


# ---------------------------------------------------------------------- the checks, on the emulated device

emulated = pytest.mark.skipif(not EMULATED, reason="of the emulated device alone")


def found(name: str) -> Row:
    """What a check finds: its figures, and under `failed` what is wrong."""
    figures: Row = {"failed": []}
    for row in gpu.CHECKS[name](Given(torch.device("cuda", 0), TINY)):
        figures["failed"] += [row.pop("failed")] if "failed" in row else []
        figures |= row
    return figures


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small GPU, as the planner and the checks see it; a tiny model; calls as the device counts them."""
    random_model = gpu_engine_checks.random_model

    def usable(
        home: torch.device, loaded: int = 0, progress: Any = None, other_gpus: Sequence[Any] = ()
    ) -> Hardware:
        measured = named_hardware("rtx4090", 1 + len(other_gpus))
        gpus = tuple(dataclasses.replace(one, memory_bytes=GIB) for one in measured.gpus)
        return dataclasses.replace(measured, gpus=gpus)

    @contextmanager
    def launches() -> Iterator[Counter[str]]:
        before, calls = dataclasses.replace(GPUS.counters), Counter[str]()
        yield calls
        calls["cudaGraphLaunch"] = GPUS.counters.graphs - before.graphs
        calls["cudaLaunchKernel"] = GPUS.counters.kernels - before.kernels

    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    # The emulation does not know `with torch.device(…)`.
    monkeypatch.setattr(
        gpu_engine_checks, "random_model", lambda name, home, dtype: random_model(name, CPU, dtype).to(home)
    )
    monkeypatch.setattr(gpu_engine_checks, "usable_hardware", usable)
    monkeypatch.setattr(gpu_engine_checks, "launches", launches)
    monkeypatch.setattr("offload_rt.engine.engine.usable_hardware", usable)
    monkeypatch.setattr(machine, "read_rate", lambda home: 10.0)
    monkeypatch.setattr(gpu_checks.triton_operators, "check", lambda home: None)
    schedule, GPUS.schedule = GPUS.schedule, "late"
    yield
    torch.cuda.synchronize()
    GPUS.schedule = schedule
    GPUS.copies.clear()


ORDER = (
    ("registration", {"gpus", "attention", "triton", "lock_s", "to_device_gb_s", "to_host_gb_s"}),
    ("overtaking", {"urgent_ms", "default_stream_ms", "urgent_overtook"}),
    ("attention", {"backend", "triton", "largest_error", "shares_of_rate", "cases"}),
    ("graphs", {"launches_a_round", "calls_a_round"}),
    ("planned", {"peak_gib", "planned_gib", "ms_per_token", "planned_ms_per_token", "prefill_s"}),
    ("streamed", {"share_of_pinned", "gap_ms_a_round", "ms_per_token", "streamed_tokens"}),
    ("cpu-share", {"to_next_queries_ms", "attention_ms", "cpu_tokens"}),
    ("drafting", {"alone_ms", "beside_stream_ms", "read_ms", "copy_gb_s"}),
    ("two-gpus", {"exchange_ms", "equal_tokens", "tokens"}),
)


@pytest.mark.gpu
@emulated
def test_all_checks_run_in_their_order(device: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PROCESSES", multiprocessing.get_context("fork"))
    path = tmp_path / "out.jsonl"
    assert command_line.main(["gpu", "--tiny", "--out", str(path)]) == 0
    _, rows = read(path)
    assert [row["check"] for row in rows] == [name for name, _ in ORDER]
    for row, (_, names) in zip(rows, ORDER, strict=True):
        assert row["status"] == "ok" and names <= set(row), row
    by_name = {row["check"]: row for row in rows}
    assert by_name["streamed"]["streamed_tokens"] == 192 and by_name["planned"]["streamed_tokens"] == 0
    assert by_name["cpu-share"]["cpu_tokens"] == 48
    assert by_name["graphs"]["calls_a_round"]["cudaGraphLaunch"] > 1
    assert by_name["two-gpus"]["equal_tokens"] == by_name["two-gpus"]["tokens"] == TINY.new_tokens
    assert by_name["two-gpus"]["other_gpus_tokens"] > 0


@pytest.mark.gpu
@emulated
def test_every_process_is_kept_to_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(gpu, "CHECKS", {"look": lambda given: [{"kept": list(fractions)}]})
    told: dict[str, Callable[..., Any]] = {
        "set_per_process_memory_fraction": lambda share, home: fractions.append(share),
        "get_device_properties": lambda home: SimpleNamespace(total_memory=96 * GIB),
    }
    for name, tell in told.items():
        monkeypatch.setattr(torch.cuda, name, tell)
    sent: list[Row] = []
    monkeypatch.setattr(gpu.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    gpu._check("look", TINY, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    assert sent == [{"kept": [0.25, 0.25]}]


@pytest.mark.gpu
@emulated
@pytest.mark.parametrize("broken", [False, True])
def test_a_copy_engine_that_serves_bulk_copies_alone_is_a_failure(
    device: None, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time: without the kernels between pieces, small copies wait for 64 MiB and more."""
    GPUS.schedule = "engine"
    if broken:
        monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)
    figures = found("overtaking")
    assert (figures["urgent_ms"] > 1) == (figures["default_stream_ms"] > 1) == broken
    assert len(figures["failed"]) == 2 * broken
    assert broken or figures["urgent_overtook"]


@pytest.mark.gpu
@emulated
@pytest.mark.parametrize("broken", ["refused", "torn"])
def test_memory_that_kernels_cannot_use_is_a_failure(
    device: None, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "refused":
        monkeypatch.setattr(PINNED, "register", lambda *given: 2)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *given: 2))
        monkeypatch.setattr(gpu_checks, "measure_link", lambda *given: (1.0, 1.0, (4, 16)))
    else:
        computed = gpu_checks.computed_copy
        monkeypatch.setattr(gpu_checks, "computed_copy", lambda one, out=None: computed(one.flip(0), out=out))
    (failure,) = found("registration")["failed"]
    assert ("page-lock" if broken == "refused" else "other bytes") in failure


@pytest.mark.gpu
@emulated
@pytest.mark.parametrize("broken", ["triton", "mask", "half"])
def test_wrong_attention_is_a_failure(device: None, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(home: str) -> None:
        raise RuntimeError("a kernel differs from its plain form by 2")

    if broken == "triton":
        monkeypatch.setattr(gpu_checks.triton_operators, "check", differs)
    elif broken == "mask":  # of a page that is masked completely, the kernel makes NaN
        monkeypatch.setattr(TorchCudaBackend, "mask", lambda backend, mask, dtype: mask.to(dtype))
    else:
        attended = gpu_checks.attended
        halves = lambda parts: [tuple(one[: len(one) // 2] for one in pair) for pair in parts]  # noqa: E731
        monkeypatch.setattr(
            gpu_checks,
            "attended",
            lambda backend, asked, parts, scale: attended(backend, asked, halves(parts), scale),
        )
    figures = found("attention")
    (failure,) = figures["failed"]
    wrong = {one["layout"] for one in figures["cases"] if not one["off"] < gpu_checks.ALLOWED_ERROR}
    if broken == "triton":
        assert failure == "Triton kernels: RuntimeError: a kernel differs from its plain form by 2"
        assert not wrong
    elif broken == "mask":
        assert wrong == {"masked"} and "in 3 cases" in failure
    else:
        assert wrong == {"resident", "segments", "pages"} and "differs from float64" in failure


@pytest.mark.gpu
@emulated
@pytest.mark.parametrize("broken", ["capture", "silent"])
def test_a_round_without_graphs_is_a_failure(
    device: None, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(capture: CudaCapture, step: Callable[[], Any]) -> Any:
        raise RuntimeError("no graph today")

    if broken == "capture":
        monkeypatch.setattr(CudaCapture, "__call__", refuse)
    else:
        monkeypatch.setattr(GraphedModel, "LONGEST", 0)
    failures = found("graphs")["failed"]
    assert failures[-1] == "no CUDA graph was launched" and len(failures) == 1 + (broken == "capture")
    assert broken == "silent" or "no graph today" in failures[0]


@pytest.mark.gpu
@emulated
def test_memory_beyond_the_plan_is_a_failure(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda home: 3 * GIB)
    figures = found("planned")
    assert figures["peak_gib"] == 3.0
    assert figures["planned_gib"] == pytest.approx(
        sum(figures["planned_parts_gib"].values()) - figures["planned_parts_gib"]["reserve"]
    )
    (failure,) = figures["failed"]
    assert failure.startswith("the peak is 3.00 GiB")


@pytest.mark.gpu
@emulated
def test_the_next_queries_are_those_of_the_same_pass(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = {"pass": [(0.0, 1.0), (2.0, 3.0)], "cpu": [(0.1, 0.2), (0.3, 0.4), (2.1, 2.2), (2.5, 2.6)]}
    monkeypatch.setattr(gpu_engine_checks, "on_lane", lambda run, lane: lanes[lane])
    figures = found("cpu-share")
    assert figures["to_next_queries_ms"] == pytest.approx(200)
    assert figures["longest_to_next_queries_ms"] == pytest.approx(300)
    assert figures["attention_ms"] == pytest.approx(100)


@pytest.mark.gpu
@emulated
@pytest.mark.parametrize("broken", [None, "copy engines", "merging"])
def test_two_gpus(device: None, broken: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "copy engines":
        GPUS.schedule = "engine"
        monkeypatch.setattr(gpu_engine_checks.PeerCopies, "MOST_BYTES", 4096)
        monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)
    elif broken == "merging":
        finish = GpuAttention.finish
        monkeypatch.setattr(
            GpuAttention,
            "finish",
            lambda remote, started: [-finish(remote, started)[0], *finish(remote, started)[1:]],
        )
    else:
        GPUS.schedule = "engine"
    figures = found("two-gpus")
    assert (figures["exchange_ms"] > 1) == (broken == "copy engines")
    assert (figures["equal_tokens"] < figures["tokens"]) == (broken == "merging")
    assert len(figures["failed"]) == (broken is not None)


def test_one_gpu_skips_the_check_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert list(gpu.CHECKS["two-gpus"](Given(CPU, TINY))) == [{"skipped": "there is one GPU"}]


# ------------------------------------------------------------------------------ `bench offload`, and figures


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A tiny model on a GPU that a processor and a paced link stand for."""
    measured = named_hardware("rtx4090")
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    card = dataclasses.replace(measured.gpus[0], memory_bytes=GIB)
    return dataclasses.replace(measured, gpus=(card,))


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
    monkeypatch.setattr(inspection, "inspect", lambda on_progress: machine)

    def usable() -> float:
        return inspection.usable_hardware(torch.device("cuda", 0), 3 * GIB).gpus[0].memory_bytes / GIB

    assert usable() == 80 + 1 + 3, "free, reserved and not handed out, loaded"
    worker.cap(24.0, "cuda:0")
    assert usable() == 24 - 5 + 1 + 3
    worker.cap(200.0, "cuda:0")
    assert shares == [1.0, 0.25, 1.0]


def test_what_a_run_says_of_its_link() -> None:
    rounds = [times(float(at), ms, None) for at, ms in enumerate((900.0, 800.0, 500.0, 800.0))]
    # A gap in each pass, which takes 0.8 s from its begin to its last copy; then none before the next one.
    gaps = (0.6, 0.4, 0.2, 0.1)
    carried = [
        copy for at, gap in enumerate(gaps) for copy in copies((at, at + 0.1), (at + 0.1 + gap, at + 0.8))
    ]
    carried = [dataclasses.replace(copy, byte_count=10**9) for copy in carried]
    found = gpu_engine_checks.carried(
        Recorded(rounds, [], [*carried, *copies((0.15, 0.5), to_host=True)]), pinned=4.0
    )
    assert found["copy_gb_s"] == pytest.approx(8 / (4 * 0.8 - sum(gaps)))
    assert found["share_of_pinned"] == pytest.approx(found["copy_gb_s"] / 4)
    assert found["longest_gap_ms"] == pytest.approx(600)
    assert found["gap_ms_a_round"] == pytest.approx((1300 + 3 * 200) / 4)
    assert found["gb_a_round"] == 2.0
    assert gpu_engine_checks.carried(Recorded(rounds, [], []), pinned=4.0)["longest_gap_ms"] == 0
