"""What goes wrong in the middle of the work: a line to the user, and nothing kept that was taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import byte_ids, byte_tokenizer, tiny_target

from cpu_kv import CopyFailed
from offload_rt import LLM, SamplingParams, cli
from offload_rt.session import Session


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    tiny_target("llama").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError("no memory for a KV slab"), "out of memory: no memory for a KV slab; give a shorter"),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "out of memory: CUDA out of memory.; give"),
        (CopyFailed("copying 3 bytes failed"), "copying 3 bytes failed; check the GPU"),
    ],
    ids=["host", "device", "link"],
)
def test_the_machine_refuses(
    error: Exception,
    told: str,
    saved: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Session, "prefill", fail)
    out = tmp_path / "out.json"
    arguments = ["--model", str(saved), "--config", "plain", "--prompt", "abc", "--json", str(out)]
    assert cli.main(["generate", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and "Traceback" not in printed.err
    assert not out.exists()


def test_a_prefill_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM.from_models(tiny_target("llama"), config="plain") as llm:
        monkeypatch.setattr(Session, "prefill", fail)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(byte_ids(50), SamplingParams(max_tokens=3))
        monkeypatch.undo()
        reserved = llm._engine.store.reserved_bytes
        assert llm._engine.store.used_bytes == 0
        assert len(llm.generate(byte_ids(50), SamplingParams(max_tokens=3)).tokens) == 3
        assert llm._engine.store.reserved_bytes == reserved  # its pages were free


def test_a_session_that_cannot_be_made_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no composition")

    with LLM.from_models(tiny_target("llama"), config="plain") as llm:
        monkeypatch.setattr(Session, "_compose", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no composition"):
                llm.generate(byte_ids(5000), SamplingParams(max_tokens=3))
            reserved = llm._engine.store.reserved_bytes
        monkeypatch.undo()
        assert len(llm.generate(byte_ids(5000), SamplingParams(max_tokens=3)).tokens) == 3
        assert llm._engine.store.reserved_bytes == reserved  # its pages were free


def test_a_stdout_without_the_characters_still_gets_the_text(
    saved: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, text = tmp_path / "out.json", tmp_path / "text"
    with text.open("w", encoding="ascii") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        arguments = ["--model", str(saved), "--config", "plain", "--prompt", "abc", "-n", "40", "--quiet"]
        assert (
            cli.main(["generate", *arguments, "--temperature", "2", "--seed", "1", "--json", str(out)]) == 0
        )
    assert json.loads(out.read_text())["timings"]["predicted_n"] > 0
