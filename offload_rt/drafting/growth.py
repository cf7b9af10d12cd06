"""Drafts that a model draws by itself: chains, fixed trees, and trees grown best first.

A pass over the newest nodes gives what their children are drawn from. Siblings are drawn without
replacement: each from what its elder siblings have left, which is also what it reports. Independent
sequences are the exception. At temperature 0 the children of a node are its most likely tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from offload_rt.caches.base import Cache
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import DraftAhead, Outcome, Proposal, TokenView
from offload_rt.drafting.outcomes import LIKELY, doubt_scale, likely_outcomes
from offload_rt.drafting.verifier import Verifier
from offload_rt.model.passes import PassOutput
from offload_rt.model.work import CopyToHost, Work
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.sampler import choices
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, Tree, on_device

Child = tuple[int, int]
"""A node to draw: its parent, and how many elder siblings it has."""


class NodeEntries:
    """The speculative entries of a cache that hold the nodes of a draft.

    A draft numbers its nodes from 0, below `ROOT`, the sequence's last token; the cache numbers its entries,
    among them those of other drafts and of the end of the sequence.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._entries: list[int] = []  # of `ROOT`, then of nodes in their order
        self._changes = -1  # `changes` of the cache's speculative tokens when the entries were right

    def lacking(
        self, view: TokenView, parents: Sequence[int], levels: Sequence[Tokens]
    ) -> tuple[list[int], list[int]]:
        """Finds the sequence and all levels but the last in the cache; other drafts may have changed it.

        Where they did, it forgets everything else.

        Returns:
            Tokens that it lacks: the end of the sequence, and nodes of these levels.
        """
        speculative = self._cache.speculative
        if self._changes == speculative.changes:
            return [], []
        sequence = view.part(self._cache.verified_length)
        # Before the first level, logits are wanted after the sequence's last token: it goes through the model
        # again.
        matched = speculative.match(sequence if levels else sequence[:-1])
        missing = sequence[len(matched) :]
        before = [token for level in levels[:-1] for token in level.known]
        path = matched[-1:]
        if not missing:
            for parent, token in zip(parents, before, strict=False):
                entry = speculative.child(path[1 + parent], token)
                if entry is None:
                    break
                path.append(entry)
        nodes = path[1:]
        self._cache.keep([*matched, *nodes])
        self._entries = list(range(len(sequence) - 1, len(sequence) + len(nodes)))
        return missing, before[len(nodes) :]

    def chain(self, count: int) -> range:
        """Returns the parents of the next `count` tokens of the sequence, each behind the one before."""
        last = len(self._cache.speculative) - 1
        return range(last, last + count)

    def place(self, parents: Sequence[int], count: int) -> list[int]:
        """Places the nodes that have no entry, behind `count` tokens of the sequence that come next.

        Args:
            parents: of all nodes.

        Returns:
            For each of these nodes, the entry of its parent.
        """
        first, new = len(self._cache.speculative) + count, parents[len(self._entries) - 1 :]
        self._entries += range(first, first + len(new))
        return [self._entries[1 + parent] for parent in new]

    def settle(self) -> None:
        """Notes that the cache has what was placed."""
        self._changes = self._cache.speculative.changes


