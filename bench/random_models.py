"""Checkpoints with random weights in the shapes of known models; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offload_rt.errors import UsageError
from offload_rt.machine.measuring import CPU
from offload_rt.model.embedded import demo_model
from offload_rt.model.named_shapes import SHAPES as KNOWN
from offload_rt.model.shape import ModelShape
from offload_rt.system.memory import available_memory

PREFIX = "random:"
LOGIT_DEVIATION = 20.0
"""Real models are sure of most tokens; random ones are if their logits are spread wide."""

POSITIONS = 262_144
TINY = ModelShape("tiny", 4, 512, 1024, 8, 4, 64, 2048, 0)  # it counts its own parameters
SHAPES = {"tiny": TINY, **KNOWN}
OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"num_local_experts": 32},
    "gemma4-31b": {
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}
"""Settings of published configs that their shapes do not tell, by name."""


def checkpoint(name: str, dtype: torch.dtype, work: Path) -> Path:
    """Returns the folder of a checkpoint `random:SHAPE` in `work`, written if it does not exist.

    Raises:
        UsageError: there is no such shape, no memory to write it from, or no room on the disk.
    """
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise UsageError(f"--model {name}: there is no such shape; there are {', '.join(SHAPES)}")
    folder = work / f"random-{shape}-{str(dtype).removeprefix('torch.')}"
    if not folder.exists():
        size = SHAPES[shape].parameters * dtype.itemsize
        if size > available_memory():
            raise UsageError(f"--model {name}: its weights, {size / 2**30:.1f} GiB, do not fit in memory")
        work.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(work).free
        if size > free_bytes:
            sizes = f"{size / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB are free in {work}"
            raise UsageError(f"--model {name}: its weights take {sizes}; set OFFLOAD_RT_CACHE to another")
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.part")
        random_model(shape, CPU, dtype).save_pretrained(unfinished)
        shutil.copy(demo_model("target") / "tokenizer.json", unfinished)  # OpenVINO requires one
        unfinished.rename(folder)
    return folder


def random_prompt(vocabulary: int, count: int) -> list[int]:
    """Random token IDs, the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    tokens: list[int] = torch.randint(vocabulary, (count,), generator=generator).tolist()
    return tokens


def config_of(shape: ModelShape, positions: int) -> PretrainedConfig:
    """The config of a model in this shape, valid for `positions` tokens."""
    kinds: dict[str, Any] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}
    kind = kinds.get(shape.name[:5], LlamaConfig)
    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": positions,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if shape.family == "qwen3_moe":
        return Qwen3MoeConfig(
            **settings, moe_intermediate_size=shape.expert_parameters // (3 * 128 * shape.hidden)
        )
    if shape.kinds.local:
        settings |= _local_settings(shape) | OWN_SETTINGS.get(shape.name, {})
        mixed: PretrainedConfig = AutoConfig.for_model(shape.family, **settings)
        return mixed
    config: PretrainedConfig = kind(**settings)
    return config


def _local_settings(shape: ModelShape) -> dict[str, Any]:
    """Settings of a config for layers that do not attend to the whole sequence."""
    kinds, settings = shape.kinds, dict[str, Any]()
    if kinds.full:  # else all layers are alike
        types = {
            True: "full_attention",
            False: "linear_attention" if kinds.recurrent else "sliding_attention",
        }
        settings["layer_types"] = [types[kind.full] for kind in kinds.kinds]
    if kinds.windowed:
        sliding = kinds.kinds[kinds.windowed[0]]
        settings["sliding_window"] = sliding.window
        settings |= {"num_key_value_heads": sliding.kv_heads, "head_dim": sliding.head_dim}
    if shape.recurrence is not None:  # states of 128 by 128, as in all Qwens
        settings["linear_num_value_heads"] = shape.recurrence.exact_elements // 128**2
    return settings


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in the shape `name` of `SHAPES` with random weights, the same ones each time."""
    return model_of(SHAPES[name], device, dtype)


def model_of(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in this shape with random weights, the same ones each time."""
    config: Any = config_of(shape, POSITIONS)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # The final norm makes hidden states of length sqrt(hidden), so that logits have this deviation.
        head: Any = model.get_output_embeddings()
        head.weight.normal_(0.0, LOGIT_DEVIATION / config.hidden_size**0.5)
    model.eval()
    return model
