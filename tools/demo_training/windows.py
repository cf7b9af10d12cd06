"""Training windows that teach a small model to live with a long context.

Three things break a model trained on short windows when its prompt grows to 128K tokens: rotary angles
it has never met, attention that is diluted over a hundred times more keys, and no habit of looking far
back. A window of a few thousand tokens can teach all three:

- *position gaps*: the text before the last stretch is moved back by a random number of positions, so
  that distances up to the model's whole range occur (PoSE, arXiv 2309.10400);
- *dilution bias*: every key behind a gap counts as `w` keys (log w is added to its attention logit),
  as if the gap were filled with text of the same kind;
- *copies*: passages of the far text, natural or random tokens, occur again near the end. Their source
  keys are exempt from the bias: only one of them exists.

Windows without a gap are plain text; the long ones at the end of training are real, up to the length
the trainer affords.
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
        tokens: `[length]` token ids, the first is the beginning-of-text token.
        positions: `[length]` position ids, strictly increasing.
        key_bias: `[length]` what to add to the attention logits of each key, for queries at or after
            `local_start`; None where nothing is diluted.
        local_start: first index of the stretch that lies behind the gap.
    """

    tokens: Tensor
    positions: Tensor
    key_bias: Tensor | None
    local_start: int


@dataclass
class WindowSampler:
    """Draws training windows from books.

    Attributes:
        books: token ids of each book, `[tokens]` each, without special tokens.
        bos: beginning-of-text token, first in every window.
        vocabulary: number of token ids.
        max_positions: largest position id plus one.
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
        """A uniform integer from `low` to `high - 1`."""
        return int(torch.randint(low, max(high, low + 1), (), generator=self.generator))

    def _chance(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def _random(self, length: int) -> Tensor:
        """Random tokens; the first two ids are special."""
        return torch.randint(2, self.vocabulary, (length,), generator=self.generator)

    def _text(self, length: int) -> Tensor:
        """Consecutive tokens, inside one book where one is long enough."""
        start = self._integer(0, len(self._stream) - length)
        for first, last in self._book_spans:
            if first <= start < last and last - first >= length:
                start = min(start, last - length)
        return self._stream[start : start + length].clone()

    def draw(self, length: int, gap_share: float, copy_share: float) -> Window:
        """One window of `length` tokens; `gap_share` and `copy_share` are probabilities."""
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
            # Half of the gaps lie in front of the far text too, so that every distance from the
            # beginning-of-text token occurs.
            lead = self._integer(0, room - gap) if self._chance() < 0.5 else 0
            positions[1:] += lead
            positions[local_start:] += gap
            key_bias = torch.zeros(length)
            key_bias[1:local_start] = math.log1p((gap + lead) / local_start)
            for start, end in sources:
                key_bias[start:end] = 0.0
        return Window(tokens, positions, key_bias, local_start)

    def draw_repeats(self, length: int) -> Window:
        """One segment over and over, of text or of random tokens: what makes a model learn to copy at all.

        Copies are rare in books, and the circuit that copies forms only where they are not; once it is
        there, `draw` carries it to far distances.
        """
        size = int(math.exp(math.log(6) + self._chance() * math.log(16)))
        segment = self._random(size) if self._chance() < 0.6 else self._text(size)
        tokens = segment.repeat(-(-length // size))[: length - 1]
        positions = torch.arange(length)
        positions[1:] += self._integer(0, self.max_positions - length)
        return Window(torch.cat([torch.tensor([self.bos]), tokens]), positions, None, 0)

    def _plant_copies(self, tokens: Tensor, local_start: int) -> list[tuple[int, int]]:
        """Repeats far passages behind `local_start`; returns where their sources lie."""
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
    """Tokens and positions of windows of one length, `[windows, length]`."""
    tokens, positions = zip(*((window.tokens, window.positions) for window in windows), strict=True)
    return torch.stack(tokens).to(device), torch.stack(positions).to(device)


def attention_bias(windows: list[Window], dtype: torch.dtype) -> Tensor | None:
    """Causal additive mask `[batch, 1, length, length]` with the dilution bias; None where there is none."""
    if all(window.key_bias is None for window in windows):
        return None
    length = len(windows[0].tokens)
    causal = torch.full((length, length), -math.inf, dtype=dtype).triu(1)
    mask = causal[None, None].repeat(len(windows), 1, 1, 1)
    for row, window in enumerate(windows):
        if window.key_bias is not None:
            mask[row, 0, window.local_start :] += window.key_bias.to(dtype)
    return mask
