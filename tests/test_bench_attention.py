"""`python -m bench attention`: what it compares and reports. No time is checked here."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from reference_attention import ReferenceBackend
from torch import Tensor

import bench.__main__ as command_line
import bench.attention
from bench import inputs, machine
from bench.attention import CPU, AttentionCase, exact, measure, take_turns
from offload_rt import native


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> float:
    """Memory that is read at 10 GB/s."""
    monkeypatch.setattr(machine, "read_rate", lambda device: 10.0)
    return 10.0


@pytest.mark.skipif(native.load_kernel() is None, reason="no C++ compiler here: the kernel cannot be built")
def test_compares_ours_with_torchs(tmp_path: Path, rate: float, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attention.json"
    arguments = f"--tokens 700 --queries 5,1 --repeats 3 --out {out}".split()
    assert command_line.main(["attention", *arguments]) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert found["machine"] == {**machine.describe(CPU), "load_average": found["machine"]["load_average"]}
    layers = product(((4, 64), (8, 128)), ("bfloat16", "float32"), (1, 5))
    for row, ((heads, dim), dtype, queries) in zip(found["measured"], layers, strict=True):
        named = row["key_heads"], row["head_dim"], row["dtype"], row["queries"]
        assert named == (heads, dim, dtype, queries)
        size = 2 if dtype == "bfloat16" else 4
        for ms, gb_s in ((row["ms"], row["gb_s"]), (row["torch_ms"], row["torch_gb_s"])):
            assert gb_s == pytest.approx(2 * heads * 700 * dim * size / ms / 1e6)
        assert row["over_torch"] == pytest.approx(row["torch_ms"] / row["ms"])
        assert row["of_read_rate"] == pytest.approx(row["gb_s"] / rate)
        for name in ("error", "torch_error"):
            assert 0 < row[name] < (1e-2 if size == 2 else 1e-5)
        assert row["lse_error"] < 1e-3
    assert (
        "## Over one layer's keys and values" in printed and "| 8         |      128 |  float32 " in printed
    )


def test_errors_are_against_float64() -> None:
    class Off(ReferenceBackend):
        def __call__(
            self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            out, lse = super().__call__(queries, keys, values, scale, mask)
            return out + 0.5, lse - 0.25

    case = AttentionCase(shapes=((2, 16),), tokens=90, queries=(2, 7), repeats=1)
    for row in measure(Off(), 2, 16, torch.float32, case):
        assert row["error"] == pytest.approx(0.5, abs=1e-5)
        assert row["lse_error"] == pytest.approx(0.25, abs=1e-5)
    parts = [torch.randn(2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (3, 50, 51)]
    parts[2] = parts[2][:, :50]
    queries, keys, values = (part.double() for part in parts)
    reference = ReferenceBackend()(queries, keys[None], values[None], 0.2, None)
    for found, wanted in zip(exact(*parts, 0.2), reference, strict=True):
        torch.testing.assert_close(found, wanted)


def test_kernels_take_turns() -> None:
    calls: list[str] = []

    def call(backend: str) -> str:
        calls.append(backend)
        return backend

    timed = take_turns([partial(call, "ours"), partial(call, "torch")], 2)
    assert calls == ["ours", "torch"] * 3
    assert [result for result, _ in timed] == ["ours", "torch"]
    assert [len(times) for _, times in timed] == [2, 2] and all(t >= 0 for _, times in timed for t in times)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tokens 0", "'0' is not a whole number of at least 1"),
        ("--queries 1,none", "'none' is not a whole number of at least 1"),
        ("--tokens 100000000", "--tokens 100000000 needs 572.2 GiB of memory, and 1.5 GiB are free"),
        ("--tokens 10 --out missing/folder.json", "its folder does not exist"),
        ("--tokens 10", "install a C++ compiler"),
    ],
)
def test_bad_input(
    arguments: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(inputs, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=3 * 2**29, total=2**34))
    kernel = None if "compiler" in message else SimpleNamespace(lanes=4, bfloat16_dots=False)
    monkeypatch.setattr(bench.attention, "load_kernel", lambda: kernel)
    assert command_line.main(["attention", "--quick", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err and out == "" and not list(tmp_path.glob("**/*.json"))
