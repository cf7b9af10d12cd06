"""GGUF files hold the checkpoint, and llama.cpp says what it does with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_target
from transformers import PreTrainedModel

pytest.importorskip("gguf")

from gguf import GGUFReader, dequantize

from bench.gguf_file import gguf_file
from bench.systems import Opener, Setup

LLAMAS = ("llama", "llama-gqa", "llama-yarn", "llama3")


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


def contents(path: Path) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {
        one.name: torch.tensor(dequantize(one.data, one.tensor_type)).reshape(*reversed(one.shape.tolist()))
        for one in reader.tensors
    }
    return fields, tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_file_holds_the_checkpoint(tmp_path: Path, dtype: str, tied: bool) -> None:
    model = tiny_target("llama-gqa", tie_word_embeddings=tied).to(getattr(torch, dtype))
    fields, tensors = contents(gguf_file(saved(tmp_path / "model", model), dtype, tmp_path))
    expected = {key: value.float() for key, value in model.state_dict().items()}
    assert ("output.weight" in tensors) is not tied
    assert len(tensors) == len(expected) - tied
    for name, key in [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("blk.1.ffn_down", "model.layers.1.mlp.down_proj"),
    ]:
        assert torch.equal(tensors[f"{name}.weight"], expected[f"{key}.weight"])
    # Components that are rotated together are half a head apart there, and neighbours here.
    for name, heads in (("q", 4), ("k", 2)):
        key = f"model.layers.1.self_attn.{name}_proj.weight"
        there = expected[key].unflatten(0, (heads, 16))
        here = tensors[f"blk.1.attn_{name}.weight"].unflatten(0, (heads, 16))
        assert torch.equal(here[:, 0::2], there[:, :8])
        assert torch.equal(here[:, 1::2], there[:, 8:])
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.context_length"] == model.config.max_position_embeddings
    assert fields["llama.rope.freq_base"] == model.config.rope_parameters["rope_theta"]


def test_a_gguf_file_holds_a_vocabulary_of_byte_pairs(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", tiny_target(layers=1))
    fields, _ = contents(gguf_file(folder, "float32", tmp_path))
    assert fields["tokenizer.ggml.model"] == "none"
    byte_pairs = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "type": "BPE"}
    end = {"id": 3, "content": "</s>"}
    (folder / "tokenizer.json").write_text(json.dumps({"model": byte_pairs, "added_tokens": [end]}))
    fields, _ = contents(gguf_file(folder, "float32", tmp_path))
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.merges"]) == ("gpt2", ["a b"])
    tokens = fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and tokens[:5] == ["a", "b", "ab", "</s>", "<unused 4>"]
    assert len(tokens) == fields["llama.vocab_size"]


def test_a_gguf_file_is_kept_until_the_checkpoint_changes(tmp_path: Path) -> None:
    model = saved(tmp_path / "model", tiny_target(layers=1))
    first = gguf_file(model, "float32", tmp_path)
    written = first.stat().st_mtime_ns
    assert gguf_file(model, "float32", tmp_path) == first
    assert first.stat().st_mtime_ns == written
    os.utime(model / "model.safetensors", ns=(0, written + 1))
    assert gguf_file(model, "float32", tmp_path) != first


@pytest.mark.parametrize(
    ("arch", "dtype", "message"),
    [
        ("qwen2", "float32", "architecture qwen2: only llama"),
        ("llama", "int8", "no GGUF file of int8: choose one of float32, float16, bfloat16"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, arch: str, dtype: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_file(saved(tmp_path / "model", tiny_target(arch, layers=1)), dtype, tmp_path)
    assert not list(tmp_path.glob("*.gguf"))


def test_a_rotary_embedding_that_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = saved(tmp_path / "model", tiny_target(layers=1, rope_parameters=rope))
    with pytest.raises(ValueError, match="'dynamic'.*cannot be written"):
        gguf_file(model, "float32", tmp_path)


@pytest.fixture
def systems() -> dict[str, Opener]:
    pytest.importorskip("llama_cpp")
    from bench.systems.llamacpp import SYSTEMS

    return SYSTEMS


def test_llama_cpp_says_what_it_is_and_rounds(systems: dict[str, Opener], tmp_path: Path) -> None:
    model = saved(tmp_path / "model", tiny_target(layers=1))
    opened = Setup(str(model), None, "float32", "cpu", 1, 1000, 4, str(tmp_path / "work"))
    for name, rounded in (("f32", ""), ("f16", "attention weights"), ("f16-flash", "sums of values")):
        system = systems[name](opened)
        assert rounded in " ".join(system.notes)
        assert bool(system.notes) is bool(rounded)
        assert ("flash attention" in system.label) is ("flash" in name)
        system.close()
    system = systems["lookup"](opened)
    assert "look-up of 4 tokens" in system.label
    system.close()
