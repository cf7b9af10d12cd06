"""What a verification may yield, guessed before it is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload_rt.sampling import Sampler

LIKELY = Sampler(temperature=1.0)  # how sure a greedy draft was of its tokens


def doubt_scale(doubts: Sequence[float], acceptance: float) -> float:
    """What to multiply doubts by, so that on average as many tokens are rejected as `acceptance` says."""
    return (1.0 - acceptance) * len(doubts) / max(sum(doubts), 1e-6) if doubts else 0.0


def ranked(probs: Tensor, tokens: Tensor) -> list[Tensor]:
    """What `likely_outcomes` has to know of `probs`, before each token and after all of them.

    Args:
        probs: `[1 + tokens, vocabulary]`.

    Returns:
        The probability of each of `tokens` `[tokens]`, then the two likeliest tokens of each row and their
        probabilities, `[1 + tokens, 2]`.
    """
    best = probs.topk(min(2, probs.shape[-1]), dim=-1)
    return [probs[torch.arange(len(tokens), device=probs.device), tokens], best.indices, best.values]


def likely_outcomes(
    tokens: Sequence[int],
    chosen: Tensor,
    likely: Tensor,
    values: Tensor,
    most: int,
    acceptance: float,
    *,
    greedy: bool = True,
) -> list[tuple[int, ...]]:
    """What a verification of a chain may yield, by the probabilities of the model that drafted it.

    All tokens accepted and the likeliest one behind them, or rejected at one of them and the likeliest other
    token in its place. A token is doubted by what its distribution leaves to others, so that as many are
    rejected as `acceptance` says.

    Args:
        tokens: the chain.
        chosen, likely, values: see `ranked`.
        most: how many outcomes at most.
        greedy: the verifier takes its likeliest token, not one that is drawn.
    """
    rivals, shares = likely.tolist(), values.tolist()
    doubts = [max(1.0 - p, 1e-6) for p in chosen.tolist()]
    scale = doubt_scale(doubts, acceptance)
    outcomes: list[tuple[float, tuple[int, ...]]] = []
    reached = 1.0
    for i, (token, doubt) in enumerate(zip(tokens, doubts, strict=True)):
        rejected = min(0.9, scale * doubt)
        for rival, value in zip(rivals[i], shares[i], strict=True):
            if rival != token:
                outcomes.append((reached * rejected * min(1.0, value / doubt), (*tokens[:i], rival)))
                break
        reached *= 1.0 - rejected
    # Two models that take their likeliest tokens agree more often than either is sure of it.
    agreed = 1.0 - min(0.9, scale * (1.0 - shares[-1][0])) if greedy and tokens else shares[-1][0]
    outcomes.append((reached * agreed, (*tokens, rivals[-1][0])))
    outcomes.sort(key=lambda outcome: -outcome[0])
    return [outcome for _, outcome in outcomes[:most]]
