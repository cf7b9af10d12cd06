"""What the model asks of a KV cache, and what the full cache tells the caches derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.attention import causal_mask


@dataclass(frozen=True)
class NewTokens:
    """The tokens of one pass, as attention sees them.

    Attributes:
        count: how many.
        mask: additive `[count, count]`, who sees whom; None for a single token.
        is_tree: they are not a chain, in which each sees all before it.
    """

    count: int
    mask: Tensor | None
    is_tree: bool = False

    @classmethod
    def chain_and_tree(
        cls, chain: int, parents: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> NewTokens:
        """`chain` tokens in order, then tree nodes whose `parents` are node numbers, -1 the chain's end."""
        count = chain + len(parents)
        if count == 1:
            return cls(1, None)
        like = torch.empty(0, dtype=dtype, device=device)
        if all(parent == node - 1 for node, parent in enumerate(parents)):
            return cls(count, causal_mask(count, like))
        sees = torch.zeros(count, count, dtype=torch.bool)
        sees[:chain, :chain] = torch.ones(chain, chain, dtype=torch.bool).tril()
        for node, parent in enumerate(parents):
            sees[chain + node] = sees[chain + parent]
            sees[chain + node, chain + node] = True
        wide = torch.promote_types(dtype, torch.float32)
        mask = torch.zeros(count, count, dtype=wide).masked_fill(~sees, -torch.inf)
        return cls(count, mask.to(device), is_tree=True)


class Cache(Protocol):
    """KV of the text so far, for one model and one sequence.

    A pass is `begin`, one `attend` a layer, then `commit`. What a pass computed is pending until then and
    is forgotten by the next `begin`. Queries and new KV are `[heads, count, head_dim]` and
    `[kv_heads, count, head_dim]`, rotated.
    """

    @property
    def length(self) -> int:
        """Number of tokens at the start of the text that the cache stands for."""

    @property
    def verified_length(self) -> int:
        """How many of those are final: no `truncate` goes behind them."""

    def begin(self, new: NewTokens) -> None:
        """Starts a pass over new tokens that follow the first `length` ones."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of the new tokens over the cache and themselves; `[heads, count, head_dim]`."""

    def commit(self, path: Sequence[int]) -> None:
        """Keeps these of the pass's tokens, in this order, and forgets the others."""

    def truncate(self, length: int) -> None:
        """Forgets all tokens from `length` on; ValueError for a length below `verified_length`."""

    def settle(self) -> None:
        """Says that every token now in the cache is final."""


@dataclass(frozen=True)
class Verified:
    """What a pass of the full cache computed for the tokens that were accepted.

    Attributes:
        keys, values: `[layers, kv_heads, tokens, head_dim]`.
        queries: `[layers, heads, tokens, head_dim]`.
        proposed: how many drafted tokens the pass verified; `tokens` are these accepted and the root.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    proposed: int


class Refill(Protocol):
    """What a derived cache takes from a pass of the full cache: no byte moves for it."""

    def take(self, layer: int, start: int, keys: Tensor, values: Tensor, *, over_link: bool = False) -> None:
        """The text's tokens from `start` on pass by, `[kv_heads, n, head_dim]`.

        Args:
            over_link: they lie in host memory, and what is taken must be sent.
        """

    def close(self) -> None:
        """Lets go of what was needed for a pass that is given up. Idempotent."""


class DerivedCache(Cache, Protocol):
    """A cheaper cache of the same model, kept true by the full cache."""

    def build(self, queries: Tensor) -> None:
        """Fills itself from the full cache, which holds the whole text so far.

        Args:
            queries: `[layers, heads, tokens, head_dim]`, those of the text's last tokens.
        """

    def adopt(self, verified: Verified) -> None:
        """Takes the KV of newly verified tokens in place of what was speculated for as many.

        Speculation behind those may stay: whoever speculated knows whether it still fits the text.
        """

    def catch_up(self) -> None:
        """Fills itself from the full cache, if it must before it is read."""

    def refill(self) -> Refill | None:
        """What to take from the pass that begins; it is used from the next `adopt` on."""
