"""Prompts are read in pieces: whatever ends the reading, the pieces stay, and a retry reads on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.small_engine import LINKS, SIZES
from support.tiny_models import LOCAL_ARCHITECTURES, byte_ids, local_model, noisy_copy, tiny_target

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams
from offload_rt.api.sessions import SessionFolder
from offload_rt.caches.full import FullCache
from offload_rt.caches.prompt_writer import PromptWriter
from offload_rt.engine.engine import Engine
from offload_rt.errors import UsageError

PIECE, LAST = 24, 8
PIECES = SIZES | {"prefill.chunk": 16, "prefill.piece": PIECE}
TEXT, LAYERS = byte_ids(170), 2
SHORT = SamplingParams(max_tokens=12)
ENDS: tuple[Callable[[], BaseException], ...] = (
    KeyboardInterrupt,
    lambda: UsageError("the client is gone"),
    lambda: MemoryError("of the machine"),
)


class Reading:
    """Progress of a prefill, which it ends at a given report.

    Attributes:
        tokens: that the newest reading had to read, and those that it had read.
    """

    def __init__(self) -> None:
        self.ends_after: int | None = None
        self.end: Callable[[], BaseException] = KeyboardInterrupt
        self.tokens = 0, 0.0

    def __call__(self, phase: str, done: int, of: int) -> None:
        if phase != "prefill":
            return
        self.tokens = of // LAYERS, done / LAYERS
        if self.ends_after is not None:
            self.ends_after -= 1
            if self.ends_after < 0:
                self.ends_after = None
                raise self.end()


def opened(
    reading: Reading, link: str = "in place", arch: str = "llama-gqa", config: str = "triforce"
) -> LLM:
    target = local_model(arch) if arch in LOCAL_ARCHITECTURES else tiny_target(arch)
    draft = noisy_copy(target) if config == "triforce" else None
    return LLM.from_models(target, draft, None, config, PIECES, reading, link=LINKS[link]())


PLACES = ("in place", "llama-gqa"), ("link", "llama-gqa"), ("link", "qwen3.5")


@pytest.fixture(scope="module", params=PLACES)
def read_in_pieces(request: pytest.FixtureRequest) -> Any:
    link, arch = request.param
    reading, paged = Reading(), arch == "llama-gqa"
    with pytest.MonkeyPatch.context() as patch:
        for module in ("prefill", "sequence"):
            patch.setattr(f"offload_rt.engine.{module}.LAST_PORTION", 4)
        with opened(reading, link, arch, "triforce" if paged else "plain") as llm:
            yield llm, reading, paged


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    length=st.integers(2, len(TEXT)),
    ends=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(ENDS)), max_size=3),
    updates=st.booleans(),
)
def test_a_retry_reads_on(
    read_in_pieces: Any, length: int, ends: list[tuple[int, Callable[[], BaseException]]], updates: bool
) -> None:
    """Nothing is read twice but the last piece, and the tokens are those of an uninterrupted run."""
    llm, reading, paged = read_in_pieces
    tokens = TEXT[:length]
    expected = llm.generate(tokens, SHORT).tokens
    context = llm.read([tokens[0] ^ 1]) if updates else None

    def read() -> Any:
        if context is not None:
            context.update(tokens)
            return context
        return llm.read(tokens)

    least = 0.0
    for reports, end in ends:
        reading.ends_after, reading.end, reading.tokens = reports, end, (0, 0.0)
        try:
            read().close()
        except (KeyboardInterrupt, UsageError, MemoryError):
            missing, read_by_then = reading.tokens
            if paged:  # other sequences keep few of the lengths that they can return to
                assert length - 1 - missing >= least, "a piece that was read before is there"
            least = length - 1 - missing + read_by_then - PIECE - LAST
        else:
            break
    reading.ends_after = None
    if context is not None and context.closed:
        context = None
    with read() as finished:
        assert finished.tokens == tokens
        assert finished.generate((), SHORT).tokens == expected
    assert llm.engine.store.used_bytes == 0


def test_another_prompt_drops_what_was_read(read_in_pieces: Any) -> None:
    llm, reading, _ = read_in_pieces
    reading.ends_after, reading.end = 11, KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        llm.read(TEXT)
    assert llm.engine.store.used_bytes > 0
    llm.read([TEXT[0] ^ 1, *TEXT[1:]]).close()
    assert llm.engine.store.used_bytes == 0


def test_an_append_that_fails_leaves_nothing(read_in_pieces: Any) -> None:
    llm, reading, _ = read_in_pieces
    with llm.read(TEXT[:40]) as context:
        reading.ends_after, reading.end = 5, KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            context.append(TEXT[40:])
        assert context.tokens == TEXT[:40]
        context.append(TEXT[40:])
        assert context.generate((), SHORT).tokens == llm.generate(TEXT, SHORT).tokens


def test_no_line_of_opening_leaks_when_it_is_interrupted() -> None:
    reading, lines = Reading(), (Engine.open.__code__, Engine.start.__code__)
    with opened(reading, config="plain") as llm:

        def opened_again(interrupted: int) -> int:
            """Reads what another reading had begun, but for an interrupt; returns the number of lines."""
            reading.ends_after, seen = 11, 0
            with pytest.raises(KeyboardInterrupt):
                llm.read(TEXT)

            def trace(frame: FrameType, event: str, _: object) -> Any:
                nonlocal seen
                if frame.f_code not in lines:
                    return None
                seen += event == "line"
                if event == "line" and seen == interrupted:
                    raise KeyboardInterrupt
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                llm.read(TEXT).close()
            finally:
                sys.settrace(before)
            return seen

        for line in range(1, opened_again(0)):  # behind the last one, the sequence is the caller's
            with pytest.raises(KeyboardInterrupt):
                opened_again(line)
            assert not llm.engine.sequences
            with llm.read(TEXT) as context:
                assert context.tokens == TEXT
            assert llm.engine.store.used_bytes == 0, f"line {line}"


def test_pieces_take_no_more_memory_than_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer ones than `prefill.chunk` only where they are planned and no KV is resident."""
    portions = list[int]()
    start = PromptWriter.__init__

    def watched(writer: PromptWriter, cache: FullCache, tokens: int) -> None:
        portions.append(tokens)
        start(writer, cache, tokens)

    monkeypatch.setattr(PromptWriter, "__init__", watched)
    for changes, longest in (
        ({}, PIECE),
        ({"prefill.piece": 0}, 16),
        ({"offload.resident_tokens": 32}, 16),
    ):
        target = tiny_target("llama-gqa")
        with (
            LLM.from_models(target, config="plain", overrides=PIECES | changes, link=PacedLink(1e9)) as llm,
            llm.read(TEXT[:60]) as context,
        ):
            del portions[:]
            context.append(TEXT[60:])
            assert max(portions) == longest


