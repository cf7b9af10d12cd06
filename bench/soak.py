"""`python -m bench soak`: a server for half an hour, with clients that disconnect at random."""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import psutil

from bench.arguments import number
from offload_rt.api.llm import LLM
from offload_rt.commands.prompts import built_in
from offload_rt.errors import UsageError
from offload_rt.system.files import write_json

DOCUMENTS = (300, 1500, 6000, 12_000)
"""Characters of the documents that are asked about."""
QUESTIONS = ("Who is it?", "And where?", "Why so?")
NEW_TOKENS = (8, 32)
LEAVING = 0.35
"""Share of the requests whose client leaves before the answer is complete."""
MOST_WAIT_S = 5.0
"""Most time after which such a client leaves."""
WARM_UP = 0.25
"""Share of the time after which memory must be level."""
IDLE_S = 60.0
"""Time in which the slots of the server must be free after the last request."""

Request = tuple[str, dict[str, Any], str]
"""Path, body, and the text that is expected."""


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--model", metavar="PATH|ID", help="an instruct model (default: the demo)")
    parser.add_argument("--minutes", type=number(float, 0.05), default=30.0, metavar="N", help="default: 30")
    parser.add_argument("--clients", type=number(int, 1), default=8, metavar="N", help="default: 8")
    parser.add_argument("--seed", type=number(int, 0), default=0, metavar="N", help="default: 0")
    parser.add_argument("--out", type=Path, metavar="FILE", help="writes the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 where an answer is wrong, a slot stays taken, or memory grows."""
    with LLM(arguments.model) as llm:
        requests = list(_requests(llm))
        name = llm.engine.target.name
    with _served(arguments.model) as (process, address):
        soak = Soak(address, requests, arguments.seed, 60 * arguments.minutes)
        memory = soak.run(arguments.clients, psutil.Process(process.pid))
        free = soak.idle(IDLE_S)
    settled = memory[int(WARM_UP * len(memory)) :]
    half = len(settled) // 2
    grown = statistics.median(settled[half:]) / statistics.median(settled[:half]) - 1 if half else 0.0
    result = {
        "model": name,
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        **dict(soak.counts),
        "slots_free": free,
        "memory_mib": [round(statistics.median(part) / 2**20) for part in (settled[:half], settled[half:])]
        if half
        else [],
        "memory_grown": round(grown, 4),
        "wrong_answers": soak.wrong[:5],
    }
    print(json.dumps(result))
    if arguments.out is not None:
        write_json("--out", arguments.out, result)
    return int(bool(soak.counts["wrong"] or soak.counts["failed"] or not free or grown > 0.02))


def _requests(llm: LLM) -> Iterator[Request]:
    """Yields requests of all protocols, with what plain use of the API answers."""
    text = built_in()
    for size in DOCUMENTS:
        for question in QUESTIONS:
            messages = [{"role": "user", "content": f"{text[:size]}\n\n{question}"}]
            for new_tokens in NEW_TOKENS:
                answer = llm.chat(messages, temperature=0.0, top_k=0, top_p=1.0, max_tokens=new_tokens).answer
                body = {"messages": messages, "max_tokens": new_tokens, "temperature": 0}
                yield "/v1/chat/completions", body, answer
                yield "/v1/messages", body | {"model": "any"}, answer
                responses = {"input": messages, "max_output_tokens": new_tokens, "temperature": 0}
                yield "/v1/responses", responses, answer
            prompt = text[:size]
            whole = llm.generate(prompt, max_tokens=NEW_TOKENS[0]).text
            body = {"prompt": prompt, "max_tokens": NEW_TOKENS[0], "temperature": 0}
            yield "/v1/completions", body, whole


@contextmanager
def _served(model: str | None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serves a model in a process of its own, at a free port."""
    command = [sys.executable, "-m", "offload_rt", "serve", "--port", "0"]
    command += [] if model is None else ["--model", model]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"http://([\d.]+:\d+)", line):
                    break
            else:
                raise UsageError("the server did not start: try offload-rt serve")
            # What it logs must be read, or it would wait for its reader.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield process, found[1]
        finally:
            process.terminate()


class Soak:
    """Clients of a server, and what became of their requests.

    Args:
        seconds: time for which they go on.

    Attributes:
        counts: requests that were answered, wrong, failed, refused, or whose client left.
        wrong: some of the wrong answers, with what was expected.
    """

    def __init__(self, address: str, requests: list[Request], seed: int, seconds: float) -> None:
        self.counts: Counter[str] = Counter(answered=0, left=0, refused=0, wrong=0, failed=0)
        self.wrong: list[tuple[str, str, str]] = []
        self._address = address
        self._requests = requests
        self._seed = seed
        self._end = time.monotonic() + seconds

    def run(self, clients: int, server: psutil.Process) -> list[int]:
        """Runs the clients; returns samples of the server's memory, in bytes."""
        samples = list[int]()
        with ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(self._client, self._seed + number) for number in range(clients)]
            while time.monotonic() < self._end:
                samples.append(server.memory_info().rss)
                time.sleep(1)
            for client in running:
                client.result()
        return samples

    def idle(self, seconds: float) -> bool:
        """Returns whether no request runs or waits any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._connection() as connection:
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
            if re.search(r"_running 0\b", text) and re.search(r"_waiting 0\b", text):
                return True
            time.sleep(0.5)
        return False

    def _client(self, seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < self._end:
            path, body, expected = chance.choice(self._requests)
            stream = chance.random() < 0.5
            leaves_after = chance.uniform(0, MOST_WAIT_S) if chance.random() < LEAVING else None
            try:
                status, text = self._ask(path, body, stream, leaves_after)
            except TimeoutError:
                self.counts["left" if leaves_after is not None else "failed"] += 1
                continue
            except (OSError, HTTPException, ValueError) as error:
                self.counts["failed"] += 1
                self.wrong.append((path, repr(error), ""))
                continue
            if status == 429:
                self.counts["refused"] += 1
            elif status != 200 or text != expected:
                self.counts["wrong"] += 1
                self.wrong.append((path, text, expected))
            else:
                self.counts["answered"] += 1

    def _ask(
        self, path: str, body: dict[str, Any], stream: bool, leaves_after: float | None
    ) -> tuple[int, str]:
        """Returns the status and the text of an answer. Raises TimeoutError where the client leaves."""
        began = time.monotonic()
        with self._connection() as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body | {"stream": stream}), headers)
            assert connection.sock is not None
            connection.sock.settimeout(600 if leaves_after is None else max(0.01, leaves_after))
            answer = connection.getresponse()
            lines = list[bytes]()
            for line in answer:
                lines.append(line)
                if leaves_after is not None and time.monotonic() - began > leaves_after:
                    raise TimeoutError
        whole = b"".join(lines)
        if answer.status != 200:
            return answer.status, whole.decode()
        if not stream:
            return 200, _text(json.loads(whole))
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return 200, "".join(map(_delta, events))

    @contextmanager
    def _connection(self) -> Iterator[HTTPConnection]:
        connection = HTTPConnection(self._address, timeout=600)
        try:
            yield connection
        finally:
            with suppress(OSError):
                connection.close()


def _text(answer: dict[str, Any]) -> str:
    """Returns the text of a whole answer of any protocol."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def _delta(event: dict[str, Any]) -> str:
    """Returns the text that an event of a stream of any protocol adds."""
    if "error" in event:
        raise ValueError(str(event["error"]))
    if "choices" in event:
        return "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event["choices"]
        )
    if event.get("type") == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return str(event["delta"]) if event.get("type") == "response.output_text.delta" else ""
