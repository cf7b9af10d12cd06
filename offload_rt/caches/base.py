"""What the model asks of a KV cache, and what the full cache tells the caches derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.host import to_device
from offload_rt.tokens import Tokens

WORD_BITS = 62
"""Entries whose visibility one int64 tells."""


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one pass, as attention and the cache see them.

    Each sees the verified text, its ancestors and itself. Ancestors are counted through: first the cache's
    speculative entries, then the tokens of the pass.

    Attributes:
        parents: of each token, in that count; -1: the verified text.
        sees: for each token, the bits of what it sees, itself included.
        known: ids of the first tokens.
        drawn: those after `known`, which may stand on the device alone.
    """

    parents: tuple[int, ...]
    sees: tuple[int, ...]
    known: Sequence[int]
    drawn: Tokens | None = None

    @classmethod
    def below(
        cls,
        held: SpeculativeTokens,
        parents: Sequence[int],
        known: Sequence[int],
        drawn: Tokens | None = None,
    ) -> NewTokens:
        """New tokens over the speculative ones that `held` holds."""
        sees = list(held.sees)
        for parent in parents:
            sees.append((sees[parent] if parent >= 0 else 0) | 1 << len(sees))
        return cls(tuple(parents), tuple(sees[len(held) :]), known, drawn)

    @classmethod
    def chain(cls, count: int) -> NewTokens:
        """`count` tokens in order behind the verified text, whatever they are."""
        return cls.below(SpeculativeTokens(), range(-1, count - 1), [0] * count)

    @property
    def count(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """How far each token is behind the verified text; the first one's depth is 1."""
        return [bits.bit_count() for bits in self.sees]

    def sees_all(self, behind: int) -> bool:
        """A single token that sees all `behind` speculative entries: no mask is needed."""
        return self.count == 1 and self.sees[0] == (1 << behind + 1) - 1

    def mask(self, behind: int, like: Tensor) -> Tensor:
        """Additive mask `[count, behind + count]` over `behind` speculative entries and the pass's own.

        In float32 or wider, on the device of `like`.
        """
        width, device = behind + self.count, like.device
        wide = torch.promote_types(like.dtype, torch.float32)
        mask = torch.zeros(self.count, width, dtype=wide, device=device)
        if all(bits == (1 << behind + 1 + at) - 1 for at, bits in enumerate(self.sees)):
            return mask.fill_(-torch.inf).triu_(behind + 1)
        words = to_device(self.words(-(-width // WORD_BITS)), device).view(self.count, -1)
        return mask.masked_fill_(~seen(words, torch.arange(width, device=device)), -torch.inf)

    def words(self, count: int) -> list[int]:
        """`sees` in `count` numbers of `WORD_BITS` bits for each token."""
        low = (1 << WORD_BITS) - 1
        return [bits >> WORD_BITS * word & low for bits in self.sees for word in range(count)]

    def hold(self, held: SpeculativeTokens, kept: Sequence[int]) -> None:
        """Adds these of the pass's tokens, in this order, to the speculative ones that it was over."""
        behind = len(held)
        place = {behind + index: behind + at for at, index in enumerate(kept)}
        for index in kept:
            parent = self.parents[index]
            held.add(self.token(index), place.get(parent, parent))

    def token(self, index: int) -> tuple[Tokens, int]:
        """Where the id of a token stands."""
        if index < len(self.known):
            return Tokens([self.known[index]]), 0
        assert self.drawn is not None
        return self.drawn, index - len(self.known)


def seen(words: Tensor, columns: Tensor) -> Tensor:
    """Whether each token sees each of the speculative entries `columns` `[n]`; `[tokens, n]` bool.

    Args:
        words: `[tokens, words]` int64, see `NewTokens.words`. Columns beyond them are not seen.
    """
    word = (columns // WORD_BITS).clamp(0, words.shape[1] - 1)
    bits = words.index_select(1, word) >> columns % WORD_BITS & 1
    return (bits == 1) & (columns < words.shape[1] * WORD_BITS)


class Cache(Protocol):
    """KV of the text so far, for one model and one text.

    A pass is `begin`, one `attend` for each layer, then `commit`. What a pass computed is pending until then
    and is forgotten by the next `begin`. Queries and new KV are `[heads, count, head_dim]` and
    `[kv_heads, count, head_dim]`, rotated.

    Attributes:
        held: tokens of the speculative entries.
    """

    held: SpeculativeTokens

    @property
    def verified_length(self) -> int:
        """Number of tokens at the start of the text that the cache stands for, and that are final."""

    def begin(self, new: NewTokens) -> None:
        """Starts a pass over new tokens."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of the new tokens over the cache and themselves; `[heads, count, head_dim]`."""

    def commit(self, kept: Sequence[int]) -> None:
        """Keeps these of the pass's tokens, in this order, and forgets the others."""

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these of the speculative entries, in this order, and forgets the others."""

    def settle(self) -> None:
        """Makes every speculative entry final: together they are a chain behind the verified text."""


@dataclass(frozen=True)
class Verified:
    """What a pass of the full cache computed for the tokens that were accepted.

    Attributes:
        tokens: their ids.
        kv: `[layers, 2, kv_heads, tokens, head_dim]`, keys and values.
        queries: `[layers, heads, tokens, head_dim]`.
        proposed: how many drafted tokens the pass verified; `tokens` are these accepted and the root.
    """

    tokens: list[int]
    kv: Tensor
    queries: Tensor
    proposed: int
