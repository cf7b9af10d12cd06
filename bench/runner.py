"""Runs systems side by side: each in a process of its own that is kept alive, timed in turn (A B C A B C …).

A system that is not there, fails, or does not answer in time is a row with the reason. Tokens are held
against those of the first system that yields any.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench import report
from bench.systems import Setup

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
OWN_ENVIRONMENT = ("ours", "transformers", "zero_style")  # of what runs in this program's
WARM_UP_TOKENS = 8
ROOM = 8  # tokens behind the longest continuation
PATIENCE_S = 1800.0

Row = dict[str, Any]


class SystemFailed(RuntimeError):
    """What a system says of itself, or that it says nothing."""


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        systems: `adapter:system`; the first one is the reference.
        contexts: prompt lengths in tokens, each the first tokens of `prompt`.
        turns: interleaved runs of every system, after one that is not timed.
        options: of single systems, by their names.
    """

    setup: Setup
    systems: tuple[str, ...]
    prompt: Sequence[int]
    contexts: tuple[int, ...]
    new_tokens: int
    turns: int
    options: Mapping[str, dict[str, Any]]
    patience_s: float = PATIENCE_S


class Worker:
    """The process of one system.

    Raises:
        SystemFailed: it cannot be opened.
    """

    def __init__(self, name: str, setup: Setup, patience_s: float = PATIENCE_S) -> None:
        adapter, _, system = name.partition(":")
        python = sys.executable if adapter in OWN_ENVIRONMENT else str(PEERS_PYTHON)
        if not Path(python).exists():
            raise SystemFailed("not installed: make bench-peers")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(setup.threads)}
        self._patience_s = patience_s
        log = setup.folder / f"{name.replace(':', '-')}.log"  # what its libraries say
        self._process = subprocess.Popen(
            [python, "-m", "bench.worker", adapter, system],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,  # an interrupt is for this process, which then ends the others
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            opened = self.ask("open", asdict(setup))
        except SystemFailed:
            self.close()
            raise
        self.label: str = opened["label"]
        self.notes: list[str] = opened["notes"]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, command: str, argument: object = None) -> dict[str, Any]:
        """The answer to a command. Raises SystemFailed where there is an error, or no answer in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([command, argument]) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._patience_s)
        except queue.Empty:
            self.close()
            raise SystemFailed(f"no answer to {command} in {self._patience_s:g} s") from None
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            code = self._process.wait()
            raise SystemFailed(f"its process ended (code {code}) in {command}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise SystemFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process. Idempotent."""
        self._process.kill()
        self._process.wait()


def run(case: Case, say: Any) -> Iterator[list[Row]]:
    """Rows of every system at one context after another, each with room for that context and no more."""
    for context in case.contexts:
        failed: dict[str, str] = {}
        with ExitStack() as closing:
            workers: dict[str, Worker] = {}
            for name in case.systems:
                say(f"{context} tokens: open {name}")
                capacity, options = context + case.new_tokens + ROOM, case.options.get(name, {})
                try:
                    setup = replace(case.setup, capacity=capacity, options=options)
                    workers[name] = Worker(name, setup, case.patience_s)
                    closing.callback(workers[name].close)
                except SystemFailed as error:
                    failed[name] = str(error)
            rows = _at(case, context, workers, failed, say)
        yield rows


def _at(case: Case, context: int, workers: dict[str, Worker], failed: dict[str, str], say: Any) -> list[Row]:
    read: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}

    def ask(name: str, command: str, argument: object) -> dict[str, Any] | None:
        if name in failed:
            return None
        try:
            return workers[name].ask(command, argument)
        except SystemFailed as error:
            failed[name] = str(error)
            say(f"{name}: {error}")
            return None

    for name in workers:
        say(f"{context} tokens: {name} reads the prompt")
        if (answer := ask(name, "prepare", list(case.prompt[:context]))) is not None:
            read[name] = answer
    for turn in range(case.turns + 1):
        say(f"{context} tokens: turn {turn} of {case.turns}")
        for name in workers:
            answer = ask(name, "run", case.new_tokens if turn else WARM_UP_TOKENS)
            if answer is not None and turn:
                runs[name].append(answer)
    rows = []
    for name in case.systems:
        row: Row = {"system": name, "context": context}
        if name in failed:
            row["error"] = failed[name]
        else:
            times = [one["ms"] / one["timed"] for one in runs[name]]
            row |= {
                "label": workers[name].label,
                "notes": workers[name].notes,
                "prefill_ms": read[name]["ms"],
                "ms_per_token": report.spread(times),
                "tokens": runs[name][-1]["tokens"],
                "steady": all(one["tokens"] == runs[name][-1]["tokens"] for one in runs[name]),
                "peak_bytes": max(one["peak_bytes"] for one in runs[name]),
            }
        rows.append(row)
    reference: list[int] = next((row["tokens"] for row in rows if "tokens" in row), [])
    for row in rows:
        if "tokens" in row:
            both = zip(row["tokens"], reference, strict=False)
            row["first_difference"] = next((at for at, (a, b) in enumerate(both) if a != b), None)
    return rows
