"""Short training windows that prepare a small model for a long context.

A model trained on short windows fails at 128K tokens for three reasons: it meets new rotary angles, its
attention is diluted over a hundred times more keys, and it never learned to look far back. Windows of a few
thousand tokens teach all three:

- *position gaps*: the positions of the last part of the window are moved on by a random number, so that all
  distances of the model's range occur (PoSE, arXiv 2309.10400);
- *dilution bias*: each key before the gap counts as `w` keys (log w is added to its attention logit), as if
  the gap were filled with similar text;
- *copies*: passages before the gap, of text or random tokens, are repeated near the end. Their keys are
  exempt from the bias, because each exists only once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """One training sequence.

    Attributes:
        tokens: `[length]` token IDs; the first is the beginning-of-text token.
        positions: `[length]` position IDs, strictly increasing.
        key_bias: `[length]`, added to the attention logits of each key for queries from `local_start` on;
            None without a dilution bias.
        local_start: first index after the gap.
    """

    tokens: Tensor
    positions: Tensor
    key_bias: Tensor | None
    local_start: int


@dataclass
class WindowSampler:
    """Draws training windows from books.

    Attributes:
        books: token IDs of each book, `[tokens]` each, without special tokens.
        bos: beginning-of-text token, first in every window.
        vocabulary: number of token IDs.
        max_positions: largest position ID plus one.
        generator: source of all randomness.
    """

    books: list[Tensor]
    bos: int
    vocabulary: int
    max_positions: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        self._stream = torch.cat(self.books)
        self._book_spans = list(pairwise(accumulate(map(len, self.books), initial=0)))

    def _integer(self, low: int, high: int) -> int:
        """Draws a uniform integer from `low` to `high - 1`."""
        return int(torch.randint(low, max(high, low + 1), (), generator=self.generator))

    def _chance(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def _random(self, length: int) -> Tensor:
        """Draws random tokens; the first two IDs are special and left out."""
        return torch.randint(2, self.vocabulary, (length,), generator=self.generator)

    def _text(self, length: int) -> Tensor:
        """Returns consecutive tokens, of one book if it is long enough."""
        start = self._integer(0, len(self._stream) - length)
        for first, last in self._book_spans:
            if first <= start < last and last - first >= length:
                start = min(start, last - length)
        return self._stream[start : start + length].clone()

    def draw(self, length: int, gap_share: float, copy_share: float) -> Window:
        """Draws a window of `length` tokens; the shares are probabilities of a gap and of copies."""
        tokens = torch.cat([torch.tensor([self.bos]), self._text(length - 1)])
        has_gap = self._chance() < gap_share
        local_start = self._integer(length // 4, 3 * length // 4)
        sources: list[tuple[int, int]] = []
        if self._chance() < copy_share:
            sources = self._plant_copies(tokens, local_start)
        positions = torch.arange(length)
        key_bias = None
        if has_gap:
            room = self.max_positions - length
            gap = int(math.exp(self._chance() * math.log(room)))
            # In half of the windows another gap follows the beginning-of-text token, so that every distance
            # from it occurs.
            lead = self._integer(0, room - gap) if self._chance() < 0.5 else 0
            positions[1:] += lead
            positions[local_start:] += gap
            key_bias = torch.zeros(length)
            key_bias[1:local_start] = math.log1p((gap + lead) / local_start)
            for start, end in sources:
                key_bias[start:end] = 0.0
        return Window(tokens, positions, key_bias, local_start)

    def draw_repeats(self, length: int) -> Window:
        """Draws a window that repeats one segment of text or random tokens.

        Copies are rare in books, and a model learns to copy only where they are frequent. Once it has,
        `draw` extends that to far distances.
        """
        size = int(math.exp(math.log(6) + self._chance() * math.log(16)))
        segment = self._random(size) if self._chance() < 0.6 else self._text(size)
        tokens = segment.repeat(-(-length // size))[: length - 1]
        positions = torch.arange(length)
        positions[1:] += self._integer(0, self.max_positions - length)
        return Window(torch.cat([torch.tensor([self.bos]), tokens]), positions, None, 0)

    def _plant_copies(self, tokens: Tensor, local_start: int) -> list[tuple[int, int]]:
        """Repeats earlier passages after `local_start`; returns the (start, end) of their sources."""
        length = len(tokens)
        sources = []
        cursor = local_start + self._integer(0, 64)
        for _ in range(self._integer(1, 5)):
            size = min(int(math.exp(math.log(16) + self._chance() * math.log(16))), local_start - 2)
            if cursor + size >= length or size < 8:
                break
            source = self._integer(1, local_start - size)
            if self._chance() < 0.3:
                tokens[source : source + size] = self._random(size)
            tokens[cursor : cursor + size] = tokens[source : source + size]
            sources.append((source, source + size))
            cursor += size + self._integer(8, length // 4)
        return sources


def batch(windows: list[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """Stacks tokens and positions of windows of one length, `[windows, length]` each."""
    tokens, positions = zip(*((window.tokens, window.positions) for window in windows), strict=True)
    return torch.stack(tokens).to(device), torch.stack(positions).to(device)


def attention_bias(windows: list[Window], dtype: torch.dtype) -> Tensor | None:
    """Returns a causal mask with the dilution bias, `[batch, 1, length, length]`; None without a bias."""
    if all(window.key_bias is None for window in windows):
        return None
    length = len(windows[0].tokens)
    causal = torch.full((length, length), -math.inf, dtype=dtype).triu(1)
    mask = causal[None, None].repeat(len(windows), 1, 1, 1)
    for row, window in enumerate(windows):
        if window.key_bias is not None:
            mask[row, 0, window.local_start :] += window.key_bias.to(dtype)
    return mask
