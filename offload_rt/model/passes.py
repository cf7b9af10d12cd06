"""The input and output of a pass of a model for one sequence, and attention of several sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.attention.sums import Softmax
from offload_rt.caches.base import Cache
from offload_rt.caches.local import Mixer
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.system.device_copies import joined, to_device


@dataclass(frozen=True)
class PassInput:
    """One sequence's share of a pass.

    Attributes:
        rows: number of last tokens after which logits are wanted.
        states: whether the states of these tokens are wanted too, from which a head continues.
        before: of a head, the target's states before the first new tokens, `[n, state_size]`; the others
            go on from those of their parents.
    """

    cache: Cache
    new: NewTokens
    rows: int
    states: bool = False
    before: Tensor | None = None

    @property
    def positions(self) -> list[int]:
        """Positions of the new tokens in the sequence."""
        return [self.cache.verified_length + depth - 1 for depth in self.new.depths]

    def upload(self, device: torch.device) -> None:
        """Brings the draft to the device in the current stream, unless it is there.

        A stream that waits for it afterwards may read the IDs, and so may the current one meanwhile.
        """
        if self.new.draft is not None:
            self.new.draft.on(device)

    def ids(self, device: torch.device) -> Tensor:
        """Returns the IDs of the new tokens on the device, `[count]`."""
        ids, draft = self.new.ids, self.new.draft
        parts = [to_device(ids, device)] if ids or draft is None else []
        return joined(parts if draft is None else [*parts, draft.on(device)])


@dataclass(frozen=True)
class PassOutput:
    """The result of a pass for one sequence.

    Attributes:
        logits: `[rows, vocabulary]`.
        states: `[rows, state_size]`, if they were wanted.
        error: raised for this sequence alone; the logits are invalid then.
    """

    logits: Tensor
    states: Tensor | None = None
    error: Exception | None = None


class BatchedAttention:
    """Attention of several sequences, each over its own cache. An error in one does not stop the others."""

    def __init__(self, inputs: Sequence[PassInput]) -> None:
        self._inputs = inputs
        self._counts = [pass_input.new.count for pass_input in inputs]
        self.errors: list[Exception | None] = [None] * len(inputs)

    def begin(self) -> None:
        for number, pass_input in enumerate(self._inputs):
            try:
                pass_input.cache.begin(pass_input.new)
            except Exception as error:
                self.errors[number] = error

    @property
    def local(self) -> _BatchedLocal:
        """The layers that do not attend to the whole sequence."""
        return _BatchedLocal(self)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention of all sequences' new tokens, which follow each other in dimension 1."""

        def attend(cache: Cache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return cache.attend(layer, query, key, value, softmax)

        return self.by_sequence(attend, queries, keys, values)

    def by_sequence(self, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Computes a result of each sequence from its tokens in dimension 1, and joins the results."""
        split = (tensor.split(self._counts, dim=1) for tensor in tensors)
        outs = []
        for number, (pass_input, *parts) in enumerate(zip(self._inputs, *split, strict=True)):
            if self.errors[number] is None:
                try:
                    outs.append(compute(pass_input.cache, *parts))
                    continue
                except Exception as error:
                    self.errors[number] = error
            outs.append(torch.zeros_like(parts[0]))
        return torch.cat(outs, dim=1)


class _BatchedLocal:
    """Layers with sliding windows or recurrent states, of several sequences."""

    def __init__(self, batch: BatchedAttention) -> None:
        self._batch = batch

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        def attend(cache: Cache, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return cache.local.attend(layer, query, key, value, softmax)

        return self._batch.by_sequence(attend, queries, keys, values)

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        return self._batch.by_sequence(lambda cache, part: cache.local.mix(layer, mixer, part), hidden)
