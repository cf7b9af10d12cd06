"""What adapters share whose KV lies in host memory: layers of a transformers cache in buffers that stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class HostLayer(DynamicLayer):
    """KV of a layer in host memory, in buffers `[texts, heads, capacity, head_dim]`.

    `keys` and `values` are views of what is filled: `crop` shortens them, and `update` goes on from there.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capacity = capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        given: Any = {"dtype": key_states.dtype, "pin_memory": key_states.is_cuda}
        shapes = ((*one.shape[:2], self._capacity, one.shape[3]) for one in (key_states, value_states))
        self.buffers = [torch.empty(shape, **given) for shape in shapes]
        self.keys, self.values = (buffer[:, :, :0] for buffer in self.buffers)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        self.keys, self.values = put(self.buffers, start, (key_states, value_states))
        return self.keys, self.values


def put(buffers: Sequence[Tensor], start: int, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Writes keys and values from token `start` on; returns all that is filled then."""
    end = start + states[0].shape[2]
    for buffer, new in zip(buffers, states, strict=True):
        buffer.narrow(2, start, end - start).copy_(new)  # a slice would quietly end at the capacity
    keys, values = (buffer[:, :, :end] for buffer in buffers)
    return keys, values
