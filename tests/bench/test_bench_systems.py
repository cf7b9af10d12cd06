"""Adapters that run in our own environment continue a prompt as its model does. No time is checked."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bench_setup import SMALL, setup
from support.tiny_models import byte_ids, noisy_copy, tiny_target
from transformers import AutoModelForCausalLM

from bench.systems._passes import HostLayer

PROMPTS = ([byte_ids(200)], [byte_ids(90), byte_ids(90, start=7)], [byte_ids(1)], [byte_ids(200)])
NEW_TOKENS = 12
ONE_SEQUENCE = "transformers:lookup", "transformers:assisted"
LINKED = ("layer_prefetch:rebuilt", "ours:retrieval")
OWN = "transformers:dynamic", "transformers:static", "zero_style:rebuilt", "ours:plain", "ours:triforce"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose end token is what follows the first prompt, and its draft."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target("llama-gqa", seed=3)
    target.save_pretrained(folder / "target")
    (end,) = greedy(folder, PROMPTS[0][0], 1)
    (folder / "target" / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    noisy_copy(target).save_pretrained(folder / "draft")
    return folder


def greedy(models: Path, prompt: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(models / "target")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@contextmanager
def opened(system: str, models: Path, work: Path, **changes: Any) -> Iterator[Any]:
    """A system with room for the longest prompt and its continuation."""
    adapter, _, name = system.partition(":")
    given = {"model": str(models / "target"), "options": SMALL, "capacity": 200 + NEW_TOKENS} | changes
    subject = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS[name](setup(work, **given))
    try:
        yield subject
    finally:
        subject.close()


@pytest.mark.parametrize("system", (*OWN, *ONE_SEQUENCE, *LINKED))
def test_systems_continue_a_prompt_from_its_end(system: str, models: Path, tmp_path: Path) -> None:
    """The same tokens in every run, whatever was asked before: those of the model."""
    given = {"draft": str(models / "draft"), "link_gb_s": 1.0 if system in LINKED else 0.0}
    with opened(system, models, tmp_path, **given) as subject:
        for prompt in PROMPTS:
            if len(prompt) > 1 and system in ONE_SEQUENCE:
                continue
            assert subject.prepare(prompt) > 0
            runs = [subject.run(count) for count in (NEW_TOKENS, 5, NEW_TOKENS)]
            each = [greedy(models, tokens, NEW_TOKENS) for tokens in prompt]
            first, expected = ([token for tokens in each for token in tokens[:n]] for n in (5, NEW_TOKENS))
            assert [one.tokens for one in runs] == [expected, first, expected]
            assert all(0 < one.timed <= len(one.tokens) and one.ms > 0 for one in runs)
        if not system.startswith("ours"):
            for count in (0, 4):
                logits = torch.tensor(subject.logits_after(expected[:count]))
                assert int(logits.argmax()) == expected[count]


@pytest.mark.parametrize("system", ONE_SEQUENCE)
def test_no_model_reads_the_prompt_again(system: str, models: Path, tmp_path: Path) -> None:
    with opened(system, models, tmp_path, draft=str(models / "draft")) as subject:
        subject.prepare(PROMPTS[0])
        passed: list[int] = []

        def note(module: Any, positional: Any, named: dict[str, Any]) -> None:
            passed.append(named["input_ids"].shape[1])

        for text in (subject.text, *([subject._draft] if system.endswith("assisted") else [])):
            text.model.register_forward_pre_hook(note, with_kwargs=True)
        subject.run(NEW_TOKENS)
        assert 0 < max(passed) < 30


@pytest.mark.parametrize(
    ("system", "message"),
    [
        ("transformers:assisted", "assisted generation needs a draft"),
        ("ours:triforce", "triforce needs a draft"),
        ("transformers:offloaded", "an offloaded cache needs a GPU"),
        ("layer_prefetch:rebuilt", "needs an emulated link"),
    ],
)
def test_a_system_says_what_it_lacks(system: str, message: str, models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message), opened(system, models, tmp_path):
        pass


def test_a_host_layer_keeps_its_kv_in_one_buffer_and_refuses_more() -> None:
    layer = HostLayer(capacity=10)
    kv = torch.randn(2, 1, 3, 10, 4)
    layer.update(*kv[..., :6, :])
    assert layer.keys is not None and layer.values is not None
    filled = layer.keys.data_ptr(), layer.values.data_ptr()
    layer.crop(-2)
    keys, values = layer.update(*kv[..., 4:, :])
    assert torch.equal(torch.stack([keys, values]), kv)
    assert (keys.data_ptr(), values.data_ptr()) == filled
    with pytest.raises(RuntimeError):
        layer.update(*kv[..., :1, :])
