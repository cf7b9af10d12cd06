"""Prompts that the server reads in pieces: beside other requests, for clients that wait and that leave."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.serving import NAME, Served, serving, steps_held_after
from support.small_engine import SIZES
from support.tiny_models import real_text

from offload_rt import SamplingParams
from offload_rt.api.sessions import SessionFolder
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import TokenSequence
from offload_rt.server.jobs.worker import Event, Job

BOOK = real_text()[:3000].encode("ascii", "replace").decode()
PIECE = 128
PIECES = SIZES | {"prefill.chunk": 64, "prefill.piece": PIECE}
CHAT = "/v1/chat/completions"


def body(text: str, **options: Any) -> dict[str, Any]:
    given = {"model": NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    return given | {"temperature": 0, "ignore_eos": True} | options


def text_of(served: Served, text: str, **options: Any) -> str:
    status, answer, _ = served.call(CHAT, body(text, **options))
    assert status == 200, answer
    content: str = json.loads(answer)["choices"][0]["message"]["content"]
    return content


class Calls:
    """The pieces that are read and the steps that are run from here on, in order.

    Attributes:
        made: the sequence of a piece, or None for a step.
        tokens: that were read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[TokenSequence | None] = []
        self.tokens = 0
        read, step = Engine.read, Engine.step

        def watched_read(engine: Engine, sequence: TokenSequence, most: int | None = None) -> bool:
            before = sequence.full.verified_length
            self.made.append(sequence)
            ended = read(engine, sequence, most)
            self.tokens += sequence.full.verified_length - before
            return ended

        def watched_step(engine: Engine, sequences: Any) -> Any:
            self.made.append(None)
            return step(engine, sequences)

        monkeypatch.setattr(Engine, "read", watched_read)
        monkeypatch.setattr(Engine, "step", watched_step)


