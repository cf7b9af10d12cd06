"""The server, as the real `openai` client and plain HTTP see it."""

from __future__ import annotations

import asyncio
import base64
import gc
import itertools
import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request
from support.serving import NAME, Served, serving, steps_held_after
from support.tiny_models import byte_tokenizer, real_text

from offload_rt import LLM, TokenEvent
from offload_rt.api.sessions import SessionFolder
from offload_rt.commands.serve import LOOPBACK
from offload_rt.engine.engine import Engine
from offload_rt.errors import UsageError
from offload_rt.server.answering import KEEP_ALIVE_S, Answering
from offload_rt.server.jobs.worker import Closing, PromptProgress, Worker
from offload_rt.server.limits import Limits
from offload_rt.server.protocols.completion_answers import ChatReply, CompletionAnswer
from offload_rt.text.answers import AnswerSplitter
from offload_rt.text.thoughts import ThoughtSplitter
from offload_rt.text.tokenize import TextStream

BOOK = real_text()[:3000].encode("ascii", "replace").decode()
QUESTIONS = ("Who is Ahab?", "Where is the whale?")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def about(question: str, book: str = BOOK) -> list[Any]:
    return [{"role": "user", "content": f"{book}\n\n{question}"}]


def asked(served: Served, question: str, **options: Any) -> Any:
    options = {"max_tokens": 12, "temperature": 0} | options
    return served.client().chat.completions.create(model=NAME, messages=about(question), **options)


def expected(llm: LLM, question: str, max_tokens: int = 12) -> str:
    """The answer by the API, where nothing is shared."""
    return llm.chat(about(question), max_tokens=max_tokens).text


def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    status, text, _ = served.call(path, body, **headers)
    return status, json.loads(text)


# ---------------------------------------------------------------------------------------- answers


def test_answers_are_those_of_the_api(served: Served) -> None:
    for question in QUESTIONS:
        text = expected(served.llm, question)
        whole = asked(served, question)
        assert whole.choices[0].message.content == text
        assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
        options = {"include_usage": True}
        chunks = list(asked(served, question, stream=True, stream_options=options))
        assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == text
        assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 12 and not chunks[-1].choices
        assert {one.id for one in chunks} == {chunks[0].id}


def test_control_tokens_in_a_message_are_text(served: Served) -> None:
    tokens = {asked(served, question).usage.prompt_tokens for question in ("a<|im_end|>b", "a<|im_and|>b")}
    assert len(tokens) == 1, "the name is read character by character"


def test_a_second_question_reads_the_document_no_more(served: Served) -> None:
    asked(served, QUESTIONS[0])
    usage = asked(served, "Another?").usage
    assert len(BOOK) < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens < len(BOOK) + 60


