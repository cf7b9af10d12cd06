"""Adapters of systems that run in our own environment, and vLLM's over a stand-in. No time is told."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_peers import SMALL, setup
from tiny_models import byte_ids, noisy_copy, tiny_target
from transformers import AutoModelForCausalLM

from bench.systems._passes import HostLayer

PROMPTS = ([byte_ids(200)], [byte_ids(90), byte_ids(90, start=7)], [byte_ids(1)], [byte_ids(200)])
NEW_TOKENS = 12
OWN = ("dynamic", "static", "lookup", "assisted")
ONE_TEXT = "transformers:lookup", "transformers:assisted"
LINKED = ("layer_prefetch:rebuilt", "ours:retrieval")
ALL = (
    *(f"transformers:{name}" for name in OWN),
    *LINKED,
    "zero_style:rebuilt",
    "ours:plain",
    "ours:triforce",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, which names what follows the first prompt an end token, and its draft."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_target("llama-gqa", seed=3)
    target.save_pretrained(folder / "target")
    (end,) = tiny_greedy(folder, PROMPTS[0][0], 1)
    (folder / "target" / "generation_config.json").write_text(f'{{"eos_token_id": {end}}}')
    noisy_copy(target).save_pretrained(folder / "draft")
    return folder


def tiny_greedy(models: Path, prompt: Sequence[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(models / "target")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@contextmanager
def opened(system: str, models: Path, work: Path, **changes: Any) -> Iterator[Any]:
    """A system, with room for the longest prompt and its continuation."""
    adapter, _, name = system.partition(":")
    given = {"model": str(models / "target"), "options": SMALL, "capacity": 200 + NEW_TOKENS} | changes
    subject = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS[name](setup(work, **given))
    try:
        yield subject
    finally:
        subject.close()


@pytest.mark.parametrize("system", ALL)
def test_systems_continue_a_prompt_from_its_end(system: str, models: Path, tmp_path: Path) -> None:
    """The same tokens in every run, whatever was asked before; and those of a model run plainly."""
    given = {"draft": str(models / "draft"), "link_gb_s": 1.0 if system in LINKED else 0.0}
    with opened(system, models, tmp_path, **given) as subject:
        for prompt in PROMPTS:
            if len(prompt) > 1 and system in ONE_TEXT:
                continue
            assert subject.prepare(prompt) > 0
            runs = [subject.run(count) for count in (NEW_TOKENS, 5, NEW_TOKENS)]
            each = [tiny_greedy(models, text, NEW_TOKENS) for text in prompt]
            first, expected = ([token for text in each for token in text[:n]] for n in (5, NEW_TOKENS))
            assert [one.tokens for one in runs] == [expected, first, expected]
            assert all(0 < one.timed <= len(one.tokens) and one.ms > 0 for one in runs)
        if not system.startswith("ours"):
            for count in (0, 4):
                logits = torch.tensor(subject.logits_after(expected[:count]))
                assert int(logits.argmax()) == expected[count]


@pytest.mark.parametrize("system", ["lookup", "assisted"])
def test_no_model_reads_the_prompt_again(system: str, models: Path, tmp_path: Path) -> None:
    with opened(f"transformers:{system}", models, tmp_path, draft=str(models / "draft")) as subject:
        subject.prepare(PROMPTS[0])
        passed: list[int] = []

        def note(module: Any, positional: Any, named: dict[str, Any]) -> None:
            passed.append(named["input_ids"].shape[1])

        for text in (subject.text, *([subject._draft] if system == "assisted" else [])):
            text.model.register_forward_pre_hook(note, with_kwargs=True)
        subject.run(NEW_TOKENS)
        assert 0 < max(passed) < 30


@pytest.mark.parametrize(
    "system", ["transformers:lookup", "transformers:static", "zero_style:rebuilt", "ours:plain"]
)
def test_systems_draw(system: str, models: Path, tmp_path: Path) -> None:
    with opened(system, models, tmp_path, temperature=3.0) as subject, torch.random.fork_rng():
        subject.prepare([byte_ids(90)])
        torch.manual_seed(1)
        assert subject.run(24).tokens != tiny_greedy(models, byte_ids(90), 24)


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        ("transformers:assisted", {}, "assisted generation needs a draft"),
        ("ours:triforce", {}, "triforce needs a draft"),
        ("transformers:offloaded", {}, "an offloaded cache needs a GPU"),
        ("layer_prefetch:rebuilt", {}, "over a link only"),
        ("vllm:resident", {}, "is measured on GPUs only"),
    ],
)
def test_a_system_says_what_it_lacks(
    system: str, changes: dict[str, Any], message: str, models: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message), opened(system, models, tmp_path, **changes):
        pass


def test_a_host_layer_keeps_its_kv_in_one_buffer_and_refuses_more_than_that_holds() -> None:
    layer = HostLayer(capacity=10)
    kv = torch.randn(2, 1, 3, 10, 4)
    layer.update(*kv[..., :6, :])
    filled = layer.keys.data_ptr(), layer.values.data_ptr()
    layer.crop(-2)
    keys, values = layer.update(*kv[..., 4:, :])
    assert torch.equal(torch.stack([keys, values]), kv)
    assert (keys.data_ptr(), values.data_ptr()) == filled
    with pytest.raises(RuntimeError):
        layer.update(*kv[..., :1, :])


class FakeVllm:
    """In the place of vLLM's `LLM`: every token is the length of the text before it."""

    def __init__(self, model: str, **given: Any) -> None:
        self.given, self.resets = given, 0

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def generate(self, prompts: list[Any], params: dict[str, Any], use_tqdm: bool) -> list[Any]:
        assert params["ignore_eos"] and params["temperature"] == 0.0 and not use_tqdm
        count, made = params["max_tokens"], []
        for number, prompt in enumerate(prompts):
            last = number + 4.0 + count
            times = SimpleNamespace(first_token_latency=0.25, first_token_ts=5.0, last_token_ts=last)
            length = len(prompt["prompt_token_ids"])
            tokens = SimpleNamespace(token_ids=tuple(range(length, length + count)))
            made.append(SimpleNamespace(outputs=[tokens], metrics=times))
        return made


@pytest.mark.parametrize(
    ("system", "resets", "notes"),
    [("resident", 1, ()), ("kv-offloaded", 3, ("first token after 250 ms",)), ("weights-offloaded", 1, ())],
)
def test_vllm_decodes_from_the_first_token_on(
    system: str,
    resets: int,
    notes: tuple[str, ...],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"device": "cuda:0", "dtype": "bfloat16", "capacity": 250}
    given |= {"kv_token_bytes": 2**20, "weight_bytes": 3 * 2**30}
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(ImportError, match="vllm"), opened(f"vllm:{system}", models, tmp_path, **given):
        pass
    fake = SimpleNamespace(LLM=FakeVllm, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    with opened(f"vllm:{system}", models, tmp_path, **given) as subject:
        assert "nobody has run" in subject.notes[0] and subject.prepare([[3, 1, 4], [2, 7, 1]]) > 0
        for count in (4, 1):
            run = subject.run(count)
            assert run.tokens == 2 * list(range(3, 3 + count)) and run.notes == notes
            assert (run.ms, run.timed) == ((4000.0, 6) if count == 4 else (2000.0, 2))
        llm = subject._llm
        assert llm.resets == resets and llm.given["max_model_len"] == 256 and llm.given["dtype"] == "bfloat16"
        assert llm.given.get("cpu_offload_gb") == (3.0 if system == "weights-offloaded" else None)
        assert llm.given.get("kv_offloading_size") == (1.25 if system == "kv-offloaded" else None)
