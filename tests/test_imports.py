"""What a command imports: refusals need neither torch nor transformers, which take seconds to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from offload_rt import cli
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
    ],
)
def test_refusals_import_neither_torch_nor_transformers(command: list[str], said: str) -> None:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, **UNREACHABLE, "PYTHONPATH": root}
    run = [sys.executable, "-c", PROGRAM, *command]
    ended = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=60)
    assert said in ended.stderr and ended.stdout == "2\n"
