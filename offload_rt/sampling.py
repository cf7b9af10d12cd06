"""From logits to the law of the next token, and from a law to a token.

A *law* is a probability vector over the vocabulary, after temperature, top-k and top-p. Every model of a
composition uses the same `SamplingLaw`, and every random choice of the program is made by one `Draws`.
"""

from __future__ import annotations

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


def choices(logits: Tensor) -> list[int]:
    """The most likely token of each row; the lowest id among equals."""
    greedy: list[int] = logits.argmax(-1).tolist()
    return greedy


class Draws(Protocol):
    """Every random choice the program makes."""

    def categorical(self, law: Tensor) -> int:
        """A token from `law` `[vocabulary]`, which need not be normalised."""

    def accept(self, probability: float) -> bool:
        """True with the given probability (1 and above: always)."""


class GeneratorDraws:
    """Draws from one explicit torch generator: the same seed repeats the same tokens."""

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._coins = torch.Generator().manual_seed(seed ^ 0x5DEECE66D)

    def categorical(self, law: Tensor) -> int:
        return int(torch.multinomial(law, 1, generator=self._generator))

    def accept(self, probability: float) -> bool:
        return float(torch.rand((), generator=self._coins, dtype=torch.float64)) < probability
