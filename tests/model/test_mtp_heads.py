"""Heads for multi-token prediction, from the checkpoints of their targets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.modeling_layers
from safetensors.torch import load_file, save_file
from support.small_engine import LINKS
from support.tiny_models import byte_ids, transformers_greedy
from support.tiny_mtp import write_mtp_checkpoint
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from offload_rt import LLM, SamplingParams
from offload_rt.attention.selector import choose_backend
from offload_rt.caches.head import HeadCache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.drafting.head_model import HeadModel
from offload_rt.errors import UsageError
from offload_rt.model.loading import load_model
from offload_rt.model.mtp_head import described_mtp, load_mtp_head
from offload_rt.model.passes import PassInput
from offload_rt.model.runner import CausalModel

CPU = torch.device("cpu")
ARCHITECTURES = ("qwen3.5", "qwen3-next", "glm4_moe")
PROMPT = byte_ids(150)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint with an MTP head of each architecture."""
    folders = {arch: tmp_path_factory.mktemp("mtp") / arch for arch in ARCHITECTURES}
    for arch, folder in folders.items():
        write_mtp_checkpoint(arch, folder)
    return folders


@torch.inference_mode()
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_head_computes_what_transformers_does(folders: dict[str, Path], arch: str) -> None:
    target = CausalModel(load_model(folders[arch], CPU, torch.float32), arch)
    model = HeadModel(load_mtp_head(target), "head")
    cache = HeadCache(
        model.head.kv_layout(),
        model.head.rotary_frequencies,
        model.head.state_size,
        sinks=2,
        window=64,
        backend=choose_backend(CPU),
    )
    cache.reset()
    tokens, states = byte_ids(20), torch.randn(20, 64)
    new = NewTokens.below(cache.speculative, range(-1, 18), tokens[1:])
    (output,) = model.forward([PassInput(cache, new, 19, states=True, before=states[:-1])])
    config: Any = target.module.config
    target.restore()
    with described_mtp(config):
        reference: Any = MtpModel.from_pretrained(target.module)
        expected = reference.forward_layer(
            0,
            states[None, :-1],
            torch.arange(1, 20)[None],
            MtpCache(config=config.get_mtp_config()),
            input_ids=torch.tensor([tokens[1:]]),
        )
    assert output.states is not None
    torch.testing.assert_close(output.states, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.logits, reference._project_to_logits(expected)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("arch", ["qwen3.5", "qwen3-next"])
def test_greedy_tokens_are_those_of_transformers(folders: dict[str, Path], arch: str, link: str) -> None:
    model = load_model(folders[arch], CPU, torch.float32)
    expected = transformers_greedy(model, PROMPT, 40)
    overrides: dict[str, object] = {"speculation.levels": ["head"], "speculation.step_down": False}
    with LLM.from_models(model, config="heads", overrides=overrides, link=LINKS[link]()) as llm:
        result = llm.generate(PROMPT, SamplingParams(max_tokens=40))
        with llm.read(PROMPT) as context:
            context.generate((), SamplingParams(max_tokens=8))
            context.rewind(len(PROMPT) - 20)
            again = context.generate(PROMPT[-20:], SamplingParams(max_tokens=40))
    assert result.tokens == again.tokens == expected
    assert result.levels[0].name == "head" and result.levels[0].proposed > 0


def test_auto_takes_the_head_of_the_checkpoint(folders: dict[str, Path]) -> None:
    with LLM(folders["qwen3.5"], dtype="float32") as llm, llm.read(PROMPT) as context:
        result = context.generate((), SamplingParams(max_tokens=4), "heads")
    assert result.levels[0].name == "head"
    assert "heads" in [config.name for config in llm.engine.planner.configs]


def test_reasons_why_there_is_none(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UsageError) as refused:
            LLM(folder, config="heads", dtype="float32", overrides={"head.path": "mtp"})
        return str(refused.value)

    plain, lacking = tmp_path / "plain", tmp_path / "lacking"
    load_model(folders["qwen3-next"], CPU, torch.float32).save_pretrained(plain)
    assert "its checkpoint has no MTP layers; name another head, or none" in refusal(plain)
    shutil.copytree(folders["qwen3.5"], lacking)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    assert "cannot be loaded" in refusal(lacking)
    monkeypatch.delattr(transformers.modeling_layers, "MtpModel")
    assert "needs transformers 5.23 or later" in refusal(folders["qwen3.5"])
