"""Sequences over one KV: each is as if it had read all itself, and none sees what another one writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.contexts import CONFIGS_AND_PLACES, HOT, NEXT, OTHER, SOME, TEXT, Make, check, fresh
from support.small_engine import DEVICES, PAGE, SIZES, again
from support.tiny_models import LONGROPE_BORDER, byte_ids, tiny_target

from offload_rt import LLM, Context, SamplingParams, UsageError
from offload_rt.drafting.levels.base import kept_means
from offload_rt.engine.sequence import TokenSequence


@DEVICES
@CONFIGS_AND_PLACES
def test_a_fork_goes_on_as_its_context(make: Make, config: str, place: str, device: torch.device) -> None:
    llm = make(config, place, device)
    with llm.read(TEXT[:105]) as context, context.fork() as fork:
        assert fork.tokens == context.tokens and fork.placement == context.placement
        assert again(fork, HOT).tokens == again(context, HOT).tokens
        fork.append(OTHER[:20])
        context.close()
        check(llm, fork, [*TEXT[:105], *OTHER[:20]])


def opened(llm: LLM, context: Context, tokens: list[int]) -> TokenSequence:
    """A sequence of these tokens over the KV of a context."""
    with llm.engine.snapshot(llm.engine.sequences[0]) as prefix:
        assert prefix.tokens == context.tokens
        return llm.engine.open(tokens, 10, prefix=prefix)


@DEVICES
@pytest.mark.parametrize("place", SOME)
def test_only_what_follows_the_common_beginning_is_read(make: Make, place: str, device: torch.device) -> None:
    reports: list[tuple[int, int]] = []
    llm = make("retrieval", place, device, on_progress=lambda _, done, total: reports.append((done, total)))
    context, layers = llm.read(TEXT[:130]), 2
    for kept, more in ((0, 40), (1, 0), (17, 40), (130, 0), (130, 40)):
        tokens = [*TEXT[:kept], *[(token + 1) % 128 for token in TEXT[kept : kept + more]]]
        reports.clear()
        used = llm.engine.store.used_bytes
        sequence = opened(llm, context, tokens)
        read = max(0, len(tokens) - max(1, kept))  # the last token is left to the first round
        assert (reports[-1][1] if reports else 0) == layers * read
        assert sequence.prefill_tokens == len(tokens) - kept
        shared = max(0, kept - 1) // PAGE * PAGE
        added = llm.engine.store.used_bytes - used
        assert added == (len(tokens) - 1 - shared) * llm.engine.store.layout.token_bytes
        made = Context(llm, sequence)
        assert made.generate((), NEXT).tokens == fresh(llm, tokens)
        made.close()
    check(llm, context, TEXT[:130])


BRANCHES = [
    ("fork", 0, 0),
    ("append", 1, 30),
    ("rewind", 0, 15),  # into a page that the other branch has too
    ("append", 0, 20),
    ("generate", 0, 8),
    ("fork", 1, 0),
    ("update", 1, 50),
    ("append", 2, 3),
    ("generate", 1, 3),
    ("close", 0, 0),
    ("rewind", 1, 37),
    ("fork", 1, 0),
    ("append", 2, 20),
]
"""Actions, each of a branch and with a number of tokens."""


@pytest.mark.parametrize("place", ["in place", "other GPUs 0"])
def test_branches_of_one_book(make: Make, place: str) -> None:
    """Each beside plain tokens. In place an append is written to the page that a rewind has cut."""
    with make("triforce", place) as llm:
        branches = [(llm.read(TEXT[:100]), TEXT[:100])]
        for action, at, count in BRANCHES:
            branch, known = branches.pop(at)
            if action == "fork":
                branches.append((branch.fork(), known))
            elif action == "append":
                branch.append(TEXT[at : at + count])
                known = [*known, *TEXT[at : at + count]]
            elif action == "rewind":
                known = known[:-count]
                branch.rewind(len(known))
            elif action == "update":
                known = [*known[:-count], *OTHER[:5]]
                branch.update(known)
            elif action == "generate":
                known = [*known, *branch.generate((), SamplingParams(max_tokens=count)).tokens]
            else:
                branch.close()
                continue
            branches.insert(at, (branch, known))
        for branch, known in branches:
            assert branch.tokens == known and again(branch, NEXT).tokens == fresh(llm, known)
        for branch, _ in branches:
            branch.close()
        assert llm.engine.store.used_bytes == 0


def test_a_snapshot_of_an_open_stream_leaves_it_going(make: Make) -> None:
    llm = make("triforce", "tiers")
    context = llm.read(TEXT[:100])
    expected = again(context, SamplingParams(max_tokens=15)).tokens
    stream = context.stream((), SamplingParams(max_tokens=15))
    taken = [next(stream).token for _ in range(4)]
    with llm.engine.snapshot(llm.engine.sequences[0]) as prefix:
        made = prefix.tokens[100:]
        assert made == expected[: len(made)] and prefix.kv.length == len(prefix.tokens) - 1
        taken += [event.token for event in stream]
        assert taken == expected
        sequence = llm.engine.open(prefix.tokens, 10, prefix=prefix)
    assert Context(llm, sequence).generate((), NEXT).tokens == fresh(llm, [*TEXT[:100], *made])


def test_there_must_be_room_for_what_is_not_shared_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("retrieval", "tiers")
    context = llm.read(TEXT[:200], 10)
    monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 30 * 2**10)
    with pytest.raises(UsageError, match="the KV of 210 tokens needs"):
        llm.read(TEXT[:200], 10)
    fork = context.fork(10)
    with pytest.raises(UsageError, match=r"the KV of 408 tokens needs .* beside \d\.\d GiB of open contexts"):
        context.fork(400)
    monkeypatch.undo()
    check(llm, fork, TEXT[:200])


def test_there_must_be_room_for_means_of_what_is_shared(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("retrieval", "tiers")
    context, layout = llm.read(TEXT[:200], 10), llm.engine.store.layout
    means = layout.means_bytes(PAGE, *kept_means(llm.engine.planner.configs[0])) // PAGE
    assert means
    monkeypatch.setattr(type(llm.engine.planner), "_free_bytes", 0)
    room = 18 * layout.token_bytes + 210 * means + 18 * 4 * llm.engine.target.hidden_size
    for missing in (1, 0):
        monkeypatch.setattr(
            "offload_rt.planning.sequence_planner.available_memory", lambda missing=missing: room - missing
        )
        if missing:
            with pytest.raises(UsageError, match="the KV of 18 tokens needs"):
                context.fork(10)
        else:
            context.fork(10)


def test_a_fork_that_fails_takes_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("triforce", "tiers")
    context = llm.read(TEXT[:100])
    used = llm.engine.store.used_bytes

    def fail(*given: Any) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("offload_rt.caches.full.FullCache.begin_with", fail)
    with pytest.raises(MemoryError):
        context.fork()
    assert llm.engine.store.used_bytes == used and len(llm.engine.sequences) == 1
    monkeypatch.undo()
    check(llm, context, TEXT[:100])


def test_what_cannot_be_asked_of_a_fork(make: Make) -> None:
    llm = make("plain")
    context = llm.read(TEXT[:50])
    context.messages = [{"role": "user", "content": "a"}]
    fork = context.fork()
    assert fork.messages == context.messages and fork.messages is not context.messages
    with pytest.raises(UsageError, match="room must be an integer, got 'a'"):
        context.fork("a")  # type: ignore[arg-type]
    context.close()
    with pytest.raises(UsageError, match="this context is closed"):
        context.fork()
    prefix = llm.engine.snapshot(llm.engine.sequences[0])
    llm.close()
    prefix.close()
    with pytest.raises(UsageError, match="this LLM is closed"):
        fork.fork()


def test_kv_of_other_rotary_frequencies_is_not_shared() -> None:
    with LLM.from_models(tiny_target("phi3"), config="plain", overrides=SIZES) as llm:
        short, tokens = llm.read(byte_ids(100)), byte_ids(LONGROPE_BORDER + 10)
        sequence = opened(llm, short, tokens)
        assert sequence.prefill_tokens == len(tokens)
        assert Context(llm, sequence).generate((), NEXT).tokens == fresh(llm, tokens)


def test_a_fork_that_takes_another_turn_needs_memory_of_its_own(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Giving up what its context has too frees nothing."""
    llm = make("plain")
    context = llm.read(TEXT[:200], 10)
    fork = context.fork(10)
    monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 2**16)
    monkeypatch.setattr(type(llm.engine.planner), "_free_bytes", 0)
    for tokens in (OTHER[:190], TEXT[:20] + OTHER[:170]):
        with pytest.raises(UsageError, match=r"the KV of \d+ tokens needs"):
            fork.update(tokens)
    assert fork.tokens == TEXT[:200]
    context.close()
    fork.update(OTHER[:190])
    monkeypatch.undo()
    check(llm, fork, OTHER[:190])
