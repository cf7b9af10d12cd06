"""The loop: what it yields, where it ends, and what it leaves in the text."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from enumeration import Parts, ScriptedDraws, own_law

from offload_rt.decoding import Token, decode
from offload_rt.drafting.base import NoDrafter, Text
from offload_rt.drafting.verifier import Sampling
from offload_rt.governor import Governor
from offload_rt.sampling import SamplingLaw
from offload_rt.schedule import Schedule
from offload_rt.verification import Draft

PROMPT = [1, 3, 0, 2]
PARTS = Parts(seed=2)
(CONTINUATION,) = own_law(PARTS.target, SamplingLaw(0.0), PROMPT, 24)  # greedy: one output
MISSING = 77  # a token that the model never writes


class NoForecast:
    """Everything is free: nothing is expected of it where nobody steps down."""

    def expected_ms(self, length: int, count: int) -> float:
        return 0.0

    def expected_tokens(self, count: int) -> float:
        return 1.0


NO_FORECAST = NoForecast()


class Oracle(NoDrafter):
    """Proposes what the target is going to write, but for the tokens at some places.

    Attributes:
        asked: (length of the text, count) of each proposal.
        settled: the verified texts it was told of.
    """

    def __init__(self, wrong: Collection[int] = ()) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []
        self.settled: list[list[int]] = []
        self._wrong = wrong

    def propose(self, text: Text, count: int) -> Draft:
        self.asked.append((len(text), count))
        start = len(text) - len(PROMPT)
        places = range(start, min(start + count, len(CONTINUATION)))
        return Draft.chain([MISSING if place in self._wrong else CONTINUATION[place] for place in places])

    def settle(self, text: Text) -> None:
        self.settled.append(text.part(0))


class Setting:
    """A greedy target with an oracle below it."""

    def __init__(self, gamma: int, wrong: Collection[int] = ()) -> None:
        self.drafter = Oracle(wrong)
        composition = PARTS.full(lambda full, sampling: self.drafter)
        self.verifier = composition(Sampling(SamplingLaw(0.0), ScriptedDraws()))
        self.verifier.cache.prefill(PROMPT[:-1])  # type: ignore[attr-defined]
        self.text = list(PROMPT)
        self._gamma = gamma

    def decode(self, max_tokens: int, stop_tokens: Collection[int] = ()) -> list[Token]:
        governor = Governor(self._gamma, step_down=False, forecast=NO_FORECAST, clock=False)
        return list(decode(Schedule(self.verifier), self.text, max_tokens, stop_tokens, governor))


def first(token: int) -> int:
    """Where the continuation has this token for the first time."""
    return CONTINUATION.index(token)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("wrong", [(), (0,), (2, 3, 9), range(24)], ids=["none", "first", "some", "all"])
@pytest.mark.parametrize("gamma", [0, 1, 5, 40])
def test_exactly_max_tokens(gamma: int, wrong: Sequence[int], max_tokens: int) -> None:
    setting = Setting(gamma, wrong)
    tokens = setting.decode(max_tokens)
    assert [token.id for token in tokens] == list(CONTINUATION[:max_tokens])
    assert setting.text == [*PROMPT, *CONTINUATION[:max_tokens]]
    assert not any(token.ends for token in tokens)
    # Room is left for the target's own token: nothing is drafted that could not be used.
    for length, count in setting.drafter.asked:
        assert 0 < count <= min(gamma, max_tokens - (length - len(PROMPT)) - 1)


def test_the_test_sees_different_tokens() -> None:
    assert len(set(CONTINUATION)) >= 3


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 4, 5, 6, 7, 20])
@pytest.mark.parametrize("stop", sorted(set(CONTINUATION)))
def test_a_stop_token_ends_the_text_wherever_in_a_draft_it_stands(stop: int, gamma: int) -> None:
    end = first(stop) + 1
    setting = Setting(gamma)
    tokens = setting.decode(20, {stop})
    assert [token.id for token in tokens] == list(CONTINUATION[:end])
    assert [token.ends for token in tokens] == [False] * (end - 1) + [True]
    assert setting.text == [*PROMPT, *CONTINUATION[:end]]


def test_a_stop_token_inside_an_accepted_draft_cuts_what_was_accepted_behind_it() -> None:
    stop = next(token for token in CONTINUATION if first(token) >= 1)
    setting = Setting(gamma=19)
    tokens = setting.decode(20, {stop})
    assert len(setting.drafter.settled) == 1  # one round, which went on behind the stop token
    assert len(setting.drafter.settled[0]) == len(PROMPT) + 20
    assert len(tokens) == first(stop) + 1 and tokens[-1] == Token(stop, True, True)
    assert setting.text == [*PROMPT, *CONTINUATION[: len(tokens)]]


def test_the_first_of_several_stop_tokens_counts() -> None:
    stops = set(CONTINUATION[3:5])
    tokens = Setting(gamma=10).decode(20, stops)
    assert len(tokens) == 1 + min(map(first, stops))


def test_a_stop_token_that_ends_max_tokens_too() -> None:
    stop = next(token for token in CONTINUATION if first(token) >= 1)
    tokens = Setting(gamma=4).decode(first(stop) + 1, {stop})
    assert tokens[-1].ends and len(tokens) == first(stop) + 1


def test_a_stop_token_in_the_prompt_does_not_matter() -> None:
    assert len(Setting(gamma=3).decode(6, {MISSING, PROMPT[-1]} - set(CONTINUATION))) == 6


def test_it_says_which_tokens_were_drafted() -> None:
    tokens = Setting(gamma=4, wrong=[2]).decode(9)
    # Two accepted, the third corrected; then four accepted and one more; then one alone.
    assert [token.from_draft for token in tokens] == [True, True, False, True, True, True, True, False, False]


def test_the_text_grows_by_a_round_and_the_drafter_is_told() -> None:
    setting = Setting(gamma=3)
    governor = Governor(3, step_down=False, forecast=NO_FORECAST, clock=False)
    source = decode(Schedule(setting.verifier), setting.text, 10, (), governor)
    assert setting.text == PROMPT  # nothing happens before the first token is asked for
    for _ in range(4):
        next(source)
        assert setting.text == [*PROMPT, *CONTINUATION[:4]]
    assert setting.drafter.settled == [[*PROMPT, *CONTINUATION[:4]]]
    next(source)
    assert len(setting.text) == len(PROMPT) + 8
    source.close()
    assert setting.verifier.cache.length == len(setting.text) - 1  # all but the last token


class Recorder(Governor):
    """Drafts in every other round, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__(3, step_down=False, forecast=NO_FORECAST, clock=False)
        self.begun: list[int] = []
        self.seen: list[tuple[int, int, int, float]] = []

    def begin(self, length: int) -> None:
        self.begun.append(length)

    def draft_count(self) -> int:
        return 0 if len(self.seen) % 2 else 3

    def observe(self, count: int, tokens: int, length: int, ms: float, fixed_ms: float) -> None:
        self.seen.append((count, tokens, length, fixed_ms))
        assert ms > 0


def test_the_governor_decides_and_is_told_what_came_of_it() -> None:
    setting, governor = Setting(gamma=3), Recorder()
    setting.verifier._pass_cost = lambda length, queries: 100.0 * length + queries
    tokens = list(decode(Schedule(setting.verifier), setting.text, 10, (), governor))
    assert governor.begun == [4]
    # (drafted, yielded, length before, fixed cost): the last token needs no draft
    assert governor.seen == [(3, 4, 4, 404.0), (0, 1, 8, 801.0), (3, 4, 9, 904.0), (0, 1, 13, 1301.0)]
    assert [length for length, _ in setting.drafter.asked] == [4, 9]
    assert [token.id for token in tokens] == list(CONTINUATION[:10])
