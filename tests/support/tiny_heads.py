"""Draft heads of EAGLE-3 with random weights, in the formats in which heads are published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

SPECFORGE, SAFEAILAB, SPECULATORS = "specforge", "safeailab", "speculators"
FORMATS = SPECFORGE, SAFEAILAB, SPECULATORS
Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Changes the config and the tensors of a head before they are written."""


def write_head(
    target: PreTrainedModel | PretrainedConfig,
    folder: Path,
    form: str = SPECFORGE,
    *,
    seed: int = 0,
    drafted: int | None = None,
    layers: int = 1,
    own_embedding: bool = False,
    taps: tuple[int, int, int] | None = (1, 1, 2),
    change: Change = lambda config, tensors: None,
) -> Path:
    """Writes a random head for a target; returns its folder.

    Args:
        drafted: number of tokens that it can predict, every second one first; None: all.
        taps: layers whose inputs it takes; None: it does not say.
    """
    config = target.config if isinstance(target, PreTrainedModel) else target
    text = config.get_text_config()
    hidden, inner, dim = text.hidden_size, 2 * text.hidden_size, 8
    heads, kv_heads, vocabulary = 4, 2, text.vocab_size
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        deviation: float = shape[1] ** -0.5
        return torch.randn(shape, generator=generator) * deviation

    tensors = {"fc.weight": weight(hidden, 3 * hidden), "norm.weight": weight(hidden)}
    for at in range(layers):
        width = hidden if at else 2 * hidden
        names = {
            "self_attn.q_proj": (heads * dim, width),
            "self_attn.k_proj": (kv_heads * dim, width),
            "self_attn.v_proj": (kv_heads * dim, width),
            "self_attn.o_proj": (hidden, heads * dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        if not at:
            names["hidden_norm"] = (hidden,)
        tensors |= {f"layers.{at}.{name}.weight": weight(*shape) for name, shape in names.items()}
    tokens = torch.arange(vocabulary)
    if drafted is not None:
        tokens = torch.cat([tokens[::2], tokens[1::2]])[:drafted].sort().values
    tensors["lm_head.weight"] = 2 * weight(len(tokens), hidden)
    if drafted is not None:
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill_(0, tokens, True)
    if own_embedding:
        tensors["embed_tokens.weight"] = weight(vocabulary, hidden)
    layer: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    stated: dict[str, Any] = {"draft_vocab_size": len(tokens)}
    if form == SPECULATORS:
        stated |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layer,
            "norm_before_residual": True,
        }
        if taps is not None:
            stated["eagle_aux_hidden_state_layer_ids"] = list(taps)
    else:
        name = "LlamaForCausalLMEagle3" if form == SPECFORGE else "LlamaForCausalLM"
        stated |= layer | {"architectures": [name]}
        if taps is not None:
            stated["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]}
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    change(stated, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(stated))
    if form == SAFEAILAB:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder
