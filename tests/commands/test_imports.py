"""What a command imports: refusals, plans and lists of sessions need neither torch nor transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload_rt.commands import cli

PROGRAM = """
import sys
from offload_rt.commands import cli
code = cli.main(sys.argv[1:])
print(code, *({"torch", "transformers"} & set(sys.modules)))
"""
UNREACHABLE = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["generate", "--nope"], "unrecognized arguments: --nope"),
        (["generate", "--prompt", "x", "--model", "nosuch"], "model nosuch: there is no such folder"),
        (["generate", "--prompt", "x", "--model", "/no/folder"], "model /no/folder: there is no such folder"),
        (["generate", "--prompt", "x", "--draft", "nosuch"], "model nosuch: there is no such folder"),
        (["generate", "--prompt-file", "/no/file"], "prompt file /no/file: cannot be read"),
        (["generate", "--prompt", "x", "--config", "nosuch"], "unknown config 'nosuch'"),
        (["generate", "--prompt", "x", "--set", "store.page=-1"], "store.page = -1: must be at least 1"),
        (["ask", "--model", "owner/nosuch", "Who?"], "model owner/nosuch: there is no such folder"),
        (["ask", "--file", "/no/file", "Who?"], "file /no/file: cannot be read"),
        (["models", "/no/folder"], "/no/folder: there is no such folder"),
        (["plan", "--context", "0"], "not a number of tokens"),
        (["plan", "--context", "8k", "--gpu", "rtx9999"], "--gpu rtx9999: is not known"),
        (["plan", "--context", "8k", "--gpu", "none", "--set", "store.page=-1"], "must be at least 1"),
        (["plan", "--context", "8k", "--gpu", "rtx4090", "--model", "nosuch"], "no shape of that name"),
        (["plan", "--context", "1M", "--gpu", "rtx4090", "--model", "llama3.1-70b"], "positions"),
        (["plan", "--context", "120k", "--gpu", "rtx5090", "--model", "llama3.1-70b"], "does not fit"),
    ],
)
def test_refusals_import_neither_torch_nor_transformers(command: list[str], said: str) -> None:
    ended = ended_command(command)
    assert said in ended.stderr and ended.stdout == "2\n"


@pytest.mark.parametrize("command", ["generate --prompt x", "ask Who?", "chat", "serve", "plan --context 8k"])
@pytest.mark.parametrize("model", ["nosuch", "owner/nosuch"])
def test_a_model_that_the_hub_cannot_be_asked_for(command: str, model: str) -> None:
    ended = ended_command([*command.split(), "--model", model], HF_HUB_OFFLINE="1")
    assert f"model {model}: there is no such folder" in ended.stderr and ended.stdout == "2\n"


@pytest.mark.parametrize("saved", [False, True])
def test_listing_and_removing_sessions_imports_neither(saved: bool, tmp_path: Path) -> None:
    if saved:
        given = ["--prompt", "Call me", "--max-new-tokens", "1", "--session", "one", "--cache", str(tmp_path)]
        assert cli.main(["generate", *given]) == 0
    listed = ended_command(["sessions", "list", "--cache", str(tmp_path)])
    assert listed.stdout.endswith("\n0\n") and ("one " in listed.stdout) == saved
    assert ended_command(["sessions", "clear", "--cache", str(tmp_path)]).stdout.endswith("\n0\n")
    removed = ended_command(["sessions", "rm", "one", "--cache", str(tmp_path)])
    assert removed.stdout == ("0\n" if saved else "2\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["plan", "--list"], "rtx4090"),
        (["plan", "--model", "llama2-7b", "--context", "127k", "--gpu", "rtx4090", "--verbose"], "fits: "),
        (
            ["plan", "--model", "qwen2.5-7b-1m", "--context", "1M", "--gpu", "l4", "--quantize", "nf4"],
            "fits: ",
        ),
        (["plan", "--model", "demo", "--context", "8k", "--gpu", "rtx3060", "--gpus", "2"], "fits: "),
    ],
)
def test_a_plan_for_named_models_and_cards_imports_neither(command: list[str], said: str) -> None:
    ended = ended_command(command)
    *printed, last = ended.stdout.splitlines()
    assert any(line.startswith(said) for line in printed) and last == "0", ended


def ended_command(command: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs a command without network; its last line is the exit code, and which of both it imported."""
    environment = {**os.environ, **UNREACHABLE, **settings, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = [sys.executable, "-c", PROGRAM, *command]
    return subprocess.run(run, capture_output=True, text=True, env=environment, timeout=60)
