"""Differences between architectures outside their decoder layers: scalar factors and rotary frequencies.

A runner takes hidden states through a model's modules. What a model computes between them is declared in its
config, if at all. This module knows such factors, and `CausalModel` refuses a model that does more.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


def scale_embeddings(hidden: Tensor, config: PretrainedConfig) -> Tensor:
    """Scales the output of the embedding for the first layer (Granite)."""
    multiplier = getattr(config, "embedding_multiplier", None)
    return hidden if multiplier is None else hidden * multiplier


def scale_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Scales the output of the head to logits (Cohere multiplies, Granite divides)."""
    multiplier = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if multiplier is not None:
        logits = logits * multiplier
    return logits if divisor is None else logits / divisor


class Rotary:
    """A model's rotary embedding, shared by all of its layers.

    LongRoPE has two sets of frequencies. transformers switches to the long set as soon as a sequence exceeds
    the original context, whatever was cached before; a `Rotary` keeps one set.

    Args:
        module: `rotary_emb` of a transformers model with full attention.

    Attributes:
        original_context: length in tokens beyond which sequences need the long set; None: there is one set.
    """

    def __init__(self, module: Any) -> None:
        # Models with several types of layers have a set of frequencies for each type.
        kind = getattr(module, "rope_type", "default")
        self._by_type = isinstance(kind, dict)
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
        """Frequencies in radians per position, `[rotated / 2]`."""
        name = "full_attention_inv_freq" if self._by_type else "inv_freq"
        frequencies: Tensor = getattr(self._module, name)
        return frequencies

    @property
    def factor(self) -> float:
        """Factor on cosines and sines; YaRN and LongRoPE have one."""
        name = "full_attention_attention_scaling" if self._by_type else "attention_scaling"
        return float(getattr(self._module, name, 1.0))

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, `[1, tokens, rotated]` in the dtype of `hidden`."""
        of_type = {"layer_type": "full_attention"} if self._by_type else {}
        embeddings: tuple[Tensor, Tensor] = self._module(hidden, position_ids=position_ids, **of_type)
        return embeddings


def _frozen(module: Any, length: int) -> Any:
    """Returns a copy of `module` that keeps the frequencies of a sequence of `length` tokens."""
    frozen = copy.deepcopy(module)
    device = frozen.inv_freq.device
    frozen(torch.empty(0, device=device), torch.tensor([[length - 1]], device=device))
    frozen.rope_type = "default"
    return frozen