def test_completions_of_texts_and_of_tokens(served: Served) -> None:
    client: Any = served.client()
    ids = list(BOOK[:100].encode())
    text = served.llm.generate(ids, max_tokens=9).text
    for prompt in (ids, BOOK[:100]):
        made = client.completions.create(model=NAME, prompt=prompt, max_tokens=9, temperature=0)
        assert made.choices[0].text == text and made.usage.prompt_tokens == 100
    several = client.completions.create(model=NAME, prompt=[ids, ids[:50]], max_tokens=9, temperature=0)
    assert [one.text for one in several.choices] == [text, served.llm.generate(ids[:50], max_tokens=9).text]
    assert several.usage.prompt_tokens == 150
    stop = text[4:6]
    (stopped,) = client.completions.create(
        model=NAME, prompt=ids, max_tokens=9, temperature=0, stop=stop
    ).choices
    assert stopped.text == text[: text.index(stop)] and stopped.finish_reason == "stop"
    chunks = client.completions.create(model=NAME, prompt=ids, max_tokens=9, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


def test_choices_share_a_prompt_and_have_seeds_of_their_own(served: Served) -> None:
    options = {"n": 3, "temperature": 1.0, "seed": 7, "max_tokens": 12}
    made = [asked(served, QUESTIONS[0], **options) for _ in range(2)]
    texts = [[choice.message.content for choice in one.choices] for one in made]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    assert made[1].usage.completion_tokens == 36
    assert made[1].usage.prompt_tokens == asked(served, QUESTIONS[0]).usage.prompt_tokens


def test_log_probabilities(served: Served) -> None:
    made = asked(served, QUESTIONS[0], logprobs=True, top_logprobs=2, max_tokens=5)
    content = made.choices[0].logprobs.content
    assert "".join(one.token for one in content) == made.choices[0].message.content
    for one in content:  # greedy: the token is the most likely one
        assert one.top_logprobs[0].token == one.token and one.top_logprobs[0].logprob == one.logprob
        assert one.logprob > one.top_logprobs[1].logprob
    chunks = asked(served, QUESTIONS[0], logprobs=True, max_tokens=5, stream=True)
    streamed = [one.choices[0].logprobs for one in chunks if one.choices and one.choices[0].logprobs]
    assert [entry.logprob for one in streamed for entry in one.content] == [one.logprob for one in content]
    client: Any = served.client()
    plain = client.completions.create(model=NAME, prompt="abc", max_tokens=3, logprobs=1, temperature=0)
    found = plain.choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 3
    assert found.text_offset == [0, 1, 2] and "".join(found.tokens) == plain.choices[0].text
    assert all(
        max(top, key=top.get) == token for top, token in zip(found.top_logprobs, found.tokens, strict=True)
    )


def test_tokens_join_to_the_content_and_have_bytes_of_their_own() -> None:
    text = "    def f():  # naïve 🐋"
    reply = ChatReply("id", NAME, 0, byte_tokenizer(), 1, splitter=AnswerSplitter(ThoughtSplitter()))
    stream = TextStream(byte_tokenizer())
    chunks = [
        chunk
        for token in text.encode()
        for chunk in reply.token(TokenEvent(token, stream.push(token), False, -1.0, ((token, -1.0),)))
    ]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    entries = [entry for one in choices if one["logprobs"] for entry in one["logprobs"]["content"]]
    assert "".join(one["delta"].get("content", "") for one in choices) == text
    assert "".join(entry["token"] for entry in entries) == text
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in entries)


def test_progress_and_timings_as_llamacpp_has_them(served: Served) -> None:
    book = BOOK[:500] + "x"
    body = {"messages": about("Who?", book), "stream": True, "return_progress": True, "max_tokens": 3}
    _, text, _ = served.call(CHAT, body)
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    progress = [one["prompt_progress"] for one in chunks if "prompt_progress" in one]
    assert progress[0]["processed"] == progress[0]["cache"] < progress[0]["total"]
    assert (
        progress[-1]["processed"] == progress[-1]["total"] == len(book) + len("[user]\n\nWho?\n[assistant]")
    )
    assert [one["processed"] for one in progress] == sorted(one["processed"] for one in progress)
    timings = chunks[-1]["timings"]
    assert timings["predicted_n"] == 3 and timings["cache_n"] == progress[0]["cache"]
    assert timings["prompt_n"] == progress[0]["total"] - progress[0]["cache"]


def test_other_routes(served: Served) -> None:
    client = served.client()
    (model,) = client.models.list().data
    assert model.id == NAME
    assert post(served, "/tokenize", {"content": "abc"}) == (200, {"tokens": list(b"abc")})
    assert json.loads(served.call("/health")[1]) == {"status": "ok"}
    asked(served, QUESTIONS[0])
    metrics = served.call("/metrics")[1]
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert float(values["offload_rt_generated_tokens_total"]) == served.metrics.generated_tokens > 0
    assert float(values['offload_rt_requests_total{status="200"}']) >= 2
    assert "<form" in served.call("/")[1]


# ----------------------------------------------------------------------------------------- sharing


def test_two_clients_ask_about_one_book_and_its_kv_exists_once() -> None:
    with serving() as served:
        texts = [expected(served.llm, question) for question in QUESTIONS]
        store, most = served.llm.engine.store, 0
        step = Engine.step

        def watched(engine: Engine, sequences: Any) -> Any:
            nonlocal most
            if len(sequences) == 2:
                most = max(most, store.used_bytes)
            return step(engine, sequences)

        with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
            patch.setattr(Engine, "step", watched)
            answers = list(pool.map(lambda question: asked(served, question), QUESTIONS))
        assert [one.choices[0].message.content for one in answers] == texts
        book = len(BOOK) * store.layout.token_bytes
        assert book < most < 1.2 * book  # while both ran
        served.idle()
        assert store.used_bytes < 1.2 * book
        assert sum(one.usage.prompt_tokens_details.cached_tokens for one in answers) >= len(BOOK)


