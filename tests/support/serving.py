"""A server over tiny models in this process, for tests of it with real clients."""

from __future__ import annotations

import asyncio
import copy
import http.client
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from anthropic import Anthropic
from openai import AsyncOpenAI, OpenAI

from offload_rt import LLM
from offload_rt.api.sessions import SessionFolder
from offload_rt.engine.engine import Engine
from offload_rt.server.app import Service, create_app
from offload_rt.server.connections import connection_class
from offload_rt.server.jobs.metrics import Metrics
from offload_rt.server.jobs.prefixes import PrefixPool
from offload_rt.server.jobs.worker import Worker
from offload_rt.text.tokenize import TextStream
from support.small_engine import SIZES
from support.tiny_models import byte_tokenizer, noisy_copy, tiny_target

NAME = "tiny"
ASCII = 128
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_tokenizer() -> Any:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return tokenizer


@dataclass
class Served:
    """A running server, and what is inside it.

    Attributes:
        address: where it listens.
    """

    llm: LLM
    worker: Worker
    prefixes: PrefixPool
    metrics: Metrics
    address: str
    notices: list[str]
    shut_down: Callable[[], None]

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def anthropic(self) -> Anthropic:
        """Returns a client that raises an error for an answer that is not as documented."""
        return Anthropic(
            base_url=self.address,
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        )

    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=60)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.address).netloc, timeout=60)

    def call(
        self, path: str, body: Any = None, method: str | None = None, **headers: str
    ) -> tuple[int, str, http.client.HTTPMessage]:
        """Status, text and headers of an answer; a body that is no bytes goes as JSON, or in pieces."""
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
        if body is not None:
            headers = {"content-type": "application/json"} | headers
        connection = self.connect()
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Waits for what comes soon, and fails where it does not come."""
        for _ in range(3000):
            if reached():
                return
            time.sleep(0.01)
        pytest.fail("what was waited for did not come in 30 seconds")

    def idle(self) -> None:
        self.wait_until(lambda: not self.worker.running and not self.worker.waiting)


@contextmanager
def serving(
    *,
    config: str = "triforce",
    parallel: int = 4,
    waiting: int = 64,
    limit_bytes: int = 2**30,
    disk: SessionFolder | None = None,
    layers: int = 2,
    patience_s: int | None = None,
    sizes: Mapping[str, object] = SIZES,
    aliases: Sequence[str] = (),
    connections: int = 256,
    header_timeout_s: float = 60.0,
    **options: Any,
) -> Iterator[Served]:
    """Serves a pair of tiny models over loopback.

    Args:
        patience_s: time that requests have to finish after a shutdown has begun; None: as long as they take.
    """
    target = tiny_target("llama-gqa", vocabulary=ASCII, layers=layers)
    # Tokens that are not ASCII would be no text that a client can send back.
    tokenizer = chat_tokenizer()
    with LLM.from_models(target, noisy_copy(target), tokenizer, config, sizes) as llm:
        metrics = Metrics()
        notices = list[str]()
        prefixes = PrefixPool(llm, limit_bytes, disk, notices.append)
        worker = Worker(llm, prefixes, metrics, parallel=parallel, waiting=waiting)
        app = create_app(Service(llm, worker, metrics, NAME, 32, aliases=aliases), metrics, **options)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(256)
            served = uvicorn.Config(
                app,
                log_level="error",
                lifespan="off",
                http=connection_class(connections, header_timeout_s),
                timeout_graceful_shutdown=patience_s,
            )
            server = uvicorn.Server(served)
            thread = threading.Thread(target=asyncio.run, args=[server.serve([listening])])
            thread.start()
            try:
                address = f"http://127.0.0.1:{listening.getsockname()[1]}"
                shut_down = partial(setattr, server, "should_exit", True)
                yield Served(llm, worker, prefixes, metrics, address, notices, shut_down)
            finally:
                server.should_exit = True
                worker.close()
                thread.join()


@contextmanager
def steps_held_after(monkeypatch: pytest.MonkeyPatch, free: int) -> Iterator[None]:
    """After `free` decode steps, the others wait until its end."""
    go_on, step, made = threading.Event(), Engine.step, itertools.count()

    def held(engine: Engine, sequences: Any) -> Any:
        if next(made) >= free:
            go_on.wait()
        return step(engine, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", held)
        try:
            yield
        finally:
            go_on.set()


@contextmanager
def saying(text: str, pieces: int = 3) -> Iterator[None]:
    """Every answer is `text`, of which each token adds so many characters."""

    def push(stream: TextStream, token: int) -> str:
        piece = text[len(stream.text) :][:pieces]
        stream.text += piece
        return piece

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TextStream, "push", push)
        patch.setattr(TextStream, "stopped", property(lambda stream: stream.text == text))
        yield
