"""Drafts that a model draws by itself: chains, fixed trees, and trees grown best first.

A pass over the newest nodes gives what their children are drawn from. Siblings are drawn without
replacement: each from what its elder siblings have left, which is also what it reports. Independent
sequences are the exception. At temperature 0 the children of a node are its most likely tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.drafting.base import Outcome, TokenView
from offload_rt.drafting.outcomes import LIKELY, doubt_scale, likely_outcomes, ranked
from offload_rt.drafting.shapes import DraftShape
from offload_rt.drafting.verifier import Verifier
from offload_rt.expectations import NEXT_CHOICE, SECOND_CHOICE
from offload_rt.host import to_device
from offload_rt.layers import LayerPlan
from offload_rt.parts import Output
from offload_rt.passes import Forward, Read, Work
from offload_rt.sampling import choices
from offload_rt.trees import ROOT, Tree, on_device
from offload_rt.verification import Draft, Tokens


class GrowsFrom(Protocol):
    """Who grows a draft (see `model_drafter.ModelDrafter`)."""

    verifier: Verifier
    stop_tokens: Collection[int]
    first_plan: LayerPlan | None


class Growth:
    """A draft below the last token of `view`, with the KV of its inner nodes in the verifier's cache.

    Another draft may be grown in the same cache between two steps: what is missing then is computed again.
    """

    def __init__(self, drafter: GrowsFrom, view: TokenView, shape: DraftShape) -> None:
        self._drafter = drafter
        self._verifier = drafter.verifier
        self._view = view
        self._shape = shape
        self._parents: list[int] = []
        self._pieces: list[Tokens] = []
        self._probs: list[Tensor] = []
        self._passed = 0  # nodes whose children may be drawn
        self._entries: list[int] = []  # of these nodes in the cache …
        self._last_entry = -1  # … and of the text's last token
        self._changes = -1  # of the cache's held tokens when they were last looked up

    def draft(self) -> Draft:
        if not self._pieces:
            return Draft()
        probs = torch.cat(self._probs) if self._probs else None
        return Draft(Tokens.joined(self._pieces), Tree(tuple(self._parents)), probs)

    def _add(self, parents: Sequence[int], tokens: Tokens, probs: Tensor | None) -> None:
        self._parents += parents
        self._pieces.append(tokens)
        if probs is not None:
            self._probs.append(probs)

    def foresee(self) -> Work[Tensor]:
        """Takes what is missing of the text into the cache; logits `[1, vocabulary]` after its last token."""
        held = self._verifier.cache.held
        missing = self._verifier.roll_back(self._view)
        logits = yield from self._run(self._below_text(len(held), missing))
        self._last_entry = len(held) - 1
        self._changes = held.changes
        return logits

    def _below_text(self, start: int, missing: list[int]) -> Forward:
        """A pass over the end of the text, which `start` entries come before."""
        parents = range(start - 1, start + len(missing) - 1)
        return self._verifier.forward(parents, missing, rows=1, plan=self._drafter.first_plan)

    def _pass(self, nodes: int) -> Work[Tensor]:
        """Passes over the newest `nodes`; their logits."""
        held = self._verifier.cache.held
        if self._changes != held.changes:
            yield from self._restore()
        start = len(held)
        first = len(self._parents) - nodes
        pieces: list[Tokens] = []
        count = nodes
        for piece in reversed(self._pieces):
            if count == 0:
                break
            pieces.insert(0, piece)
            count -= len(piece)
        newest = Tokens.joined(pieces)
        parents = [self._entry(parent, first, start) for parent in self._parents[first:]]
        known, drawn = (newest.known, None) if newest.arrived else ([], newest)
        logits = yield from self._run(self._verifier.forward(parents, known, drawn, rows=nodes))
        self._entries += range(start, start + nodes)
        self._passed += nodes
        self._changes = held.changes
        return logits

    def _run(self, forward: Forward) -> Work[Tensor]:
        output: Output = yield forward
        self._verifier.cache.commit(range(forward.part.new.count))
        return output.logits

    def _entry(self, node: int, first: int, start: int) -> int:
        """Where a node stands, in the count of a pass over the nodes from `first` on."""
        if node == ROOT:
            return self._last_entry
        return self._entries[node] if node < first else start + node - first

    def _restore(self) -> Work[None]:
        """Finds the nodes in the cache again after others have used it, and computes what is gone."""
        cache, view = self._verifier.cache, self._view
        path = cache.held.match(view.part(cache.verified_length))
        known = self.draft().tokens.known
        kept = list(path)
        places: dict[int, int] = {}
        for node in range(self._passed):
            above = path[-1] if self._parents[node] == ROOT and path else places.get(self._parents[node])
            entry = None if above is None else cache.held.child(above, known[node])
            if entry is None or len(path) < len(view) - cache.verified_length:
                break
            places[node] = entry
            kept.append(entry)
        cache.keep(kept)
        self._last_entry = len(path) - 1
        self._entries = list(range(len(path), len(kept)))
        missing = view.part(cache.verified_length + len(path))
        if missing:
            start = len(path)
            yield from self._run(self._below_text(start, missing))
            self._last_entry = start + len(missing) - 1
        first, start = len(self._entries), len(cache.held)
        if first < self._passed:
            parents = [self._entry(parent, first, start) for parent in self._parents[first : self._passed]]
            lost = known[first : self._passed]
            yield from self._run(self._verifier.forward(parents, lost, rows=1))
            self._entries += range(start, start + self._passed - first)
        self._changes = cache.held.changes

    def _arrive(self, tokens: Tokens, also: Sequence[Tensor] = ()) -> Work[list[Tensor]]:
        """Brings tokens that were drawn to the host, and other results in the same read."""
        pending = tokens.pending()
        read = yield Read([*pending, *also], self._verifier.stats)
        tokens.arrive(read[: len(pending)])
        return list(read[len(pending) :])

    def _trace_nan(self) -> None:
        self._verifier.trace_nan(self._view, self.draft())


class LevelGrowth(Growth):
    """A chain, independent sequences or a tree whose shape is known before: one level of nodes a step."""

    def __init__(self, drafter: GrowsFrom, view: TokenView, shape: DraftShape) -> None:
        super().__init__(drafter, view, shape)
        self._depth = 0
        self._level: list[int] = [ROOT]
        self._logits: list[Tensor] = []
        self._stopped = False

    def step(self) -> Work[bool]:
        if not (yield from self._deepen()):
            return False
        tokens = self._pieces[-1]
        yield from self._arrive(tokens)
        # No use to draft beyond the end of the text.
        self._stopped = all(token in self._drafter.stop_tokens for token in tokens.known)
        return True

    def complete(self) -> Work[Draft]:
        while (yield from self._deepen()):
            pass
        return self.draft()

    def _deepen(self) -> Work[bool]:
        if self._depth >= self._shape.depth or self._stopped:
            return False
        if self._depth == 0:
            logits = yield from self.foresee()
            # There are no more ranks than tokens.
            self._shape = replace(self._shape, rates=self._shape.rates[: logits.shape[1]])
        widths = self._shape.children(self._depth, len(self._level))
        if not any(widths):
            return False
        if self._depth:
            logits = yield from self._pass(len(self._level))
        self._logits.append(logits)
        sampler = self._verifier.sampling.sampler
        widest = min(max(widths), logits.shape[1])
        # Rows that have an eldest child, those that have a second one, …
        rows = [[row for row, width in enumerate(widths) if width > child] for child in range(widest)]
        if sampler.greedy:
            # Among equals the lowest id, as the verifier takes it.
            best = choices(logits)[:, None] if widest == 1 else logits.topk(widest).indices
            drawn = torch.cat([best[_at(which, best), child] for child, which in enumerate(rows)])
            probs, probe = None, logits.gather(1, best[:, :1])
        else:
            drawn, probs = self._draw(sampler.probs(logits), rows)
            probe = probs[:, :1]
        tokens = Tokens(tensor=drawn, nan=probe.isnan().any(), on_nan=self._trace_nan)
        first = len(self._parents)
        self._add([self._level[row] for which in rows for row in which], tokens, probs)
        self._level = list(range(first, len(self._parents)))
        self._depth += 1
        return True

    def _draw(self, probs: Tensor, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """The eldest child of the first `rows`, the second one of the next, and what each was drawn from."""
        tokens, drawn_from = [], []
        held: Sequence[int] = range(len(probs))  # rows of which there is something left
        for child, which in enumerate(rows):
            place = {row: at for at, row in enumerate(held)}
            probs, held = probs[_at([place[row] for row in which], probs)], which
            drawn_from.append(probs)
            tokens.append(self._verifier.sampling.draws.categorical(probs))
            if child + 1 < len(rows) and self._shape.kind != "sequences":
                probs = without(probs, tokens[-1])
        return torch.cat(tokens), torch.cat(drawn_from)

    def outcomes(self, most: int, acceptance: float) -> Work[list[Outcome]]:
        draft = self.draft()
        if not len(draft) or not draft.tree.is_chain:
            return []
        yield from self._arrive(draft.tokens)
        verifier, tokens = self._verifier, draft.tokens.known
        if self._passed < len(draft):
            self._logits.append((yield from self._pass(len(draft) - self._passed)))
        return (yield from chain_outcomes(verifier, tokens, torch.cat(self._logits), most, acceptance))


def _at(rows: Sequence[int], table: Tensor) -> slice | Tensor:
    """These rows of a table, rising; all of them by a slice, which copies nothing."""
    return slice(None) if len(rows) == len(table) else on_device(tuple(rows), table.device)


def without(probs: Tensor, tokens: Tensor) -> Tensor:
    """`probs` `[rows, vocabulary]` without a token of each row, normalized; all 0 where none is left."""
    rest = probs.scatter(1, tokens[:, None], 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(rest.dtype).tiny)


def chain_outcomes(
    verifier: Verifier, tokens: list[int], logits: Tensor, most: int, acceptance: float
) -> Work[list[Outcome]]:
    """Likely outcomes of a chain, from the logits before each of its tokens and after the last."""
    sampler = verifier.sampling.sampler
    probs = LIKELY.probs(logits) if sampler.greedy else sampler.probs(logits)
    read = ranked(probs, to_device(tokens, probs.device))
    chosen, likely, values = yield Read(read, verifier.stats)
    return likely_outcomes(tokens, chosen, likely, values, most, acceptance, greedy=sampler.greedy)


@dataclass
class _Node:
    """A node whose children may be drawn.

    Attributes:
        number: in the draft, or `ROOT`.
        value: chance that a verification reaches it.
        chances: of its next children, each given that the elder ones are rejected.
        tokens: these children at temperature 0.
        row: of `BestFirst._left`, what its next child is drawn from.
    """

    number: int
    value: float
    chances: list[float]
    tokens: list[int]
    row: int
    drawn: int = 0
    rejected: float = field(default=1.0)

    @property
    def promise(self) -> float:
        """Chance that its next child is accepted."""
        if self.drawn == len(self.chances):
            return 0.0
        return self.value * self.rejected * self.chances[self.drawn]


class BestFirst(Growth):
    """A tree that grows where the draft's own probabilities promise most.

    Each step draws the children with the highest chance to be accepted, as many as keep `nodes` and `depth`
    of the shape, and passes over them. What promises too little is not drawn; what is drawn is proposed.
    """

    CHILDREN = 8
    """Of a node, at most."""

    def __init__(self, drafter: GrowsFrom, view: TokenView, shape: DraftShape) -> None:
        super().__init__(drafter, view, shape)
        self._open: list[_Node] = []
        self._left = torch.empty(0)
        self._steps = 0
        self._rows = 0
        self._doubts: list[float] = []

    def step(self) -> Work[bool]:
        if self._steps >= self._shape.depth:
            return False
        if self._steps == 0:
            logits = yield from self.foresee()
            yield from self._opened([ROOT], [], logits)
        chosen = self._choose(min(self._shape.per_pass, self._shape.nodes - len(self._parents)))
        if not chosen:
            self._steps = self._shape.depth
            return False
        self._steps += 1
        first = len(self._parents)
        self._draw(chosen)
        if self._steps == self._shape.depth:
            yield from self._arrive(Tokens.joined(self._pieces[-1:]))
            return True
        logits = yield from self._pass(len(chosen))
        yield from self._opened([first + at for at in range(len(chosen))], chosen, logits)
        return True

    def complete(self) -> Work[Draft]:
        while (yield from self.step()):
            pass
        return self.draft()

    def outcomes(self, most: int, acceptance: float) -> Work[list[Outcome]]:
        """None: what follows each of many leaves would take a pass to know."""
        yield from ()
        return []

    def _choose(self, count: int) -> list[tuple[_Node, int, float]]:
        """The most promising children: (parent, which child, chance to be accepted)."""
        chosen = []
        for _ in range(count):
            best = max(self._open, key=lambda node: node.promise)
            if best.promise <= 0.0:
                break
            chosen.append((best, best.drawn, best.promise))
            best.rejected *= 1.0 - best.chances[best.drawn]
            best.drawn += 1
        # The eldest children of all first: a sibling is drawn from what they leave.
        return sorted(chosen, key=lambda one: one[1])

    def _draw(self, chosen: list[tuple[_Node, int, float]]) -> None:
        """Adds these children to the draft."""
        parents = [parent.number for parent, _, _ in chosen]
        if self._verifier.sampling.sampler.greedy:
            self._add(parents, Tokens([parent.tokens[which] for parent, which, _ in chosen]), None)
            return
        tokens, drawn_from = [], []
        for rank in sorted({which for _, which, _ in chosen}):
            rows = torch.tensor([parent.row for parent, which, _ in chosen if which == rank])
            rows = rows.to(self._left.device)
            drawn_from.append(self._left[rows])
            tokens.append(self._verifier.sampling.draws.categorical(drawn_from[-1]))
            self._left[rows] = without(drawn_from[-1], tokens[-1])
        self._add(parents, Tokens(tensor=torch.cat(tokens)), torch.cat(drawn_from))

    def _opened(self, nodes: list[int], chosen: list[tuple[_Node, int, float]], logits: Tensor) -> Work[None]:
        """Notes what the children of new nodes are drawn from, and how likely each is to be accepted.

        Args:
            chosen: the nodes as they were chosen; none for the root.
        """
        sampler = self._verifier.sampling.sampler
        most = min(self.CHILDREN, logits.shape[1])
        if sampler.greedy:
            likely, best = LIKELY.probs(logits).topk(most)
            # Among equals the verifier takes the lowest id.
            best[:, 0] = choices(logits)
            told = [likely, best]
        else:
            probs = sampler.probs(logits)
            self._left = probs if not len(self._left) else torch.cat([self._left, probs])
            # Chance that two draws agree, and how many tokens can be drawn at all.
            told = [(probs * probs).sum(-1, keepdim=True), (probs > 0).sum(-1, keepdim=True)]
        newest = self._pieces[-1] if chosen else Tokens([])
        nan, sure, what = yield from self._arrive(newest, [told[0].isnan().any(), *told])
        if nan:
            self._trace_nan()
        promises = [promise for _, _, promise in chosen] or [1.0]
        for at, (number, promise) in enumerate(zip(nodes, promises, strict=True)):
            if sampler.greedy:
                chances, known = self._greedy_chances(sure[at].tolist()), what[at].tolist()
            else:
                chances, known = self._sampled_chances(float(sure[at, 0]), min(int(what[at, 0]), most)), []
            self._open.append(_Node(number, promise, chances, known, self._rows))
            self._rows += 1

    def _first_chance(self, doubt: float) -> float:
        self._doubts.append(doubt)
        return 1.0 - min(0.9, doubt_scale(self._doubts, self._shape.rates[0]) * doubt)

    def _greedy_chances(self, likely: list[float]) -> list[float]:
        first = self._first_chance(1.0 - likely[0])
        chances, left = [first], max(1.0 - likely[0], 1e-6)
        for probability in likely[1:]:
            chances.append(min(1.0, probability / left))
            left = max(left - probability, 1e-6)
        return chances

    def _sampled_chances(self, agreement: float, children: int) -> list[float]:
        # How often a drawn token is rejected rises with the root of how often two draws differ, and says
        # nothing about which one was drawn (measured on the demo pair).
        first = self._first_chance((1.0 - min(1.0, agreement)) ** 0.5)
        return [first, *(SECOND_CHOICE * NEXT_CHOICE**elder for elder in range(children - 1))]
