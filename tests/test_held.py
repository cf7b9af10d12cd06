"""The tokens that a cache holds as speculation against a plain list of paths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.caches.held import HeldTokens
from offload_rt.verification import Tokens


@dataclass(frozen=True, eq=False)
class Entry:
    """A token as it is held, below which other one, and whether the host knows it."""

    token: int
    above: Entry | None
    tokens: Tokens

    def line(self) -> list[Entry]:
        """From below the text down to this one."""
        return [*(self.above.line() if self.above is not None else []), self]

    def path(self) -> list[int]:
        """Ids on that line; -1 where the host does not know one."""
        return [entry.token if entry.tokens.arrived else -1 for entry in self.line()]


TEXTS = [list(text) for length in (1, 2, 3) for text in product((0, 1), repeat=length)]


def check(held: HeldTokens, plain: list[Entry]) -> None:
    assert len(held) == len(plain)
    places = {entry: place for place, entry in enumerate(plain)}
    lines = [[places[above] for above in entry.line() if above in places] for entry in plain]
    assert held.parents == [line[-2] if len(line) > 1 else -1 for line in lines]
    assert held.sees == [sum(1 << above for above in line) for line in lines]
    for number in range(len(plain)):
        assert held.below(number) == [e for e, line in enumerate(lines) if number in line[:-1]]
    for text in TEXTS:
        found = [plain[entry] for entry in held.match(text)]
        starts = [entry.path() for entry in plain if entry.path() == text[: len(entry.path())]]
        assert len(found) == max(map(len, starts), default=0)
        if found:
            assert found == found[-1].line() and found[-1].path() == text[: len(found)]


def without_line(entry: Entry, lost: set[Entry], made: dict[Entry, Entry]) -> Entry:
    """`entry` as it is once `lost` are forgotten; what was below one of those is below the text."""
    if entry not in made:
        above = None if entry.above is None or entry.above in lost else without_line(entry.above, lost, made)
        made[entry] = Entry(entry.token, above, entry.tokens)
    return made[entry]


OPERATIONS = st.one_of(
    # A token below one of the newest entries.
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 4), st.just(True)),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.none(), st.none()),
    st.tuples(st.just("keep"), st.lists(st.booleans(), max_size=12), st.none(), st.none()),
    st.tuples(st.just("keep below"), st.integers(0, 9), st.none(), st.none()),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=30))
def test_entries_are_those_of_a_list_of_paths(operations: list[tuple[str, Any, int, bool]]) -> None:
    held, plain = HeldTokens(), list[Entry]()
    for name, argument, step, known in operations:
        changes, length = held.changes, len(plain)
        if name == "add":
            above = max(-1, length - 1 - step)
            tokens = Tokens([argument]) if known else Tokens(tensor=torch.tensor([argument]))
            held.add((tokens, 0), above)
            plain.append(Entry(argument, plain[above] if above >= 0 else None, tokens))
            assert held.changes != changes
        elif name == "arrive" and length:
            tokens = plain[argument % length].tokens
            tokens.arrive(tokens.pending())
        elif name.startswith("keep"):
            if name == "keep":
                wanted = dict(zip(plain, [*argument, *[False] * length], strict=False))
                left = [entry for entry in plain if all(wanted[above] for above in entry.line())]
                left.sort(key=lambda entry: (len(entry.line()), -plain.index(entry)))
            else:
                left = [e for e in plain if length and plain[argument % length] in e.line()[:-1]]
            held.keep([plain.index(entry) for entry in left])
            made: dict[Entry, Entry] = {}
            plain = [without_line(entry, set(plain) - set(left), made) for entry in left]
            assert held.changes != changes
        check(held, plain)
    held.clear()
    check(held, [])