def test_a_prompt_that_is_being_read_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(Reading(), config="plain") as llm:
        engine, target = llm.engine, llm.engine.target
        token_bytes = engine.store.layout.stored_token_bytes + target.hidden_size * target.dtype.itemsize
        available = int(1.5 * len(TEXT) * token_bytes)
        monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: available)
        for pieces in range(3):
            sequence = engine.start(TEXT, 1)
            for _ in range(pieces):
                engine.read(sequence)
            with pytest.raises(UsageError, match="fits"):
                engine.start([1, *TEXT[1:]], 1)
            engine.close_sequence(sequence)
        assert not engine.sequences


def test_pieces_are_kept_as_a_session_and_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_rt.api.sessions.LEAST_TOKENS", 16)
    reading = Reading()
    with opened(reading) as llm:
        for name in ("mine", None):
            folder = SessionFolder(tmp_path / str(name))
            reading.ends_after = 20
            with pytest.raises(KeyboardInterrupt):
                folder.open(llm, TEXT, 12, name, cache=name is None)
            kept = folder.keep_unfinished(llm, name)
            assert kept > PIECE and llm.engine.store.used_bytes == 0
            assert folder.keep_unfinished(llm, name) == 0
            context, found = folder.open(llm, TEXT, 12, name, cache=name is None)
            assert found == kept
            assert context.generate((), SHORT).tokens == llm.generate(TEXT, SHORT).tokens
            context.close()


def test_a_session_loses_no_token_to_what_was_read_of_another_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_rt.api.sessions.LEAST_TOKENS", 16)
    reading, folder = Reading(), SessionFolder(tmp_path)
    with opened(reading) as llm:
        with llm.read(TEXT) as context:
            folder.save(context, "mine")
        reading.ends_after = 8
        with pytest.raises(KeyboardInterrupt):
            folder.open(llm, [*TEXT[:100], *TEXT[:70]], 12, "mine", cache=False)
        assert folder.keep_unfinished(llm, "mine", cache=False) == 0
        assert [entry.name for entry in folder.entries()] == ["mine"]
        with folder.load(llm, "mine") as context:
            assert context.tokens == TEXT
