"""The tokens that a pass adds, and which entries and tokens each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.kernels.tail import TailView
from offload_rt.sampling.tokens import Tokens
from offload_rt.system.device_copies import to_device

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
        ids: IDs of the first tokens, which the host knows.
        draft: the tokens after them, whose IDs may exist only on the device.
    """

    parents: tuple[int, ...]
    sees: tuple[int, ...]
    ids: Sequence[int]
    draft: Tokens | None = None

    @classmethod
    def below(
        cls,
        speculative: SpeculativeTokens,
        parents: Sequence[int],
        ids: Sequence[int],
        draft: Tokens | None = None,
    ) -> NewTokens:
        """Returns new tokens over a cache's speculative entries."""
        sees = list(speculative.sees)
        for parent in parents:
            sees.append((sees[parent] if parent >= 0 else 0) | 1 << len(sees))
        return cls(tuple(parents), tuple(sees[len(speculative) :]), ids, draft)

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

    @property
    def in_order(self) -> bool:
        """Each token of the pass sees all before it."""
        return all(bits == (1 << at + 1) - 1 for at, bits in enumerate(self.sees))

    def view(self, page: int, shared: int, device: torch.device) -> TailView:
        """Returns how the tokens of the pass see `shared` tokens, then speculative ones and themselves.

        Args:
            page: in tokens.
        """
        if self.in_order:
            return TailView(page, self.count, shared)
        rows = [[shared + at for at in range(bits.bit_length()) if bits >> at & 1] for bits in self.sees]
        longest = max(map(len, rows))
        paths = torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int32)
        lengths = torch.tensor([shared + len(row) for row in rows], dtype=torch.int32)
        return TailView(page, self.count, shared, to_device(paths, device), to_device(lengths, device))

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

    def commit_to(self, speculative: SpeculativeTokens, indices: Sequence[int]) -> None:
        """Adds these tokens of the pass, in this order, to the speculative entries that it was over."""
        behind = len(speculative)
        place = {behind + index: behind + at for at, index in enumerate(indices)}
        for index in indices:
            parent = self.parents[index]
            speculative.add(self.token(index), place.get(parent, parent))

    def part(self, start: int, stop: int) -> NewTokens:
        """Returns the tokens `start` to `stop` as those of a pass after one of the tokens before them."""
        draft, known = self.draft, len(self.ids)
        if draft is not None and (start > known or stop < self.count):
            inside = slice(max(0, start - known), max(0, stop - known))
            draft = Tokens(draft.known[inside]) if inside.stop > inside.start else None
        return NewTokens(self.parents[start:stop], self.sees[start:stop], self.ids[start:stop], draft)

    def token(self, index: int) -> tuple[Tokens, int]:
        """Returns the tokens that contain token `index`, and its place among them."""
        if index < len(self.ids):
            return Tokens([self.ids[index]]), 0
        assert self.draft is not None
        return self.draft, index - len(self.ids)


def sees_entries(words: Tensor, columns: Tensor) -> Tensor:
    """Returns whether each token sees each of the speculative entries `columns` `[n]`; `[tokens, n]` bool.

    Args:
        words: from `NewTokens.words`, `[tokens, words]` int64. Columns beyond them are not seen.
    """
    word = (columns // WORD_BITS).clamp(0, words.shape[1] - 1)
    bits = words.index_select(1, word) >> columns % WORD_BITS & 1
    return (bits == 1) & (columns < words.shape[1] * WORD_BITS)
