"""`offload-rt serve` as a process, and what it refuses."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from support.serving import chat_tokenizer
from support.tiny_models import real_text, tiny_target

from offload_rt.api.sessions import SessionFolder
from offload_rt.commands import cli

ROOT = Path(__file__).parents[2]


def test_it_serves_until_sigterm_and_finishes_and_saves_what_runs(tmp_path: Path) -> None:
    tiny_target("llama-gqa", vocabulary=128).save_pretrained(tmp_path / "small")
    chat_tokenizer().save_pretrained(tmp_path / "small")
    command = [sys.executable, "-m", "offload_rt", "serve", "--model", str(tmp_path / "small"), "--port", "0"]
    command += ["--config", "lookup", "--cache", str(tmp_path / "cache"), "--name", "it"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        lines = list[str]()
        try:
            while not lines or not lines[-1].startswith("serving"):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            (address,) = re.findall(r"it at (http://127\.0\.0\.1:\d+) ", lines[-1])
            body = {"prompt": list(real_text()[:1500].encode("ascii", "replace")), "stream": True}
            body |= {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
            asked = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60) as answer:
                while not (first := answer.readline()).startswith(b"data: {"):
                    assert first in (b": waiting\n", b"\n")
                process.send_signal(signal.SIGTERM)
                rest = answer.read().decode()
            assert rest.endswith("data: [DONE]\n\n")
            assert '"finish_reason": "length"' in rest
            errors = process.stderr.read()
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "request    1,500 prompt tokens (0 were there)" in errors and "Traceback" not in errors
    (kept,) = SessionFolder(tmp_path / "cache").entries()
    assert kept.tokens == 1800


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--port", str(port)]) == 2
    error = f"127.0.0.1:{port}: cannot listen there (Address already in use); name another --port\n"
    assert capsys.readouterr().err == f"offload-rt: error: {error}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "'70000' is not a port: use 0 to 65535"),
        (["--api-key", " "], "the key is empty: give one, or leave the flag out"),
        (["--keep", "much"], "'much' is not a number of GiB"),
        (["--parallel", "0"], "'0' is not an integer of at least 1"),
        (["--host", "nowhere.invalid"], "nowhere.invalid:8000: cannot listen there"),
        (["--context", "1M", "--port", "0"], "positions of demo"),
    ],
)
def test_bad_flags(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *flags]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
