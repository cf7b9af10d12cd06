"""The acceptance rules that make speculative decoding lossless.

They need a draft, the verifier's probabilities and random numbers; no model and no cache. The host never
waits: the verdict of any draft is two numbers on the device. Row 0 of `probs` is the verifier's distribution
after the text so far, row `1 + i` the one after draft node `i`.

Two rules cover every draft:

- A *sampled* draft reports for each node the distribution `q` that its token was drawn from, given its
  elder siblings. The children of a node are tried in order: accept `x` with probability min(1, p(x) / q(x)),
  else replace `p` by norm(max(0, p - q)) (Leviathan et al. 2023, theorem 1; for several children the
  multi-round rejection of SpecInfer and Sequoia). If every child is rejected, the token is drawn from the
  `p` that is left.
- A *deterministic* draft (look-up, any greedy choice) reports no `q`: it is the sampled draft whose `q` is
  one-hot. Each child is then accepted with the probability that the verifier itself draws its token.

The length of a draft, and whether a sibling is drawn at all, may depend on anything drawn before. A node that
has been drawn is never dropped: dropping it by its cost would bias the output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload_rt.sampling.sampler import Draws
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import Tree, on_device


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens that continue the text so far.

    Attributes:
        tokens: token of each node.
        tree: parent of each node.
        probs: `[nodes, vocabulary]`, the distribution that each token was drawn from, given its elder
            siblings; None for a deterministic draft.
        source_nodes: number of nodes at the end that a token source added to a model's draft; their
            acceptance does not count for the model.
    """

    tokens: Tokens = field(default_factory=lambda: Tokens([]))
    tree: Tree = field(default_factory=Tree)
    probs: Tensor | None = None
    source_nodes: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tree):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tree)} parents")
        if self.probs is not None and len(self.probs) != len(self.tree):
            raise ValueError(f"{len(self.tree)} tokens but probs of shape {list(self.probs.shape)}")

    def __len__(self) -> int:
        return len(self.tree)


@dataclass(frozen=True)
class Verdict:
    """The result of a verification, on the device; the host waits once a round, to read it.

    Attributes:
        row: 0-d, row of the last accepted node; 0 if none was accepted.
        token: 0-d, the verifier's own token after that node.
    """

    row: Tensor
    token: Tensor


def verify_greedy(draft: Draft, likeliest: Tensor) -> Verdict:
    """Accepts the nodes whose tokens are the verifier's `likeliest` of their rows, `[1 + nodes]`."""
    if not len(draft):
        return Verdict(likeliest.new_zeros(()), likeliest[0])
    device = likeliest.device
    row = draft.tree.descend(draft.tokens.on(device) == likeliest[draft.tree.parent_rows(device)])
    # chosen[row] would wait for the device: torch reads an index without dimensions on the host.
    return Verdict(row, likeliest.gather(0, row[None])[0])


def verify(draft: Draft, probs: Tensor, draws: Draws) -> Verdict:
    """Samples accepted nodes and a final token that are distributed as `probs`, whatever was drafted.

    Args:
        probs: `[1 + nodes, vocabulary]`, the verifier's distributions.
    """
    if not len(draft):
        return Verdict(torch.zeros((), dtype=torch.long, device=probs.device), draws.categorical(probs[0]))
    device, tree = probs.device, draft.tree
    tokens, above = draft.tokens.on(device), tree.parent_rows(device)
    # Each row minus its rejected children so far; the last child is subtracted below.
    remaining = probs if len(tree.ranks) == 1 else probs.clone()
    last = torch.full((len(probs),), -1, device=device)
    chances = torch.empty(len(tree), dtype=torch.float64, device=device)
    for rank, elder in zip(tree.ranks, [[], *tree.ranks], strict=False):
        nodes = on_device(tuple(rank), device)
        rows = above[nodes]
        if elder:
            remaining[rows] = residual(remaining[rows], _proposal(draft, last[rows], probs))
        likely = remaining[rows, tokens[nodes]].double()
        drawn_from = torch.ones_like(likely)
        if draft.probs is not None:
            drawn_from = draft.probs[nodes, tokens[nodes]].double()
        # A token of proposal probability 0 was not drawn: nothing was left for this sibling.
        chances[nodes] = torch.where(drawn_from > 0, likely / drawn_from, 0.0)
        last[rows] = nodes
    row = draws.descend(tree, chances)
    final, child = remaining.index_select(0, row[None]), last.index_select(0, row[None])
    # Below a leaf nothing was proposed, so nothing is subtracted.
    proposal = _proposal(draft, child.clamp(min=0), probs) * (child >= 0)[:, None]
    return Verdict(row, draws.categorical(residual(final, proposal)[0]))


def _proposal(draft: Draft, nodes: Tensor, probs: Tensor) -> Tensor:
    """Distributions `[n, vocabulary]` that the tokens of `nodes` `[n]` were drawn from."""
    if draft.probs is not None:
        return draft.probs.index_select(0, nodes)
    certain = probs.new_zeros(len(nodes), probs.shape[1])
    return certain.scatter_(1, draft.tokens.on(probs.device)[nodes][:, None], 1.0)


def residual(probs: Tensor, proposal: Tensor) -> Tensor:
    """Returns norm(max(0, probs - proposal)) per row, or `probs` where both are equal up to rounding."""
    difference = torch.clamp(probs - proposal, min=0.0)
    total = difference.sum(-1, keepdim=True)
    return torch.where(total > 0, difference / total, probs)
