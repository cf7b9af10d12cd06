"""What a decode step asks its batch for: passes of a model, reads of results, passes in the background."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from offload_rt.caches.full import FullCache
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput

T = TypeVar("T")


class Model(Protocol):
    """The interface of a model that a batch runs, see `CausalModel`."""

    device: torch.device
    dtype: torch.dtype

    def forward(self, inputs: Sequence[PassInput], order: LayerOrder | None = None) -> list[PassOutput]: ...

    def raise_nan(self, pass_input: PassInput) -> NoReturn: ...


@dataclass
class LevelStats:
    """Statistics of one level of a composition.

    Attributes:
        name: the level as in the config (`draft:streaming`, `target:retrieved`, `target:full`).
        passes: number of passes of its model.
        proposed: number of tokens that the level below proposed to it.
        accepted: number of these that it accepted.
        ms: host time in its passes and reads, without the levels below; an equal share of a pass of several
            sequences. Work that a GPU has not finished counts where the host waits for it.
        host_reads: number of times the host waited for its results.
    """

    name: str
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    ms: float = 0.0
    host_reads: int = 0


@dataclass(frozen=True)
class Forward:
    """Requests a pass; the answer is a `PassOutput`."""

    model: Model
    input: PassInput
    order: LayerOrder | None
    stats: LevelStats


@dataclass(frozen=True)
class CopyToHost:
    """Requests tensors on the host; the answer is a list of them."""

    tensors: Sequence[Tensor]
    stats: LevelStats


@dataclass(frozen=True)
class StartPass:
    """Requests a pass over the full cache in the background; the answer is a `BackgroundPass`."""

    forward: Forward
    full: FullCache


@dataclass(frozen=True)
class AwaitPass:
    """Requests the result of a background pass; the answer is a `PassOutput`."""

    running: BackgroundPass


Outputs = dict[int, PassOutput]
"""Outputs by the number of the sequence in the batch."""


Passed = tuple[Outputs, float]
"""Outputs of a background pass, and when it ended, in seconds of `clock.now`."""


@dataclass(eq=False)
class BackgroundPass:
    """A pass in the background, of one or several sequences.

    Attributes:
        future: its outputs.
        number: number of this sequence in the batch.
        sequences: number of sequences in the pass.
        started: seconds of `clock.now`.
    """

    future: Future[Passed]
    number: int
    sequences: int
    started: float

    @property
    def done(self) -> bool:
        return self.future.done()

    @property
    def ms(self) -> float:
        """Duration in ms; waits for the end of the pass."""
        _, ended = self.future.result()
        return 1e3 * (ended - self.started)


Request = Forward | CopyToHost | StartPass | AwaitPass


Work = Generator[Request, Any, T]
