"""`bench gpu`: its runner, and its checks on the emulated device. No time of a clock is checked."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED, GPUS, PINNED
from support.bench_setup import SMALL, SMALLER, Inside, bench_main, records

from bench import (
    cases,
    gpu,
    gpu_checks,
    gpu_engine_checks,
    gpu_kernel_checks,
    machine,
    prediction_accuracy,
    runner,
    side_by_side,
    worker,
)
from bench.cases import CASES, ON_CUDA
from bench.gpu_checks import SIZES, Sizes, Subject
from bench.random_models import SHAPES, random_model
from bench.results import Row
from bench.rounds import Recorded
from bench.systems import ours
from cpu_kv import PacedLink
from cpu_kv.link import CopyRecord
from cpu_kv.mapped import PeerCopies, computed_copy
from offload_rt.attention import cuda_backends
from offload_rt.attention.cuda_backends import TorchCudaBackend
from offload_rt.caches.remote import GpuAttention
from offload_rt.engine.sequence import TokenSequence
from offload_rt.kernels import operators, triton_operators
from offload_rt.machine import inspection
from offload_rt.model.cuda_graphs import CudaCapture, PassGraphs
from offload_rt.model.loading import load_model
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.system.hardware import Hardware, named_hardware
from offload_rt.system.second_device import SecondDevice

CPU = torch.device("cpu")
GIB = 2**30
FEW = {
    key: SMALL[key] for key in SMALL if key.startswith(("retrieval.b", "retrieval.recent", "spec", "store"))
}
TINY = Sizes(
    "tiny",
    limit_s=60,
    shape="tiny",
    locked_bytes=4 * 2**20,
    keys=1024,
    drafted_entries=64,
    short=200,
    planned=200,
    streamed=200,
    largest=200,
    largest_shape="tiny",
    largest_config={},
    new_tokens=14,
    steps=2,
    repeats=1,
    pages=8,
    ring_pages=6,
    quantized_entries=256,
    chunks=300,
    copied_bytes=2**20,
    product=64,
    tokens_context=600,
    config=ON_CUDA | FEW,
)


def test_each_check_is_a_line_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "checks.jsonl"
    found: dict[str, list[Row]] = {
        "planned": [{"rate": 2.5}, {"cases": [{"rate": 1}]}],
        "graphs": [{"failed": "the result is wrong"}, {"failed": "another too"}, {"rate": 1}],
        "two-gpus": [{"skipped": "there is one GPU"}],
    }
    written: list[int] = []

    def findings(name: str, sizes: Sizes) -> list[Row]:
        assert sizes.name == "quick"
        written.append(len(out.read_text().splitlines()))
        return found[name]

    monkeypatch.setattr(gpu, "findings", findings)
    monkeypatch.setattr(gpu, "no_cuda_device", lambda: None)
    assert bench_main(f"gpu --quick --only planned,graphs,two-gpus --out {out}") == 1
    head, *rows = records(out)
    assert head["command"].startswith("python -m bench gpu --quick") and head["sizes"]["name"] == "quick"
    assert written == [1, 2, 3], "a line is written when its check is done"
    assert [(row["check"], row["status"], row["why"]) for row in rows] == [
        ("planned", "ok", []),
        ("graphs", "failed", ["the result is wrong", "another too"]),
        ("two-gpus", "skipped", ["there is one GPU"]),
    ]
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "rate 2.50" in first and "cases" not in first
    assert json.loads(last) == {"ok": ["planned"], "failed": ["graphs"], "skipped": ["two-gpus"]}
    assert bench_main("gpu --only first") == 2
    assert "'first' is none of bits, kernels" in capsys.readouterr().err


def test_checks_by_default() -> None:
    one, two = gpu._by_default(1), gpu._by_default(2)
    assert two[:2] == ["bits", "kernels"] and "largest" not in two
    assert [name for name in two if name not in one] == ["two-gpus", "groups"]


def test_a_check_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/__init__.py").touch()
    script = "import os, sys; print('{\"of\": \"' + '-'.join(sys.argv[1:]) + '\"}', flush=True); os._exit(7)"
    (tmp_path / "bench/gpu.py").write_text(script)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    said = "its process ended with 7, or was not done after 60 s"
    assert list(gpu.findings("graphs", TINY)) == [{"of": "graphs-tiny"}, {"failed": said}]


def test_a_check_ends_by_what_it_raises_and_is_kept_to_24_gib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(given: Subject) -> Iterator[Row]:
        print("not a finding")
        yield {"kept": list(kept)}
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB")

    kept: list[float] = []
    monkeypatch.setitem(SIZES, "tiny", TINY)
    monkeypatch.setattr(gpu, "CHECKS", {"full": full})
    monkeypatch.setattr(gpu, "choose_device", lambda name: CPU)
    for name, tell in (
        ("device_count", lambda: 2),
        ("set_per_process_memory_fraction", lambda share, home: kept.append(share)),
        ("get_device_properties", lambda home: SimpleNamespace(total_memory=96 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, tell)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    gpu.check("full", "tiny")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"kept": [23.3 / 96, 23.3 / 96]}
    error = r"torch.OutOfMemoryError: CUDA out of memory. \(test_bench_gpu.py:\d+\)"
    assert re.fullmatch(error, second["failed"])


# ---------------------------------------------------------------------- the checks, on the emulated device

emulated = [pytest.mark.gpu, pytest.mark.skipif(not EMULATED, reason="of the emulated device alone")]


def on_emulated_device(test: Callable[..., None]) -> Callable[..., None]:
    for mark in [*emulated, pytest.mark.usefixtures("device")]:
        test = mark(test)
    return test


def found(name: str) -> Row:
    """The figures of a check, and under `failed` what is wrong."""
    figures: Row = {"failed": []}
    for row in gpu.CHECKS[name](Subject(torch.device("cuda", 0), TINY)):
        figures["failed"] += [row.pop("failed")] if "failed" in row else []
        figures |= row
    return figures


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small GPU, as the planner and the checks see it; a tiny model; calls as the device counts them."""
    milliseconds = gpu_kernel_checks.milliseconds

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
    monkeypatch.setattr("offload_rt.planning.sequence_planner.usable_hardware", usable)
    monkeypatch.setattr(machine, "read_rate", lambda home: 10.0)
    monkeypatch.setattr(triton_operators, "check", lambda *given: None)
    # Engines know that the emulation runs no kernels, whichever test asked first.
    monkeypatch.setattr(cuda_backends, "_CHECKED", {None: "no kernels"})
    monkeypatch.setattr(gpu_kernel_checks, "SLOWEST_PIECES", 0.0)
    monkeypatch.setattr(gpu_kernel_checks, "use_triton", lambda: None)
    # No time is checked: two launches in a row take the way of twenty.
    monkeypatch.setattr(
        gpu_kernel_checks, "milliseconds", lambda given, work, launches=2: milliseconds(given, work, 2)
    )
    for name in ("combine", "attend_pages", "attend_quantized"):
        monkeypatch.setattr(triton_operators, name, getattr(operators, name))
    schedule, GPUS.schedule = GPUS.schedule, "late"
    yield
    torch.cuda.synchronize()
    GPUS.schedule = schedule
    GPUS.copies.clear()


