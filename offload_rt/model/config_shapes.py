"""Shapes of models that a transformers config describes, or that are in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cpu_kv import ElementType
from offload_rt.caches.layer_kinds import LayerKind
from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError, first_line
from offload_rt.model.layer_kinds import layer_kinds
from offload_rt.model.plane_weights import in_planes
from offload_rt.model.quantization import WITH_EXPERTS
from offload_rt.model.quantized_checkpoints import (
    NUMBERS_OF_EXPERTS,
    quantized_weights,
    stated_quantization,
)
from offload_rt.model.quantized_experts import unknown_experts
from offload_rt.model.recurrence import recurrence_of
from offload_rt.model.shape import DUAL_CHUNK, ModelShape
from offload_rt.model.supported import refuse_unsupported

_MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "ffn_dim")
"""Names of the width inside an MLP in a config."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k")
"""Names of the number of experts that a token goes through in a config."""


def from_config(
    config: PretrainedConfig, dtype: ElementType | None, name: str, quantize: str = NO_QUANTIZATION
) -> ModelShape:
    """Returns the shape that a transformers config describes.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.
        quantize: nf4 or int8: its weights are quantised as they load.

    Raises:
        UsageError: for an architecture or a quantisation that the runtime does not support.
    """
    try:
        model = _without_memory(config)
    except Exception as error:  # transformers raises many types for one thing
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(
            f"model {name} ({kind}): is no causal language model: {first_line(error)}"
        ) from error
    refuse_unsupported(model, name)
    return shape_of(model, dtype, name, quantize)


def _without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """Returns a model of modules and sizes alone, none of them quantised."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _numbers_of_experts(experts: Sequence[Any], text: PretrainedConfig) -> dict[str, Any]:
    """Returns the fields of a shape with the numbers of experts; a step is taken to read all where a config
    does not say how many it chooses."""
    if not experts:
        return {}
    named = (
        getattr(experts[0], "num_experts", None),
        *(getattr(text, name, None) for name in NUMBERS_OF_EXPERTS),
    )
    number = next((value for value in named if type(value) is int), 1)
    chosen = next((value for name in _CHOSEN if type(value := getattr(text, name, None)) is int), number)
    return {"experts": number, "chosen_experts": min(chosen, number), "expert_layers": len(experts)}


def ignored_parts(config: PretrainedConfig) -> str:
    """Returns a note on what a config asks for and the runtime leaves out; empty for nothing."""
    return DUAL_CHUNK if getattr(config.get_text_config(), "dual_chunk_attention_config", None) else ""


def shape_of(
    model: PreTrainedModel, dtype: ElementType | None, name: str, quantize: str = NO_QUANTIZATION
) -> ModelShape:
    """Returns the shape of a transformers model.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.
        quantize: nf4 or int8: its weights are quantised as they load.

    Raises:
        UsageError: a quantisation that the runtime does not support.
    """
    quantization = stated_quantization(model.config, name, quantize)
    if (quantization is not None or in_planes(model)) and model.device.type != "meta":
        model = _without_memory(model.config)
    text = model.config.get_text_config()
    heads: int = getattr(text, "num_attention_heads", None) or 1
    rope: dict[str, object] = getattr(text, "rope_parameters", None) or {}
    kinds = layer_kinds(model)
    attention = [kind for kind in kinds.kinds if kind.kv_heads] or [
        LayerKind(heads, text.hidden_size // heads)
    ]
    paged = next((kind for kind in attention if kind.full), attention[0])
    mlps = [getattr(layer, "mlp", None) for layer in model.model.layers]
    experts = [getattr(mlp, "experts", None) for mlp in mlps]
    # transformers builds a model in a floating-point type of torch alone.
    own_dtype = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    quantized: dict[str, Any] = {}
    if quantization is not None:
        if quantization.method == WITH_EXPERTS and (reason := unknown_experts(model)) is not None:
            raise UsageError(f"model {name}: {reason}")
        weights = (
            quantized_weights(quantization, mlp, f"model.layers.{at}.mlp.") if mlp else 0
            for at, mlp in enumerate(mlps)
        )
        quantized["quantized_mlp"] = max(weights)
        quantized["quantized"] = quantized_weights(quantization, model)
    return ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=next(
            filter(None, (getattr(text, name, None) for name in _MLP_WIDTHS)), text.hidden_size
        ),
        heads=heads,
        kv_heads=paged.kv_heads,
        head_dim=paged.head_dim,
        vocabulary=text.vocab_size,
        parameters=model.num_parameters(),
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        mlp_parameters=max(sum(p.numel() for p in mlp.parameters()) if mlp else 0 for mlp in mlps),
        max_positions=text.max_position_embeddings,
        family=text.model_type,
        # Models with several sets of frequencies are not stretched as a whole.
        rope_scaled=rope.get("rope_type", "default") != "default"
        or any(isinstance(item, dict) for item in rope.values()),
        ignored=ignored_parts(model.config),
        kinds=kinds,
        recurrence=recurrence_of(model, kinds, name),
        expert_parameters=max(
            sum(p.numel() for name, p in item.named_parameters() if "bias" not in name) if item else 0
            for item in experts
        ),
        **_numbers_of_experts([item for item in experts if item is not None], text),
        quantization=quantization,
        **quantized,
        dtype=dtype or ElementType.of(own_dtype),
    )
