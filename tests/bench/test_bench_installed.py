"""Peers that `make bench-peers` has installed continue a prompt as transformers does, time after time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import byte_ids, tiny_target, to
from transformers import AutoModelForCausalLM

from bench.runner import PEERS_PYTHON, SystemFailed, Worker
from bench.systems import Setup

pytestmark = pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="make bench-peers installs them")

PROMPTS = ([byte_ids(700), byte_ids(700, start=5000)], [byte_ids(300, start=5000)], [[7]])
NEW_TOKENS = 24
EXACT = "deepspeed:resident", "deepspeed:offloaded", "openvino:f32", "llamacpp:f32"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where DeepSpeed's extension is compiled, once for all tests."""
    return str(tmp_path_factory.mktemp("work"))


def saved(folder: Path, work: str, arch: str = "llama-gqa", dtype: str = "float32", **changes: Any) -> Setup:
    """A tiny checkpoint; OpenVINO rounds weights to float16."""
    model = tiny_target(arch, seed=3, vocabulary=4096, **changes)
    to(model, torch.float16).save_pretrained(folder)
    return Setup(str(folder), None, dtype, "cpu", 1, 1000, 32, work, batch=2)


@contextmanager
def opened(system: str, setup: Setup) -> Iterator[tuple[Worker, str, dict[str, Any]]]:
    """Its process, the name it has there, and its label and notes."""
    adapter, _, name = system.partition(":")
    worker = Worker(adapter, setup, patience_s=300.0)
    try:
        yield worker, name, worker.ask("open", name, setup)
    finally:
        worker.close()


@pytest.mark.parametrize("system", EXACT)
def test_a_system_continues_greedily(system: str, tmp_path: Path, work: str) -> None:
    """It yields the target's greedy tokens, whatever was asked before."""
    setup = saved(tmp_path, work)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with opened(system, setup) as (worker, name, _):
        for prompt in PROMPTS:
            ids = torch.tensor(prompt)
            with torch.inference_mode():
                for _ in range(NEW_TOKENS):
                    ids = torch.cat([ids, target(ids).logits[:, -1:].argmax(-1)], dim=1)
            expected = ids[:, len(prompt[0]) :]
            assert len(expected.unique()) > 1
            assert worker.ask("prepare", name, prompt)["ms"] >= 0
            for count in (NEW_TOKENS, 3, NEW_TOKENS):
                run = worker.ask("run", name, count)
                assert run["tokens"] == expected[:, :count].flatten().tolist()
                assert run["ms"] > 0 and run["timed"] > 0


def test_llama_cpp_names_what_it_rounds_and_its_file_is_written_once(tmp_path: Path) -> None:
    setup, written = saved(tmp_path / "model", str(tmp_path / "work")), list[list[int]]()
    for system in ("f16", "f16", "f16-flash"):
        with opened(f"llamacpp:{system}", setup) as (worker, name, said):
            assert said["notes"][0] == "KV is float16, weights are float32" and "float16 KV" in said["label"]
            worker.ask("prepare", name, PROMPTS[1])
            assert len(worker.ask("run", name, 3)["tokens"]) == 3
        written.append([path.stat().st_mtime_ns for path in setup.folder.glob("*.gguf")])
    assert written[0] == written[1] == written[2]
    os.utime(tmp_path / "model" / "model.safetensors")  # the checkpoint changes
    with opened("llamacpp:f32", setup):
        assert [path.stat().st_mtime_ns for path in setup.folder.glob("*.gguf")] > written[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"arch": "qwen2"}, "architecture qwen2: only llama"),
        ({"dtype": "int8"}, "no GGUF file of int8: choose one of float32, float16, bfloat16"),
        ({"arch": "llama-yarn"}, "'yarn'.*cannot be written"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    setup = saved(tmp_path / "model", str(tmp_path / "work"), **given)
    with pytest.raises(SystemFailed, match=message), opened("llamacpp:f32", setup):
        pass
    assert not list(setup.folder.glob("*.gguf"))