FIGURES = {
    "bits": {"bfloat16", "retrieval, streamed, bfloat16", "trees, streamed, float32"},
    "kernels": {"llama2-7b_q24_off", "llama3.1-8b_4bit_gb_s"},
    "packed-pages": {"llama2-7b_pack_s_of_128k_tokens", "llama3.1-8b_packed_over_raw", "ring_gb_s"},
    "link-rates": {"one_piece_gb_s", "pieces_gb_s", "beside_products_gb_s"},
    "temporaries": {"choose_mib", "choose_ms", "quantise_mib", "quantise_ms"},
    "equal-tokens": {"resident, plain", "all tiers, retrieval"},
    "drafting": {"alone_ms", "beside_stream_ms", "read_ms", "copy_gb_s"},
    "streamed": {"share_of_pinned", "gap_ms_a_round", "ms_per_token", "streamed_tokens"},
    "cpu-share": {"to_next_queries_ms", "attention_ms", "cpu_tokens"},
    "planned": {"peak_gib", "planned_gib", "ms_per_token", "planned_ms_per_token", "prefill_s"},
    "graphs": {"launches_a_round", "calls_a_round"},
    "attention": {"backend", "triton", "largest_error", "largest_share_of_rate", "cases"},
    "overtaking": {"urgent_ms", "default_stream_ms", "urgent_overtook"},
    "page-locking": {"gpus", "locked_bytes", "lock_s"},
    "two-gpus": {"exchange_ms", "equal_tokens", "tokens"},
    "groups": {"passes", "largest_difference"},
    "largest": {"peak_gib", "reserved_gib", "ms_per_token", "streamed_tokens"},
}


