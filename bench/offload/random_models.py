"""Models with random weights in the shapes of known ones, built on the device: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

LOGIT_DEVIATION = 20.0
"""Real models are sure of most tokens; random ones are only where their logits are spread wide."""


@dataclass(frozen=True)
class Shape:
    """A model's sizes, as transformers' config class names them."""

    config: type[Any]
    sizes: dict[str, int]


SHAPES = {
    "tiny": Shape(
        LlamaConfig,
        {
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 2048,
            "max_position_embeddings": 65_536,
        },
    ),
    "llama2-7b-128k": Shape(
        LlamaConfig,
        {
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32_000,
            "max_position_embeddings": 262_144,
        },
    ),
    "llama3.1-8b": Shape(
        LlamaConfig,
        {
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "max_position_embeddings": 262_144,
        },
    ),
    "qwen2.5-7b": Shape(
        Qwen2Config,
        {
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152_064,
            "max_position_embeddings": 262_144,
        },
    ),
}
LARGE_SHAPES = ("llama2-7b-128k", "llama3.1-8b", "qwen2.5-7b")


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in the shape `name` of `SHAPES`, with random weights, the same ones each time."""
    shape = SHAPES[name]
    config = shape.config(**shape.sizes, tie_word_embeddings=False, eos_token_id=None, pad_token_id=None)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # The final norm makes hidden states of length sqrt(hidden): logits deviate by as much as is asked.
        head: Any = model.get_output_embeddings()
        head.weight.normal_(0.0, LOGIT_DEVIATION / config.hidden_size**0.5)
    model.eval()
    return model
