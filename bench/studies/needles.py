"""Needles: passages of random tokens in a long prompt, which the model is to repeat."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import fmean

import torch

from bench.results import Row
from bench.studies.texts import Texts, passed, take
from offload_rt.engine.sequence import TokenSequence

PASSAGE = 32  # random tokens
CUE = 8  # of them are repeated at the end of the prompt; the model is to continue with the others
SPACING = 64  # tokens of text between passages at one depth
DEPTHS = 9
EACH = 4  # passages at each depth, if at least half of the prompt remains text
CONTEXTS = (16, 4, 2, 1)
"""Prompt lengths, as divisors of the longest."""


def needle(study: Texts) -> list[Row]:
    """Needle score by depth.

    Passages of random tokens are planted from the beginning of a prompt (0) to its end (1), and the first
    tokens of each are repeated behind the prompt. The score is the share of its other tokens that the model
    predicts.
    """
    generator, alphabet = torch.Generator().manual_seed(study.sizes.seed), study.alphabet
    rows, least = list[Row](), DEPTHS * (PASSAGE + SPACING)
    for length in (study.sizes.context // part for part in CONTEXTS):
        count, scores = min(EACH, max(1, length // (2 * least))), list[list[float]]()
        if length < least:
            continue
        for name, tokens in study.books.items():
            prompt, passages = plant(tokens, length, DEPTHS, count, alphabet, generator)
            with study.sequence(f"{name}: needles in {length} tokens", prompt) as sequence:
                take(sequence, prompt)
                scores.append(recall(sequence, passages, count))
        by_depth = {
            f"{at / (DEPTHS - 1):g}": fmean(depth_scores)
            for at, depth_scores in enumerate(zip(*scores, strict=True))
        }
        rows.append({"context": length, "passages": count, "chance": 1 / len(alphabet)} | by_depth)
    return rows


def plant(
    text: Sequence[int],
    length: int,
    depths: int,
    count: int,
    alphabet: Sequence[int],
    generator: torch.Generator,
) -> tuple[list[int], list[list[int]]]:
    """Plants `count` passages at each of `depths` depths; returns the prompt and the passages.

    Depth 0 is right after the first token; the last depth ends with the prompt.

    Args:
        length: of the prompt, in tokens.
        alphabet: token IDs that passages are drawn from.

    Raises:
        ValueError: the passages do not fit.
    """
    text_tokens = length - depths * count * PASSAGE
    room = text_tokens - 1 - (count - 1) * SPACING
    if room < (depths - 1) * count * SPACING or text_tokens > len(text):
        raise ValueError(f"{depths * count} passages do not fit {length} tokens, or the text is too short")
    prompt: list[int] = []
    passages: list[list[int]] = []
    position = 0
    for depth, number in product(range(depths), range(count)):
        at = 1 + room * depth // max(depths - 1, 1) + number * SPACING
        choices = torch.randint(len(alphabet), (PASSAGE,), generator=generator).tolist()
        passages.append([alphabet[i] for i in choices])
        prompt += [*text[position:at], *passages[-1]]
        position = at
    return [*prompt, *text[position:text_tokens]], passages


@torch.inference_mode()
def recall(sequence: TokenSequence, passages: Sequence[Sequence[int]], count: int) -> list[float]:
    """The share of passage tokens after the cue that the model's argmax predicts, by depth.

    The prompt must have been read. Each passage follows it, teacher forced.

    Args:
        count: passages at each depth.
    """
    right = []
    for passage in passages:
        logits = passed(sequence.verifier, passage[:-1], PASSAGE - CUE).logits
        right.append(int((logits.argmax(-1).cpu() == torch.tensor(passage[CUE:])).sum()))
    sequence.full.abandon()
    judged = count * (PASSAGE - CUE)
    return [sum(right[at : at + count]) / judged for at in range(0, len(right), count)]