class Growth(Proposal, ABC):
    """A draft below the last token of `view`, with the KV of its inner nodes in the verifier's cache.

    It grows by a level a step. Another draft may be grown in the same cache between two steps: what is
    missing then is computed again.
    """

    def __init__(self, verifier: Verifier, view: TokenView, shape: DraftShape) -> None:
        self._verifier = verifier
        self._view = view
        self._shape = shape
        self._parents: list[int] = []
        self._levels: list[Tokens] = []
        self._probs: list[Tensor] = []
        self._logits: list[Tensor] = []  # after the sequence, and after the nodes of each level
        self._newest = range(ROOT, 0)  # nodes of the last level; at first the sequence's last token
        self._nan: Tensor | None = None  # 0-d bool: met in the logits after them
        self._entries = NodeEntries(verifier.cache)

    def draft(self) -> Draft:
        probs = torch.cat(self._probs) if self._probs else None
        return Draft(Tokens.joined(self._levels), Tree(tuple(self._parents)), probs)

    def outcomes(self, limit: int, acceptance: float) -> Work[list[Outcome]]:
        draft = self.draft()
        if not len(draft):
            return []
        yield from self._arrive(draft.tokens)
        if len(self._logits) == len(self._levels):
            self._logits.append((yield from self.foresee()))
        given = draft.tokens.known, draft.tree, torch.cat(self._logits)
        return (yield from likely_outcomes(self._verifier, *given, limit, acceptance))

    def step(self) -> Work[bool]:
        if not (yield from self._deepen()):
            return False
        yield from self._arrive(self._levels[-1])
        return True

    def complete(self) -> Work[Draft]:
        while (yield from self._deepen()):
            pass
        return self.draft()

    @abstractmethod
    def _deepen(self) -> Work[bool]:
        """Draws another level, which may stay on the device; returns False once the draft is complete."""

    def foresee(self) -> Work[Tensor]:
        """Returns the processed logits after each node of the newest level, at first after the sequence.

        What the cache lacks above it goes through the model in front of it.
        """
        yield from self._verifier.catch_up()
        entries, newest = self._entries, self._levels[-1] if self._levels else None
        sequence, nodes = entries.lacking(self._view, self._parents, self._levels)
        if sequence and newest is not None and self._verifier.first_order is not None:
            # The first order is only for the sequence.
            yield from self._pass(entries.chain(len(sequence)), sequence, first=True)
            sequence = []
        parents = [*entries.chain(len(sequence)), *entries.place(self._parents, len(sequence))]
        ids = [*sequence, *nodes]
        logits = yield from self._pass(parents, ids, newest, len(self._newest), first=bool(sequence))
        entries.settle()
        processor, stats = self._verifier.sampling.processor, self._verifier.stats
        return (yield from processor.process(logits, self._view, self._levels, self._parents, stats))

    def _pass(
        self,
        parents: Sequence[int],
        ids: Sequence[int],
        draft: Tokens | None = None,
        rows: int = 1,
        *,
        first: bool = False,
    ) -> Work[Tensor]:
        """A pass whose tokens stay in the cache; the logits of the last `rows`."""
        output: PassOutput = yield self._verifier.forward(
            self._view, parents, ids, draft, rows=rows, first=first
        )
        self._verifier.cache.commit(range(len(parents)))
        return output.logits

    def _offered(self, logits: Tensor, count: int) -> Tensor:
        """Returns what the children of each newest node are drawn from, one row a node.

        Returns:
            Probabilities `[nodes, vocabulary]`; where all is greedy the tokens themselves, `[nodes, most]`.
        """
        sampler = self._verifier.sampling.sampler
        if sampler.greedy:
            offered = choices(logits)[:, None]  # among equals the lowest id, as the verifier takes it
            probe = logits.gather(1, offered)
            if count > 1:
                best = logits.topk(count).indices
                # Among equals another one may come first there: it takes that one's place.
                others = torch.where(best == offered, best[:, :1], best)[:, 1:]
                offered = torch.cat([offered, others], 1)
        else:
            offered = sampler.probs(logits)
            probe = offered[:, 0]
        self._nan = probe.isnan().any()
        return offered

    def _draw(self, children: Sequence[Child], offered: Tensor) -> None:
        """Adds children to the draft, the eldest of all nodes first.

        Args:
            offered: what each node's next child is drawn from, see `_offered`; the newest node's comes last.
        """
        sampling, behind = self._verifier.sampling, len(offered) - len(self._parents)

        def rows(nodes_and_ranks: Sequence[Child]) -> Tensor:
            return on_device(tuple(behind + parent for parent, _ in nodes_and_ranks), offered.device)

        if sampling.sampler.greedy:
            tokens = offered[rows(children), on_device(tuple(rank for _, rank in children), offered.device)]
        else:
            pieces = []
            for _, siblings in groupby(children, key=itemgetter(1)):
                at = rows(list(siblings))
                probs = offered[at]
                self._probs.append(probs)
                pieces.append(sampling.draws.categorical(probs))
                if self._shape.kind not in ("chain", "sequences"):
                    offered[at] = without(probs, pieces[-1])
            tokens = torch.cat(pieces)
        self._levels.append(Tokens(tensor=tokens, nan=self._nan, on_nan=self._trace_nan))
        self._newest = range(len(self._parents), len(self._parents) + len(children))
        self._parents += [parent for parent, _ in children]

    def _arrive(self, tokens: Tokens, also: Sequence[Tensor] = ()) -> Work[list[Tensor]]:
        """Brings tokens that were drawn to the host, and other results in the same read."""
        pending = tokens.pending()
        copies = yield CopyToHost([*pending, *also], self._verifier.stats)
        tokens.arrive(copies[: len(pending)])
        return list(copies[len(pending) :])

    def _trace_nan(self) -> None:
        self._verifier.trace_nan(self._view, Draft(Tokens.joined(self._levels), Tree(tuple(self._parents))))


