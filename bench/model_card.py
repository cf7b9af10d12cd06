"""`python -m bench model-card`: whether a target behaves like a long-context model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from bench import inputs
from bench.acceptance import CACHES, HEAVY_HITTERS, small_caches
from bench.inputs import size
from bench.needles import needle
from bench.report import Row
from bench.studies import Part, Study
from bench.texts import Texts
from offload_rt.engine.prefill import prefill
from offload_rt.engine.sequence import TokenSequence

WINDOWS = (32, 16, 8, 4, 2, 1)
"""Lengths of prompts with one end, as divisors of the longest."""
HEAD_SLICE = 2048  # rows of logits at a time


@dataclass(frozen=True)
class Sizes:
    """How much `model-card` measures.

    Attributes:
        divisors: of the context; what is left are contexts at which small caches are compared.
        shares: one over these of such a context is what they hold.
        caches: their names.
    """

    context: int = size(131072, "tokens of the longest prompt", inputs.count(1024))
    step: int = size(8192, "tokens whose loss is told together", inputs.count(1))
    positions: int = size(256, "that the acceptance is a mean of", inputs.count(8))
    seed: int = size(0, "of the passages", inputs.count(0), metavar="S")
    divisors: tuple[int, ...] = (4, 1)
    shares: tuple[int, ...] = (32, 8)
    caches: tuple[str, ...] = tuple(name for name in CACHES if name != HEAVY_HITTERS)


def loss(study: Texts) -> list[Row]:
    """Loss with more and more text before it.

    Nats a token, of all texts and of each: of step after step of the prompt, and of its last tokens, with
    less and less before them cut away. A change is against the shorter prompt above, with its standard
    error, tokens taken for independent; a rise is a change of more than two of them.
    """
    context, step = study.sizes.context, study.sizes.step
    windows = [context // part for part in WINDOWS]
    last = windows[0] // 2
    found = defaultdict[int, list[Tensor]](list)
    for name, tokens in study.books.items():
        for window in windows:
            prompt = window_of(tokens[:context], window, study.tokenizer.bos_token_id)
            with study.sequence(f"{name}: loss after {window} tokens", prompt) as sequence:
                found[window].append(token_losses(sequence, prompt))

    def row(prompt: int, start: int, losses: Tensor, change: Tensor | None) -> Row:
        by_text = losses.nanmean(1).tolist()
        place = {"prompt": prompt, "from": start, "to": start + losses.shape[1], "loss": fmean(by_text)}
        return place | of_change(change) | dict(zip(study.books, by_text, strict=True))

    along = pad(torch.stack(found[context]), (1, 0), value=torch.nan)  # the first token has none
    rows = [row(context, start, along[:, start : start + step], None) for start in range(0, context, step)]
    ends = [torch.stack(losses)[:, -last:] for losses in found.values()]
    changes = [None, *(after - before for before, after in pairwise(ends))]
    cases = zip(windows, ends, changes, strict=True)
    return rows + [row(window, window - last, losses, change) for window, losses, change in cases]


def of_change(change: Tensor | None) -> Row:
    """What there is to say of the change of each token's loss."""
    if change is None:
        return {"change": None, "error": None, "rises": None}
    mean, error = float(change.mean()), float(change.std() / change.numel() ** 0.5)
    return {"change": mean, "error": error, "rises": mean > 2 * error}


@torch.inference_mode()
def token_losses(sequence: TokenSequence, tokens: Sequence[int]) -> Tensor:
    """Loss in nats of all tokens but the first one, while they are read: `[tokens - 1]`, float64, CPU."""
    model = sequence.target
    hidden = prefill(model, sequence.full, tokens, sequence.config.prefill.chunk, outputs=True)
    assert hidden is not None
    before = hidden[:, :-1].split(HEAD_SLICE, dim=1)
    after = torch.tensor(tokens[1:], device=model.device).split(HEAD_SLICE)
    logits = ((model.logits(part).float(), goals) for part, goals in zip(before, after, strict=True))
    return torch.cat([cross_entropy(*pair, reduction="none") for pair in logits]).double().cpu()


def window_of(prompt: Sequence[int], window: int, beginning: int | None) -> list[int]:
    """The last tokens of `prompt`, `window` in all; a beginning-of-text token stays in front of them."""
    first = [prompt[0]] if prompt[0] == beginning and window < len(prompt) else []
    return [*first, *prompt[max(0, len(prompt) - window) + len(first) :]]


MODEL_CARD = Study(
    name="model-card",
    about="loss along a long prompt, needle score, acceptance of small caches",
    note="Columns `paper` are the paper's figures, of another model.",
    sizes=Sizes(),
    if_quick={"context": 8192, "step": 1024, "positions": 128},
    add_arguments=partial(inputs.add_arguments, draft=False),
    opened=Texts.opened,
    parts={
        "loss": Part(loss),
        "needle": Part(needle),
        "acceptance": Part(small_caches, ("cache", "context", "entries"), ("books", "needles")),
    },
)
