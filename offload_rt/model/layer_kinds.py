"""What each decoder layer of a model keeps of a sequence, read from its config and modules.

A full-attention layer keeps the KV of all tokens, which is paged. A layer with a sliding window keeps the KV
of its newest tokens, and a layer of linear attention, a state-space layer or a short convolution keeps a
state of fixed size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpu_kv.sizes import Element, ElementType
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Recurrence:
    """Sizes of one layer with a recurrent state; of several kinds of layers the largest.

    Attributes:
        parameters: weights of its mixer.
        elements: numbers of its state that have the model's data type: the last inputs of a convolution.
        exact_elements: those that are float32 whatever the model's data type.
        working_bytes: memory for each token of a long pass, in bfloat16 and without fused kernels.
    """

    parameters: int
    elements: int
    exact_elements: int = 0
    working_bytes: int = field(default=0, compare=False)  # depends on the versions of libraries

    def state_bytes(self, dtype: Element) -> int:
        """Returns the bytes of the state of one layer of a model of that data type."""
        return self.elements * dtype.itemsize + self.exact_elements * ElementType.FLOAT32.itemsize


def layer_kinds(model: PreTrainedModel) -> LayerKinds:
    """Returns the kinds of the layers of a model, whose weights may be on the meta device."""
    config = model.config.get_text_config()
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    return LayerKinds(
        tuple(
            _kind(block, config, types[layer] if layer < len(types) else "")
            for layer, block in enumerate(model.model.layers)
        )
    )


def _kind(block: nn.Module, config: Any, layer_type: str) -> LayerKind:
    attention, mixer = None, ""
    for name, part in block.named_children():
        if getattr(part, "layer_idx", None) is None:
            continue
        if _is_mixer(part):
            mixer = name
        elif attention is None:
            attention = part
    if attention is None:
        return LayerKind(mixer=mixer)
    heads: int = config.num_attention_heads
    head_dim: int = (
        getattr(attention, "head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // heads
    )
    width = getattr(getattr(attention, "k_proj", None), "out_features", None)
    # A config whose layers differ in it has no number of KV heads: then it is that of the weights.
    kv_heads: int = width // head_dim if isinstance(width, int) else 0
    kv_heads = kv_heads or getattr(config, "num_key_value_heads", None) or heads
    window = _window(attention, config, layer_type)
    return LayerKind(kv_heads, head_dim, window, mixer, layer_type or "full_attention")


def _is_mixer(part: nn.Module) -> bool:
    """Returns whether a part of a layer carries a recurrent state.

    All mixers of transformers that do have a short convolution. So has some attention, which is causal.
    """
    from torch import nn  # a shape by name needs no torch

    return not hasattr(part, "is_causal") and any(isinstance(module, nn.Conv1d) for module in part.modules())


def _window(attention: nn.Module, config: Any, layer_type: str) -> int | None:
    """Returns the sliding window of a layer in tokens; None if it covers all positions of the model."""
    if layer_type and "sliding" not in layer_type:
        return None
    window = getattr(attention, "sliding_window", None)
    if window is None and getattr(config, "use_sliding_window", True):
        window = getattr(config, "sliding_window", None)
    return usable_window(config, window)


def usable_window(config: Any, window: int | None) -> int | None:
    """Returns a sliding window in tokens; None if it covers all positions of the model."""
    return window if window is not None and window < config.max_position_embeddings else None
