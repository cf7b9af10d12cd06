"""The programs in `examples/`, run unchanged on a short text."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from offload_rt.drafting.levels.base import LEVELS

EXAMPLES = Path(__file__).parent.parent / "examples"
Output = Callable[..., str]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night, and nobody was abroad. " * 8)
    return path


@pytest.fixture
def long_book(tmp_path: Path) -> Path:
    """A text of several pages of the store."""
    path = tmp_path / "long.txt"
    path.write_text("It was a dark and stormy night, and nobody was abroad. " * 100)
    return path


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Output]:
    """Runs a program; returns its stdout. The levels that it registers are forgotten afterwards."""
    levels = dict(LEVELS)

    def run(program: str, *arguments: Path | str) -> str:
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return capsys.readouterr().out

    yield run
    LEVELS.clear()
    LEVELS.update(levels)


def test_stream_prints_the_text_and_the_speed(output: Output, book: Path) -> None:
    *text, speed = output("stream.py", book).splitlines()
    assert "".join(text).strip()
    assert re.fullmatch(r"\d+\.\d tokens/s", speed)


def test_compare_prints_the_ratio_and_equal_tokens(output: Output, book: Path) -> None:
    printed = output("compare.py", book)
    assert re.fullmatch(r"\d+\.\d\d times as fast as plain decoding; tokens equal: True\n", printed)


def test_a_long_context_goes_on_as_plain_decoding_does(output: Output) -> None:
    _, tokens = output("million_tokens.py", "20000").splitlines()
    assert tokens == "tokens equal to plain decoding: True"


def test_ask_answers_every_question(output: Output, book: Path) -> None:
    answers = output("ask.py", book).splitlines()
    assert len(answers) == 2
    assert all(re.fullmatch(r".*\? .*, \d+ tokens read in \d+ ms", answer) for answer in answers)


def test_batch_continues_every_prompt(output: Output, book: Path) -> None:
    first, second = output("batch.py", book, book).splitlines()
    assert first == second
    assert first.startswith(f"{book}: '")


def accepted(printed: str, level: str) -> int:
    """Number of drafted tokens of a level that were accepted, by what an example prints."""
    match = re.match(rf"{level}: (\d+) of \d+ drafted tokens accepted\n", printed)
    assert match is not None, printed
    return int(match[1])


def test_a_cache_policy_drafts_and_tokens_are_those_of_plain_decoding(
    output: Output, long_book: Path
) -> None:
    printed = output("cache_policy.py", long_book)
    assert accepted(printed, "target:strided") > 0
    assert printed.endswith("tokens equal to plain decoding: True\n")


def test_a_drafter_finds_phrases_and_tokens_are_those_of_plain_decoding(output: Output, book: Path) -> None:
    phrases = "It was a dark and stormy night", ", and nobody was abroad."
    printed = output("drafter.py", book, *phrases)
    assert accepted(printed, "phrases") > 0
    assert printed.endswith("tokens equal to plain decoding: True\n")


def test_a_timeline_shows_a_pass_beside_its_stream_and_a_draft(output: Output, long_book: Path) -> None:
    *spans, equal = output("timeline.py", long_book).splitlines()
    lanes = [re.fullmatch(r" *-?[\d.]+ ms +[\d.]+ ms  (\w+) +(.*)", span) for span in spans]
    names = [match.groups() for match in lanes if match]
    assert len(names) == len(spans)
    assert {("pass", "verify"), ("link", "to device"), ("draft", "draft")} <= set(names)
    assert names.count(("pass", "verify")) == 1
    assert equal == "tokens equal to plain decoding: True"
