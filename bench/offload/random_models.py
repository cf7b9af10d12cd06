"""Models with random weights in the shapes of known ones, built on the device: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from offload_rt.planning.shapes import SHAPES as KNOWN
from offload_rt.planning.shapes import ModelShape

LOGIT_DEVIATION = 20.0
"""Real models are sure of most tokens; random ones are only where their logits are spread wide."""

POSITIONS = 262_144
LARGE_SHAPES = ("llama2-7b", "llama3.1-8b", "qwen2.5-7b")
TINY = ModelShape("tiny", 4, 512, 1024, 8, 4, 64, 2048, 0)  # it counts its own parameters
SHAPES = {"tiny": TINY, **{name: KNOWN[name] for name in LARGE_SHAPES}}


def random_model(name: str, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model in the shape `name` of `SHAPES`, with random weights, the same ones each time."""
    shape = SHAPES[name]
    kind: Any = Qwen2Config if name.startswith("qwen2") else LlamaConfig
    config = kind(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=None,
    )
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        # The final norm makes hidden states of length sqrt(hidden): logits deviate by as much as is asked.
        head: Any = model.get_output_embeddings()
        head.weight.normal_(0.0, LOGIT_DEVIATION / config.hidden_size**0.5)
    model.eval()
    return model
