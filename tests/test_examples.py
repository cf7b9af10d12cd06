"""The programs in `examples/`, run unchanged on a short text."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
Output = Callable[..., str]


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night, and nobody was abroad. " * 8)
    return path


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Output:
    """Runs a program; returns its stdout."""

    def run(program: str, *arguments: Path) -> str:
        monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_stream_prints_the_text_and_the_speed(output: Output, book: Path) -> None:
    *text, speed = output("stream.py", book).splitlines()
    assert "".join(text).strip()
    assert re.fullmatch(r"\d+\.\d tokens/s", speed)


def test_compare_prints_the_ratio_and_equal_tokens(output: Output, book: Path) -> None:
    printed = output("compare.py", book)
    assert re.fullmatch(r"\d+\.\d\d times as fast as plain decoding; tokens equal: True\n", printed)


def test_ask_answers_every_question(output: Output, book: Path) -> None:
    answers = output("ask.py", book).splitlines()
    assert len(answers) == 2
    assert all(re.fullmatch(r".*\? .*, \d+ ms to read the question", answer) for answer in answers)


def test_batch_continues_every_prompt(output: Output, book: Path) -> None:
    first, second = output("batch.py", book, book).splitlines()
    assert first == second
    assert first.startswith(f"{book}: '")
