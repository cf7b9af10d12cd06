"""What one text gives to a pass of a model and gets from it, and attention of several texts at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.caches.base import Cache, NewTokens
from offload_rt.host import to_device


@dataclass(frozen=True)
class PassInput:
    """One text's share of a pass.

    Attributes:
        rows: logits are wanted after so many of the last tokens.
        hidden: their hidden states are wanted too.
    """

    cache: Cache
    new: NewTokens
    rows: int
    hidden: bool = False

    @property
    def positions(self) -> list[int]:
        """Of the new tokens in their text."""
        return [self.cache.verified_length + depth - 1 for depth in self.new.depths]

    def ids(self, device: torch.device) -> Tensor:
        """Ids of the new tokens on the device, `[count]`."""
        known = to_device(self.new.known, device)
        return known if self.new.drawn is None else torch.cat([known, self.new.drawn.on(device)])


@dataclass(frozen=True)
class PassOutput:
    """What a pass computed for one part.

    Attributes:
        logits: `[rows, vocabulary]`.
        hidden: `[rows, hidden_size]`, after the last layer, where they were asked for.
        error: what went wrong in this part alone; the logits mean nothing then.
    """

    logits: Tensor
    hidden: Tensor | None = None
    error: Exception | None = None


class BatchedAttention:
    """Attention of several parts: each over its own cache. A part that fails does not stop the others."""

    def __init__(self, parts: Sequence[PassInput]) -> None:
        self._parts = parts
        self._counts = [part.new.count for part in parts]
        self.errors: list[Exception | None] = [None] * len(parts)

    def begin(self) -> None:
        for number, part in enumerate(self._parts):
            try:
                part.cache.begin(part.new)
            except Exception as error:
                self.errors[number] = error

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        split = (tensor.split(self._counts, dim=1) for tensor in (queries, keys, values))
        outs = []
        for number, (part, asked, key, value) in enumerate(zip(self._parts, *split, strict=True)):
            if self.errors[number] is None:
                try:
                    outs.append(part.cache.attend(layer, asked, key, value, scale))
                    continue
                except Exception as error:
                    self.errors[number] = error
            outs.append(torch.zeros_like(asked))
        return torch.cat(outs, dim=1)
