"""Whether a passage of random tokens is found again from anywhere in a long prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.context import ContextReader

PASSAGE = 32  # random tokens
CUE = 8  # of them are repeated at the end of the prompt; the others are to follow
SPACING = 64  # tokens of text between passages at one depth


@dataclass(frozen=True)
class Planted:
    """A prompt with passages in it.

    Attributes:
        tokens: the prompt.
        passages: by depth, the tokens of each passage.
        starts: by depth, where each passage begins.
    """

    tokens: list[int]
    passages: list[list[list[int]]]
    starts: list[list[int]]


def plant(
    text: Sequence[int],
    length: int,
    depths: int,
    each: int,
    alphabet: Sequence[int],
    generator: torch.Generator,
) -> Planted:
    """A prompt of `length` tokens: the beginning of `text` with `each` passages at each of `depths` depths.

    Depth 0 is right behind the first token, the last depth ends with the prompt.

    Args:
        alphabet: token ids that passages are drawn from.

    Raises:
        ValueError: the passages do not fit.
    """
    kept = length - depths * each * PASSAGE
    room = kept - 1 - (each - 1) * SPACING
    if room < (depths - 1) * each * SPACING or kept > len(text):
        raise ValueError(f"{depths * each} passages do not fit {length} tokens, or the text is too short")
    prompt: list[int] = []
    passages: list[list[list[int]]] = []
    starts: list[list[int]] = []
    taken = 0
    for depth in range(depths):
        passages.append([])
        starts.append([])
        for number in range(each):
            at = 1 + room * depth // max(depths - 1, 1) + number * SPACING
            prompt += text[taken:at]
            taken = at
            drawn = torch.randint(len(alphabet), (PASSAGE,), generator=generator).tolist()
            starts[-1].append(len(prompt))
            passages[-1].append([alphabet[i] for i in drawn])
            prompt += passages[-1][-1]
    prompt += text[taken:kept]
    return Planted(prompt, passages, starts)


@torch.inference_mode()
def recall(reader: ContextReader, planted: Planted) -> list[float]:
    """By depth, the share of the passages' tokens after their cue that the model's argmax gives.

    The prompt must have been read. Each passage is cued behind the prompt, and its true tokens are forced.
    """
    scores = []
    for passages in planted.passages:
        right = 0
        for passage in passages:
            logits = reader.logits(reader.full, passage[:-1], PASSAGE - CUE)
            right += int((logits.argmax(-1).cpu() == torch.tensor(passage[CUE:])).sum())
        scores.append(right / (len(passages) * (PASSAGE - CUE)))
    reader.full.abandon()
    return scores
