"""MLP blocks whose weights are on another GPU than the rest of their model."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv.mapped import PeerCopies
from cpu_kv.streams import follower
from offload_rt.errors import UsageError
from offload_rt.model.quantized_weights import stored_bytes


class RemoteMlp(torch.nn.Module):
    """An MLP block on another GPU: hidden states go there and its output comes back.

    Each stream of `home` has its own stream on that GPU, so that a pass that waits for its link does not hold
    up a draft.
    """

    def __init__(self, block: torch.nn.Module, home: torch.device, gpu: torch.device) -> None:
        super().__init__()
        self.block = block.to(gpu)
        self._home, self._gpu = home, gpu

    @property
    def weight_bytes(self) -> int:
        return stored_bytes(self.block)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._gpu.type != "cuda":
            out: Tensor = self.block(hidden)
            return out
        stream = torch.cuda.current_stream(self._home)
        outward, back = _peer_copies(stream, self._home, self._gpu)
        with torch.cuda.stream(remote_stream := follower(stream, self._gpu)):
            result = self.block(outward.copy(hidden, stream, remote_stream))
        return back.copy(result, remote_stream, stream)


@cache
def _peer_copies(
    stream: torch.cuda.Stream, home: torch.device, gpu: torch.device
) -> tuple[PeerCopies, PeerCopies]:
    """Returns the copies there and back for a stream of the first GPU, shared by all blocks and models."""
    return PeerCopies(home, gpu), PeerCopies(gpu, home)


def remote_mlps(model: torch.nn.Module) -> list[RemoteMlp]:
    """Returns the MLP blocks of a model whose weights are on another GPU."""
    return [module for module in model.modules() if isinstance(module, RemoteMlp)]


def place_mlps(model: PreTrainedModel, home: torch.device, gpu: torch.device, count: int) -> PreTrainedModel:
    """Moves the model to `home`, and the MLP blocks of its first `count` layers to `gpu`.

    Raises:
        UsageError: its layers have no attribute `mlp`.
    """
    layers = model.model.layers[:count]
    try:
        blocks = [layer.mlp for layer in layers]
    except AttributeError:
        raise UsageError(f"{type(model).__name__}: its layers have no `mlp` to put on {gpu}") from None
    for layer in layers:
        layer.mlp = torch.nn.Identity()  # while the rest of the model moves
    torch.nn.Module.to(model, home)
    model.tie_weights()  # torch may have made new parameters, which share nothing
    for layer, block in zip(layers, blocks, strict=True):
        layer.mlp = RemoteMlp(block, home, gpu)
    return model
