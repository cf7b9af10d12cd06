"""Losslessness where thoughts have a budget, proved by enumeration as in `test_enumeration.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from proofs.test_enumeration import BRIEF, check
from support.enumeration import SomePaths
from support.table_models import VOCABULARY, Parts
from torch import Tensor

from offload_rt.drafting.thought_grammar import ThoughtsFirst, ThoughtTokens
from offload_rt.sampling.sampler import Sampler

OPEN, CLOSE = 4, 3
"""Tokens that begin and end thoughts."""


class LimitedThoughts(SomePaths):
    """Thoughts of a budget, token by token as its definition says, and as the program has it.

    Args:
        opened: the prompt has opened them.
        answer: what follows them; None: any text.
    """

    def __init__(self, budget: int, opened: bool, answer: SomePaths | None) -> None:
        self._budget, self._opened, self._answer = budget, opened, answer
        thoughts = ThoughtTokens([OPEN], [CLOSE], [], opened, may_open=not opened)
        self._grammar = ThoughtsFirst(thoughts, answer, budget, (), VOCABULARY)

    def followers(self, tokens: Sequence[int]) -> Collection[int]:
        thinking, used, start = self._opened, 0, 0
        for at, token in enumerate(tokens):
            if thinking and token == CLOSE:
                thinking, start = False, at + 1
            elif thinking:
                used += 1
            elif at == 0 and token == OPEN:
                thinking = True
        if thinking:
            return [CLOSE] if used >= self._budget else range(VOCABULARY)
        if self._answer is None:
            return range(VOCABULARY)
        opening = [OPEN] if not tokens and not self._opened else []
        return {*self._answer.followers(tokens[start:]), *opening}

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        return self._grammar.allowed(tokens)

    def complete(self, tokens: Sequence[int]) -> bool:
        return self._grammar.complete(tokens)


@pytest.mark.parametrize("sampler", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize("answer", [None, SomePaths(seed=4)], ids=["any text", "a grammar"])
@pytest.mark.parametrize("opened", [True, False], ids=["opened", "by the model"])
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("name", ["plain", "naive", "triforce 1 1", "retrieval, grown"])
def test_a_budget_of_thoughts_is_part_of_the_distribution(
    name: str, budget: int, opened: bool, answer: SomePaths | None, sampler: Sampler
) -> None:
    parts = Parts(seed=5, support=2 if answer is None else 3)
    check(name, sampler, parts, grammar=LimitedThoughts(budget, opened, answer))