@on_emulated_device
@pytest.mark.parametrize("name", FIGURES)
def test_checks(name: str) -> None:
    figures = found(name)
    assert list(FIGURES) == list(gpu.CHECKS) and FIGURES[name] <= set(figures) and not figures["failed"]
    told = {
        "streamed": ("streamed_tokens", 192),
        "planned": ("streamed_tokens", 0),
        "cpu-share": ("cpu_tokens", 48),
    }
    key, value = told.get(name, ("failed", []))
    assert figures[key] == value
    if name == "two-gpus":
        assert figures["equal_tokens"] == figures["tokens"] == TINY.new_tokens
        assert figures["other_gpus_tokens"] > 0
    if name == "groups":
        assert [row["exchanges"] for row in figures["passes"]] == [3, 2]
    if name == "graphs":
        assert figures["calls_a_round"]["cudaGraphLaunch"] > 1


def _refuse(*given: Any) -> Any:
    raise RuntimeError("no graph today")


def _no_kernels_between_pieces(patch: pytest.MonkeyPatch) -> None:
    """In virtual time: small copies wait for 64 MiB and more."""
    patch.setattr(GPUS, "schedule", "engine")
    patch.setattr(torch.Tensor, "fill_", lambda tensor, value: tensor)


def _busy_copy_engines(patch: pytest.MonkeyPatch) -> None:
    _no_kernels_between_pieces(patch)
    patch.setattr(PeerCopies, "MOST_BYTES", 4096)


def _refused_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PINNED, "register", lambda *given: 2)
    patch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *given: 2))


def _torn_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gpu_checks, "computed_copy", lambda one, out=None: computed_copy(one.flip(0), out=out))


