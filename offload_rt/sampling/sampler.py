"""Logits to probabilities, and probabilities to tokens.

All models of a composition use the same `Sampler`, and one `Draws` makes every random choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.errors import UsageError
from offload_rt.sampling.trees import Tree


@dataclass(frozen=True)
class Sampler:
    """Penalties, temperature, top-k, top-p and min-p, applied in this order, as in transformers and vLLM.

    Attributes:
        temperature: 0 is greedy decoding.
        top_p: keep the smallest set of most likely tokens whose probabilities reach this sum.
        top_k: keep the k most likely tokens; 0 keeps all.
        min_p: keep the tokens that are at least so likely, relative to the most likely one; 0 keeps all.
        repetition_penalty: divides positive logits of tokens that are in the sequence, its prompt included,
            and multiplies negative ones; 1 changes nothing.
        presence_penalty: is subtracted from the logits of tokens that were generated before.
        frequency_penalty: is subtracted from a token's logit as often as it was generated before.

    Raises:
        UsageError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    _: KW_ONLY
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature} is out of range: use 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p {self.top_p} is out of range: use a number above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is out of range: use 0 (off) or a positive number")
        if not 0.0 <= self.min_p <= 1.0:
            raise UsageError(f"min-p {self.min_p} is out of range: use 0 (off) to 1")
        if not 0.0 < self.repetition_penalty < float("inf"):
            remedy = "use a number above 0; 1 is off"
            raise UsageError(f"repetition-penalty {self.repetition_penalty} is out of range: {remedy}")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2.0 <= value <= 2.0:
                raise UsageError(f"{name}-penalty {value} is out of range: use -2 to 2; 0 is off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Returns whether the distribution of a token depends on those before it by more than the model."""
        off = (1.0, 0.0, 0.0)
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != off

    def penalised(self, logits: Tensor, generated: Tensor, prompt: Tensor) -> Tensor:
        """Returns `logits` `[rows, vocabulary]` with penalties, in float32 or wider.

        Args:
            generated: `[rows, vocabulary]`, how often each token was generated before.
            prompt: `[vocabulary]` bool, the tokens of the prompt.
        """
        wide, present = _wide(logits), generated > 0
        if self.repetition_penalty != 1.0:
            penalty = min(max(self.repetition_penalty, 1e-30), 1e30)  # no logit overflows, nor becomes NaN
            wide = torch.where(present | prompt, torch.where(wide < 0, wide * penalty, wide / penalty), wide)
        if self.frequency_penalty:
            wide = wide - self.frequency_penalty * generated
        if self.presence_penalty:
            wide = wide - self.presence_penalty * present.to(wide.dtype)
        return wide

    def probs(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of `logits`, penalised ones, both `[rows, vocabulary]`, in float32 or
        wider.

        Not for a greedy sampler, which takes the argmax: see `choices`.
        """
        wide = _wide(logits)
        # The largest logit becomes 0, so that a tiny temperature does not make it infinite. A temperature
        # that the dtype rounds to 0 would make it NaN.
        temperature = max(self.temperature, torch.finfo(wide.dtype).tiny)
        wide = (wide - wide.amax(-1, keepdim=True)) / temperature
        if 0 < self.top_k < wide.shape[-1]:
            kth = wide.topk(self.top_k, dim=-1).values[..., -1:]
            wide = wide.masked_fill(wide < kth, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = wide.sort(dim=-1, descending=True, stable=True)
            probs = ordered.softmax(-1)
            before = probs.cumsum(-1) - probs
            ordered = ordered.masked_fill(before >= self.top_p, -torch.inf)
            wide = torch.full_like(wide, -torch.inf).scatter(-1, order, ordered)
        if self.min_p > 0.0:
            wide = wide.masked_fill(wide < math.log(self.min_p), -torch.inf)  # the largest logit is 0
        return wide.softmax(-1)


def _wide(logits: Tensor) -> Tensor:
    """Returns `logits` in float32, or wider if they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def choices(logits: Tensor) -> Tensor:
    """Returns the most likely token of each row, `[rows]`, on the same device; among equals the lowest ID."""
    return logits.max(-1).indices  # in bfloat16 on a CPU, argmax takes several times as long


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Samples a token from each row by inverting its cumulative distribution at `uniforms`.

    Args:
        probs: `[..., vocabulary]`; need not be normalized. A token of probability 0 is never picked.
        uniforms: `[...]` float64, at least 0 and below 1.

    Returns:
        Token IDs `[...]` on the device of `probs`; the host does not wait.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    at = (uniforms * cumulative[..., -1])[..., None]
    tokens = torch.searchsorted(cumulative, at, right=True)[..., 0]
    return tokens.clamp(max=probs.shape[-1] - 1)  # beyond the end only if a row is NaN or all 0


class Draws(Protocol):
    """The source of every random choice. Results stay on the device of the probabilities."""

    def categorical(self, probs: Tensor) -> Tensor:
        """Draws a token from each row of `probs` `[..., vocabulary]`, normalized or not; `[...]`."""

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        """Walks down a tree from its root; returns the row of the last accepted node, 0-d.

        At each node the children are tried in order, and child `i` is accepted with probability
        `chances[i]` (always if it is 1 or more). Row 0 is the root, row `1 + i` is node `i`.
        """


class GeneratorDraws:
    """Draws from generators of one seed on one device; a seed repeats its tokens.

    Acceptance has a generator of its own: how many drafts are tested does not change the tokens drawn.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._tokens = torch.Generator(device).manual_seed(seed)
        self._coins = torch.Generator(device).manual_seed(seed ^ 0x5DEECE66D)

    def categorical(self, probs: Tensor) -> Tensor:
        return pick(probs, _uniforms(probs.shape[:-1], self._tokens))

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        return tree.descend(_uniforms(chances.shape, self._coins) < chances)


def _uniforms(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Returns uniform numbers in [0, 1), float64."""
    return torch.rand(shape, dtype=torch.float64, device=generator.device, generator=generator)
