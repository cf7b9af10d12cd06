"""The programs in `examples/`, run as they are on a short text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night, and nobody was abroad. " * 8)
    return path


def output(program: str, *arguments: Path) -> str:
    """What `program` writes to stdout; it must succeed."""
    ended = subprocess.run(
        [sys.executable, ROOT / "examples" / program, *arguments],
        # A program's own folder, not the current one, is on its path.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_stream_prints_the_text_and_the_speed(book: Path) -> None:
    *text, speed = output("stream.py", book).splitlines()
    assert "".join(text).strip()
    assert re.fullmatch(r"\d+\.\d tokens/s", speed)


def test_compare_prints_the_ratio_and_equal_tokens(book: Path) -> None:
    printed = output("compare.py", book)
    assert re.fullmatch(r"\d+\.\d\d times as fast as plain decoding; tokens equal: True\n", printed)


def test_batch_continues_every_prompt(book: Path) -> None:
    first, second = output("batch.py", book, book).splitlines()
    assert first == second
    assert first.startswith(f"{book}: '")
