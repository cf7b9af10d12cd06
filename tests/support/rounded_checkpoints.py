"""Checkpoints whose matrices are rounded, as programs write them that quantise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Rounding = Callable[[Tensor], dict[str, Tensor]]
"""Returns the tensors that a file has of a matrix, by the ends of their names."""


def write_rounded(plain: Path, path: Path, rounding: Rounding, stated: dict[str, object]) -> None:
    """Writes a checkpoint whose matrices are rounded, as programs write it that quantise."""
    path.mkdir()
    tensors = dict[str, Tensor]()
    for name, tensor in load_file(plain / "model.safetensors").items():
        matrix = name.endswith("_proj.weight")
        made = rounding(tensor) if matrix else {"weight": tensor}
        tensors |= {name.removesuffix("weight") + end: one.contiguous() for end, one in made.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": stated}
    (path / "config.json").write_text(json.dumps(config))


INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
DYNAMIC: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": True,
}
COMPRESSED: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": DYNAMIC}},
}


def int4(weight: Tensor) -> dict[str, Tensor]:
    """Eight numbers of 4 bits in an integer of 32, a scale for 32 of them; as of compressed-tensors."""
    rows, columns = weight.shape
    scale = weight.reshape(rows, -1, 32).abs().amax(-1) / 7
    numbers = (weight / scale.repeat_interleave(32, 1)).round().clamp(-8, 7).long() + 8
    packed = (numbers.reshape(rows, -1, 8) << 4 * torch.arange(8)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).int()
    shape = torch.tensor([rows, columns])
    # What activations would be rounded with is not needed where they are not.
    return {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": shape,
        "input_scale": torch.ones(1),
    }


def fp8(weight: Tensor) -> dict[str, Tensor]:
    """Blocks of 128 by 128 numbers of 8 bits with a scale each."""
    rows, columns = -(-weight.shape[0] // 128), -(-weight.shape[1] // 128)
    scale = torch.full((rows, columns), float(weight.abs().max()) / 448)
    return {"weight": (weight / scale[0, 0]).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