@dataclass
class Chain:
    """A chain that is drawn beside others: its tokens, and one row each before them."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class LevelGrowth(Growth):
    """A chain, independent sequences or a tree whose shape is known before."""

    def __init__(self, verifier: Verifier, view: TokenView, shape: DraftShape) -> None:
        super().__init__(verifier, view, shape)
        self._widths = shape.levels

    def _deepen(self) -> Work[bool]:
        depth = len(self._levels)
        # Fewer nodes than planned where there are more ranks than tokens.
        widths = self._widths[depth][: len(self._newest)] if depth < len(self._widths) else []
        if not any(widths) or self._ended():
            return False
        logits = yield from self.foresee()
        self._logits.append(logits)
        widest = min(max(widths), logits.shape[1])
        children = [
            (node, rank)
            for rank in range(widest)
            for node, width in zip(self._newest, widths, strict=True)
            if width > rank
        ]
        self._draw(children, self._offered(logits, widest))
        return True

    def begin_with(self, chain: Chain) -> None:
        """Begins with a chain that was drawn with others, and may be in the cache."""
        if chain.tokens:
            self._levels = [Tokens([token]) for token in chain.tokens]
            self._parents = list(range(ROOT, len(chain.tokens) - 1))
            self._newest = range(len(chain.tokens) - 1, len(chain.tokens))
            self._probs, self._logits = list(chain.probs), list(chain.logits)

    def _ended(self) -> bool:
        """Returns whether every newest node is a stop token, so that nothing need be drafted behind it."""
        if not self._levels or not self._levels[-1].arrived:
            return False
        stop_tokens = self._verifier.sampling.stop_tokens
        return all(token in stop_tokens for token in self._levels[-1].known)


class OutcomeForest(Growth, DraftAhead):
    """Chains below several outcomes of a verification, drawn together: a pass takes a token of each.

    The first nodes are the outcomes themselves. What they share, the beginning of the draft that is verified,
    is in the cache already.
    """

    def __init__(self, verifier: Verifier, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> None:
        super().__init__(verifier, view, CHAIN)
        self.depth = 0
        self._shapes = shapes
        self._chains = {outcome: Chain() for outcome in shapes}
        self._growing = list(shapes)  # outcomes whose chains have the newest nodes
        prefixes = sorted({outcome[:end] for outcome in shapes for end in range(1, len(outcome))}, key=len)
        for nodes in (prefixes, self._growing):
            if nodes:
                self._levels.append(Tokens([node[-1] for node in nodes]))
                self._parents += [prefixes.index(node[:-1]) if node[:-1] else ROOT for node in nodes]
        self._newest = range(len(prefixes), len(self._parents))

    @staticmethod
    def nodes(shapes: Mapping[Outcome, DraftShape]) -> int:
        """Returns how many nodes such a forest has at most."""
        return sum(len(outcome) + shape.depth for outcome, shape in shapes.items())

    def proposals(self) -> dict[Outcome, Proposal]:
        proposals = dict[Outcome, Proposal]()
        for outcome, chain in self._chains.items():
            proposal = LevelGrowth(self._verifier, self._view.extended(outcome), self._shapes[outcome])
            proposal.begin_with(chain)
            proposals[outcome] = proposal
        return proposals

    def step(self) -> Work[bool]:
        if not (yield from super().step()):
            return False
        self.depth += 1
        for outcome, token in zip(self._growing, self._levels[-1].known, strict=True):
            self._chains[outcome].tokens.append(token)
        return True

    def _deepen(self) -> Work[bool]:
        rows = [row for row, outcome in enumerate(self._growing) if self._grows(outcome)]
        if not rows:
            return False
        logits = yield from self.foresee()
        self._draw([(self._newest[row], 0) for row in rows], self._offered(logits, 1))
        self._growing = [self._growing[row] for row in rows]
        for at, (row, outcome) in enumerate(zip(rows, self._growing, strict=True)):
            chain = self._chains[outcome]
            chain.logits.append(logits[row : row + 1])
            chain.probs += [probs[at : at + 1] for probs in self._probs[-1:]]
        return True

    def _grows(self, outcome: Outcome) -> bool:
        """Returns whether the chain below an outcome is not complete."""
        last = (*outcome, *self._chains[outcome].tokens)[-1]
        deeper = self.depth < self._shapes[outcome].depth
        return deeper and last not in self._verifier.sampling.stop_tokens


def without(probs: Tensor, tokens: Tensor) -> Tensor:
    """Returns `probs` `[rows, vocabulary]` without a token of each row, normalized; 0 where none is left."""
    remaining = probs.scatter(1, tokens[:, None], 0.0)
    return remaining / remaining.sum(-1, keepdim=True).clamp(min=torch.finfo(remaining.dtype).tiny)


@dataclass
class _Node:
    """A node whose children may be drawn.

    Attributes:
        number: in the draft, or `ROOT`.
        reached: chance that a verification comes to its next child.
        chances: of its children to be accepted then.
        children: how many of them are drawn.
    """

    number: int
    reached: float
    chances: list[float]
    children: int = 0

    @property
    def promise(self) -> float:
        """Chance that its next child is accepted."""
        return self.reached * self.chances[self.children] if self.children < len(self.chances) else 0.0


class BestFirst(Growth):
    """A tree that grows where the draft's own probabilities promise most.

    Each step draws the children with the highest chance to be accepted, as many as keep `nodes` and `depth`
    of the shape. What promises too little is not drawn; what is drawn is proposed.
    """

    CHILDREN = 8
    """Most children of a node."""

    def __init__(self, verifier: Verifier, view: TokenView, shape: DraftShape) -> None:
        super().__init__(verifier, view, shape)
        self._open: list[_Node] = []
        self._promises = [1.0]  # of the newest nodes
        self._remaining: Tensor | None = None  # what is left of what was offered, of all nodes
        self._doubts: list[float] = []

    def _deepen(self) -> Work[bool]:
        room = min(self._shape.per_pass, self._shape.nodes - len(self._parents))
        if len(self._levels) == self._shape.depth or not room:
            return False
        logits = yield from self.foresee()
        self._logits.append(logits)
        offered = self._offered(logits, min(self.CHILDREN, logits.shape[1]))
        self._remaining = offered if self._remaining is None else torch.cat([self._remaining, offered])
        yield from self._open_newest(logits, offered)
        self._draw(self._choose(room), self._remaining)
        return True

    def _open_newest(self, logits: Tensor, offered: Tensor) -> Work[None]:
        """Notes how likely each child of the newest nodes is to be accepted, where the elder ones are not.

        The eldest by how much the draft doubts it, the others by what has been seen of their ranks.
        """
        if self._verifier.sampling.sampler.greedy:
            doubts = 1.0 - LIKELY.probs(logits).gather(1, offered[:, :1])[:, 0]
            possible = torch.full_like(doubts, offered.shape[1])
        else:
            # How often a drawn token is rejected rises with the root of how often two draws differ, and says
            # nothing about which one was drawn (measured on the demo pair).
            doubts = (1.0 - (offered**2).sum(-1)).clamp(min=0.0).sqrt()
            possible = (offered > 0).sum(-1, dtype=doubts.dtype).clamp(max=self.CHILDREN)
        newest = self._levels[-1] if self._levels else Tokens([])
        (figures,) = yield from self._arrive(newest, [torch.stack([doubts, possible], 1)])
        usual, *later = self._shape.rates
        for number, reached, (doubt, ranks) in zip(
            self._newest, self._promises, figures.tolist(), strict=True
        ):
            self._doubts.append(doubt)
            eldest = 1.0 - min(0.9, doubt_scale(self._doubts, usual) * doubt)
            self._open.append(_Node(number, reached, [eldest, *later[: int(ranks) - 1]]))

    def _choose(self, count: int) -> list[Child]:
        """The most promising children, the eldest of all nodes first."""
        children = []
        for _ in range(count):
            node = max(self._open, key=lambda node: node.promise)
            if node.promise <= 0.0:
                break
            children.append((node.number, node.children, node.promise))
            node.reached *= 1.0 - node.chances[node.children]
            node.children += 1
        children.sort(key=itemgetter(1))
        self._promises = [promise for *_, promise in children]
        return [(number, rank) for number, rank, _ in children]
