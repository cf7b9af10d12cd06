"""From logits to the law of the next token, and from a law to a token.

A *law* is a probability vector over the vocabulary, after temperature, top-k and top-p. Every model of a
composition uses the same `SamplingLaw`, and every random choice of the program is made by one `Draws`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.errors import UsageError


@dataclass(frozen=True)
class SamplingLaw:
    """How logits become a law: temperature first, then top-k, then top-p, as transformers orders them.

    Attributes:
        temperature: 0 means greedy: the law is all on the largest logit.
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

    def laws(self, logits: Tensor) -> Tensor:
        """Laws `[rows, vocabulary]` of `logits` `[rows, vocabulary]`, in float32 or wider.

        Not defined for a greedy law: there the argmax alone is needed, see `choices`.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # The largest becomes 0 first: a tiny temperature must not make it infinite.
        wide = (wide - wide.amax(-1, keepdim=True)) / self.temperature
        if 0 < self.top_k < wide.shape[-1]:
            kth = wide.topk(self.top_k, dim=-1).values[..., -1:]
            wide = wide.masked_fill(wide < kth, -torch.inf)
        if self.top_p < 1.0:
            ordered, order = wide.sort(dim=-1, descending=True, stable=True)
            law = ordered.softmax(-1)
            before = law.cumsum(-1) - law
            ordered = ordered.masked_fill(before >= self.top_p, -torch.inf)
            wide = torch.full_like(wide, -torch.inf).scatter(-1, order, ordered)
        return wide.softmax(-1)


def choices(logits: Tensor) -> Tensor:
    """The most likely token of each row, `[rows]` on their device; the lowest id among equals."""
    return logits.argmax(-1)


def pick(law: Tensor, uniform: Tensor) -> Tensor:
    """The token where the running sum of `law` passes the share `uniform` of the whole: the inverse CDF.

    Args:
        law: `[vocabulary]`; need not be normalised. A token of probability 0 is never picked.
        uniform: 0-d float64, at least 0 and below 1.

    Returns:
        0-d, on the law's device: nothing waits for it.
    """
    cumulative = law.cumsum(0, dtype=torch.float64)
    token = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return token.clamp(max=len(law) - 1)  # beyond the end only where the law is NaN


def accepted_before(uniforms: Tensor, probabilities: Tensor) -> Tensor:
    """How many trials succeed before the first that fails; trial i does where uniform < probability; 0-d."""
    return (uniforms < probabilities).long().cumprod(0).sum()


class Draws(Protocol):
    """Every random choice the program makes. Results stay on the device of what they are drawn from."""

    def categorical(self, law: Tensor) -> Tensor:
        """A token from `law` `[vocabulary]`, which need not be normalised; 0-d."""

    def accept(self, probability: float) -> bool:
        """True with the given probability (1 and above: always)."""

    def accepted(self, probabilities: Tensor) -> Tensor:
        """How many of these trials `[trials]` succeed, in order, before the first that fails; 0-d."""


class GeneratorDraws:
    """Draws from explicit torch generators of one seed: the same seed repeats the same tokens."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        kinds = {"cpu": torch.device("cpu"), torch.device(device).type: torch.device(device)}
        self._generators = {
            kind: torch.Generator(device=place).manual_seed(seed) for kind, place in kinds.items()
        }
        self._coins = {
            kind: torch.Generator(device=place).manual_seed(seed ^ 0x5DEECE66D)
            for kind, place in kinds.items()
        }

    def categorical(self, law: Tensor) -> Tensor:
        return pick(law, _uniforms((), law.device, self._generators))

    def accept(self, probability: float) -> bool:
        return bool(_uniforms((), torch.device("cpu"), self._coins) < probability)

    def accepted(self, probabilities: Tensor) -> Tensor:
        uniforms = _uniforms(probabilities.shape, probabilities.device, self._coins)
        return accepted_before(uniforms, probabilities)


def _uniforms(
    shape: Sequence[int], device: torch.device, generators: Mapping[str, torch.Generator]
) -> Tensor:
    """From [0, 1), in float64."""
    return torch.rand(shape, dtype=torch.float64, device=device, generator=generators[device.type])
