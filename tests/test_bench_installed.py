"""Peers that `make bench-peers` has installed continue a prompt as transformers does, time after time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tiny_models import byte_ids, tiny_target
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.runner import PEERS_PYTHON, Worker
from bench.systems import Setup
from offload_rt.loading import demo_model

pytestmark = pytest.mark.skipif(not PEERS_PYTHON.exists(), reason="make bench-peers installs them")

PROMPTS = (byte_ids(700), byte_ids(300, start=5000), [7])
NEW_TOKENS = 24
EXACT = ("deepspeed:resident", "deepspeed:offloaded", "llamacpp:f32", "llamacpp:lookup", "openvino:f32")
"""Not llama.cpp's flash attention, nor 8-bit KV."""


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def check(system: str, setup: Setup, target: PreTrainedModel) -> None:
    """It yields the target's greedy tokens, whatever was asked before."""
    adapter, _, name = system.partition(":")
    worker = Worker(adapter, setup, patience_s=300.0)
    try:
        worker.ask("open", name, asdict(setup))
        for prompt in PROMPTS:
            assert worker.ask("prepare", name, prompt)["ms"] >= 0
            expected = greedy(target, prompt)
            assert len(set(expected)) > 1
            for count in (NEW_TOKENS, 3, NEW_TOKENS):
                run = worker.ask("run", name, count)
                assert run["tokens"] == expected[:count] and run["ms"] > 0 and run["timed"] > 0
    finally:
        worker.close()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where DeepSpeed's extension is compiled, once for all tests."""
    return str(tmp_path_factory.mktemp("work"))


def saved(folder: Path, arch: str, work: str) -> tuple[Setup, PreTrainedModel]:
    # OpenVINO rounds weights to it.
    tiny_target(arch, seed=3, vocabulary=4096).to(torch.float16).save_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shutil.copy(demo_model("target") / "tokenizer.json", folder)  # OpenVINO asks for one
    return Setup(str(folder), None, "float32", "cpu", 1, 1000, 32, work), target


@pytest.mark.parametrize("system", EXACT)
def test_a_system_continues_greedily(system: str, tmp_path: Path, work: str) -> None:
    check(system, *saved(tmp_path, "llama-gqa", work))


@pytest.mark.parametrize("arch", ["llama", "llama-yarn", "llama3"])
def test_llama_cpp_has_the_rotary_embedding_of_the_checkpoint(arch: str, tmp_path: Path, work: str) -> None:
    check("llamacpp:f32", *saved(tmp_path, arch, work))
