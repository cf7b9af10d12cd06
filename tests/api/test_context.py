"""`Context`: sequences that are appended to, continued and taken back, wherever their KV lies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from emulated.gpu import EMULATED
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.contexts import ASCII, HOT, NEXT, OTHER, PLACES, SOME, TEXT, Make, check, fresh
from support.small_engine import CONFIGS, DEVICES, PAGE, SIZES, again
from support.tiny_models import LONGROPE_BORDER, byte_ids, tiny_target
from support.uneven_link import UnevenLink
from transformers import PreTrainedModel

from cpu_kv import CopyFailed
from offload_rt import LLM, SamplingParams, TokenStream, UsageError
from offload_rt.caches.selection import LAST_QUERIES

# ------------------------------------------------------------------------------ appends and rewinds


@DEVICES
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("config", ["triforce", "trees"])
def test_an_append_is_as_good_as_reading_all_at_once(
    make: Make, config: str, place: str, device: torch.device
) -> None:
    llm = make(config, place, device)
    # From within a page, by one token, to a page's edge, a page, nothing but the edge behind it, and more
    # than a chunk; in a row, and each after tokens were generated and taken back.
    ends = [20, 21, 32, 48, 49, 150, 151, 160, 230]
    if EMULATED and device.type == "cuda":
        ends = [20, 21, 48, 160]  # an emulated GPU is slow
    context, unasked = llm.read(TEXT[: ends[0]]), llm.read(TEXT[: ends[0]])
    for start, end in pairwise(ends):
        context.append(TEXT[start:end])
        unasked.append(TEXT[start:end])
        check(llm, context, TEXT[:end])
    check(llm, unasked, TEXT[: ends[-1]])


@pytest.mark.parametrize("config", ["naive", "retrieval", "triforce", "trees"])
def test_what_is_drafted_follows_an_append(make: Make, config: str) -> None:
    """Tokens would not tell: whatever is drafted, they are those of plain decoding."""
    llm, params = make(config), SamplingParams(max_tokens=40)
    whole = llm.generate(TEXT, params)
    context = llm.read(OTHER[:100])
    context.generate((), params)
    context.rewind(1)
    context.append(TEXT)
    context.rewind(1)
    with llm.read(TEXT[:150]) as context:
        context.generate(OTHER[:20], params)
        context.rewind(150)
        context.append(TEXT[150 : 200 - LAST_QUERIES])
        appended = context.generate(TEXT[200 - LAST_QUERIES :], params)
    assert appended.tokens == whole.tokens
    counts = [[(one.name, one.proposed, one.accepted) for one in made.levels] for made in (appended, whole)]
    assert counts[0] == counts[1]


@DEVICES
@pytest.mark.parametrize("place", [*SOME, "other GPUs 1"])
def test_other_tokens_after_a_rewind(make: Make, place: str, device: torch.device) -> None:
    """Below what tiers keep on their devices, too, which grows again by what is read then."""
    llm = make("triforce", place, device)
    context = llm.read(TEXT[:150])
    for length in (149, 144, 70, 33, 32, 15, 1):
        context.rewind(length)
        check(llm, context, TEXT[:length])
        context.append(OTHER[length:150])
        check(llm, context, [*TEXT[:length], *OTHER[length:150]])
        context.rewind(length)
        context.append(TEXT[length:150])
    check(llm, context, TEXT[:150])
    placed, whole = context.placement, llm.read(TEXT[:150]).placement
    assert placed == whole and sum(placed.values()) == 144


def test_a_context_that_is_read_again_has_its_resident_memory_once(make: Make) -> None:
    """Also where less was resident before."""
    llm = make("plain", "tiers")
    llm.read(TEXT[:150])
    needed = llm.engine.sequences[-1].full.resident_bytes
    for before in (150, 20):
        context = llm.read(TEXT[:before])
        context.rewind(1)
        context.append(TEXT[1:150])
        assert llm.engine.sequences[-1].full.resident_bytes == needed > 0
        check(llm, context, TEXT[:150])


def test_every_end_of_a_sequence_is_appended_to(
    make: Make, models: tuple[PreTrainedModel, PreTrainedModel]
) -> None:
    llm, prompt = make("retrieval", "tiers"), TEXT[:100]
    long = SamplingParams(max_tokens=30)
    greedy = llm.generate(prompt, long).tokens
    stop = bytes(greedy[9:11]).decode()
    ends: dict[str, list[int]] = {}
    with llm.read(prompt) as context:
        for reason in ("length", "stop", "interrupted", "eos"):
            if reason == "eos":
                models[0].generation_config.eos_token_id = greedy[7]
            params = SamplingParams(max_tokens=30, stop=(stop,) if reason == "stop" else ())
            try:
                stream = context.stream((), params)
                for number, _ in enumerate(stream):
                    if reason == "interrupted" and number == 4:
                        break
                result = context.generate(OTHER[:23], NEXT)  # ends a stream that is open
            finally:
                models[0].generation_config.eos_token_id = None
            assert stream.result is not None and stream.result.finish_reason == reason
            ends[reason] = stream.result.tokens
            assert result.start == 100 + len(ends[reason])
            assert context.tokens[: result.prompt_tokens] == [*prompt, *ends[reason], *OTHER[:23]]
            assert result.finish_reason == "eos" or result.tokens == fresh(
                llm, context.tokens[: result.prompt_tokens]
            )
            check(llm, context, context.tokens)
            context.rewind(100)
    assert ends["length"] == greedy and ends["interrupted"] == greedy[:5]
    assert ends["eos"] == greedy[: greedy.index(greedy[7]) + 1]
    assert ends["stop"] == greedy[: bytes(greedy).decode().index(stop) + 2]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 70)),
        st.tuples(st.just("generate"), st.integers(1, 20)),
        st.tuples(st.just("ask"), st.integers(1, 70)),
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("rewind"), st.floats(0, 1)),
        st.tuples(st.just("update"), st.tuples(st.floats(0, 1), st.integers(0, 70))),
        st.tuples(st.just("config"), st.sampled_from(CONFIGS)),
    ),
    min_size=3,
    max_size=7,
)


@pytest.mark.parametrize("place", SOME)
@pytest.mark.parametrize("config", CONFIGS)
@settings(
    derandomize=True,
    max_examples=3,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(actions=ACTIONS, first=st.integers(1, 70))
def test_any_use_of_a_context(
    make: Make, place: str, config: str, actions: list[tuple[str, Any]], first: int
) -> None:
    """Beside one that reads all anew and decodes it plainly; `config` may change on the way."""
    known = TEXT[:first]
    with make("triforce", place) as llm, llm.read(known) as context:
        for action, value in actions:
            if action == "append":
                context.append(OTHER[:value])
                known = [*known, *OTHER[:value]]
            elif action == "rewind":
                known = known[: max(1, round(value * len(known)))]
                context.rewind(len(known))
            elif action == "update":
                share, count = value
                wanted = [*known[: round(share * len(known))], *OTHER[:count]] or known
                kept = context.update(wanted)
                same = [one == other for one, other in zip(known, wanted, strict=False)]
                assert kept == (same.index(False) if False in same else len(same))
                known = wanted
            elif action == "config":
                config = value
            elif action == "ask":
                result = context.generate(OTHER[:value], NEXT, config)
                assert (result.start, result.prompt_tokens) == (len(known), len(known) + value)
                known = [*known, *OTHER[:value]]
                assert result.tokens == fresh(llm, known)
                known = [*known, *result.tokens]
            else:
                params = SamplingParams(max_tokens=20 if action == "take" else value)
                with llm.read(known) as whole:
                    expected = whole.generate((), params, "plain").tokens
                if action == "take":
                    taken = [
                        event.token
                        for _, event in zip(range(value), context.stream((), params, config), strict=False)
                    ]
                else:
                    taken = context.generate((), params, config).tokens
                    value = len(taken)
                assert taken == expected[:value]
                known = [*known, *expected[:value]]
            assert context.tokens == known
        check(llm, context, known, config)
        context.close()
        assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("place", SOME)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_seed_repeats_its_tokens_after_a_rewind(make: Make, config: str, place: str) -> None:
    llm = make(config, place)
    context = llm.read(TEXT[:100])
    first = again(context, HOT).tokens
    context.generate(OTHER[:30], NEXT)
    context.rewind(100)
    assert again(context, HOT).tokens == first == again(context, HOT).tokens


# ------------------------------------------------------------------------------------ many contexts


def test_contexts_share_memory_and_give_it_back(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make("retrieval", "tiers")
    store = llm.engine.store
    first, second = llm.read(TEXT[:100], 10), llm.read(OTHER[:150], 10)
    monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 0)
    with pytest.raises(UsageError, match=r"the KV of 340 tokens .* beside \d\.\d GiB of open contexts: "):
        llm.read(TEXT[:200], 140)
    long = byte_ids(1000, vocabulary=ASCII)
    for use in (first.append, first.generate, first.stream):
        with pytest.raises(UsageError, match="longest context that fits"):
            use(long)
    check_both = [(first, TEXT[:100]), (second, OTHER[:150])]
    expected = [again(context, NEXT).tokens for context, _ in check_both]
    monkeypatch.undo()
    for (context, tokens), found in zip(check_both, expected, strict=True):
        assert context.tokens == tokens and found == fresh(llm, tokens)
    used = store.used_bytes
    first.close()
    first.close()
    assert 0 < store.used_bytes < used and first.closed
    check(llm, second, OTHER[:150])
    with second:
        pass
    assert store.used_bytes == 0


def test_a_context_that_fails_to_be_made_takes_nothing(make: Make) -> None:
    def fail(phase: str, done: int, total: int) -> None:
        raise ValueError("no")

    llm = make("plain", on_progress=fail)
    with pytest.raises(ValueError, match="no"):
        llm.read(TEXT)
    assert llm.engine.store.used_bytes == 0


@pytest.mark.parametrize("place", ["in place", "tiers"])
def test_threads_use_contexts_of_their_own(make: Make, place: str) -> None:
    llm = make("triforce", place)
    prompts = [TEXT[:90], OTHER[:120]]
    expected = [[fresh(llm, prompt), fresh(llm, [*prompt, *TEXT[:50]])] for prompt in prompts]
    found: list[list[list[int]]] = [[], []]

    def work(at: int) -> None:
        with llm.read(prompts[at]) as context:
            for _ in range(3):
                found[at] = [again(context, NEXT).tokens]
                found[at].append([event.token for event in context.stream(TEXT[:50], NEXT)])
                context.rewind(len(prompts[at]))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == expected and llm.engine.store.used_bytes == 0


def test_an_open_stream_ends_when_its_context_is_used(make: Make) -> None:
    llm = make("triforce", "tiers")
    context = llm.read(TEXT[:100])
    uses: list[Callable[[], object]] = [
        lambda: context.append(OTHER[:5]),
        lambda: context.rewind(len(context.tokens)),
        lambda: context.stream((), NEXT),
        context.close,
    ]
    greedy = fresh(llm, TEXT[:100])
    for use in uses:
        stream: TokenStream = context.stream((), SamplingParams(max_tokens=30))
        taken = [next(stream).token for _ in range(3)]
        assert context.tokens == [*TEXT[:100], *taken]
        use()
        assert stream.result is not None and stream.result.finish_reason == "interrupted"
        assert stream.result.tokens == taken == greedy[:3] and list(stream) == []
        if not context.closed:
            context.rewind(100)
    assert context.tokens == [*TEXT[:100], *greedy[:3]] and llm.engine.store.used_bytes == 0


# ---------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("place", SOME)
def test_an_append_that_is_interrupted_leaves_what_was_there(
    make: Make, place: str, error: type[BaseException]
) -> None:
    left: list[int] = []

    def told(phase: str, done: int, total: int) -> None:
        if left:
            left[0] -= 1
            if left[0] == 0:
                raise error("stop here")

    llm = make("triforce", place, on_progress=told)
    context = llm.read(TEXT[:105])
    first = again(context, NEXT).tokens
    for reports in (1, 2, 3):  # the first and the second chunk, and the rest
        for use in (context.append, context.generate):
            left[:] = [reports]
            with pytest.raises(error):
                use(OTHER[:100])
            left.clear()
            check(llm, context, TEXT[:105])
            context.append(OTHER[:11])
            check(llm, context, [*TEXT[:105], *OTHER[:11]])
            context.rewind(105)
    assert again(context, NEXT).tokens == first


@pytest.mark.parametrize("place", ["streamed", "tiers", "other GPUs 0"])
def test_an_append_whose_copies_fail_leaves_what_was_there(make: Make, place: str) -> None:
    link, failed = UnevenLink(), 0

    def fails(number: int) -> Callable[[object], bool]:
        """Of the copies from here on, this one."""
        moves = iter(range(number))
        return lambda pairs: next(moves, None) == number - 1

    llm = make("retrieval", place, link=link)
    context = llm.read(TEXT[:105])
    for fails_at in range(1, 30):
        link.failing = fails(fails_at)
        try:
            context.append(OTHER[:100])
        except CopyFailed:
            failed += 1
        link.failing = lambda pairs: False
        if len(context) > 105:
            break
        check(llm, context, TEXT[:105])
    assert failed >= 3 and context.tokens == [*TEXT[:105], *OTHER[:100]]


def test_what_cannot_be_asked_of_a_context(make: Make) -> None:
    llm = make("triforce")
    context = llm.read(TEXT[:50])
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: context.rewind(0), "rewind to 0: the context has 50 tokens; give 1 to 50"),
        (lambda: context.rewind(51), "rewind to 51: the context has 50 tokens; give 1 to 50"),
        (lambda: context.rewind(-1), "rewind to -1"),
        (lambda: context.rewind(1.5), "length must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: context.append(""), "the prompt is empty"),
        (lambda: context.append([1, ASCII]), f"token {ASCII} is outside the vocabulary"),
        (lambda: context.append([[1]]), "prompt token 0"),  # type: ignore[arg-type]
        (lambda: context.generate((), {"max_tokens": 3}), "params {'max_tokens': 3}: give SamplingParams"),  # type: ignore[arg-type]
        (lambda: context.generate((), NEXT, "fly"), "unknown config 'fly'"),
        (lambda: context.generate((), NEXT, "auto"), "config auto: selects among several"),
        (
            lambda: context.generate((), NEXT, overrides={"retrieval.budget": 512}),
            "name the config that they",
        ),
        (lambda: context.generate((), NEXT, "retrieval", {"a.b": 1}), "unknown key a.b"),
        (lambda: context.generate((), SamplingParams(max_tokens=9000)), "positions of LlamaForCausalLM"),
        (lambda: context.append([1] * 9000), "positions of LlamaForCausalLM"),
        (lambda: context.update([1] * 9000), "9000 prompt tokens are more than"),
        (lambda: context.update([]), "the prompt is empty"),
        (lambda: llm.read(TEXT, 1.5), "room must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: llm.read([]), "the prompt is empty"),
    ]
    for use, message in refused:
        with pytest.raises(UsageError) as told:
            use()
        assert message in str(told.value) and "\n" not in str(told.value)
    check(llm, context, TEXT[:50])
    context.close()
    for use in (lambda: context.append(TEXT), context.generate, context.stream, lambda: context.rewind(3)):
        with pytest.raises(UsageError, match="this context is closed: read the text again"):
            use()
    assert context.tokens == TEXT[:50]


def test_closing_an_llm_closes_its_contexts(make: Make) -> None:
    llm = make("triforce", "tiers")
    context, begun = llm.read(TEXT[:50]), llm.read(OTHER[:50])
    stream = begun.stream((), NEXT)
    next(stream)
    llm.close()
    assert llm.engine.store.used_bytes == 0
    for use in (lambda: context.append(TEXT), context.generate, context.stream, lambda: context.rewind(3)):
        with pytest.raises(UsageError, match="this LLM is closed"):
            use()
    with pytest.raises(UsageError, match="this LLM is closed"):
        list(stream)
    for one in (context, begun):
        one.close()
        assert one.closed


def test_a_context_does_not_grow_over_the_border_of_its_frequencies() -> None:
    with LLM.from_models(tiny_target("phi3"), config="plain", overrides=SIZES) as llm:
        context, beyond = llm.read(byte_ids(30)), llm.read(byte_ids(LONGROPE_BORDER + 10))
        expected = again(context, NEXT).tokens
        crossing = byte_ids(LONGROPE_BORDER)
        for use in (
            lambda: context.append(crossing),
            lambda: context.generate((), SamplingParams(max_tokens=LONGROPE_BORDER)),
            lambda: beyond.rewind(LONGROPE_BORDER),
        ):
            with pytest.raises(UsageError, match=f"{LONGROPE_BORDER} tokens"):
                use()
        assert context.tokens == byte_ids(30) and again(context, NEXT).tokens == expected
        beyond.append(byte_ids(PAGE))
        assert again(beyond, NEXT).tokens == fresh(llm, beyond.tokens)


def test_a_context_goes_on_to_the_last_position() -> None:
    """The room that it was opened with is no longer ahead of it."""
    target = tiny_target("llama-gqa")
    limit = target.config.max_position_embeddings
    with LLM.from_models(target, config="retrieval", overrides=SIZES) as llm:
        context = llm.read(byte_ids(limit - 20), room=20)
        tokens = [context.generate((), max_tokens=10).tokens for _ in range(2)]
        assert list(map(len, tokens)) == [10, 10]
