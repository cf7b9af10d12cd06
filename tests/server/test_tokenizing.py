"""Long prompts in the tokenizer: others have their turns, and what cannot be answered is not read on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.serving import Served, serving

from offload_rt import LLM
from offload_rt.text import pieces, tokenize

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(config="lookup", layers=1) as one:
        yield one


class Endless:
    """Prompts that begin with "long" come in parts until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = 0
        self.let_go = threading.Event()
        encoded = LLM.encoded

        def endless(llm: LLM, text: str, **options: Any) -> Iterator[list[int]]:
            while text.startswith("long") and not self.let_go.is_set():
                self.parts += 1
                time.sleep(0.002)
                yield []
            yield from encoded(llm, text, **options)

        monkeypatch.setattr(LLM, "encoded", endless)


def test_a_long_prompt_does_not_hold_up_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Endless(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(served.call, COMPLETION, {"prompt": "long", "max_tokens": 1})
        try:
            served.wait_until(lambda: endless.parts > 0)
            assert served.call(COMPLETION, {"prompt": "short", "max_tokens": 1})[0] == 200
        finally:
            endless.let_go.set()
        assert long.result()[0] == 200


def test_a_prompt_whose_client_has_left_is_read_no_further(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless(monkeypatch)
    connection = served.connect()
    connection.request(
        "POST", COMPLETION, json.dumps({"prompt": "long"}), {"content-type": "application/json"}
    )
    served.wait_until(lambda: endless.parts > 0)
    connection.close()
    try:
        served.wait_until(lambda: served.metrics.requests[499] > 0)
    finally:
        endless.let_go.set()


def test_a_prompt_is_read_up_to_what_fits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, tokenize):
        monkeypatch.setattr(module, "PIECE", 1000)
    text = "a whale " * 20_000
    for path, body_of in ((COMPLETION, of_text), (CHAT, of_message)):
        message = refusal(served, path, body_of(text))
        assert "at least 16000 prompt tokens are more than the 8192 positions" in message
        message = refusal(served, path, body_of(text[:80_000]))  # by its tokens, as far as they were counted
        assert 8192 < int(message.removeprefix("at least ").split()[0]) < 9300
    assert json.loads(served.call("/tokenize", {"content": text})[1])["tokens"] == list(text.encode())


def of_text(text: str) -> dict[str, Any]:
    return {"prompt": text}


def of_message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def refusal(served: Served, path: str, body: dict[str, Any]) -> str:
    status, answer, _ = served.call(path, body)
    error = json.loads(answer)["error"]
    field = "messages" if path == CHAT else "prompt"
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    return str(error["message"])
