"""MLP blocks of a model whose weights are on another GPU."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv.mapped import PeerCopies
from cpu_kv.streams import follower
from offload_rt.errors import UsageError


class RemoteMlp(torch.nn.Module):
    """A block whose weights are on another GPU: hidden states go there, what it makes of them comes back.

    Each stream of `home` has one of its own there: a pass that waits for its link holds up no draft.
    """

    def __init__(self, block: torch.nn.Module, home: torch.device, gpu: torch.device) -> None:
        super().__init__()
        self.block = block.to(gpu)
        self._home, self._gpu = home, gpu

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.block.parameters())

    def forward(self, hidden: Tensor) -> Tensor:
        if self._gpu.type != "cuda":
            out: Tensor = self.block(hidden)
            return out
        stream = torch.cuda.current_stream(self._home)
        there, back = _peer_copies(stream, self._home, self._gpu)
        with torch.cuda.stream(follower(stream, self._gpu)):
            return back.copy(self.block(there.copy(hidden)))


@cache
def _peer_copies(
    stream: torch.cuda.Stream, home: torch.device, gpu: torch.device
) -> tuple[PeerCopies, PeerCopies]:
    """The copies there and back of all blocks of all models, in a stream of the first GPU.

    Each stream has buffers of its own: a draft must not wait for a pass that waits for its link.
    """
    return PeerCopies(home, gpu), PeerCopies(gpu, home)


def spread(model: PreTrainedModel, home: torch.device, gpu: torch.device, count: int) -> PreTrainedModel:
    """Puts the model on `home`, and the MLP blocks of its first `count` layers on `gpu`.

    Raises:
        UsageError: its layers have no such block.
    """
    layers = model.model.layers[:count]
    try:
        blocks = [layer.mlp for layer in layers]
    except AttributeError:
        raise UsageError(f"{type(model).__name__}: its layers have no `mlp` to put on {gpu}") from None
    for layer in layers:
        layer.mlp = torch.nn.Identity()  # while all that stays goes to its place
    torch.nn.Module.to(model, home)
    for layer, block in zip(layers, blocks, strict=True):
        layer.mlp = RemoteMlp(block, home, gpu)
    return model
