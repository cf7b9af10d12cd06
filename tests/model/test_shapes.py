"""Shapes of models: counted as transformers counts, by name or from a config, without weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, tiny_target
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from bench.random_models import config_of
from cpu_kv import ElementType
from offload_rt.api.opening import name_of
from offload_rt.errors import UsageError
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.config_shapes import from_config, shape_of
from offload_rt.model.embedded import demo_model
from offload_rt.model.loading import load_model
from offload_rt.model.named_shapes import SHAPES, find_shape, known_name

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ARCHITECTURES),
    ("llama", {"tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("arch", "settings"), VARIANTS)
def test_parameters_are_those_of_the_model(arch: str, settings: dict[str, Any]) -> None:
    model = tiny_target(arch, layers=3, **settings)
    shape = from_config(model.config, ElementType.FLOAT32, arch)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.weight_bytes == sum(parameter.nbytes for parameter in model.parameters())
    # A step reads the output head, and of the embedding nothing unless they are one.
    unread = 0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.nbytes
    assert shape.step_bytes == shape.weight_bytes - unread
    attention = model.model.layers[0].self_attn
    key_width = attention.o_proj.weight.shape[1] // attention.num_key_value_groups
    assert shape.token_bytes == 2 * 3 * key_width * 4
    assert shape.layer_token_bytes * 3 == shape.token_bytes
    assert shape.group * shape.kv_heads == shape.heads


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_that_of_a_model_of_its_sizes(name: str) -> None:
    named = find_shape(name, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(named, named.max_positions))
    if named.quantization is not None:  # as published; the weights of a model here are not
        assert named.weight_bytes < named.parameters
        named = replace(named, quantization=None, quantized=0, quantized_mlp=0)
    assert shape_of(model, ElementType.BFLOAT16, name) == named
    assert named.weight_bytes == 2 * named.parameters


@pytest.mark.parametrize(("name", "part"), [("demo", "target"), ("demo-draft", "draft")])
def test_the_demo_pair_comes_from_its_packaged_config(name: str, part: str) -> None:
    shape = find_shape(name, ElementType.FLOAT32)
    model = load_model(demo_model(part), torch.device("cpu"), torch.float32)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.name == name == name_of(model) and shape.max_positions == 262_144
    read = from_config(model_config(demo_model(part)), ElementType.FLOAT32, name)
    assert (shape, shape.family, shape.rope_scaled) == (read, read.family, read.rope_scaled)
    assert find_shape(demo_model(part), ElementType.FLOAT32) == shape, "whichever way it is named"
    assert known_name(f"owner/{name}") is None


def test_a_folder_needs_its_config_alone(tmp_path: Path) -> None:
    config = tiny_target("llama-gqa").config
    config.save_pretrained(tmp_path)
    shape = find_shape(tmp_path, None)
    assert shape == from_config(config, None, str(tmp_path))
    assert shape.dtype == ElementType.FLOAT32 and shape.kv_heads == 2


def test_the_dtype_is_the_checkpoints_unless_one_is_asked_for(tmp_path: Path) -> None:
    tiny_target().config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float16"}))
    assert find_shape(tmp_path, None).dtype == ElementType.FLOAT16
    assert find_shape(tmp_path, ElementType.BFLOAT16).dtype == ElementType.BFLOAT16


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GPT2Config(n_layer=1, n_embd=64, n_head=2), "not supported"),
        (
            LlamaConfig(
                num_hidden_layers=1,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "rotary frequencies",
        ),
    ],
)
def test_what_generate_refuses_has_no_plan(config: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        from_config(config, None, "odd")
