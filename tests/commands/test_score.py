"""`offload-rt score` prints the perplexity that transformers' own forward pass gives."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import byte_tokenizer, real_text, tiny_target
from transformers import PreTrainedModel

from offload_rt.commands import cli
from offload_rt.commands.console import Console
from offload_rt.commands.score import Text

MODEL = tiny_target("llama-gqa")
TEXTS = {"first.txt": f"    naïve 日本\n{real_text()[:300]}", "second.md": real_text()[500:900]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "one.txt").write_text("x")
    (folder / "long.txt").write_text(9000 * "a")
    (folder / "ids").write_text(" ".join(map(str, TEXTS["first.txt"].encode())))
    MODEL.save_pretrained(folder / "model")
    MODEL.save_pretrained(folder / "no-tokenizer")
    byte_tokenizer().save_pretrained(folder / "model")
    return folder


def losses(model: PreTrainedModel, tokens: Sequence[int]) -> list[float]:
    """Negative log probabilities of all tokens but the first, by transformers."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([tokens])).logits[0, :-1].double().log_softmax(-1)
    found: list[float] = (-logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]).tolist()
    return found


def score(
    folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "model"
) -> tuple[list[str], dict[str, Any]]:
    """What a run prints, and its JSON."""
    os.chdir(folder)
    path = folder / "out.json"
    assert cli.main(["score", "--model", model, *arguments, "--quiet", "--json", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report: dict[str, Any] = json.loads(path.read_text())
    return out.splitlines(), report


@pytest.fixture(autouse=True)
def _stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path.cwd())  # back again afterwards


def test_several_texts_and_all_of_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, report = score(folder, capsys, *TEXTS, "--top", "3")
    assert (report["model"], report["dtype"], report["context"]) == ("model", "float32", None)
    together = list[float]()
    for (name, text), line, values in zip(TEXTS.items(), lines, report["texts"], strict=False):
        data = text.encode()
        expected = losses(MODEL, list(data))
        together += expected
        mean = sum(expected) / len(expected)
        bits = sum(expected) / math.log(2) / (len(data) - 1)  # the first byte has no probability
        assert line.startswith(f"{name}: perplexity ")
        found = [float(number) for number in re.findall(r"\d+\.\d{4}", line)]
        assert found == pytest.approx([math.exp(mean), mean, bits], rel=1e-3)
        assert f"{len(expected)} tokens scored" in line
        assert (values["name"], values["tokens"], values["bytes"]) == (name, len(data), len(data) - 1)
        assert values["token_ids"] == list(data) and "".join(values["texts"]) == text
        assert values["logprobs"][0] is None and values["greedy"][0] is None and values["top"][0] == []
        assert values["logprobs"][1:] == pytest.approx([-loss for loss in expected], abs=1e-3)
        assert values["perplexity"] == pytest.approx(math.exp(mean), rel=1e-3)
        assert values["bits_per_byte"] == pytest.approx(bits, rel=1e-3)
        for token, greedy, top in zip(data[1:], values["greedy"][1:], values["top"][1:], strict=True):
            assert len(top) == 3 and greedy == (top[0][0] == token)
    mean = sum(together) / len(together)
    assert len(lines) == 3 and lines[2].startswith("all 2 texts: perplexity ")
    assert float(lines[2].split()[4]) == pytest.approx(math.exp(mean), rel=1e-3)


@pytest.mark.parametrize(("context", "stride"), [(100, 50), (100, 99), (64, 1), (64, 7), (1000, 500)])
def test_windows_are_scored_by_themselves(
    context: int, stride: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with the tokens that it counts, behind those that fill it."""
    arguments = [] if stride == context // 2 else ["--stride", str(stride)]
    _, report = score(folder, capsys, "first.txt", "--context", str(context), *arguments)
    tokens = list(TEXTS["first.txt"].encode())
    expected, end = losses(MODEL, tokens[:context]), context
    while end < len(tokens):
        counted = min(stride, len(tokens) - end)
        end += counted
        expected += losses(MODEL, tokens[end - context : end])[-counted:]
    (values,) = report["texts"]
    assert [-logprob for logprob in values["logprobs"][1:]] == pytest.approx(expected, abs=1e-3)
    assert "".join(values["texts"]) == TEXTS["first.txt"]


@settings(deadline=None)
@given(data=st.data(), length=st.integers(2, 60), context=st.integers(2, 20), beginning=st.integers(0, 3))
def test_windows_count_every_token_once(
    data: st.DataObject, length: int, context: int, beginning: int
) -> None:
    beginning = min(beginning, length, context - 1)
    stride = data.draw(st.integers(1, max(1, context - max(1, beginning))))
    text = Text("text", list(range(length)), context, stride, beginning)
    windows = list(text.windows())
    assert [token for window in windows for token in window.tokens[window.start :]] == text.tokens
    assert sum(len(window.tokens) for window in windows) == text.tokens_to_read
    for window in windows:
        assert len(window.tokens) == text.longest <= context
        assert window.tokens[:beginning] == text.tokens[:beginning]
        assert window is windows[0] or window.start >= max(1, beginning)


def test_the_last_tokens_of_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, report = score(folder, capsys, "first.txt", "--max-prompt-tokens", "50")
    tokens = list(TEXTS["first.txt"].encode())[-50:]
    (values,) = report["texts"]
    assert values["token_ids"] == tokens
    assert values["logprobs"][1:] == pytest.approx([-loss for loss in losses(MODEL, tokens)], abs=1e-3)


def test_token_ids_need_no_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,), report = score(folder, capsys, "--prompt-tokens", "ids", model="no-tokenizer")
    (values,) = report["texts"]
    assert values["texts"] is values["bits_per_byte"] is values["bytes"] is None and "byte" not in line
    tokens = list(TEXTS["first.txt"].encode())
    assert values["logprob"] == pytest.approx(-sum(losses(MODEL, tokens)), rel=1e-3)


def test_stdin_is_a_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXTS["first.txt"].encode())))
    (line,), report = score(folder, capsys, "-")
    assert line.startswith("stdin: perplexity ")
    assert report["texts"][0]["token_ids"] == list(TEXTS["first.txt"].encode())


def test_an_interrupt_keeps_the_texts_that_were_scored(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)

    def interrupted(console: Console, phase: str, done: int, total: int) -> None:
        if phase == "score" and total == len(TEXTS["second.md"].encode()):
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "progress", interrupted)
    assert cli.main(["score", "--model", "model", *TEXTS, "--json", "kept.json"]) == 130
    assert capsys.readouterr().out.startswith("first.txt: perplexity ")
    report = json.loads((folder / "kept.json").read_text())
    assert [values["name"] for values in report["texts"]] == ["first.txt"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "no text is given; name a FILE, - for stdin, or --prompt-tokens FILE"),
        ("nothing.txt", "file nothing.txt: cannot be read"),
        ("one.txt", "one.txt: has 1 token, and the first one has no probability; give at least 2"),
        ("first.txt --stride 3", "--stride 3 is of windows; give their length, --context N"),
        ("first.txt --context 1", "--context 1 is too short for a window; use at least 2"),
        ("first.txt --context 8 --stride 8", "--stride 8 is too long for windows of 8 tokens; use 1 to 7"),
        ("first.txt --context x", "'x' is not a number of tokens"),
        ("first.txt --top 2", "the likeliest tokens are written to --json FILE; name it"),
        ("first.txt --top 21 --json out.json", "--top 21 is out of range; use 0 to 20"),
        ("first.txt --model nothing", "nothing"),
        ("first.txt --model no-tokenizer", "has no tokenizer and cannot read a text"),
        ("first.txt --config lookup", "--config"),
        ("long.txt", "9000 prompt tokens are more than the 8192 positions of model: use at most 8192 prompt"),
        ("long.txt", "; or score the text in windows, --context N\n"),
        ("long.txt --context 9000", "are more than the 8192 positions of model"),
    ],
)
def test_bad_requests_are_refused_in_a_line(
    arguments: str,
    line: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert cli.main(["score", "--model", "model", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("offload-rt: error: ") and err.count("\n") == 1 and line in err
