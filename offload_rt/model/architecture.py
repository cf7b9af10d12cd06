"""What differs between architectures outside their decoder layers: scalar factors and rotary frequencies.

A runner takes hidden states through a model's modules. What a model does between them is declared in its
config, if at all: the factors that are known stand here, and `CausalModel` refuses a model that does more.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig


def scale_embeddings(hidden: Tensor, config: PretrainedConfig) -> Tensor:
    """What the first layer takes, from what the embedding gives (Granite)."""
    multiplier = getattr(config, "embedding_multiplier", None)
    return hidden if multiplier is None else hidden * multiplier


def scale_logits(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Logits, from what the head gives (Cohere multiplies, Granite divides)."""
    multiplier = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if multiplier is not None:
        logits = logits * multiplier
    return logits if divisor is None else logits / divisor


class Rotary:
    """A model's rotary embedding, the same for all of its layers.

    LongRoPE has two sets of frequencies. transformers takes the one for long texts as soon as a text is
    longer than the original context, whatever was cached before; here each `Rotary` has one set for good.

    Args:
        module: `rotary_emb` of a transformers model of full attention.

    Attributes:
        border: the original context, in tokens; longer texts have other frequencies. None: no such border.
    """

    def __init__(self, module: Any) -> None:
        # Models with several types of layers have one set of frequencies for each, and are asked by type.
        kind = getattr(module, "rope_type", "default")
        self._by_type = isinstance(kind, dict)
        self._module = module
        self.border: int | None = None
        if kind == "longrope":
            self.border = int(module.config.rope_parameters["original_max_position_embeddings"])
            self._module = _frozen(module, self.border)
            self._long = _frozen(module, self.border + 1)

    def beyond_the_border(self) -> Rotary:
        """The rotary embedding of long texts."""
        rotary = copy.copy(self)
        rotary._module = self._long
        return rotary

    @property
    def frequencies(self) -> Tensor:
        """`[rotated / 2]`, radians a position."""
        name = "full_attention_inv_freq" if self._by_type else "inv_freq"
        frequencies: Tensor = getattr(self._module, name)
        return frequencies

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[1, tokens, rotated]` in the dtype of `hidden`."""
        of_type = {"layer_type": "full_attention"} if self._by_type else {}
        embeddings: tuple[Tensor, Tensor] = self._module(hidden, position_ids=position_ids, **of_type)
        return embeddings


def _frozen(module: Any, length: int) -> Any:
    """A copy of `module` whose frequencies stay those of a text of `length` tokens."""
    frozen = copy.deepcopy(module)
    device = frozen.inv_freq.device
    frozen(torch.empty(0, device=device), torch.tensor([[length - 1]], device=device))
    frozen.rope_type = "default"
    return frozen
