"""From logits to the probabilities of the next token, and from those to a token.

Every model of a composition uses the same `Sampler`, and every random choice of the program is made by
one `Draws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.errors import UsageError
from offload_rt.trees import Tree


@dataclass(frozen=True)
class Sampler:
    """How logits become probabilities: temperature, then top-k, then top-p, in the order of transformers.

    Attributes:
        temperature: 0 is greedy: all probability is on the largest logit.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach this sum.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature {self.temperature} is out of range: use 0 (greedy) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError(f"top-p {self.top_p} is out of range: use a number above 0 and at most 1")
        if self.top_k < 0:
            raise UsageError(f"top-k {self.top_k} is out of range: use 0 (off) or a positive number")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def probs(self, logits: Tensor) -> Tensor:
        """Probabilities `[rows, vocabulary]` of `logits` `[rows, vocabulary]`, in float32 or wider.

        Not defined for a greedy sampler, which needs the argmax alone: see `choices`.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The largest becomes 0 first: a tiny temperature must not make it infinite. One that the dtype rounds
        # to 0 would make it NaN.
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
        return wide.softmax(-1)


def choices(logits: Tensor) -> Tensor:
    """The most likely token of each row, `[rows]` on their device; the lowest id among equals."""
    return logits.argmax(-1)


def pick(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token where the running sum of each row passes the share `uniforms` of the whole (inverse CDF).

    Args:
        probs: `[..., vocabulary]`; need not be normalized. A token of probability 0 is never picked.
        uniforms: `[...]` float64, at least 0 and below 1.

    Returns:
        `[...]` on the device of `probs`: nothing waits for it.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    at = (uniforms * cumulative[..., -1])[..., None]
    tokens = torch.searchsorted(cumulative, at, right=True)[..., 0]
    return tokens.clamp(max=probs.shape[-1] - 1)  # beyond the end only where a row is NaN or all 0


class Draws(Protocol):
    """Every random choice the program makes. Results stay on the device of what they are drawn from."""

    def categorical(self, probs: Tensor) -> Tensor:
        """A token from each row of `probs` `[..., vocabulary]`, which need not be normalized; `[...]`."""

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        """Walks down a tree from its root; returns the row of the last accepted node, 0-d.

        At each node its children are tried in order, and child `i` is accepted with probability
        `chances[i]` (1 and above: always). Row 0 is the root, row `1 + i` is node `i`.
        """


class GeneratorDraws:
    """Draws on one device from explicit generators of one seed: the same seed repeats the same tokens."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._tokens = torch.Generator(device).manual_seed(seed)
        self._coins = torch.Generator(device).manual_seed(seed ^ 0x5DEECE66D)

    def categorical(self, probs: Tensor) -> Tensor:
        return pick(probs, _uniforms(probs.shape[:-1], self._tokens))

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        return tree.descend(_uniforms(chances.shape, self._coins) < chances)


def _uniforms(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """From [0, 1), in float64."""
    return torch.rand(shape, dtype=torch.float64, device=generator.device, generator=generator)