def test_fifty_clients_that_lose_patience_all_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves when a third of a prompt was read for it, and asks again; nothing is read twice."""
    books = [BOOK[at : at + 1500] for at in range(0, 1000, 250)]
    with serving(layers=1, sizes=PIECES, waiting=200) as served:
        texts = [
            served.llm.chat(body(book)["messages"], max_tokens=8, ignore_eos=True).text for book in books
        ]
        calls = Calls(monkeypatch)

        def client(number: int) -> tuple[str, int]:
            attempts = 0
            while True:
                attempts += 1
                connection, answer = served.connect(), ""
                sent = json.dumps(body(books[number % 4], stream=True, return_progress=True))
                connection.request("POST", CHAT, sent, {"content-type": "application/json"})
                for line in connection.getresponse():
                    if line.startswith(b"data: {"):
                        chunk = json.loads(line[6:])
                        progress = chunk.get("prompt_progress")
                        if progress and progress["processed"] - progress["cache"] > progress["total"] // 3:
                            break
                        answer += "".join(one["delta"].get("content") or "" for one in chunk["choices"])
                    elif line.startswith(b"data: [DONE]"):
                        return answer, attempts
                connection.close()

        with ThreadPoolExecutor(50) as pool:
            found = list(pool.map(client, range(50)))
        assert [answer for answer, _ in found] == [texts[number % 4].lstrip() for number in range(50)]
        assert max(attempts for _, attempts in found) > 1
        served.idle()
        prompts = sum(len(served.llm.chat_template.encode(body(book)["messages"])) for book in books)
        assert calls.tokens < prompts, "the last token of each is left to its first step"
        assert not served.llm.engine.sequences


def test_streams_go_on_between_two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(sizes=PIECES) as served:
        reading, wait = threading.Event(), threading.Event()
        calls = Calls(monkeypatch)
        read = Engine.read

        def held(engine: Engine, sequence: TokenSequence, most: int | None = None) -> bool:
            if sequence.full.verified_length < PIECE:
                reading.set()
                assert wait.wait(30)
            return read(engine, sequence, most)

        with ThreadPoolExecutor(3) as pool:
            running = pool.submit(text_of, served, "Who?", max_tokens=400)
            served.wait_until(lambda: served.worker.running == 1 and None in calls.made)
            monkeypatch.setattr(Engine, "read", held)
            long = [pool.submit(text_of, served, first + BOOK[:1800]) for first in ("A", "B")]
            assert reading.wait(30)
            del calls.made[:]
            wait.set()
            for answer in (*long, running):
                answer.result()
        first = next(made for made in calls.made if made is not None)
        pieces = [at for at, made in enumerate(calls.made) if made is first]
        assert len(pieces) >= 1800 // PIECE
        for one, following in pairwise(pieces):
            between = calls.made[one + 1 : following]
            assert None in between, "the running request is stepped after every piece"
        both = {made for made in calls.made[pieces[0] : pieces[-1]] if made is not None}
        assert len(both) == 2, "the second prompt is not read after the first, but in turn with it"


def test_prompts_that_differ_in_the_end_read_their_beginning_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(sizes=PIECES) as served:
        beginning, ends = BOOK[:1500], ("A" * 900, "B" * 900)
        texts = [text_of(served, beginning + end) for end in ends]
    with serving(sizes=PIECES) as served, ThreadPoolExecutor(2) as pool:
        reading, wait = threading.Event(), threading.Event()
        calls, read = Calls(monkeypatch), Engine.read

        def held(engine: Engine, sequence: TokenSequence, most: int | None = None) -> bool:
            if sequence.full.verified_length >= PIECE:
                reading.set()
                assert wait.wait(30)
            return read(engine, sequence, most)

        monkeypatch.setattr(Engine, "read", held)
        answers = [pool.submit(text_of, served, beginning + ends[0])]
        assert reading.wait(30)
        answers.append(pool.submit(text_of, served, beginning + ends[1]))
        served.wait_until(lambda: served.worker.waiting == 1)
        wait.set()
        assert [answer.result() for answer in answers] == texts
        assert calls.tokens < len(beginning) + sum(map(len, ends)) + 2 * PIECE


def test_an_error_while_the_server_closes_is_a_client_s_only_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(sizes=PIECES) as served:
        reading, read, events = threading.Event(), Engine.read, list[Event]()

        def failing(engine: Engine, sequence: TokenSequence, most: int | None = None) -> bool:
            if sequence.full.verified_length < PIECE:
                return read(engine, sequence, most)
            reading.set()
            served.wait_until(lambda: served.worker.closing)
            raise RuntimeError("the link broke")

        monkeypatch.setattr(Engine, "read", failing)
        tokens = served.llm.prompt_ids(BOOK)
        served.worker.submit([Job(tokens, SamplingParams(max_tokens=4, seed=0), events.append)])
        assert reading.wait(30)
        served.worker.close()
        assert [str(event) for event in events if isinstance(event, Exception)] == ["the link broke"]
        assert isinstance(events[-1], Exception)


def test_a_client_is_told_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parallel=1) as served, ThreadPoolExecutor(3) as pool:
        with steps_held_after(monkeypatch, free=0):
            others = [pool.submit(text_of, served, "Who?")]
            served.wait_until(lambda: served.worker.running == 1)
            others.append(pool.submit(text_of, served, "Where?"))
            served.wait_until(lambda: served.worker.waiting == 1)
            connection = served.connect()
            sent = json.dumps(body("When?", stream=True, return_progress=True))
            connection.request("POST", CHAT, sent, {"content-type": "application/json"})
            served.wait_until(lambda: served.worker.waiting == 2)
        chunks = [json.loads(line[6:]) for line in connection.getresponse() if line.startswith(b"data: {")]
        assert [chunk["queue"]["position"] for chunk in chunks if "queue" in chunk] == [1, 0]
        assert all(other.result() for other in others)


def test_a_shutdown_keeps_the_pieces_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.api.sessions.LEAST_TOKENS", 16)
    monkeypatch.setattr("offload_rt.server.jobs.prefixes.LEAST_TOKENS", 16)
    disk = SessionFolder(tmp_path)
    with serving(sizes=PIECES, disk=disk) as served, ThreadPoolExecutor(1) as pool:
        read, pieces = Engine.read, threading.Semaphore(0)

        def held(engine: Engine, sequence: TokenSequence, most: int | None = None) -> bool:
            if sequence.full.verified_length >= 4 * PIECE:
                pieces.release()
                served.wait_until(lambda: served.worker.closing)
            return read(engine, sequence, most)

        monkeypatch.setattr(Engine, "read", held)
        cut_off = pool.submit(served.call, CHAT, body(BOOK))
        assert pieces.acquire(timeout=30)
        served.worker.close()
        assert cut_off.result()[0] == 503
        monkeypatch.setattr(Engine, "read", read)
    with serving(sizes=PIECES, disk=disk) as served:
        status, answer, _ = served.call(CHAT, body(BOOK))
        assert status == 200
        cached = json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == 4 * PIECE + 1
