"""The protocols between a model and its KV cache, and between the full cache and its derived caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cpu_kv import Gatherer, KVLayout, KVPages, SequenceKV
from offload_rt.attention.backends import AttentionBackend
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.speculative import SpeculativeTokens

if TYPE_CHECKING:
    from offload_rt.caches.local import LocalState
    from offload_rt.caches.local_history import LocalLayers


class Cache(Protocol):
    """The KV of one sequence for one model.

    A pass is `begin`, one `attend` for each layer, then `commit`. Its KV is pending until then, and is
    forgotten by the next `begin`.

    Attributes:
        speculative: tokens of the speculative entries.
        local: what layers with sliding windows or recurrent states keep of the sequence.
    """

    speculative: SpeculativeTokens
    local: LocalState

    @property
    def verified_length(self) -> int:
        """Number of final tokens that the cache represents, from the start of the sequence."""

    def begin(self, new: NewTokens) -> None:
        """Starts a pass over new tokens."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention of the new tokens over the cache and themselves.

        Args:
            layer: number among the full-attention layers.
            queries: rotated, `[heads, count, head_dim]`.
            keys, values: of the new tokens, rotated, `[kv_heads, count, head_dim]`.

        Returns:
            `[heads, count, head_dim]`.
        """

    def commit(self, indices: Sequence[int]) -> None:
        """Keeps these tokens of the pass, in this order, and forgets the others."""

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these speculative entries, in this order, and forgets the others."""

    def settle(self) -> None:
        """Makes all speculative entries final; they must be a chain behind the verified sequence."""


class CachedModel(Protocol):
    """What a cache is built by: the layers of a model, or those of them that one device attends."""

    @property
    def rotary_frequencies(self) -> Tensor:
        """Of the model, `[rotated / 2]`, on the device of the cache."""

    @property
    def local_layers(self) -> LocalLayers:
        """Those that do not attend to the whole sequence."""

    def kv_layout(self) -> KVLayout:
        """Returns the layout of the KV of these layers."""


class CacheSource(Protocol):
    """What a derived cache reads: the layers of the full cache, or those of them that one device attends."""

    @property
    def layers(self) -> Sequence[int]:
        """Their numbers in the store, rising."""

    @property
    def layout(self) -> KVLayout:
        """The layout of their KV."""

    @property
    def device(self) -> torch.device:
        """The device that attends them."""

    @property
    def backend(self) -> AttentionBackend:
        """The attention of that device."""

    @property
    def local(self) -> LocalState:
        """The layers that do not attend to the whole sequence."""

    @property
    def sequence(self) -> SequenceKV:
        """The sequence in the store, with all layers."""

    @property
    def transfer(self) -> Gatherer:
        """Brings KV of the layers from the store to the device."""

    @property
    def verified_length(self) -> int:
        """Number of committed tokens."""

    @property
    def scale(self) -> float:
        """The model's softmax scale."""


@dataclass(frozen=True)
class VerifiedTokens:
    """The accepted tokens of a pass of the full cache.

    Attributes:
        tokens: their ids.
        kv: their keys and values, `[layers, 2, kv_heads, tokens, head_dim]`.
        queries: `[layers, heads, tokens, head_dim]`.
        proposed: number of drafted tokens that were verified; `tokens` are the root and the accepted ones.
    """

    tokens: list[int]
    kv: Tensor
    queries: Tensor
    proposed: int


class DerivedCache(ABC):
    """A cache that follows the passes of the full cache of the same model.

    In each pass of the full cache: `begin_pass`; in each layer `take_segment` for every segment and
    `take_mass`; then `adopt` after the commit, or `abandon_pass`. They run in the thread of the pass.

    Attributes:
        mass_chunk: tokens per chunk of the attention mass that it takes; None: it takes none.
    """

    mass_chunk: int | None = None

    @abstractmethod
    def build(self, queries: Tensor) -> None:
        """Fills itself from the full cache, which has the whole sequence so far.

        Args:
            queries: of the last tokens, `[layers, heads, tokens, head_dim]`.
        """

    def catch_up(self) -> None:  # noqa: B027
        """Fills itself from the full cache if it must before it is read."""

    def begin_pass(self) -> bool:
        """Starts a pass of the full cache; returns whether the cache takes its segments."""
        return False

    def take_segment(  # noqa: B027
        self, layer: int, start: int, runs: Sequence[KVPages], *, over_link: bool
    ) -> None:
        """Takes what it needs of consecutive tokens of a layer.

        Args:
            start: position of the first token.
            runs: their pages in order.
            over_link: `runs` are in host memory, and must be sent over the link.
        """

    def take_mass(self, layer: int, total: AttentionSum) -> None:  # noqa: B027
        """Takes the attention mass of a layer, see `AttentionSum.add_mass_to`."""

    @abstractmethod
    def adopt(self, verified: VerifiedTokens) -> None:
        """Takes the KV of verified tokens, and forgets speculation that is wrong now."""

    def abandon_pass(self) -> None:  # noqa: B027
        """Stops work for a pass that was begun and takes `abandon_pass` instead of `adopt`."""
