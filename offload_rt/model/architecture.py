"""Differences between architectures outside their decoder layers: names, scalar factors, rotary frequencies.

A runner takes hidden states through a model's modules. What a model computes between them is declared in its
config, if at all. This module knows such factors, and `CausalModel` refuses a model that does more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_FULL = "full_attention"
EMBEDDINGS = ("embed_tokens", "embeddings")
"""Names that the embedding of a transformers model may have in its body."""
FINAL_NORMS = ("norm", "final_layernorm", "embedding_norm", "final_norm", "norm_f")
"""Names that the norm behind its last decoder layer may have."""
_ROTARIES = ("rotary_emb", "pos_emb")

_REFUSED = {
    "kv_lora_rank": "latent attention (MLA): keys and values are made of a compressed vector",
    "hidden_size_per_layer_input": "further embeddings in each layer (hidden_size_per_layer_input)",
    "num_kv_shared_layers": "layers that attend to the KV of others (num_kv_shared_layers)",
    "attn_logit_softcapping": "attention with capped scores (attn_logit_softcapping)",
}
"""What a model has where a setting of its config is neither None nor 0."""


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names by which modules take a cache: the first one since transformers 5.24, which warns of the others."""


def cache_argument(forward: Callable[..., object]) -> str:
    """Returns the name by which a module of transformers takes a cache."""
    return next(filter(signature(forward).parameters.__contains__, CACHE_ARGUMENTS))


CACHE_ARGUMENT = cache_argument(LlamaDecoderLayer.forward)
"""The name by which models, decoder layers and attention take it."""


class _Discarded(dict[str, object]):
    """Keeps nothing."""

    def __setitem__(self, key: str, value: object) -> None:
        pass


def further_arguments(block: Any) -> dict[str, Any]:
    """Returns arguments without which the decoder layers of some architectures do not run.

    Gemma 4 leaves KV there for later layers. Models with layers that attend to it are refused.
    """
    return (
        {"shared_kv_states": _Discarded()}
        if "shared_kv_states" in signature(block.forward).parameters
        else {}
    )


def embedding(body: Any) -> Any:
    """Returns the embedding of a transformers model; None if it is not found."""
    return _named(body, EMBEDDINGS)


def final_norm(body: Any) -> Any:
    """Returns the norm behind the last decoder layer of a transformers model; None if it is not found."""
    return _named(body, FINAL_NORMS)


def rotary_embedding(body: Any) -> Any:
    """Returns the rotary embedding of a transformers model; None: it has none that all layers share."""
    return _named(body, _ROTARIES)


def _named(owner: Any, names: tuple[str, ...]) -> Any:
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None)


def missing_modules(model: Any) -> list[str]:
    """Returns the names of modules that a runner needs and a transformers model has not."""
    body = getattr(model, "model", None)
    modules = {
        "model.embed_tokens": embedding(body),
        "model.layers": getattr(body, "layers", None),
        "model.norm": final_norm(body),
        "lm_head": getattr(model, "lm_head", None),
    }
    return [name for name, module in modules.items() if module is None]


def unsupported_settings(config: PretrainedConfig) -> list[str]:
    """Returns what a text model has by its config and a runner cannot compute."""
    return [meaning for name, meaning in _REFUSED.items() if _is_set(config, name)]


def _is_set(config: PretrainedConfig, name: str) -> bool:
    """Returns whether a setting is neither None nor 0 in any layer."""
    try:
        return bool(getattr(config, name, None))
    except Exception:  # transformers raises an error of its own for a setting that differs by layer
        return True


def scale_embeddings(hidden: Tensor, config: PretrainedConfig) -> Tensor:
    """Scales the output of the embedding for the first layer (Granite)."""
    multiplier = getattr(config, "embedding_multiplier", None)
    return hidden if multiplier is None else hidden * multiplier


def scale_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Scales the output of the head to logits (Cohere and Falcon-H1 multiply, Granite divides)."""
    multiplier = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    divisor = getattr(config, "logits_scaling", None)
    if multiplier is not None:
        logits = logits * multiplier
    return logits if divisor is None else logits / divisor


class Rotary:
    """A model's rotary embedding, shared by all of its layers.

    LongRoPE has two sets of frequencies. transformers switches to the long set as soon as a sequence exceeds
    the original context, whatever was cached before; a `Rotary` keeps one set.

    Args:
        module: `rotary_emb` of a transformers model; None: it has no rotary positions.

    Attributes:
        original_context: length in tokens beyond which sequences need the long set; None: there is one set.
    """

    def __init__(self, module: Any) -> None:
        # Models with several types of layers have a set of frequencies for each type.
        kind = getattr(module, "rope_type", "default")
        self._types = kind if isinstance(kind, dict) else None
        self._module = module
        self.original_context: int | None = None
        if kind == "longrope":
            self.original_context = int(module.config.rope_parameters["original_max_position_embeddings"])
            self._module = _frozen(module, self.original_context)
            self._long = _frozen(module, self.original_context + 1)

    def long_context(self) -> Rotary:
        """Returns the rotary embedding of sequences beyond the original context."""
        rotary = copy.copy(self)
        rotary._module = self._long
        return rotary

    @property
    def frequencies(self) -> Tensor:
        """Frequencies of full-attention layers in radians per position, `[rotated / 2]`; may be empty."""
        if self._module is None or (self._types is not None and _FULL not in self._types):
            return torch.empty(0)
        name = "inv_freq" if self._types is None else f"{_FULL}_inv_freq"
        frequencies: Tensor = getattr(self._module, name)
        return frequencies

    @property
    def factor(self) -> float:
        """Factor on cosines and sines; YaRN and LongRoPE have one."""
        name = "attention_scaling" if self._types is None else f"{_FULL}_attention_scaling"
        return float(getattr(self._module, name, 1.0))

    def __call__(self, hidden: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor] | None:
        """Returns cosines and sines, `[1, tokens, rotated]` in the dtype of `hidden`; None: no rotation.

        Args:
            layer_type: of the layers that are rotated.
        """
        if self._module is None or (self._types is not None and layer_type not in self._types):
            return None
        of_type = {} if self._types is None else {"layer_type": layer_type}
        if hasattr(self._module, "mrope_section"):
            # Time, height and width are the same in a text; older versions of transformers expect all three.
            position_ids = position_ids.expand(3, *position_ids.shape)
        embeddings: tuple[Tensor, Tensor] = self._module(hidden, position_ids=position_ids, **of_type)
        return embeddings


def _frozen(module: Any, length: int) -> Any:
    """Returns a copy of `module` that keeps the frequencies of a sequence of `length` tokens."""
    frozen = copy.deepcopy(module)
    device = frozen.inv_freq.device
    frozen(torch.empty(0, device=device), torch.tensor([[length - 1]], device=device))
    frozen.rope_type = "default"
    return frozen
