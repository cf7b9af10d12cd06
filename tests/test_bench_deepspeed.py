"""The rebuilt ZeRO-Inference continues a prompt as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import byte_ids, tiny_target
from transformers import PreTrainedModel

from bench.systems import Setup, _passes, zero_style

PROMPTS = (byte_ids(90), byte_ids(61, start=500), byte_ids(1))
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny_target("llama-gqa", seed=3)


@pytest.fixture
def setup(target: PreTrainedModel, tmp_path: Path) -> Iterator[Setup]:
    """What opens a system on a checkpoint that names the first token of the continuation as an end token."""
    threads = torch.get_num_threads()
    target.save_pretrained(tmp_path / "target")
    first = greedy(target, PROMPTS[0])[0]
    (tmp_path / "target" / "generation_config.json").write_text(f'{{"eos_token_id": {first}}}')
    yield Setup(
        model=str(tmp_path / "target"),
        draft=None,
        dtype="float32",
        device="cpu",
        threads=1,
        capacity=len(PROMPTS[0]) + NEW_TOKENS,
        chunk=32,
        work=str(tmp_path / "work"),
    )
    torch.set_num_threads(threads)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """`NEW_TOKENS` that follow, the whole text read anew for each."""
    ids = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def test_the_rebuilt_one_continues_greedily(setup: Setup, target: PreTrainedModel) -> None:
    system = zero_style.SYSTEMS["rebuilt"](setup)
    for prompt in PROMPTS:
        system.prepare(prompt)
        for _ in range(2):
            run = system.run(NEW_TOKENS)
            assert run.tokens == greedy(target, prompt)
            assert run.timed == NEW_TOKENS
    system.close()


def test_a_host_layer_keeps_its_kv_in_one_buffer_and_refuses_more_than_that_holds() -> None:
    layer = _passes.HostLayer(capacity=10)
    kv = torch.randn(2, 1, 3, 10, 4)
    layer.update(*kv[..., :6, :])
    filled = layer.keys.data_ptr(), layer.values.data_ptr()
    layer.crop(-2)
    keys, values = layer.update(*kv[..., 4:, :])
    assert torch.equal(torch.stack([keys, values]), kv)
    assert (keys.data_ptr(), values.data_ptr()) == filled
    with pytest.raises(RuntimeError):
        layer.update(*kv[..., :1, :])
