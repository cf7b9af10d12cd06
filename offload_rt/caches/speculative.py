"""Which tokens a cache holds as speculation: a forest below its verified text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_rt.tokens import Tokens


class SpeculativeTokens:
    """Tokens of the speculative entries, in the order of the entries; entry `i` comes after its parent.

    Attributes:
        parents: entry of each one's parent; -1: the verified text.
        sees: the bits of each one's ancestors, itself included.
        changes: how often entries came or went.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._tokens: list[tuple[Tokens, int]] = []
        self.parents: list[int] = []
        self.sees: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, token: tuple[Tokens, int], parent: int) -> None:
        """One more entry, below the entry `parent`."""
        self.changes += 1
        self.sees.append((self.sees[parent] if parent >= 0 else 0) | 1 << len(self))
        self.parents.append(parent)
        self._tokens.append(token)

    def match(self, tokens: Iterable[int]) -> list[int]:
        """Entries of the longest start of `tokens` that is held below the verified text.

        A token that never came to the host matches nothing: nobody has asked for it.
        """
        ends = [-1]  # of independent sequences several may start alike
        for token in tokens:
            longer = [e for e in range(len(self)) if self.parents[e] in ends and self._is(e, token)]
            if not longer:
                break
            ends = longer
        line = self.sees[ends[0]] if ends[0] >= 0 else 0
        return [entry for entry in range(len(self)) if line >> entry & 1]

    def child(self, entry: int, token: int) -> int | None:
        """The entry below `entry` that holds `token`."""
        below = (e for e in range(entry + 1, len(self)) if self.parents[e] == entry)
        return next((e for e in below if self._is(e, token)), None)

    def below(self, entry: int) -> list[int]:
        """Entries that descend from `entry`, without it."""
        return [e for e in range(entry + 1, len(self)) if self.sees[e] >> entry & 1]

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these in this order, and forgets the others; a child of one of those is below the text."""
        place = {-1: -1} | {entry: new for new, entry in enumerate(entries)}
        tokens = [self._tokens[entry] for entry in entries]
        parents = [place.get(self.parents[entry], -1) for entry in entries]
        self.clear()
        for token, parent in zip(tokens, parents, strict=True):
            self.add(token, parent)

    def clear(self) -> None:
        """Forgets all."""
        self.changes += 1
        self._tokens.clear()
        self.parents.clear()
        self.sees.clear()

    def _is(self, entry: int, token: int) -> bool:
        held, at = self._tokens[entry]
        return held.arrived and held.known[at] == token
