"""Guesses what a verification may yield, before it is over."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from offload_rt.drafting.base import Outcome
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.work import CopyToHost, Work
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.trees import Tree
from offload_rt.system.device_copies import to_device

LIKELY = Sampler(temperature=1.0)  # how sure a greedy draft was of its tokens


def doubt_scale(doubts: Sequence[float], acceptance: float) -> float:
    """Returns the factor for doubts by which as many tokens are rejected on average as `acceptance` says."""
    return (1.0 - acceptance) * len(doubts) / max(sum(doubts), 1e-6) if doubts else 0.0


def likely_outcomes(
    drafter: Verifier, tokens: Sequence[int], tree: Tree, logits: Tensor, limit: int, acceptance: float
) -> Work[list[Outcome]]:
    """Returns what a verification of a draft may yield, by the probabilities of the model that drew it.

    All tokens down to a leaf accepted and the likeliest one behind them, or a node's children all rejected
    and the likeliest other token in their place. An eldest child is doubted by what its distribution leaves
    to others, so that as many are rejected as `acceptance` says; its younger siblings and other tokens share
    that by their probabilities.

    Args:
        tokens: of the nodes, drawn by `drafter`.
        logits: `[1 + nodes, vocabulary]`, processed, after the sequence and after each node.
        limit: how many outcomes at most.
        acceptance: of an eldest child.
    """
    sampler = drafter.sampling.sampler
    probs = LIKELY.probs(logits) if sampler.greedy else sampler.probs(logits)
    children: list[list[int]] = [[] for _ in range(1 + len(tokens))]  # by the row of their parent
    for node, parent in enumerate(tree.parents):
        children[1 + parent].append(node)
    most = 1 + max(map(len, children))  # one of so many is none of the children
    best = probs.topk(min(most, probs.shape[-1]), dim=-1)
    chances = probs[tree.parent_rows(probs.device)].gather(1, to_device(tokens, probs.device)[:, None])[:, 0]
    copies = yield CopyToHost([chances, best.indices, best.values], drafter.stats)
    sure, rivals, shares = (values.tolist() for values in copies)
    doubts = {nodes[0]: max(1.0 - sure[nodes[0]], 1e-6) for nodes in children if nodes}
    scale = doubt_scale([*doubts.values()], acceptance)
    outcomes = dict[Outcome, float]()
    reached = [1.0] * (1 + len(tokens))  # by row

    def add(row: int, token: int, chance: float) -> None:
        outcome = (*(tokens[node] for node in tree.path(row)), token)
        outcomes[outcome] = outcomes.get(outcome, 0.0) + chance

    for row, nodes in enumerate(children):
        if not nodes:
            agreed = shares[row][0]
            if sampler.greedy and tokens:
                # Two models that take their likeliest tokens agree more often than either is sure of it.
                agreed = 1.0 - min(0.9, scale * (1.0 - agreed))
            add(row, rivals[row][0], reached[row] * agreed)
            continue
        eldest, *younger = nodes
        doubt = doubts[eldest]
        rejected = reached[row] * min(0.9, scale * doubt)
        reached[1 + eldest] = reached[row] - rejected
        for node in younger:
            reached[1 + node] = rejected * min(1.0, sure[node] / doubt)
        taken = {tokens[node] for node in nodes}
        for rival, value in zip(rivals[row], shares[row], strict=True):
            if rival not in taken:
                add(row, rival, rejected * min(1.0, value / doubt))
                break
    return sorted(outcomes, key=lambda outcome: -outcomes[outcome])[:limit]
