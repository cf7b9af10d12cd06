"""Other cards: blocks of a model whose weights are there, in step with the device that computes the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import Link
from offload_rt.errors import UsageError


class Card:
    """Another card, by the link to it, and where it attends.

    Attributes:
        stream: one for all texts: torch's allocator keeps what one of them gave back for the next, and has so
            few streams that new ones would soon be those of the link. None on a CPU.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self.stream = torch.cuda.Stream(link.device) if link.device.type == "cuda" else None


@contextmanager
def in_step(there: torch.cuda.Stream, home: torch.device) -> Iterator[None]:
    """What is launched within goes to a stream of another card, after all of `home` so far; `home` waits."""
    current = torch.cuda.current_stream(home)
    there.wait_stream(current)
    with torch.cuda.stream(there):
        yield
    current.wait_stream(there)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to a device; to be called `in_step`."""
    return torch.empty_like(tensor, device=device).copy_(tensor, non_blocking=True)


class Elsewhere(torch.nn.Module):
    """A block whose weights are on another card: hidden states go there, what it makes of them comes back.

    Each stream of `home` has one of its own there: a pass that waits for its link holds up no draft.
    """

    def __init__(self, block: torch.nn.Module, home: torch.device, card: torch.device) -> None:
        super().__init__()
        self.block = block.to(card)
        self._home, self._card = home, card
        self._streams: dict[torch.cuda.Stream, torch.cuda.Stream] = {}

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.block.parameters())

    def forward(self, hidden: Tensor) -> Tensor:
        if self._card.type != "cuda":
            out: Tensor = self.block(hidden)
            return out
        current = torch.cuda.current_stream(self._home)
        if current not in self._streams:
            self._streams[current] = torch.cuda.Stream(self._card)
        with in_step(self._streams[current], self._home):
            return sent(self.block(sent(hidden, self._card)), self._home)


def spread(model: PreTrainedModel, home: torch.device, card: torch.device, count: int) -> PreTrainedModel:
    """The model on `home`, with the MLP blocks of its first `count` layers on `card`.

    Raises:
        UsageError: its layers have no such block.
    """
    layers = model.model.layers[:count]
    try:
        blocks = [layer.mlp for layer in layers]
    except AttributeError:
        raise UsageError(f"{type(model).__name__}: its layers have no `mlp` to put on {card}") from None
    for layer in layers:
        layer.mlp = torch.nn.Identity()  # while all that stays goes to its place
    torch.nn.Module.to(model, home)
    for layer, block in zip(layers, blocks, strict=True):
        layer.mlp = Elsewhere(block, home, card)
    return model
