"""Speculative tokens as plain lists: the reference for caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class Forest(Generic[T]):
    """Speculative tokens after a verified text. A parent is an earlier entry, or -1 for the text."""

    tokens: list[T] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def line(self, entry: int) -> list[int]:
        """Returns the path of entries from the text to `entry`, inclusive; empty for -1."""
        line = []
        while entry >= 0:
            line.append(entry)
            entry = self.parents[entry]
        return line[::-1]

    def depths(self) -> list[int]:
        return [len(self.line(entry)) for entry in range(len(self))]

    def with_new(self, tokens: list[T], parents: list[int]) -> Forest[T]:
        return Forest(self.tokens + tokens, self.parents + parents)

    def only(self, entries: Sequence[int]) -> Forest[T]:
        """Keeps these entries in this order; entries without their parent follow the text."""
        place = {entry: number for number, entry in enumerate(entries)}
        parents = [place.get(self.parents[entry], -1) for entry in entries]
        return Forest([self.tokens[entry] for entry in entries], parents)

    def after(self, verified: list[T]) -> Forest[T]:
        """Returns the entries that continue the text once `verified` is part of it."""
        ends = [e for e in range(len(self)) if [self.tokens[n] for n in self.line(e)] == verified]
        below = [e for e in range(len(self)) if ends and ends[0] in self.line(e)[:-1]]
        return self.only(below)

    def closed(self, wanted: Sequence[bool]) -> list[int]:
        """Returns the wanted entries whose ancestors are wanted, by depth and newest first."""
        wanted = [*wanted, *[False] * len(self)]
        kept = [e for e in range(len(self)) if all(wanted[above] for above in self.line(e))]
        return sorted(kept, key=lambda entry: (len(self.line(entry)), -entry))
