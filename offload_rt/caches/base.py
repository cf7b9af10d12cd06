"""The protocols between a model and its KV cache, and between the full cache and its derived caches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from cpu_kv import KeysValues
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.sampling.tokens import Tokens
from offload_rt.system.device_copies import to_device

if TYPE_CHECKING:
    from offload_rt.caches.local import LocalState

WORD_BITS = 62
"""Speculative entries per int64 word of a bit mask."""


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one pass, as attention and the cache see them.

    Each token sees the verified sequence, its ancestors and itself. Ancestors are numbered through: first the
    cache's speculative entries, then the tokens of the pass.

    Attributes:
        parents: the number of each token's parent; -1: the verified sequence.
        sees: for each token, a bit mask of the numbers it sees, itself included.
        known: ids of the first tokens.
        drawn: the tokens after `known`, whose ids may exist on the device alone.
    """

    parents: tuple[int, ...]
    sees: tuple[int, ...]
    known: Sequence[int]
    drawn: Tokens | None = None

    @classmethod
    def below(
        cls,
        speculative: SpeculativeTokens,
        parents: Sequence[int],
        known: Sequence[int],
        drawn: Tokens | None = None,
    ) -> NewTokens:
        """Returns new tokens over a cache's speculative entries."""
        sees = list(speculative.sees)
        for parent in parents:
            sees.append((sees[parent] if parent >= 0 else 0) | 1 << len(sees))
        return cls(tuple(parents), tuple(sees[len(speculative) :]), known, drawn)

    @classmethod
    def chain(cls, count: int) -> NewTokens:
        """Returns `count` arbitrary tokens in order behind the verified sequence."""
        return cls.below(SpeculativeTokens(), range(-1, count - 1), [0] * count)

    @property
    def count(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """The distance of each token from the verified sequence; 1 for the first one."""
        return [bits.bit_count() for bits in self.sees]

    def sees_all(self, behind: int) -> bool:
        """Returns whether a single token sees all `behind` speculative entries, so that no mask is needed."""
        return self.count == 1 and self.sees[0] == (1 << behind + 1) - 1

    def mask(self, behind: int, like: Tensor) -> Tensor:
        """Returns an additive mask over `behind` speculative entries and the tokens of the pass.

        Returns:
            `[count, behind + count]`, in float32 or wider, on the device of `like`.
        """
        width, device = behind + self.count, like.device
        wide = torch.promote_types(like.dtype, torch.float32)
        mask = torch.zeros(self.count, width, dtype=wide, device=device)
        if all(bits == (1 << behind + 1 + at) - 1 for at, bits in enumerate(self.sees)):
            return mask.fill_(-torch.inf).triu_(behind + 1)
        words = to_device(self.words(-(-width // WORD_BITS)), device).view(self.count, -1)
        return mask.masked_fill_(~sees_entries(words, torch.arange(width, device=device)), -torch.inf)

    def words(self, count: int) -> list[int]:
        """Returns `sees` as `count` words of `WORD_BITS` bits for each token, token by token."""
        low = (1 << WORD_BITS) - 1
        return [bits >> WORD_BITS * word & low for bits in self.sees for word in range(count)]

    def commit_to(self, speculative: SpeculativeTokens, kept: Sequence[int]) -> None:
        """Adds these tokens of the pass, in this order, to the speculative entries that it was over."""
        behind = len(speculative)
        place = {behind + index: behind + at for at, index in enumerate(kept)}
        for index in kept:
            parent = self.parents[index]
            speculative.add(self.token(index), place.get(parent, parent))

    def token(self, index: int) -> tuple[Tokens, int]:
        """Returns the tokens that contain token `index`, and its place among them."""
        if index < len(self.known):
            return Tokens([self.known[index]]), 0
        assert self.drawn is not None
        return self.drawn, index - len(self.known)


def sees_entries(words: Tensor, columns: Tensor) -> Tensor:
    """Returns whether each token sees each of the speculative entries `columns` `[n]`; `[tokens, n]` bool.

    Args:
        words: from `NewTokens.words`, `[tokens, words]` int64. Columns beyond them are not seen.
    """
    word = (columns // WORD_BITS).clamp(0, words.shape[1] - 1)
    bits = words.index_select(1, word) >> columns % WORD_BITS & 1
    return (bits == 1) & (columns < words.shape[1] * WORD_BITS)


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

    def commit(self, kept: Sequence[int]) -> None:
        """Keeps these tokens of the pass, in this order, and forgets the others."""

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these speculative entries, in this order, and forgets the others."""

    def settle(self) -> None:
        """Makes all speculative entries final; they must be a chain behind the verified sequence."""


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
        self, layer: int, start: int, runs: Sequence[KeysValues], *, over_link: bool
    ) -> None:
        """Takes what it needs of consecutive tokens of a layer.

        Args:
            start: position of the first token.
            runs: their keys and values in order, `[pages, kv_heads, tokens, head_dim]`.
            over_link: `runs` are in host memory, and must be sent over the link.
        """

    def take_mass(self, layer: int, total: AttentionSum) -> None:  # noqa: B027
        """Takes the attention mass of a layer, see `AttentionSum.add_mass_to`."""

    @abstractmethod
    def adopt(self, verified: VerifiedTokens) -> None:
        """Takes the KV of verified tokens, and forgets speculation that is wrong now."""

    def abandon_pass(self) -> None:  # noqa: B027
        """Stops work for a pass that was begun and takes `abandon_pass` instead of `adopt`."""
