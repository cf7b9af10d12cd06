"""What a drafter is: anything that proposes tokens together with the laws they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from offload_rt.verification import Draft


@dataclass
class LevelStats:
    """What one level of a composition did.

    Attributes:
        name: level, as in the config (`draft:streaming`, `target:retrieved`, `target:full`).
        rounds: verification passes.
        proposed: tokens that the level below proposed to it.
        accepted: how many of them it accepted.
        ms: time in its own passes and verdicts, without that of the levels below.
            On a GPU the host's time: what the device still has to do is counted where a level waits for it.
        fixed_ms: the same by the shapes of its passes, at nominal rates (`costs.py`).
        host_reads: how often the host waited for its results.
    """

    name: str
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    ms: float = 0.0
    fixed_ms: float = 0.0
    host_reads: int = 0


class Text:
    """All tokens so far, the prompt included: a long base that is shared, and a short tail.

    A drafter grows a text by speculation without copying what may be 128K tokens long.
    """

    def __init__(self, base: list[int], tail: Sequence[int] = ()) -> None:
        self._base = base
        self._length = len(base)  # the base may grow later; this text does not
        self._tail = list(tail)

    def __len__(self) -> int:
        return self._length + len(self._tail)

    def extended(self, tokens: Sequence[int]) -> Text:
        """This text with `tokens` behind it."""
        longer = Text(self._base)
        longer._length = self._length
        longer._tail = [*self._tail, *tokens]
        return longer

    def part(self, start: int, end: int | None = None) -> list[int]:
        """Tokens `start` to `end` (default: to the end), both counted from the beginning."""
        end = len(self) if end is None else min(end, len(self))
        if start >= self._length:
            return self._tail[start - self._length : end - self._length]
        return self._base[start : min(end, self._length)] + self._tail[: max(0, end - self._length)]


class Proposal(Protocol):
    """A draft in the making."""

    def step(self) -> bool:
        """Draws some more of it; False when it is complete (and nothing was drawn)."""

    def draft(self) -> Draft:
        """What has been drawn so far."""


class Drafter(Protocol):
    """Proposes continuations of a text.

    `settle` tells what is verified by the full cache; a text given to `propose` may reach beyond that
    with tokens that are speculation themselves (the middle of a hierarchy).
    """

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of the drafter's levels, the cheapest first."""

    def prefill(self, text: Text) -> None:
        """A new text begins with this prompt; the caches derived from the full one are built already."""

    def propose(self, text: Text, count: int) -> Draft:
        """About `count` tokens below the last token of `text`, fewer where there is nothing to propose."""

    def proposal(self, text: Text, count: int) -> Proposal:
        """What `propose` does, step by step. Other texts may be drafted for between the steps."""

    def outcomes(self, text: Text, draft: Draft, most: int, acceptance: float) -> list[tuple[int, ...]]:
        """What a verification of `draft` below `text` may yield: tokens behind the text, the likeliest first.

        Args:
            most: how many outcomes at most.
            acceptance: chance that the verifier accepts a drafted token, by what has been seen of the text.
        """

    def settle(self, text: Text) -> None:
        """All of `text` is verified; the KV of all but its last token is in the full cache."""

    @property
    def expected_acceptance(self) -> float:
        """Share of its tokens that a verifier usually accepts, before anything has been seen."""

    def expected_ms(self, length: int, count: int) -> float:
        """Fixed cost of proposing `count` tokens at a text of `length`, at the usual acceptance below."""


@dataclass(frozen=True)
class Complete:
    """A proposal that was made at once."""

    made: Draft

    def step(self) -> bool:
        return False

    def draft(self) -> Draft:
        return self.made


class NoDrafter:
    """Proposes nothing: its verifier decodes plainly."""

    levels: list[LevelStats]

    def __init__(self) -> None:
        self.levels = []

    def prefill(self, text: Text) -> None:
        pass

    def propose(self, text: Text, count: int) -> Draft:
        return Draft()

    def proposal(self, text: Text, count: int) -> Proposal:
        return Complete(Draft())

    def outcomes(self, text: Text, draft: Draft, most: int, acceptance: float) -> list[tuple[int, ...]]:
        return []

    def settle(self, text: Text) -> None:
        pass

    @property
    def expected_acceptance(self) -> float:
        return 0.0

    def expected_ms(self, length: int, count: int) -> float:
        return 0.0
