"""Drafting without a model: what followed the end of the sequence where it occurred before.

Found, not drawn: such a draft is deterministic and reports no probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence

from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting.base import Drafter, Proposal, Round, TokenView
from offload_rt.model.work import LevelStats, Work
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, Tree
from offload_rt.system import clock

MOST_ENDS = 64
"""Ends of a sequence whose newest occurrences are noted; in "aaaa…" as many occur as it has tokens."""


class Source(Drafter, ABC):
    """Proposes what a look-up of the sequence's end finds.

    Attributes:
        name: the level's, as in the config.
    """

    name: str

    def __init__(self) -> None:
        self.stats = LevelStats(self.name)

    @abstractmethod
    def extend(self, view: TokenView) -> None:
        """Indexes the tokens of `view`, all verified, that are new since the last call."""

    @abstractmethod
    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        """Returns what followed earlier occurrences of the longest end of `view`, `depth` tokens at most."""

    @property
    def levels(self) -> list[LevelStats]:
        return [self.stats]

    def prefill(self, view: TokenView) -> Work[None]:
        yield from ()
        self.extend(view)  # its time is the prompt's, not the level's

    def observe(self, view: TokenView, round: Round) -> None:
        started = clock.now()
        self.extend(view)
        self.stats.ms += 1e3 * (clock.now() - started)

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if not shape.depth:
            return Proposal()
        started = clock.now()
        draft = heaviest(self.find(view, shape.depth), shape)
        self.stats.passes += 1
        self.stats.ms += 1e3 * (clock.now() - started)
        return Proposal(draft)


class SuffixAutomaton(Source):
    """An earlier occurrence of the longest end of the sequence that occurs in it, however long.

    The automaton of all substrings of the verified sequence (Blumer et al. 1985), built as the sequence
    grows. A state stands for substrings that end at the same places; its link for the longest of their ends
    that also ends elsewhere. A token costs the same at any length, on average. (The use: SuffixDecoding,
    arXiv 2411.04975; SAM decoding, arXiv 2411.10666.)

    Args:
        shortest: what is shorter is no occurrence.
        longest: most tokens of the end that are compared, and then its newest occurrence is found; None: any
            number, and then no more tokens are proposed than matched.
    """

    name = "suffix"

    def __init__(self, shortest: int, longest: int | None = None) -> None:
        super().__init__()
        self._shortest, self._longest_match = shortest, longest
        self._transitions: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._longest = [0]  # length of the longest substring of a state
        self._end = [0]  # where one of its occurrences ends, not that at the end of the sequence
        self._last = 0
        self._length = 0  # number of tokens

    def extend(self, view: TokenView) -> None:
        for token in view.part(self._length):
            self._take(token)

    def _state(self, longest: int, following: dict[int, int], link: int, end: int) -> int:
        self._transitions.append(following)
        self._link.append(link)
        self._longest.append(longest)
        self._end.append(end)
        return len(self._transitions) - 1

    def _take(self, token: int) -> None:
        for state in self._ends(self._link[self._last]):
            self._end[state] = self._length
        self._length += 1
        state = self._state(self._longest[self._last] + 1, {}, 0, self._length)
        above, self._last = self._last, state
        while above >= 0 and token not in self._transitions[above]:
            self._transitions[above][token] = state
            above = self._link[above]
        if above >= 0:
            self._link[state] = self._split(above, token)

    def _ends(self, state: int) -> Iterator[int]:
        """Yields a state, and the states of its ends, the longest first, where `longest` limits them."""
        for _ in range(1 if self._longest_match is None else MOST_ENDS):
            if state <= 0:
                return
            yield state
            state = self._link[state]

    def _split(self, above: int, token: int) -> int:
        """Returns the state of the longest substring of `above` with `token` behind it, alone."""
        state, longest = self._transitions[above][token], self._longest[above] + 1
        if self._longest[state] == longest:
            return state
        copied = self._state(longest, dict(self._transitions[state]), self._link[state], self._end[state])
        self._link[state] = copied
        while above >= 0 and self._transitions[above].get(token) == state:
            self._transitions[above][token] = copied
            above = self._link[above]
        return copied

    def find(self, view: TokenView, depth: int) -> Sequence[Sequence[int]]:
        state = max(0, self._link[self._last])
        length = self._longest[state]
        for token in view.part(self._length):  # speculation
            while state and token not in self._transitions[state]:
                state = self._link[state]
                length = self._longest[state]
            state = self._transitions[state].get(token, 0)
            length = length + 1 if state else 0
        if length < self._shortest:
            return []
        if self._longest_match is None:
            depth = min(depth, length)  # the longer what matched, the longer what follows goes on to match
        else:
            state = next(
                (end for end in self._ends(state) if self._longest[self._link[end]] < self._longest_match),
                state,
            )
        return [view.part(self._end[state], self._end[state] + depth)]


class NGrams(SuffixAutomaton):
    """Prompt look-up: what followed the last n-gram of the sequence, the longest that occurred before."""

    name = "lookup"


def heaviest(continuations: Sequence[Sequence[int]], shape: DraftShape) -> Draft:
    """Returns a draft of the beginnings that most continuations share: a chain, or a tree (REST).

    Among equals, what was found first.
    """
    weights = Counter(
        tuple(continuation[:length])
        for continuation in continuations
        for length in range(1, len(continuation) + 1)
    )
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    # What begins another one is no lighter and was found no later: parents come before their children.
    for beginning, _ in weights.most_common():
        if beginning[:-1] in nodes and len(tokens) < shape.size:
            parents.append(nodes[beginning[:-1]])
            if shape.kind == "chain":
                nodes.clear()
            nodes[beginning] = len(tokens)
            tokens.append(beginning[-1])
    return Draft(Tokens(tokens), Tree(tuple(parents)))