def test_a_full_disk_fails_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: SessionFolder, *given: Any) -> None:
        raise UsageError("no room is left")

    monkeypatch.setattr(SessionFolder, "keep_prefix", full)
    with serving(layers=1, limit_bytes=0, disk=SessionFolder(tmp_path)) as served:
        for book in (BOOK, BOOK[::-1]):
            body = {"messages": about("Who?", book), "max_tokens": 3}
            assert post(served, CHAT, body)[0] == 200
        served.idle()
        assert served.notices == ["a context is not kept on disk: no room is left"]


def test_a_small_limit_gives_the_oldest_prefixes_up() -> None:
    with serving(limit_bytes=0) as served:
        asked(served, QUESTIONS[0])
        served.idle()
        assert len(served.prefixes) == 1
        book = BOOK[::-1]
        client: Any = served.client()
        made = client.chat.completions.create(
            model=NAME, messages=about("Who?", book), max_tokens=3, temperature=0
        )
        served.idle()
        assert len(served.prefixes) == 1 and made.usage.prompt_tokens_details.cached_tokens < 10
        assert asked(served, QUESTIONS[0]).usage.prompt_tokens_details.cached_tokens < 10


def test_prefixes_outlive_the_server_on_disk(tmp_path: Path) -> None:
    folder = SessionFolder(tmp_path, limit_bytes=2**30)
    with serving(config="lookup", disk=folder) as served:
        first = asked(served, QUESTIONS[0])
    assert [one.cached for one in folder.entries()] == [True]
    with serving(config="lookup", disk=folder) as served:
        again = asked(served, QUESTIONS[0])
        assert again.usage.prompt_tokens_details.cached_tokens > len(BOOK)
        assert again.choices[0].message.content == first.choices[0].message.content
        for entry in folder.entries():  # torn meanwhile: read again
            entry.path.write_bytes(entry.path.read_bytes()[:-1000])
    with serving(config="lookup", disk=folder) as served:
        assert asked(served, QUESTIONS[0]).choices == again.choices


# ------------------------------------------------------------------------------ clients that leave


def test_a_client_that_goes_away_frees_its_turn() -> None:
    with serving(parallel=1, layers=1) as served:
        text = expected(served.llm, QUESTIONS[0])
        endless = {"messages": about("Go on."), "max_tokens": 4000}
        for stream in (True, False):
            connection = served.connect()
            body = json.dumps(endless | {"stream": stream})
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            if stream:
                connection.getresponse().readline()
            served.wait_until(lambda: served.worker.running == 1)
            connection.close()
            assert asked(served, QUESTIONS[0]).choices[0].message.content == text
            served.idle()
        assert served.metrics.generated_tokens < 4000


# The client leaves generators in streams that are closed early; collected in another thread, they warn.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_fifty_clients_of_which_some_go_away() -> None:
    with serving(config="lookup", layers=1) as served:
        chance = random.Random(1)
        books = [BOOK[: 300 + 10 * number] for number in range(5)]
        texts = [served.llm.chat(about("Who?", book), max_tokens=12).text for book in books]

        async def one(client: openai.AsyncOpenAI, number: int, leaves: bool) -> str | None:
            await asyncio.sleep(0.01 * (number % 7))
            stream = await client.chat.completions.create(
                model=NAME,
                messages=about("Who?", books[number % 5]),
                max_tokens=12,
                temperature=0,
                stream=True,
            )
            pieces = []
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")
                if leaves and len(pieces) == 1 + number % 4:
                    await stream.close()
                    return None
            return "".join(pieces)

        async def everyone(leaving: list[bool]) -> list[str | None]:
            async with served.async_client() as client:
                return await asyncio.gather(*(one(client, at, leaves) for at, leaves in enumerate(leaving)))

        leaving = [chance.random() < 0.4 for _ in range(50)]
        found = asyncio.run(everyone(leaving))
        gc.collect()
        for number, (text, leaves) in enumerate(zip(found, leaving, strict=True)):
            assert text == (None if leaves else texts[number % 5])
        served.idle()
        assert len(served.llm.engine.sequences) == 0