def _half_of_the_keys(patch: pytest.MonkeyPatch) -> None:
    of = gpu_checks.attended

    def attended(backend: Any, queries: Any, pages: Any, *given: Any) -> Any:
        if len(pages) > 1:  # without a mask
            pages = pages[: len(pages) // 2]
        return of(backend, queries, pages, *given)

    patch.setattr(gpu_checks, "attended", attended)


def _wrong_merging(patch: pytest.MonkeyPatch) -> None:
    finish = GpuAttention.finish
    negated = lambda remote, started: [-finish(remote, started)[0], *finish(remote, started)[1:]]  # noqa: E731
    patch.setattr(GpuAttention, "finish", negated)


def _no_stream_for_results(patch: pytest.MonkeyPatch) -> None:
    def finish(second: SecondDevice, started: Any) -> Any:
        """Sends the result from another stream than it is computed in."""
        others = torch.cuda.Stream(second.device), torch.cuda.current_stream(second.home)
        return second._copies[1].copy(started.result(), *others)

    patch.setattr(SecondDevice, "finish", finish)


def _products_of_any_rows(patch: pytest.MonkeyPatch) -> None:
    """Results say `bits` all the same."""
    patch.setattr(CausalModel, "_found_to_differ", lambda model: "products")
    patch.setattr(TokenSequence, "differs_by", None)


Break = Callable[[pytest.MonkeyPatch], object]
BROKEN: list[tuple[str, Break, str]] = [
    ("bits", _products_of_any_rows, "other bits than in plain decoding"),
    ("page-locking", _refused_memory, "page-lock"),
    ("page-locking", _torn_memory, "other bytes"),
    ("overtaking", _no_kernels_between_pieces, "urgent: a small copy took"),
    (
        "attention",
        lambda patch: patch.setattr(triton_operators, "check", _refuse),
        "Triton kernels",
    ),
    # Of a page that is masked completely, the kernel makes NaN.
    (
        "attention",
        lambda p: p.setattr(TorchCudaBackend, "mask", lambda one, mask, dtype: mask.to(dtype)),
        "nan",
    ),
    ("attention", _half_of_the_keys, "differs from float64"),
    ("graphs", lambda patch: patch.setattr(CudaCapture, "__call__", _refuse), "no graph today"),
    ("graphs", lambda patch: patch.setattr(PassGraphs, "LONGEST", 0), "no CUDA graph was launched"),
    (
        "planned",
        lambda patch: patch.setattr(torch.cuda, "max_memory_allocated", lambda home: 3 * GIB),
        "the peak is 3.00 GiB",
    ),
    ("two-gpus", _busy_copy_engines, "there and back behind bulk copies"),
    ("two-gpus", _wrong_merging, "tokens differ"),
    ("groups", _no_stream_for_results, "other logits than one: groups:2@1, groups:4"),
]


@on_emulated_device
@pytest.mark.parametrize(("name", "damage", "failure"), BROKEN)
def test_a_check_fails_where_something_is_broken(
    name: str, damage: Break, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    assert failure in found(name)["failed"][0]


@on_emulated_device
def test_a_copy_engine_that_yields_is_no_failure() -> None:
    GPUS.schedule = "engine"
    assert not found("overtaking")["failed"] and not found("two-gpus")["failed"]


@on_emulated_device
def test_the_next_queries_are_those_of_the_same_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = {"pass": [(0.0, 1.0), (2.0, 3.0)], "cpu": [(0.1, 0.2), (0.3, 0.4), (2.1, 2.2), (2.5, 2.6)]}
    monkeypatch.setattr(gpu_engine_checks, "on_lane", lambda run, lane: lanes[lane])
    figures = found("cpu-share")
    assert figures["to_next_queries_ms"] == pytest.approx(200)
    assert figures["longest_to_next_queries_ms"] == pytest.approx(300)
    assert figures["attention_ms"] == pytest.approx(100)


@pytest.mark.parametrize("name", ["two-gpus", "groups"])
def test_one_gpu_skips_the_check_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert list(gpu.CHECKS[name](Subject(CPU, TINY))) == [{"skipped": "there is one GPU"}]


def test_figures_of_the_link() -> None:
    # Four rounds of 0.8 s in each of which the link is idle once.
    gaps = (0.6, 0.4, 0.2, 0.1)
    spans = [span for at, gap in enumerate(gaps) for span in ((at, at + 0.1), (at + 0.1 + gap, at + 0.8))]
    carried = [CopyRecord(False, 10**9, *span) for span in spans] + [CopyRecord(True, 1, 0.15, 0.5)]
    run = Recorded([None] * 4, [], carried)  # type: ignore[list-item]
    told = gpu_engine_checks.carried(run, pinned=4.0)
    assert told["copy_gb_s"] == pytest.approx(8 / (4 * 0.8 - sum(gaps))) and told["gb_a_round"] == 2.0
    assert told["share_of_pinned"] == pytest.approx(told["copy_gb_s"] / 4)
    assert told["longest_gap_ms"] == pytest.approx(600)
    assert told["gap_ms_a_round"] == pytest.approx((1300 + 3 * 200) / 4)


# ---------------------------------------------------------------------------------- `bench offload` on a GPU


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("memory_bytes", [GIB, 2**20])
def test_ours_is_measured_streamed_and_as_planned(
    memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor and a paced link stand for the GPU."""
    named = named_hardware("rtx4090")
    card = dataclasses.replace(named.gpus[0], memory_bytes=memory_bytes)
    hardware, describe, caps = dataclasses.replace(named, gpus=(card,)), machine.describe, list[float]()
    declared = CASES["offload"]
    case = dataclasses.replace(declared, on_cuda={**declared.on_cuda, "options": SMALL})
    monkeypatch.setenv("OFFLOAD_RT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(SHAPES, "tiny", SMALLER)
    monkeypatch.setitem(cases.CASES, "offload", case)
    monkeypatch.setattr(side_by_side, "choose_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(machine, "describe", lambda device: describe(CPU))
    monkeypatch.setattr(machine, "read_rate", lambda device: 1000.0)
    monkeypatch.setattr(prediction_accuracy, "usable_hardware", lambda device: hardware)
    monkeypatch.setattr(runner, "Worker", Inside)
    monkeypatch.setattr(worker, "cap", lambda gib, device: caps.append(gib))
    monkeypatch.setattr(ours, "usable_hardware", lambda device: hardware)
    monkeypatch.setattr(ours, "load_model", lambda path, device, dtype: load_model(path, CPU, dtype))
    monkeypatch.setattr(ours, "CudaLink", lambda device: PacedLink(25e9))
    monkeypatch.setattr(ours, "open_runner", partial(open_runner, capture=_refuse))
    given = f"offload --model random:tiny --device cuda --acceptance 1 --out {tmp_path}/out.jsonl"
    assert bench_main(given, "--contexts 160 --turns 1") == (0 if memory_bytes == GIB else 2)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["place"] for one in found] == ["streamed", "planned"] and set(caps) == {23.3}
    assert found[0]["options"] == SMALL | {"offload.resident_tokens": 0, "offload.cpu_tokens": 0}
    for record in found:
        assert record["new_tokens"] == 48 and record["gpu_memory_gib"] == 23.3
        assert record["link_rate_gb_s"] == card.to_device_rate
        for row in record["rows"]:
            if memory_bytes == GIB:
                assert "error" not in row and row["rounds"]["predicted_over_measured"] > 0
                assert "no CUDA graphs" in row["notes"][-1]
            else:
                assert "GPU" in row["error"], "refused before its weights are loaded"


def test_a_limited_gpu_is_planned_with_what_is_left_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [1.0]
    for name, tell in (
        ("get_device_properties", lambda device: SimpleNamespace(total_memory=96 * GIB)),
        ("set_per_process_memory_fraction", lambda share, device: shares.append(share)),
        ("get_per_process_memory_fraction", lambda device: shares[-1]),
        ("mem_get_info", lambda device: (80 * GIB, 96 * GIB)),
        ("memory_reserved", lambda device: 5 * GIB),
        ("memory_allocated", lambda device: 4 * GIB),
    ):
        monkeypatch.setattr(torch.cuda, name, tell)
    monkeypatch.setattr(
        inspection, "inspect", lambda on_progress: SimpleNamespace(hardware=named_hardware("rtx4090"))
    )

    def usable() -> float:
        return inspection.usable_hardware(torch.device("cuda", 0), 3 * GIB).gpus[0].memory_bytes / GIB

    assert usable() == 80 + 1 + 3, "free, reserved and not handed out, loaded"
    worker.cap(24.0, "cuda:0")
    assert usable() == 24 - 5 + 1 + 3
    worker.cap(200.0, "cuda:0")
    assert shares == [1.0, 0.25, 1.0]
