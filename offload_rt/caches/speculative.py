"""The speculative tokens of a cache: a forest below its verified sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload_rt.sampling.tokens import Tokens


class SpeculativeTokens:
    """Tokens of the speculative entries, in entry order; every entry comes after its parent.

    Attributes:
        parents: the parent entry of each; -1: the verified sequence.
        sees: for each entry, a bit mask of its ancestors, itself included.
        changes: number of changes so far, for caches of derived data.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._tokens: list[tuple[Tokens, int]] = []
        self.parents: list[int] = []
        self.sees: list[int] = []

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, token: tuple[Tokens, int], parent: int) -> None:
        """Adds an entry below the entry `parent`."""
        self.changes += 1
        self.sees.append((self.sees[parent] if parent >= 0 else 0) | 1 << len(self))
        self.parents.append(parent)
        self._tokens.append(token)

    def match(self, tokens: Iterable[int]) -> list[int]:
        """Returns the entries of the longest prefix of `tokens` that is present below the verified sequence.

        A token whose id was never read by the host matches nothing.
        """
        ends = [-1]  # several, as independent chains may start alike
        for token in tokens:
            longer = [e for e in range(len(self)) if self.parents[e] in ends and self._is(e, token)]
            if not longer:
                break
            ends = longer
        line = self.sees[ends[0]] if ends[0] >= 0 else 0
        return [entry for entry in range(len(self)) if line >> entry & 1]

    def child(self, entry: int, token: int) -> int | None:
        """Returns the child of `entry` with this token, or None."""
        below = (e for e in range(entry + 1, len(self)) if self.parents[e] == entry)
        return next((e for e in below if self._is(e, token)), None)

    def below(self, entry: int) -> list[int]:
        """Returns the descendants of `entry`."""
        return [e for e in range(entry + 1, len(self)) if self.sees[e] >> entry & 1]

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these entries, in this order; children of the others move below the verified sequence."""
        place = {-1: -1} | {entry: new for new, entry in enumerate(entries)}
        tokens = [self._tokens[entry] for entry in entries]
        parents = [place.get(self.parents[entry], -1) for entry in entries]
        self.clear()
        for token, parent in zip(tokens, parents, strict=True):
            self.add(token, parent)

    def clear(self) -> None:
        """Forgets all entries."""
        self.changes += 1
        self._tokens.clear()
        self.parents.clear()
        self.sees.clear()

    def _is(self, entry: int, token: int) -> bool:
        tokens, at = self._tokens[entry]
        return tokens.arrived and tokens.known[at] == token