def test_many_requests_take_no_more_memory() -> None:
    """Not one object for each of them, once as many prefixes are kept as there is room for."""
    with serving(config="lookup", layers=1, limit_bytes=2**19) as served:

        def ask(number: int) -> None:
            body = {"prompt": f"{number} {BOOK[:60]}", "max_tokens": 2, "temperature": 0}
            assert served.call(COMPLETION, body)[0] == 200

        def held() -> tuple[int, int]:
            served.idle()
            gc.collect()
            return len(gc.get_objects()), threading.active_count()

        for number in range(200):
            ask(number)
        objects, threads = held()
        for number in range(200, 320):
            ask(number)
        now, still = held()
        assert now < objects + 120 and still <= threads + 1
        store = served.llm.engine.store
        assert store.used_bytes <= 2**19 and store.reserved_bytes <= 1.5 * 2**19


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "one", "strict": True, "schema": schema}}


def test_answers_fit_a_schema(served: Served) -> None:
    wanted = json_schema({"enum": ["whale", "sail"]})
    for options in ({}, {"temperature": 1, "n": 3, "seed": 1}):
        for choice in asked(served, "Who?", response_format=wanted, **options).choices:
            assert (choice.message.content, choice.finish_reason) in (('"whale"', "stop"), ('"sail"', "stop"))
    chunks = asked(served, "Who?", response_format=wanted, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) in ('"whale"', '"sail"')
    some = asked(served, "Who?", response_format={"type": "json_object"})
    assert some.choices[0].message.content.startswith("{")
    body = {"prompt": "x", "response_format": wanted, "temperature": 0}
    assert post(served, "/v1/completions", body)[1]["choices"][0]["text"] in ('"whale"', '"sail"')


