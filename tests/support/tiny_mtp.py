"""Checkpoints whose files have a head for multi-token prediction, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from offload_rt.model.mtp_head import described_mtp
from support.tiny_models import local_model, random_model

_BESIDE = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "post_norm": "norm",
}
"""Names of the parts beside the layer, in transformers and in checkpoints of Qwen."""


def mtp_target(arch: str) -> PreTrainedModel:
    """A small target of an architecture that is published with MTP layers."""
    if arch == "glm4_moe":  # transformers knows its MTP layer only by the numbers of published models
        return random_model(
            arch,
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=46,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            max_position_embeddings=4096,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    return local_model(arch)


def write_mtp_checkpoint(arch: str, folder: Path) -> PreTrainedModel:
    """Writes a target with an MTP head beside its weights; returns the target."""
    model = mtp_target(arch)
    model.save_pretrained(folder)
    with described_mtp(model.config), torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head: Any = MtpModel(model, 1)
    file, layers = folder / "model.safetensors", model.config.num_hidden_layers
    tensors = load_file(file)
    for name, weight in head.layers[0].state_dict().items():
        part, _, rest = name.partition(".")
        stored = (
            torch.randn(weight.shape) * 0.1 if weight.ndim > 1 else weight + 0.1 * torch.randn(weight.shape)
        )
        if arch == "glm4_moe":
            inner = {"mtp_block": "", "post_norm": "shared_head.norm."}.get(part, f"{part}.")
            tensors[f"model.layers.{layers}.{inner}{rest}"] = stored
        else:
            inner = f"layers.0.{rest}" if part == "mtp_block" else f"{_BESIDE[part]}.{rest}"
            tensors[f"mtp.{inner}"] = stored
    save_file(tensors, file, {"format": "pt"})
    if arch == "qwen3.5":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return model
