"""The target's loss along a long prompt, and with more and more context before the same tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from offload_rt.model import CausalModel

HEAD_SLICE = 2048  # rows of logits at a time


@torch.inference_mode()
def token_losses(model: CausalModel, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """Loss in nats of each token but the first: `[tokens - 1]`, float64 on the CPU.

    Args:
        hidden: `[1, tokens, hidden_size]`, what the last layer put out.
    """
    goal = torch.tensor(tokens[1:], device=model.device)
    losses = []
    for start in range(0, len(goal), HEAD_SLICE):
        wanted = goal[start : start + HEAD_SLICE]
        logits = model.logits(hidden[:, start : start + len(wanted)]).float()
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(losses).double().cpu()


def step_means(losses: Tensor, step: int) -> list[float]:
    """Mean loss of the tokens at positions `0 .. step`, `step .. 2 step`, …; the first token has no loss."""
    ends = range(step, len(losses) + 2, step)
    return [float(losses[max(end - step - 1, 0) : end - 1].mean()) for end in ends]


def without_rise(contexts: Sequence[int], rises: Sequence[bool]) -> int:
    """The largest of `contexts` up to which nothing rises."""
    return next((contexts[max(at - 1, 0)] for at, rise in enumerate(rises) if rise), contexts[-1])


def paired(windows: Sequence[int], losses: Sequence[Tensor]) -> dict[str, Any]:
    """Losses of the same tokens with contexts of different length before them, as JSON values.

    `changes` are against the window before it, `errors` their standard errors, with tokens taken for
    independent; `without_rise` is the largest window up to which no change is above two of them.

    Args:
        windows: prompt lengths, the tokens themselves included, rising.
        losses: `[tokens]` with each.
    """
    changes = [torch.zeros_like(losses[0])]
    changes += [after - before for before, after in itertools.pairwise(losses)]
    means = [float(change.mean()) for change in changes]
    errors = [float(change.std() / len(change) ** 0.5) for change in changes]
    rises = [change > 2 * error for change, error in zip(means, errors, strict=True)]
    found = {"windows": list(windows), "means": [float(loss.mean()) for loss in losses]}
    return found | {"changes": means, "errors": errors, "without_rise": without_rise(windows, rises)}


def window_of(prompt: Sequence[int], window: int, beginning: int | None) -> list[int]:
    """The last tokens of `prompt`, `window` in all; a beginning-of-text token stays in front of them."""
    first = [prompt[0]] if prompt[0] == beginning and window < len(prompt) else []
    return [*first, *prompt[max(0, len(prompt) - window) + len(first) :]]
