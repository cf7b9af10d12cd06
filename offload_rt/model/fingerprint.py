"""Fingerprints of models: one model can go on from the KV of another whose fingerprint is the same."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, astuple, dataclass
from typing import Any, Self

import torch
from torch import Tensor

from offload_rt.model.quantization import bitsandbytes_scales, named_weights
from offload_rt.model.runner import CausalModel

SAMPLES = 64
"""Values of each parameter that are compared."""
_NUMBERS = (
    *("model_type", "hidden_act", "hidden_activation", "hidden_size", "intermediate_size", "vocab_size"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "layer_norm_eps", "use_qk_norm", "query_pre_attn_scalar"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_scale"),
)
"""Settings of a config that KV depends on beside the weights; named, as a newer transformers may add some."""


@dataclass(frozen=True)
class Fingerprint:
    """Describes a model as it was loaded.

    Attributes:
        layout: layers, KV heads and head dimension.
        rotary: rotary frequencies, in radians per position, and the factor on cosines and sines.
        tokenizer: digest of the vocabulary; None: unknown, as there is no tokenizer.
        weights: digest of architecture and weights.
    """

    layout: tuple[int, int, int]
    dtype: str
    rotary: tuple[float, ...]
    tokenizer: str | None
    weights: str

    @classmethod
    def of(cls, model: CausalModel, tokenizer: str | None) -> Self:
        """Returns the fingerprint of a runner, whose frequencies may be those of long sequences."""
        layout = model.kv_layout()
        return cls(
            (layout.layers, layout.kv_heads, layout.head_dim),
            str(model.dtype).removeprefix("torch."),
            (*model.rotary_frequencies.double().tolist(), model.rotary_factor),
            tokenizer,
            weights_digest(model),
        )

    def difference(self, other: Fingerprint) -> str | None:
        """Returns what the KV of `other` was computed by and this model has not; None: it fits."""
        if self.layout != other.layout:
            return f"another KV layout (layers, heads, head dimension {other.layout}, here {self.layout})"
        if self.dtype != other.dtype:
            return f"another dtype ({other.dtype}, here {self.dtype})"
        # Devices may compute frequencies that differ in the last bit.
        close = (math.isclose(*pair, rel_tol=1e-5) for pair in zip(self.rotary, other.rotary, strict=False))
        if len(self.rotary) != len(other.rotary) or not all(close):
            return "other rotary settings (rope scaling, or a sequence beyond longrope's original context)"
        if None not in (self.tokenizer, other.tokenizer) and self.tokenizer != other.tokenizer:
            return "another tokenizer"
        return None if self.weights == other.weights else "another model"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError for anything else."""
        stated: dict[str, Any] = json.loads(text)
        layers, heads, dim = stated.pop("layout")
        return cls(layout=(layers, heads, dim), rotary=tuple(map(float, stated.pop("rotary"))), **stated)


def weights_digest(model: CausalModel) -> str:
    """Returns a digest of architecture, names, shapes and evenly spaced values of all weights."""
    config = model.module.config.get_text_config()
    numbers = {name: getattr(config, name, None) for name in _NUMBERS}
    if model.kinds.local:
        numbers["layer_kinds"] = [astuple(kind) for kind in model.kinds.kinds]
        numbers["rope_parameters"] = getattr(config, "rope_parameters", None)
    digest = hashlib.sha256(json.dumps(numbers, sort_keys=True, default=str).encode())
    samples: dict[torch.device, list[Tensor]] = {}
    weights = [
        *named_weights(model.module),
        *(("scales", scales) for scales in bitsandbytes_scales(model.module)),
    ]
    for name, parameter in weights:
        plain = name.replace(".mlp.block.", ".mlp.")  # on whichever GPU it is
        digest.update(f"{plain} {list(parameter.shape)}".encode())
        count = min(SAMPLES, parameter.numel())
        at = torch.arange(count, device=parameter.device) * parameter.numel() // max(count, 1)
        values = parameter.detach()[torch.unravel_index(at, parameter.shape)]
        samples.setdefault(parameter.device, []).append(values.float())
    # One read for each device; in an order that does not depend on where parameters are.
    arrived = {device: iter(torch.cat(values).cpu().split([len(one) for one in values]))
               for device, values in samples.items()}  # fmt: skip
    for _, parameter in weights:
        digest.update(next(arrived[parameter.device]).numpy().tobytes())
    return digest.hexdigest()[:32]
