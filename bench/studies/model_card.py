"""`python -m bench model-card`: whether a target behaves like a long-context model."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import pad

from bench import arguments as args
from bench.results import Row
from bench.studies.acceptance import CACHES, HEAVY_HITTERS, ROUND, small_caches
from bench.studies.needles import needle
from bench.studies.study import Part, Study
from bench.studies.texts import Texts
from offload_rt.engine.scoring import PromptScorer
from offload_rt.engine.sequence import TokenSequence

WINDOWS = (32, 16, 8, 4, 2, 1)
"""Lengths of prompts that end at the same token, as divisors of the longest."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of `model-card`.

    Attributes:
        context: tokens of the longest prompt.
        step: tokens whose mean loss is a row.
        positions: tokens over which acceptance is averaged.
        seed: of the random passages.
        divisors: small caches are compared at the context divided by each of these.
        shares: small caches hold one over these of such a context.
        caches: names of the small caches.
    """

    context: int = 131072
    step: int = 8192
    positions: int = 256
    seed: int = 0
    divisors: tuple[int, ...] = (4, 1)
    shares: tuple[int, ...] = (32, 8)
    caches: tuple[str, ...] = tuple(name for name in CACHES if name != HEAVY_HITTERS)


def loss(study: Texts) -> list[Row]:
    """Loss along a prompt, and by its length.

    Nats per token, the mean of all texts and each text: for successive steps of the prompt, and for its last
    tokens after shorter and longer contexts. A change is against the next shorter prompt, with its standard
    error if tokens are independent; the loss rises if the change exceeds two standard errors.
    """
    context, step = study.sizes.context, study.sizes.step
    windows = [context // part for part in WINDOWS]
    last = windows[0] // 2
    losses_of = defaultdict[int, list[Tensor]](list)
    for name, tokens in study.books.items():
        for window in windows:
            prompt = window_of(tokens[:context], window, study.tokenizer.bos_token_id)
            with study.sequence(f"{name}: loss after {window} tokens", prompt) as sequence:
                losses_of[window].append(token_losses(sequence, prompt))

    def row(prompt: int, start: int, losses: Tensor, change: Tensor | None) -> Row:
        by_text = losses.nanmean(1).tolist()
        place = {"prompt": prompt, "from": start, "to": start + losses.shape[1], "loss": fmean(by_text)}
        return place | of_change(change) | dict(zip(study.books, by_text, strict=True))

    along = pad(torch.stack(losses_of[context]), (1, 0), value=torch.nan)  # the first token has no loss
    rows = [row(context, start, along[:, start : start + step], None) for start in range(0, context, step)]
    ends = [torch.stack(losses)[:, -last:] for losses in losses_of.values()]
    changes = [None, *(after - before for before, after in pairwise(ends))]
    cases = zip(windows, ends, changes, strict=True)
    return rows + [row(window, window - last, losses, change) for window, losses, change in cases]


def of_change(change: Tensor | None) -> Row:
    """Mean and standard error of the change of each token's loss, and whether the loss rises."""
    if change is None:
        return {"change": None, "error": None, "rises": None}
    mean, error = float(change.mean()), float(change.std() / change.numel() ** 0.5)
    return {"change": mean, "error": error, "rises": mean > 2 * error}


def token_losses(sequence: TokenSequence, tokens: Sequence[int]) -> Tensor:
    """Reads `tokens`; returns the loss in nats of all but the first: `[tokens - 1]`, float64, CPU."""
    scorer = PromptScorer(sequence.target, tokens)
    sequence.append(tokens, scorer.take)
    while not sequence.read_piece():
        pass
    return -torch.tensor(scorer.score().logprobs[1:], dtype=torch.float64)


def window_of(prompt: Sequence[int], window: int, beginning: int | None) -> list[int]:
    """The last `window` tokens of `prompt`; a beginning-of-text token stays in front of them."""
    first = [prompt[0]] if prompt[0] == beginning and window < len(prompt) else []
    return [*first, *prompt[max(0, len(prompt) - window) + len(first) :]]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the study's own."""
    args.add_models(parser, draft=False)
    args.add_numbers(
        parser,
        Sizes,
        ("context", int, 1024, "tokens of the longest prompt"),
        ("step", int, 1, "tokens whose mean loss is a row"),
        ("positions", int, ROUND, "tokens over which acceptance is averaged"),
        ("seed", int, 0, "of the random passages"),
    )


STUDY = Study(
    note="Columns `paper` are the paper's own figures, for another model.",
    sizes=Sizes(),
    quick={"context": 8192, "step": 1024, "positions": 128},
    minutes=(20, 2),
    opened=Texts.opened,
    parts={"loss": Part(loss), "needle": Part(needle), "acceptance": Part(small_caches)},
    options=options,
)
