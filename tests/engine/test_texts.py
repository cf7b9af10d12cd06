"""Rounds of a text: what they yield, where it ends, and what they leave in it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from support.enumeration import ScriptedDraws, Text, own_probs, step
from support.small_engine import passes_of
from support.table_models import Parts

from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import Drafter, Proposal, Round, TokenView
from offload_rt.drafting.verifier import Sampling
from offload_rt.engine.batching import BatchRunner
from offload_rt.engine.decode import decode_step
from offload_rt.sampling.rejection import Draft
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import forest

PROMPT = [1, 3, 0, 2]
PARTS = Parts(seed=2)
(CONTINUATION,) = own_probs(PARTS.target, Sampler(0.0), PROMPT, 24)  # greedy: one output
MISSING = 4 if 4 not in CONTINUATION else 77  # a token that the model never writes


class Oracle(Drafter):
    """Proposes what the target is going to write, but for the tokens at some places.

    Attributes:
        asked: (length of the text, depth) of each proposal.
        observed: the verified texts it was told of.
    """

    def __init__(self, wrong: Collection[int] = ()) -> None:
        self.asked: list[tuple[int, int]] = []
        self.observed: list[list[int]] = []
        self._wrong = wrong

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        self.asked.append((len(view), shape.depth))
        start = len(view) - len(PROMPT)
        places = range(start, min(start + shape.depth, len(CONTINUATION)))
        wrong = {token: (token + 1) % 5 for token in range(5)}
        told = [CONTINUATION[p] if p not in self._wrong else wrong[CONTINUATION[p]] for p in places]
        return Proposal(Draft(Tokens(told), forest([len(told)])))

    def observe(self, view: TokenView, round: Round) -> None:
        self.observed.append(view.part(0))


def text_of(drafter: Oracle, depth: int, max_tokens: int, stop_tokens: Collection[int] = ()) -> Text:
    """A greedy target with an oracle below it."""
    composition = PARTS.full(lambda parts, full, sampling: drafter)
    verifier = composition(Sampling(Sampler(0.0), ScriptedDraws(), stop_tokens))
    return Text(verifier, PROMPT, max_tokens, CHAIN.deep(depth))


def run(*texts: Text) -> None:
    while not all(text.ended for text in texts):
        step(texts)


def first(token: int) -> int:
    """Where the continuation has this token for the first time."""
    return CONTINUATION.index(token)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("wrong", [(), (0,), (2, 3, 9), range(24)], ids=["none", "first", "some", "all"])
@pytest.mark.parametrize("depth", [0, 1, 5, 40])
def test_exactly_max_tokens(depth: int, wrong: Sequence[int], max_tokens: int) -> None:
    drafter = Oracle(wrong)
    text = text_of(drafter, depth, max_tokens)
    run(text)
    assert text.output == CONTINUATION[:max_tokens]
    # Room is left for the target's own token: nothing is drafted that could not be used.
    for length, count in drafter.asked:
        assert 0 <= count <= min(depth, max_tokens - (length - len(PROMPT)) - 1)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 5, 20])
@pytest.mark.parametrize("stop", sorted(set(CONTINUATION)))
def test_a_stop_token_ends_the_text_wherever_in_a_draft_it_stands(stop: int, depth: int) -> None:
    text = text_of(Oracle(), depth, 20, {stop})
    run(text)
    assert text.output == CONTINUATION[: first(stop) + 1]


def test_the_text_grows_by_a_round_and_the_drafter_is_told() -> None:
    drafter = Oracle(wrong=[2])
    text = text_of(drafter, 4, 9)
    run(text)
    # Two accepted, the third corrected; then four accepted and one more; then one alone.
    assert [times.accepted for times in text.rounds] == [2, 4, 0]
    assert [len(view) - len(PROMPT) for view in drafter.observed] == [3, 8, 9]
    assert text.full.verified_length == len(text.tokens) - 1  # all but the last token


# ------------------------------------------------------------------------------ several texts


def test_texts_of_a_batch_share_their_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = passes_of(monkeypatch, type(PARTS.target))
    texts = [text_of(Oracle(), 3, count) for count in (8, 4, 12)]
    run(*texts)
    assert [text.output for text in texts] == [CONTINUATION[:count] for count in (8, 4, 12)]
    assert [len(counts) for counts, _ in passes] == [3, 2, 1]  # four tokens a round: one text ends after each


class Broken(Oracle):
    """Fails at a text of some length."""

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        if len(view) > len(PROMPT):
            raise MemoryError("no room")
        return super().proposal(view, shape)


def test_one_that_fails_ends_alone() -> None:
    texts = [text_of(Oracle(), 3, 8), text_of(Broken(), 3, 8)]
    first_step = BatchRunner([decode_step(text) for text in texts]).run()
    assert not any(isinstance(result, Exception) for result in first_step)
    fine, failed = BatchRunner([decode_step(text) for text in texts]).run()
    assert isinstance(failed, MemoryError) and not isinstance(fine, Exception)
    assert texts[0].output == CONTINUATION[:8] and texts[1].output == CONTINUATION[:4]


def test_an_interrupt_ends_all_and_is_passed_on() -> None:
    class Interrupted(Oracle):
        def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        BatchRunner([decode_step(text_of(one, 3, 8)) for one in (Interrupted(), Oracle())]).run()
