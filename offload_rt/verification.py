"""The rules of acceptance: what makes speculation lossless.

Pure functions of a draft and of the verifier's laws; no model, no cache. Row 0 of `laws` is the
verifier's law after the text so far, row 1 + i its law after draft node i.

Two rules cover every draft:

- a draft whose tokens were *sampled* reports, for each node, the law that its token was drawn from given
  its elder siblings. Children of a node are tried in order: accept x with min(1, p(x) / q(x)), else p
  becomes norm(max(0, p - q)) (Leviathan et al. 2023, theorem 1; for several children SpecInfer and
  Sequoia: multi-round rejection). When no child is left, the token is drawn from what p has become.
- a *deterministic* draft (look-up, any greedy choice) reports no laws: the token is drawn from the
  verifier's own law, and the walk goes on through the child that bears it, if there is one. At
  temperature 0 this is the rule for every draft.

The walk down a tree is the host's. Below the root of a chain there is nothing to choose between, so all its
nodes are judged at once where the laws are: `verify_chain` waits for no one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload_rt.sampling import Draws

ROOT = -1


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens below the text so far.

    Attributes:
        tokens: token of each node; a node comes after its parent and after its elder siblings. They may
            still be on the device (`drafting.drawn.DrawnTokens`): looking at them makes the host wait.
        parents: index of each node's parent, `ROOT` for the children of the text's last token.
        laws: `[nodes, vocabulary]`, the law each token was drawn from given its elder siblings; None for
            a deterministic draft.
        scores: `[nodes, vocabulary]`, logits of the model that drafted, before each token: for guesses of
            what a verification may yield, which decide nothing.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    laws: Tensor | None = None
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        if any(not ROOT <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents {list(self.parents)} must be {ROOT} or an earlier node")
        if self.laws is not None and len(self.laws) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens but laws of shape {tuple(self.laws.shape)}")

    @classmethod
    def chain(cls, tokens: Sequence[int], laws: Tensor | None = None, scores: Tensor | None = None) -> Draft:
        """The tree in which each node's parent is the one before it."""
        return cls(tokens, range(ROOT, len(tokens) - 1), laws, scores)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def children(self, node: int) -> list[int]:
        """Children of `node` (or of `ROOT`), eldest first."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    path: accepted nodes from the root down.
    token: the verifier's own token after them.
    """

    path: list[int]
    token: int


def verify_matching(draft: Draft, choose: Callable[[int], int]) -> Verdict:
    """The rule for deterministic drafts.

    Args:
        choose: the token that the verifier itself takes at a row of its laws. Asked only where the walk
            arrives, and once for each row.
    """
    path: list[int] = []
    node = ROOT
    while True:
        token = choose(node + 1)
        match = next((c for c in draft.children(node) if draft.tokens[c] == token), None)
        if match is None:
            return Verdict(path, token)
        path.append(match)
        node = match


def verify_sampled(draft: Draft, laws: Tensor, draws: Draws) -> Verdict:
    """The rule for sampled drafts; `laws` `[1 + nodes, vocabulary]`."""
    if draft.laws is None:
        raise ValueError("a sampled draft reports the laws its tokens were drawn from")
    path: list[int] = []
    node = ROOT
    while True:
        law = laws[node + 1]
        accepted = None
        for child in draft.children(node):
            token, proposal = draft.tokens[child], draft.laws[child]
            if draws.accept(float(law[token]) / float(proposal[token])):
                accepted = child
                break
            law = residual(law, proposal)
        if accepted is None:
            return Verdict(path, int(draws.categorical(law)))
        path.append(accepted)
        node = accepted


def residual(law: Tensor, proposal: Tensor) -> Tensor:
    """norm(max(0, law - proposal)); `law` itself where nothing is left (equal up to rounding)."""
    rest = torch.clamp(law - proposal, min=0.0)
    total = rest.sum()
    return torch.where(total > 0, rest / total, law)


def verify(draft: Draft, laws: Tensor, draws: Draws) -> Verdict:
    """Tokens that follow `laws`, whatever was drafted."""
    if draft.laws is not None:
        return verify_sampled(draft, laws, draws)
    return verify_matching(draft, lambda row: int(draws.categorical(laws[row])))


def verify_chain(
    tokens: Tensor, proposals: Tensor | None, laws: Tensor, draws: Draws
) -> tuple[Tensor, Tensor]:
    """Both rules for a chain, without the host: nothing here depends on a value.

    A deterministic draft is one that was drawn from laws with all weight on its tokens.

    Args:
        tokens: `[nodes]`.
        proposals: `[nodes, vocabulary]`, the laws the tokens were drawn from; None: deterministic.
        laws: `[1 + nodes, vocabulary]`.

    Returns:
        How many tokens are accepted, and the verifier's own token after them; 0-d, on the device.
    """
    nodes = len(tokens)
    if nodes == 0:
        return tokens.new_zeros(()), draws.categorical(laws[0])
    at = tokens[:, None]
    if proposals is None:
        proposals = torch.zeros_like(laws[1:]).scatter_(1, at, 1.0)
    likely = laws[:-1].gather(1, at)[:, 0].double() / proposals.gather(1, at)[:, 0].double()
    accepted = draws.accepted(likely)
    row = accepted[None]
    law = laws.index_select(0, row)[0]
    # Behind the last node nothing was proposed, and nothing is taken off.
    proposal = proposals.index_select(0, row.clamp(max=nodes - 1))[0] * (accepted < nodes)
    return accepted, draws.categorical(residual(law, proposal))
