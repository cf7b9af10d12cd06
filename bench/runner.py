"""Runs systems side by side: in processes that are kept alive, timed in turn (A B C A B C …).

Systems of a peer have a process each; those of ours and of transformers share one, and a prefill. A system
that is not installed, does not fit, fails, or does not answer in time is a row with the reason. Greedy tokens
are compared with those of the first system that yields any.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench.cases import Named
from bench.results import Row, spread
from bench.systems import Prompt, Setup
from offload_rt.system.hardware import GIB
from offload_rt.system.memory import available_memory

ROOT = Path(__file__).resolve().parents[1]
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
OWN_ENVIRONMENT = ("ours", "transformers", "zero_style", "layer_prefetch")  # adapters that need no other one
ONE_PROCESS = ("ours", "transformers")  # adapters whose systems share a process
LINKED = ("ours", "zero_style", "layer_prefetch")  # adapters that an emulated link applies to
WARM_UP_TOKENS = 8
PATIENCE_S = 1800.0
CLOSING_S = 5.0

Say = Callable[[str], None]


class SystemFailed(RuntimeError):
    """A system reported an error, or gave no answer."""


@dataclass(frozen=True)
class Job:
    """Systems that continue one prompt.

    Attributes:
        setup: has room for the prompt and its continuation.
        systems: `adapter:system+key=value`; the first one is the reference.
        turns: interleaved runs of every system, after one that is not timed.
        picture: path where the last system draws its last run; empty: nowhere.
    """

    setup: Setup
    systems: Sequence[str]
    prompt: Prompt
    new_tokens: int
    turns: int
    picture: str = ""


class Worker:
    """A process for systems of one adapter.

    Raises:
        SystemFailed: the adapter's environment is not installed.
    """

    def __init__(self, adapter: str, setup: Setup, patience_s: float = PATIENCE_S) -> None:
        python = Path(sys.executable) if adapter in OWN_ENVIRONMENT else PEERS_PYTHON
        if not python.exists():
            raise SystemFailed("not installed: make bench-peers")
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(setup.threads)}
        if adapter != "ours":  # which sets it where there is a GPU, perhaps in this process too
            environment.pop("OMP_WAIT_POLICY", None)
        self._patience_s = patience_s
        self._connection, theirs = Pipe()
        with theirs, (setup.folder / f"{adapter}.log").open("a") as log:  # what libraries print
            self._process = subprocess.Popen(
                [str(python), "-m", "bench.worker", adapter, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # an interrupt is for this process, which then ends the others
            )

    def ask(self, command: str, *arguments: object) -> dict[str, Any]:
        """Sends a command and returns the answer.

        Raises:
            SystemFailed: the answer is an error, or there is none in time.
        """
        try:
            self._connection.send([command, *arguments])
            if not self._connection.poll(self._patience_s):
                self._kill()
                raise SystemFailed(f"no answer to {command} in {self._patience_s:g} s")
            answer: dict[str, Any] = self._connection.recv()
        except (OSError, EOFError):
            self.close()
            raise SystemFailed(f"its process ended (code {self._process.returncode}) in {command}") from None
        if "error" in answer:
            raise SystemFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process, after a moment in which its systems may release what they hold. Idempotent."""
        self._connection.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSING_S)
        finally:
            self._kill()

    def _kill(self) -> None:
        """Kills the process, if it still runs, and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(job: Job, say: Say) -> list[Row]:
    """Returns a row for every system."""
    with ExitStack() as closing:
        return _Opened(job, closing, say).rows()


class _Opened:
    """The systems of a job."""

    def __init__(self, job: Job, closing: ExitStack, say: Say) -> None:
        self._job, self._closing, self._say = job, closing, say
        self._workers: dict[str, Worker] = {}
        self._failed: dict[str, str] = {}
        setup = job.setup
        self._least = setup.weight_bytes + len(job.prompt) * setup.capacity * setup.kv_token_bytes
        self._free_bytes = available_memory()
        self._opened: dict[str, dict[str, Any]] = {}
        for name in job.systems:
            say(f"open {name}")
            named = Named.parse(name)
            own = replace(job.setup, settings=dict(named.settings), acceptance=named.acceptance)
            if (answer := self._ask(name, "open", own)) is not None:
                self._opened[name] = answer

    def _worker(self, name: str) -> Worker:
        """The process of a system, started if need be.

        Raises:
            SystemFailed: it cannot be started.
        """
        adapter = name.partition(":")[0]
        process = adapter if adapter in ONE_PROCESS else name
        if self._job.setup.link_gb_s and adapter not in LINKED:
            raise SystemFailed("an emulated link does not apply to it")
        if process not in self._workers:
            if self._least > self._free_bytes and self._job.setup.device == "cpu":
                rest = f"{self._free_bytes / GIB:.1f} are left"
                raise SystemFailed(f"its weights and KV take {self._least / GIB:.1f} GiB, and {rest}")
            self._workers[process] = Worker(adapter, self._job.setup)
            self._closing.callback(self._workers[process].close)
            self._free_bytes -= self._least
        return self._workers[process]

    def _ask(self, name: str, command: str, *arguments: object) -> dict[str, Any] | None:
        """The answer of a system; None if it has failed, now or before."""
        if name in self._failed:
            return None
        try:
            return self._worker(name).ask(command, name.partition(":")[2], *arguments)
        except SystemFailed as error:
            self._failed[name] = str(error)
            self._say(f"{name}: {error}")
            return None

    def rows(self) -> list[Row]:
        """Prepares all systems, times them in turn, and compares their tokens."""
        prefill_ms: dict[str, float] = {}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self._job.systems}
        for name in runs:
            self._say(f"{name} reads the prompt")
            if (answer := self._ask(name, "prepare", self._job.prompt)) is not None:
                prefill_ms[name] = answer["ms"]
        time_left = ""
        for turn in range(self._job.turns + 1):
            self._say(f"turn {turn} of {self._job.turns}{time_left}")
            started = perf_counter()
            for name in runs:
                answer = self._ask(name, "run", self._job.new_tokens if turn else WARM_UP_TOKENS)
                runs[name] += [answer] if answer is not None and turn else []
            seconds = (perf_counter() - started) * (self._job.turns - turn)
            time_left = f", {seconds:.0f} s left here" if turn else ""
        rows = [self._row(name, prefill_ms.get(name, 0.0), runs[name]) for name in runs]
        self._compare([row for row in rows if "tokens" in row and row["synthetic"] is None])
        if self._job.picture:
            self._ask(self._job.systems[-1], "draw", self._job.picture)
        return rows

    def _row(self, name: str, prefill_ms: float, runs: Sequence[Mapping[str, Any]]) -> Row:
        row: Row = {"system": name, "synthetic": Named.parse(name).acceptance}
        if name in self._failed:
            return row | {"error": self._failed[name]}
        last, opened = runs[-1], self._opened[name]
        tokens, has_rounds = last["tokens"], last["rounds"] is not None
        yielded = median(len(run["tokens"]) / run["rounds"] for run in runs) if has_rounds else None
        row |= {
            "label": opened["label"],
            "notes": [*opened["notes"], *last["notes"]],
            "prefill_ms": prefill_ms,
            "ms_per_token": spread([run["ms"] / run["timed"] for run in runs]),
            "tokens_per_round": yielded,
            "accepted": last["accepted"],
            "tokens": tokens,
            "steady": all(run["tokens"] == tokens for run in runs),
        }
        if last["figures"]:
            row["figures"] = [run["figures"] for run in runs]
        return row | {key: last[key] for key in ("peak_bytes", "device_bytes")}

    def _compare(self, rows: Sequence[Row]) -> None:
        """Adds where tokens differ from the reference's first, and by how much its logit is higher there."""
        for row in rows:
            tokens, reference, expected = row["tokens"], rows[0]["system"], rows[0]["tokens"]
            both = enumerate(zip(tokens, expected, strict=False))
            first = next((at for at, (token, other) in both if token != other), None)
            row["first_difference"] = first
            if first is not None and len(self._job.prompt) == 1:
                with suppress(SystemFailed):  # not every system has `logits_after`
                    system, before = reference.partition(":")[2], expected[:first]
                    logits = self._worker(reference).ask("logits_after", system, before)["logits"]
                    row["logit_gap"] = logits[expected[first]] - logits[tokens[first]]
