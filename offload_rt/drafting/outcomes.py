"""Guesses what a verification may yield, before it is over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offload_rt.drafting.base import Outcome
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.work import CopyToHost, Work
from offload_rt.sampling.sampler import Sampler
from offload_rt.system.device_copies import to_device

LIKELY = Sampler(temperature=1.0)  # how sure a greedy draft was of its tokens


def doubt_scale(doubts: Sequence[float], acceptance: float) -> float:
    """Returns the factor for doubts by which as many tokens are rejected on average as `acceptance` says."""
    return (1.0 - acceptance) * len(doubts) / max(sum(doubts), 1e-6) if doubts else 0.0


def chain_outcomes(
    drafter: Verifier, tokens: Sequence[int], logits: Tensor, limit: int, acceptance: float
) -> Work[list[Outcome]]:
    """Returns what a verification of a chain may yield, by the probabilities of the model that drafted it.

    All tokens accepted and the likeliest one behind them, or rejected at one of them and the likeliest other
    token in its place. A token is doubted by what its distribution leaves to others, so that as many are
    rejected as `acceptance` says.

    Args:
        tokens: the chain, drafted by `drafter`.
        logits: `[1 + tokens, vocabulary]`, processed, before each token and after the last.
        limit: how many outcomes at most.
    """
    sampler = drafter.sampling.sampler
    probs = LIKELY.probs(logits) if sampler.greedy else sampler.probs(logits)
    best = probs.topk(min(2, probs.shape[-1]), dim=-1)
    chances = probs[:-1].gather(1, to_device(tokens, probs.device)[:, None])[:, 0]
    copies = yield CopyToHost([chances, best.indices, best.values], drafter.stats)
    sure, rivals, shares = (values.tolist() for values in copies)
    doubts = [max(1.0 - p, 1e-6) for p in sure]
    scale = doubt_scale(doubts, acceptance)
    outcomes: list[tuple[float, Outcome]] = []
    reached = 1.0
    for i, (token, doubt) in enumerate(zip(tokens, doubts, strict=True)):
        rejected = min(0.9, scale * doubt)
        for rival, value in zip(rivals[i], shares[i], strict=True):
            if rival != token:
                outcomes.append((reached * rejected * min(1.0, value / doubt), (*tokens[:i], rival)))
                break
        reached *= 1.0 - rejected
    # Two models that take their likeliest tokens agree more often than either is sure of it.
    agreed = shares[-1][0]
    if sampler.greedy and tokens:
        agreed = 1.0 - min(0.9, scale * (1.0 - agreed))
    outcomes.append((reached * agreed, (*tokens, rivals[-1][0])))
    outcomes.sort(key=lambda outcome: -outcome[0])
    return [outcome for _, outcome in outcomes[:limit]]
