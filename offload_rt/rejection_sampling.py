"""The rules of acceptance: what makes speculation lossless.

Pure functions of a draft and of the verifier's probabilities; no model, no cache, and no wait of the host:
whatever the draft, its verdict is two numbers on the device. Row 0 of `probs` is the verifier's distribution
after the text so far, row `1 + i` the one after draft node `i`.

Two rules cover every draft:

- A *sampled* draft reports for each node the probabilities `q` that its token was drawn from, given its
  elder siblings. Children of a node are tried in order: accept `x` with min(1, p(x) / q(x)), else `p` becomes
  norm(max(0, p - q)) (Leviathan et al. 2023, theorem 1; for several children SpecInfer and Sequoia:
  multi-round rejection). When no child is left, the token is drawn from what `p` has become.
- A *deterministic* draft (look-up, any greedy choice) reports none: it is the sampled one whose `q` is all on
  its token. Trying the children in order then means accepting each with the probability that the verifier
  itself draws it.

How far a draft goes, and whether a sibling is drawn at all, may depend on anything that was drawn before,
but a node that has been drawn is never dropped: dropping it by its cost would bias the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload_rt.host import to_device
from offload_rt.sampling import Draws
from offload_rt.trees import Tree, on_device


class Tokens:
    """Token ids that the host knows, that stand on the device, or both.

    What is drawn on a device stays there until a read that is needed anyway brings it along (`arrive`).

    Args:
        known: the ids, where the host knows them.
        tensor: `[count]` int64 on the device, where they stand there.
        nan: 0-d bool on the device: some of the logits that they were drawn from are NaN.
        on_nan: called where `nan` turns out to be true; raises.
    """

    def __init__(
        self,
        known: Sequence[int] | None = None,
        tensor: Tensor | None = None,
        nan: Tensor | None = None,
        on_nan: Callable[[], None] | None = None,
        parts: Sequence[Tokens] = (),
    ) -> None:
        if known is None and tensor is None:
            raise ValueError("tokens are known or stand on a device")
        self._known = None if known is None else list(known)
        self._tensor = tensor
        self._nan = nan
        self._on_nan = on_nan
        self._parts = parts

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """All of them, one after the other; what arrives for the whole arrives for each."""
        if len(parts) == 1:
            return parts[0]
        if all(part.arrived for part in parts):
            return cls([token for part in parts for token in part.known])
        device = next(part._tensor.device for part in parts if part._tensor is not None)
        return cls(tensor=torch.cat([part.on(device) for part in parts]), parts=parts)

    def __len__(self) -> int:
        if self._known is not None:
            return len(self._known)
        assert self._tensor is not None
        return len(self._tensor)

    @property
    def arrived(self) -> bool:
        """Whether the host knows them."""
        return self._known is not None

    @property
    def known(self) -> list[int]:
        """The ids; RuntimeError before they have arrived."""
        if self._known is None:
            raise RuntimeError("these tokens are on the device alone: read them first")
        return self._known

    def on(self, device: torch.device) -> Tensor:
        """The ids on `device`, `[count]`."""
        if self._tensor is None:
            self._tensor = to_device(self.known, device)
        return self._tensor

    def pending(self) -> list[Tensor]:
        """What a read has to bring: nothing, or ids and whether NaN was met."""
        if self.arrived:
            return []
        assert self._tensor is not None
        probes = [nan for part in (self, *self._parts) if (nan := part._nan) is not None]
        return [self._tensor, *([torch.stack(probes).any()] if probes else [])]

    def arrive(self, read: Sequence[Tensor]) -> None:
        """Takes what was read of `pending`.

        Raises:
            NotANumber: the tokens mean nothing.
        """
        if not read:
            return
        self._take(read[0].tolist())
        if len(read) > 1 and bool(read[1]):
            for part in (self, *self._parts):
                if part._on_nan is not None:
                    part._on_nan()

    def _take(self, ids: list[int]) -> None:
        self._known = ids
        start = 0
        for part in self._parts:
            part._take(ids[start : start + len(part)])
            start += len(part)


@dataclass(frozen=True)
class Draft:
    """A tree of proposed tokens below the text so far.

    Attributes:
        tokens: token of each node.
        tree: how the nodes hang together.
        probs: `[nodes, vocabulary]`, what each token was drawn from given its elder siblings; None for a
            deterministic draft, whose tokens are certain.
        found: so many nodes at the end were found beside what a model drafted: what becomes of them says
            nothing of that model.
    """

    tokens: Tokens = field(default_factory=lambda: Tokens([]))
    tree: Tree = field(default_factory=Tree)
    probs: Tensor | None = None
    found: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.tree):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.tree)} parents")
        if self.probs is not None and len(self.probs) != len(self.tree):
            raise ValueError(f"{len(self.tree)} tokens but probs of shape {list(self.probs.shape)}")

    def __len__(self) -> int:
        return len(self.tree)


@dataclass(frozen=True)
class Verdict:
    """What a verification decided, on the device; reading it is the one wait of a round.

    Attributes:
        row: 0-d, of the last accepted node; 0: none was accepted.
        token: 0-d, the verifier's own token after it.
    """

    row: Tensor
    token: Tensor


def verify_greedy(draft: Draft, chosen: Tensor) -> Verdict:
    """The verdict where the verifier takes `chosen` `[1 + nodes]`, its most likely token of each row."""
    if not len(draft):
        return Verdict(chosen.new_zeros(()), chosen[0])
    device = chosen.device
    row = draft.tree.descend(draft.tokens.on(device) == chosen[draft.tree.parent_rows(device)])
    # chosen[row] would wait for the device: torch reads an index without dimensions on the host.
    return Verdict(row, chosen.gather(0, row[None])[0])


def verify(draft: Draft, probs: Tensor, draws: Draws) -> Verdict:
    """Tokens distributed as `probs` `[1 + nodes, vocabulary]` say, whatever was drafted."""
    if not len(draft):
        return Verdict(torch.zeros((), dtype=torch.long, device=probs.device), draws.categorical(probs[0]))
    device, tree = probs.device, draft.tree
    tokens, above = draft.tokens.on(device), tree.parent_rows(device)
    # What is left of each row once the children tried so far are rejected; the last one's is taken off below.
    left = probs if len(tree.ranks) == 1 else probs.clone()
    last = torch.full((len(probs),), -1, device=device)
    chances = torch.empty(len(tree), dtype=torch.float64, device=device)
    for rank, elder in zip(tree.ranks, [[], *tree.ranks], strict=False):
        nodes = on_device(tuple(rank), device)
        rows = above[nodes]
        if elder:
            left[rows] = residual(left[rows], _proposal(draft, last[rows], probs))
        likely = left[rows, tokens[nodes]].double()
        drawn_from = torch.ones_like(likely)
        if draft.probs is not None:
            drawn_from = draft.probs[nodes, tokens[nodes]].double()
        # A candidate beyond the support of its proposal was not drawn at all.
        chances[nodes] = torch.where(drawn_from > 0, likely / drawn_from, 0.0)
        last[rows] = nodes
    row = draws.descend(tree, chances)
    final, child = left.index_select(0, row[None]), last.index_select(0, row[None])
    # Behind a leaf nothing was proposed, and nothing is taken off.
    proposal = _proposal(draft, child.clamp(min=0), probs) * (child >= 0)[:, None]
    return Verdict(row, draws.categorical(residual(final, proposal)[0]))


def _proposal(draft: Draft, nodes: Tensor, probs: Tensor) -> Tensor:
    """What the tokens of `nodes` `[n]` were drawn from, `[n, vocabulary]`."""
    if draft.probs is not None:
        return draft.probs.index_select(0, nodes)
    certain = probs.new_zeros(len(nodes), probs.shape[1])
    return certain.scatter_(1, draft.tokens.on(probs.device)[nodes][:, None], 1.0)


def residual(probs: Tensor, proposal: Tensor) -> Tensor:
    """norm(max(0, probs - proposal)) by rows; `probs` where nothing is left (equal up to rounding)."""
    rest = torch.clamp(probs - proposal, min=0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, probs)
