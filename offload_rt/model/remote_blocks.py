"""Attention blocks that run on a second device, beside those of their group on the first (EasySpec)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload_rt.model.architecture import CACHE_ARGUMENT
from offload_rt.model.quantized_weights import stored_bytes
from offload_rt.system.second_device import SecondDevice


class RemoteBlocks:
    """The attention blocks of a model that a second device runs.

    Args:
        layers: the decoder layers of the model.

    Attributes:
        second: the device; None before `take`.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.second: SecondDevice | None = None
        self._layers = layers
        self._blocks: dict[int, Sequence[Any]] = {}  # norm and attention by layer

    def take(self, second: SecondDevice, layers: Sequence[int]) -> None:
        """Copies the attention blocks of these layers to a device, unless they are there."""
        if self.second is not second:
            self.second = second
            self._blocks.clear()
        with second.on_stream():
            for number in sorted({*layers} - self._blocks.keys()):
                layer = self._layers[number]
                blocks = layer.input_layernorm, layer.self_attn
                if second.device != second.home:
                    blocks = tuple(copy.deepcopy(block).to(second.device) for block in blocks)
                self._blocks[number] = blocks

    @property
    def weight_bytes(self) -> int:
        """Bytes of the copies."""
        if self.second is None or self.second.device == self.second.home:
            return 0
        return sum(stored_bytes(block) for blocks in self._blocks.values() for block in blocks)

    def begin(self, arguments: Mapping[str, Any]) -> RemotePass:
        """Begins a forward pass, whose blocks take `arguments` beside hidden states."""
        assert self.second is not None, "a plan on two devices needs a second one"
        return RemotePass(self.second, self._blocks, arguments)


class RemotePass:
    """One forward pass of blocks on a second device."""

    def __init__(
        self, second: SecondDevice, blocks: Mapping[int, Sequence[Any]], arguments: Mapping[str, Any]
    ) -> None:
        self._second, self._blocks = second, blocks
        self._home_arguments = arguments
        self._arguments: dict[str, Any] = {}  # as they are on the second device

    def start(self, layers: Sequence[int], hidden: Tensor) -> Callable[[], Sequence[Tensor]]:
        """Starts the attention blocks of `layers`, which all take `hidden`, `[1, tokens, hidden_size]`.

        One copy goes there and one comes back, whatever the number of layers.

        Returns:
            A function that waits for their outputs and returns them on the home device.
        """
        sent = self._sent(hidden)

        def attend() -> Tensor:
            outputs = []
            for layer in layers:
                norm, attention = self._blocks[layer]
                outputs.append(attention(norm(sent), **self._arguments)[0])
            return torch.cat(outputs)

        second = self._second
        future = second.start(attend)
        return lambda: second.finish(future).split(1)

    def _sent(self, hidden: Tensor) -> Tensor:
        """Returns hidden states there; the first of a pass take its positions with them."""
        if self._arguments:
            (sent,) = self._second.send(hidden)
            return sent
        positions, rotation = (
            self._home_arguments["position_ids"],
            self._home_arguments["position_embeddings"],
        )
        sent, positions, *rotation = self._second.send(hidden, positions, *rotation)
        layer_pass = replace(self._home_arguments[CACHE_ARGUMENT], positions=positions[0])
        self._arguments = {
            **self._home_arguments,
            **dict.fromkeys(("attention_pass", CACHE_ARGUMENT), layer_pass),
            "position_ids": positions,
            "position_embeddings": tuple(rotation),
        }
        return sent