# ---------------------------------------------------------------------------------------- refusals

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, b"{", 400, "the body is not JSON"),
    (CHAT, 30_000 * b"[", 400, "the body is "),
    (CHAT, [], 400, "must be a JSON object"),
    (CHAT, {}, 400, "messages: Field required"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "message 1 has the role 'robot'"),
    (CHAT, {"messages": HI, "model": "gpt-5"}, 404, "model 'gpt-5' is not served here: use 'tiny'"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400, "tools[0].function is None"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice 'required' needs tools"),
    (CHAT, {"messages": HI, "functions": [{}]}, 400, "functions is not supported by this server: give them"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format.type: "),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 400, "has no json_schema: give one"),
    (CHAT, {"messages": HI, "response_format": json_schema({"type": "nope"})}, 400, "Invalid type: nope"),
    (CHAT, {"messages": HI, "tempature": 1}, 400, "unknown parameter tempature"),
    (CHAT, {"messages": HI, "temperature": -1}, 400, "temperature -1.0 is out of range"),
    (CHAT, {"messages": HI, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": 10**400}, 400, "is out of range"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, "top_logprobs is given without logprobs"),
    (CHAT, {"messages": HI, "model": "\ud800"}, 404, r"model '\ud800' is not served"),
    (CHAT, {"messages": [1]}, 400, "message 1 is 1: give a dict"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": about("Who?", 3 * BOOK)}, 400, "more than the 8192 positions"),
    (CHAT, {"messages": HI, "n": 99}, 400, "n: "),
    (CHAT, {"messages": HI, "stop": [""]}, 400, "stop string is empty"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs x=1"),
    (COMPLETION, {"prompt": ""}, 400, "prompt is empty"),
    (COMPLETION, {"prompt": []}, 400, "prompt is empty"),
    (COMPLETION, {"prompt": [*range(100), "a"]}, 400, "prompt token 100 must be an integer, got 'a'"),
    (COMPLETION, {"prompt": [HI]}, 400, "prompt token 0 must be an integer"),
    (COMPLETION, {"prompt": ["a"] * 35, "n": 2}, 400, "70 choices are more than the 68 that fit"),
    (COMPLETION, {"prompt": [500]}, 400, "token 500 is outside the vocabulary of 128"),
    (COMPLETION, {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    ("/document", {"name": "\udfff.txt", "data": ""}, 400, r"file \udfff.txt: is empty"),
    ("/chat/completions", {}, 404, "/chat/completions: Not Found; there are /v1/chat/completions, "),
    ("/v1/models", {}, 405, "Method Not Allowed"),
    (CHAT, {"messages": HI, "min_tokens": 3}, 400, "min_tokens is not supported"),
    (CHAT, {"messages": HI, "reasoning_effort": "huge"}, 400, "reasoning_effort: Input should be 'none'"),
    (CHAT, {"messages": HI, "thinking_budget": -1}, 400, "thinking_budget: "),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"thinking_budget": True}}, 400, "use 0 or more"),
    (CHAT, {"messages": HI, "continue_final_message": True}, 400, "the last message has the role user"),
    (
        CHAT,
        {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
        400,
        "continue_final_message and add_generation_prompt are both true",
    ),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens 0 generates nothing"),
    (COMPLETION, {"prompt": "x", "prompt_logprobs": 21}, 400, "prompt_logprobs: "),
    (CHAT, {"messages": HI, "seed": -2}, 400, "seed"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_refusals_name_what_is_wrong(served: Served, path: str, body: Any, status: int, message: str) -> None:
    found, answer = post(served, path, body)
    assert (found, message in answer["error"]["message"]) == (status, True), answer
    if isinstance(body, dict) and status == 400:
        assert post(served, path, body | {"stream": True})[0] == 400
    assert not served.worker.running


def test_a_document_is_returned_with_what_cannot_be_read_of_it(served: Served) -> None:
    data = base64.b64encode(b"<p>caf\xe9").decode()
    notices = [
        "file a.html: is not utf-8; read as cp1252; name its encoding if that is wrong (--encoding NAME)"
    ]
    assert post(served, "/document", {"name": "a.html", "data": data}) == (
        200,
        {"text": "caf\xe9", "notices": notices},
    )


def test_fields_that_ask_for_nothing_are_taken(served: Served) -> None:
    body = {"messages": HI, "max_tokens": 1, "user": "me", "metadata": {"a": "b"}, "seed": None}
    body |= {"tools": [], "response_format": {"type": "text"}, "logit_bias": {}, "store": False}
    assert post(served, CHAT, body)[0] == 200
    body = {"messages": HI, "max_tokens": 1, "seed": -1, "top_k": -1, "stop": "", "min_tokens": 0}
    body |= {"logprobs": False, "top_logprobs": 0, "reasoning_effort": "none", "stop_token_ids": []}
    status, answer = post(served, CHAT, body | {"max_completion_tokens": -1})
    assert status == 200 and answer["choices"][0]["logprobs"] is None


def test_a_limit_of_tokens_is_no_demand(served: Served) -> None:
    body = {"prompt": [5] * 8189, "max_tokens": 100, "ignore_eos": True}
    status, answer = post(served, COMPLETION, body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"
    status, answer = post(served, COMPLETION, {"prompt": [5] * 8192})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_a_model_is_described_by_its_name(served: Served) -> None:
    client: Any = served.client()
    (listed,) = client.models.list().data
    assert client.models.retrieve(NAME) == listed
    with pytest.raises(openai.NotFoundError, match="model 'a/b' is not served here: use 'tiny'"):
        client.models.retrieve("a/b")


def test_clients_may_name_the_model_otherwise() -> None:
    with serving(layers=1, aliases=["gpt-4o", NAME]) as served:
        client: Any = served.client()
        assert [model.id for model in client.models.list().data] == [NAME, "gpt-4o"]
        assert client.models.retrieve("gpt-4o").id == "gpt-4o"
        client.chat.completions.create(model="gpt-4o", messages=HI, max_tokens=1)
        with pytest.raises(openai.NotFoundError, match="use 'tiny' or 'gpt-4o'"):
            client.chat.completions.create(model="gpt-5", messages=HI, max_tokens=1)


def test_an_answer_names_its_request_and_its_program(served: Served) -> None:
    client: Any = served.client()
    question = {"model": NAME, "messages": HI, "max_tokens": 1}
    raw = client.chat.completions.with_raw_response.create(**question, extra_headers={"x-request-id": "a-7"})
    assert raw.headers["x-request-id"] == "a-7"
    assert raw.parse().system_fingerprint.startswith("offload-rt-")
    made = client.chat.completions.create(**question)
    assert len(made._request_id) == 32


def test_a_full_queue_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parallel=1, waiting=1) as served, ThreadPoolExecutor(2) as pool:
        with steps_held_after(monkeypatch, 0):
            going = [pool.submit(asked, served, question) for question in QUESTIONS]
            served.wait_until(lambda: served.worker.running == served.worker.waiting == 1)
            with pytest.raises(openai.RateLimitError, match="too many requests are waiting"):
                asked(served, "A third?")
        assert all(one.result().choices for one in going)


def test_a_stream_in_the_queue_begins_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parallel=1, waiting=1, layers=1) as served, ThreadPoolExecutor(1) as pool:
        with steps_held_after(monkeypatch, 0):
            first = pool.submit(asked, served, "A?")
            served.wait_until(lambda: served.worker.running == 1 and not served.worker.waiting)
            connection = served.connect()
            body = json.dumps({"messages": HI, "max_tokens": 2, "stream": True})
            connection.request("POST", CHAT, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200 and answer.readline() == b": waiting\n"
            assert served.worker.running == served.worker.waiting == 1
        assert answer.read().endswith(b"data: [DONE]\n\n")
        assert first.result().choices


def test_a_stream_that_reads_a_prompt_says_that_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress that is not sent keeps no connection open."""
    seconds = itertools.count(0, KEEP_ALIVE_S)
    monkeypatch.setattr("offload_rt.system.clock.now", lambda: next(seconds))

    async def connected() -> Any:
        await asyncio.sleep(60)

    async def lines() -> list[Any]:
        events = asyncio.Queue[Any]()
        for done in (1, 2, 3):
            events.put_nowait((0, PromptProgress(3, 0, done, 0.0)))
        events.put_nowait((0, Closing()))
        reply = ChatReply("id", NAME, 0, None, None, splitter=AnswerSplitter(ThoughtSplitter()))
        answer = CompletionAnswer([reply], prompts=1, with_usage=False, with_progress=False)
        stream = await Answering([], answer, events).stream(Request({"type": "http"}, connected))
        return [line async for line in stream.body_iterator]  # type: ignore[attr-defined]

    *waiting, error = asyncio.run(lines())
    assert waiting == 4 * [": waiting\n\n"] and "shutting down" in error


def test_clients_that_leave_the_queue_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parallel=1, waiting=2, layers=1) as served, ThreadPoolExecutor(3) as pool:
        with steps_held_after(monkeypatch, 0):
            first = pool.submit(asked, served, "A?")
            served.wait_until(lambda: served.worker.running == 1 and not served.worker.waiting)
            second = pool.submit(asked, served, "B?")
            served.wait_until(lambda: served.worker.waiting == 1)
            leaves = served.connect()  # behind one that stays
            leaves.request("POST", CHAT, json.dumps({"messages": HI}), {"content-type": "application/json"})
            served.wait_until(lambda: served.worker.waiting == 2)
            leaves.close()
            served.wait_until(lambda: served.metrics.requests[499] == 1)
            third = pool.submit(asked, served, "C?")
            served.wait_until(lambda: served.worker.waiting == 2 or third.done())
        assert all(one.result().choices for one in (first, second, third))


def test_a_prompt_waits_for_memory_that_others_will_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(layers=1) as served, ThreadPoolExecutor(2) as pool:
        with steps_held_after(monkeypatch, 0):
            first = pool.submit(asked, served, QUESTIONS[0])
            served.wait_until(lambda: served.worker.running == 1 and served.worker.waiting == 0)
            full = Engine.check_room

            def check_room(engine: Engine, *given: Any) -> None:
                if engine.sequences:
                    raise UsageError("no room")
                full(engine, *given)

            monkeypatch.setattr(Engine, "check_room", check_room)
            second = pool.submit(asked, served, "Is it a whale?")
            served.wait_until(lambda: served.worker.waiting == 1)
        assert first.result().choices and second.result().choices


def test_memory_that_is_short_is_400_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        asked(served, QUESTIONS[0])
        monkeypatch.setattr("offload_rt.planning.sequence_planner.available_memory", lambda: 0)
        with pytest.raises(openai.BadRequestError, match=r"needs 0.0 GiB of memory .* are available"):
            served.client().completions.create(model=NAME, prompt=BOOK[::-1] + BOOK, max_tokens=9)
        monkeypatch.undo()
        assert asked(served, QUESTIONS[0]).choices


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_engine_is_500_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    with serving(layers=1) as served:

        def fail(engine: Engine, sequences: Any) -> Any:
            raise RuntimeError("device lost")

        with monkeypatch.context() as patch:
            patch.setattr(Engine, "step", fail)
            with pytest.raises(openai.APIError, match="the engine failed: device lost"):
                deque_of = asked(served, QUESTIONS[0], stream=stream)
                list(deque_of)
        served.idle()
        assert served.metrics.errors == 1 and not served.llm.engine.sequences
        assert asked(served, QUESTIONS[0]).choices[0].message.content


def test_a_token_without_text_is_500_and_the_server_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(layers=1) as served:
        with monkeypatch.context() as patch:
            patch.setattr(TextStream, "push", lambda stream, token: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="division by zero"):
                asked(served, QUESTIONS[0])
        served.idle()
        assert not served.llm.engine.sequences
        assert asked(served, QUESTIONS[0]).choices


def test_a_shutdown_tells_the_clients_that_it_cuts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving(layers=1, patience_s=0) as served,
        ThreadPoolExecutor(1) as pool,
        steps_held_after(monkeypatch, 1),
    ):
        stream = asked(served, QUESTIONS[0], stream=True)
        next(stream)
        whole = pool.submit(post, served, CHAT, {"messages": HI})
        served.wait_until(lambda: served.worker.running + served.worker.waiting == 2)
        served.shut_down()
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
        status, answer = whole.result()
        assert (status, answer["error"]["code"]) == (503, "closing")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_worker_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(layers=1) as served:
        monkeypatch.setattr(Worker, "_step", lambda worker: 1 / 0)
        assert [post(served, CHAT, {"messages": HI})[0] for _ in range(2)] == [503, 503]
        assert served.call("/health")[0] == 503


def test_a_body_that_does_not_come_is_refused() -> None:
    sent = list[Any]()

    async def never() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(*given: Any) -> None:
        raise AssertionError("the request is not complete")

    answered = list[int]()
    limits = Limits(
        app, api_key=None, body_bytes=99, hosts=None, on_answer=answered.append, body_timeout_s=0.01
    )
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
    asyncio.run(limits(scope, never, send))
    assert answered == [sent[0]["status"]] == [408] and b"nothing more of the body" in sent[1]["body"]


def test_keys_hosts_and_large_bodies() -> None:
    limits: dict[str, Any] = {"api_key": "schlüssel", "body_bytes": 1000, "hosts": LOOPBACK}
    with serving(layers=1, cors_origins=["http://site"], **limits) as served:
        body = {"messages": HI, "max_tokens": 1}
        assert post(served, CHAT, body)[0] == post(served, CHAT, body, authorization="Bearer x")[0] == 401
        key = {"authorization": "bearer " + "schlüssel".encode().decode("latin-1")}
        assert post(served, CHAT, body, **key)[0] == 200
        assert post(served, CHAT, body, **{"x-api-key": key["authorization"].split()[1]})[0] == 200
        assert post(served, CHAT, body, **{"x-api-key": "x"})[0] == 401
        assert served.call("/health")[0] == 200
        assert post(served, CHAT, body, host="evil.example", **key)[0] == 403
        assert [served.call("/health", host=host)[0] for host in ("[::1]", "[::1]:80", "::2")] == [
            200,
            200,
            403,
        ]
        assert post(served, CHAT, body, **key | {"content-type": "text/plain"})[0] == 415
        status, answer = post(served, CHAT, body | {"user": 2000 * "x"}, **key)
        assert status == 413 and "larger than" in answer["error"]["message"]
        connection = served.connect()
        connection.putrequest("POST", CHAT)  # of 200 MB, of which it sends none
        for name, value in {"content-length": "200000000", "content-type": "application/json", **key}.items():
            connection.putheader(name, value)
        connection.endheaders()
        assert connection.getresponse().status == 413
        pieces = iter([b"x" * 600, b"x" * 600])  # of no stated length
        assert served.call(CHAT, pieces, **key)[0] == 413
        asking = {"origin": "http://site", "access-control-request-method": "POST"}
        asking["access-control-request-headers"] = "authorization,content-type,x-stainless-os"
        _, _, allowed = served.call(CHAT, method="OPTIONS", **asking)
        assert allowed["access-control-allow-origin"] == "http://site"
        assert "x-stainless-os" in allowed["access-control-allow-headers"]
        _, _, other = served.call(CHAT, method="OPTIONS", **asking | {"origin": "http://other"})
        assert "access-control-allow-origin" not in other
