"""Which models are supported: what their layers must be, and what is refused by name."""

from __future__ import annotations

from transformers import PreTrainedModel

from offload_rt.errors import UsageError
from offload_rt.model.architecture import (
    missing_modules,
    rotary_embedding,
    unsupported_settings,
)
from offload_rt.model.layer_kinds import layer_kinds


def kind_of(model: PreTrainedModel) -> str:
    """Returns the name of the model's architecture, that of its class."""
    return type(model).__name__


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Refuses models with layers that are not supported, and those without attention.

    Raises:
        UsageError: names the architecture and what is not supported.
    """
    kind = kind_of(model)
    config = model.config.get_text_config()
    if missing := missing_modules(model):
        raise UsageError(f"{name}: {kind} is not supported: it has no {', '.join(missing)}")
    if not hasattr(config, "max_position_embeddings"):
        raise UsageError(f"{name}: {kind} is not supported: its config has no max_position_embeddings")
    if unknown := unsupported_settings(config):
        raise UsageError(f"{name}: {kind} is not supported: it has {', '.join(unknown)}")
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unknown_types := ", ".join(sorted(layer_types - _LAYER_TYPES)):
        raise UsageError(f"{name}: {kind} has layers of type {unknown_types}, which are not supported")
    kinds = layer_kinds(model).kinds
    for layer, item in enumerate(kinds):
        if item.rope in ("linear_attention", "conv", "hybrid", "hybrid_sliding") and not item.recurrent:
            raise UsageError(
                f"{name}: {kind} is not supported: no module of its layer {layer} ({item.rope}) is known to"
                " keep a recurrent state"
            )
    for noun, sizes in (
        ("full attention", {(item.kv_heads, item.head_dim) for item in kinds if item.full}),
        ("sliding windows", {(item.kv_heads, item.head_dim) for item in kinds if item.windowed}),
    ):
        if len(sizes) > 1:
            raise UsageError(f"{name}: {kind} is not supported: its layers with {noun} differ in their sizes")
    if not any(item.full or item.windowed for item in kinds):
        raise UsageError(f"{name}: {kind} is not supported: none of its layers has attention")
    rope = getattr(rotary_embedding(model.model), "rope_type", "default")
    # Models with several types of layers have a dict; none of them has LongRoPE yet.
    changing = {"dynamic"} & {rope} if isinstance(rope, str) else {"dynamic", "longrope"} & {*rope.values()}
    if changing:
        raise UsageError(
            f"{name}: {kind} changes its rotary frequencies with the length of the sequence "
            f"({', '.join(changing)}), which is not supported: KV in the store never changes"
        )


_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "attention",
    "mamba",
    "mlp",
    "moe",
}
