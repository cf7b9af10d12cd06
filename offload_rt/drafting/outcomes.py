"""What a verification may yield, guessed before it is over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def likely_outcomes(
    tokens: Sequence[int], laws: Tensor, most: int, acceptance: float, *, greedy: bool = True
) -> list[tuple[int, ...]]:
    """What a verification of a chain may yield, by the laws of the model that drafted it.

    All tokens accepted and the likeliest one behind them, or rejected at one of them and the likeliest other
    token in its place. A token is doubted by what its law leaves to others, so that as many are rejected as
    `acceptance` says.

    Args:
        tokens: the chain.
        laws: `[1 + tokens, vocabulary]`, before each token and after the last.
        most: how many outcomes at most.
        greedy: the verifier takes its likeliest token, not one drawn from its law.
    """
    best = laws.topk(min(2, laws.shape[-1]), dim=-1)
    chosen = laws[range(len(tokens)), list(tokens)].tolist()
    likely, values = best.indices.tolist(), best.values.tolist()
    doubts = [max(1.0 - p, 1e-6) for p in chosen]
    scale = (1.0 - acceptance) * len(tokens) / sum(doubts) if tokens else 0.0
    outcomes: list[tuple[float, tuple[int, ...]]] = []
    reached = 1.0
    for i, (token, doubt) in enumerate(zip(tokens, doubts, strict=True)):
        rejected = min(0.9, scale * doubt)
        for rival, value in zip(likely[i], values[i], strict=True):
            if rival != token:
                outcomes.append((reached * rejected * min(1.0, value / doubt), (*tokens[:i], rival)))
                break
        reached *= 1.0 - rejected
    # Two models that take their likeliest tokens agree more often than either is sure of it.
    agreed = 1.0 - min(0.9, scale * (1.0 - values[-1][0])) if greedy and tokens else values[-1][0]
    outcomes.append((reached * agreed, (*tokens, likely[-1][0])))
    outcomes.sort(key=lambda outcome: -outcome[0])
    return [outcome for _, outcome in outcomes[:most]]
