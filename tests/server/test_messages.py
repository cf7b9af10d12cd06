"""Anthropic's messages, as the real `anthropic` client and plain HTTP see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import claude_code
from support.serving import NAME, Served, saying, serving, steps_held_after
from support.tiny_models import real_text

from offload_rt.engine.engine import Engine
from offload_rt.engine.results import TokenEvent
from offload_rt.server.jobs.worker import Finished, PromptProgress, Queued
from offload_rt.server.limits import Limits
from offload_rt.server.protocols.message_answers import MessageAnswer
from offload_rt.server.protocols.messages import MessagesRequest, message_fields
from offload_rt.text.answers import AnswerSplitter
from offload_rt.text.call_formats import HermesCalls
from offload_rt.text.calls import CallSplitter
from offload_rt.text.thoughts import ThoughtSplitter
from offload_rt.text.tools import Tools, checked_tools

BOOK = real_text()[:1500].encode("ascii", "replace").decode()
QUESTION: Any = [{"role": "user", "content": f"{BOOK}\n\nWho is Ahab?"}]
HI: Any = [{"role": "user", "content": "Hi"}]
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(layers=1) as one:
        yield one


def asked(served: Served, **options: Any) -> Any:
    options = {"model": "claude-any", "messages": QUESTION, "max_tokens": 12} | options
    return served.anthropic().messages.create(**options)


def streamed(served: Served, **options: Any) -> Any:
    options = {"model": "claude-any", "messages": QUESTION, "max_tokens": 12} | options
    with served.anthropic().messages.stream(**options) as stream:
        return stream.get_final_message()


def post(served: Served, body: Any, path: str = MESSAGES, **headers: str) -> tuple[int, dict[str, Any]]:
    status, text, _ = served.call(path, body, **headers)
    return status, json.loads(text)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    found = []
    for line in text.strip().split("\n\n"):
        name, data = line.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# ---------------------------------------------------------------------------------------- answers


def test_a_message_is_the_answer_of_the_api(served: Served) -> None:
    expected = served.llm.chat(QUESTION, max_tokens=12)
    asked(served)
    message = asked(served)
    assert text_of(message) == expected.answer and message.model == NAME
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    usage = message.usage
    assert usage.cache_read_input_tokens > len(BOOK) and usage.output_tokens == 12
    assert usage.cache_read_input_tokens + usage.input_tokens == expected.prompt_tokens


def test_a_stream_adds_up_to_the_whole_message(served: Served) -> None:
    asked(served)
    whole, parts = asked(served), streamed(served)
    assert parts.to_dict(exclude_none=True) | {"id": whole.id} == whole.to_dict(exclude_none=True)


def test_the_events_of_a_stream(served: Served) -> None:
    _, text, headers = served.call(MESSAGES, {"messages": HI, "max_tokens": 3, "stream": True})
    assert headers["content-type"].startswith("text/event-stream")
    ping, start, begin, *deltas, stop, delta, end = events(text)
    assert ping == {"type": "ping"} and end == {"type": "message_stop"}
    assert start["message"]["content"] == [] and start["message"]["stop_reason"] is None
    assert start["message"]["usage"]["output_tokens"] == 0
    assert begin["content_block"] == {"type": "text", "text": ""}
    assert {one["type"] for one in deltas} == {"content_block_delta"}
    assert {one["index"] for one in (begin, *deltas, stop)} == {0}
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"] == start["message"]["usage"] | {"output_tokens": 3}


def test_the_stop_sequence_that_ended_a_message_is_named(served: Served) -> None:
    text = text_of(asked(served))
    stops = ["never", text[3:5]]
    for message in (asked(served, stop_sequences=stops), streamed(served, stop_sequences=stops)):
        assert text_of(message) == text[: text.index(text[3:5])]
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text[3:5])


def test_max_tokens_is_a_ceiling(served: Served) -> None:
    full = [{"role": "user", "content": "x" * (8192 - 30)}]
    body = {"messages": full, "max_tokens": 32_000, "top_k": 1, "temperature": 1}
    status, message = post(served, body)
    assert status == 200 and message["usage"]["output_tokens"] < 30
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_sampling_parameters_reach_the_sampler(served: Served) -> None:
    greedy = {"messages": QUESTION, "max_tokens": 12, "temperature": 1, "top_k": 1}
    assert post(served, greedy)[1]["content"] == [{"type": "text", "text": text_of(asked(served))}]
    status, answer = post(served, greedy | {"top_p": 2})
    assert status == 400 and "top-p 2.0 is out of range" in answer["error"]["message"]


def test_an_answer_fits_a_schema(served: Served) -> None:
    wanted = {"type": "json_schema", "schema": {"enum": ["whale", "sail"]}}
    for options in ({"output_config": {"format": wanted}}, {"extra_body": {"output_format": wanted}}):
        message = asked(served, **options)
        assert text_of(message) in ('"whale"', '"sail"') and message.stop_reason == "end_turn"


def test_tokens_are_counted(served: Served) -> None:
    client = served.anthropic()
    count = client.messages.count_tokens(model="any", messages=QUESTION, system="Be brief.").input_tokens
    message = asked(served, system="Be brief.")
    assert count == message.usage.input_tokens + message.usage.cache_read_input_tokens
    # A content may be a text or blocks of text.
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]}]
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.count_tokens(model="any", messages=blocks, system=system).input_tokens == count
    assert not served.worker.running


def test_a_last_answer_is_continued(served: Served) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "He is the "}]
    prompt = served.llm.chat_template.encode(messages, continue_final=True)
    message = asked(served, messages=messages)
    assert text_of(message) == served.llm.generate(prompt, max_tokens=12).text
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(prompt)


def test_the_model_is_listed(served: Served) -> None:
    client = served.anthropic()
    (model,) = client.models.list()
    assert (model.id, model.max_input_tokens) == (NAME, 8192) and model == client.models.retrieve(NAME)


TOOLS = checked_tools([{"type": "function", "function": {"name": name}} for name in ("read", "list")])
CALLS = '<tool_call>\n{"name": "read", "arguments": {"path": "a b"}}\n</tool_call>'
CALLS += '\n<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
TEXTS = {
    "": [],
    "I see.": ["text"],
    "<think>\nHm.\n</think>\n\nI see.": ["thinking", "text"],
    f"<think>\nHm.\n</think>\n\n{CALLS}": ["thinking", "tool_use", "tool_use"],
    f"Let me look.\n{CALLS}\nDone.": ["text", "tool_use", "tool_use", "text"],
    "<think>\nHm": ["thinking"],
}


def written(text: str, cuts: Sequence[int], *, shows_thoughts: bool = True) -> tuple[Any, Any]:
    """A message of a text that comes in pieces: whole, and as the client reads its stream."""
    splitter = AnswerSplitter(ThoughtSplitter(), CallSplitter(HermesCalls(), Tools(TOOLS)))
    answer = MessageAnswer(NAME, 9, 99, splitter, shows_thoughts=shows_thoughts, request_id="a")
    ends = [*sorted(cuts), len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    result: Any = SimpleNamespace(finish_reason="eos", stop_string=None, tokens=pieces)
    events: list[Any] = [Queued(1), PromptProgress(9, 4, 4, 0.0), PromptProgress(9, 4, 9, 0.0)]
    events += [TokenEvent(0, piece, False) for piece in pieces]
    sent = [answer.waiting]
    for event in (*events, Finished(result, 4)):
        sent += [message.line for message in answer.take(0, event)]
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, headers=headers, text="".join(sent))
    )
    client = anthropic.Anthropic(
        api_key="none", http_client=httpx2.Client(transport=transport), _strict_response_validation=True
    )
    with client.messages.stream(model="any", messages=HI, max_tokens=99) as stream:
        streamed = stream.get_final_message().to_dict(exclude_none=True)
    whole = {name: value for name, value in answer.whole().items() if value is not None}
    return whole, streamed


@given(text=st.sampled_from(list(TEXTS)), data=st.data())
@settings(max_examples=60, deadline=None)
def test_thoughts_text_and_calls_are_blocks_of_a_message(text: str, data: st.DataObject) -> None:
    whole, streamed = written(text, data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    assert streamed == whole
    blocks = whole["content"]
    assert [block["type"] for block in blocks] == TEXTS[text]
    calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert calls == ([("read", {"path": "a b"}), ("list", {})] if CALLS in text else [])
    assert len({block["id"] for block in blocks if block["type"] == "tool_use"}) == len(calls)
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")
    for block in blocks:
        if block["type"] == "thinking":
            assert block["thinking"].startswith("Hm") and block["signature"]


def test_the_text_of_thoughts_may_be_left_out() -> None:
    whole, streamed = written("<think>Hm.</think>I see.", [8, 9], shows_thoughts=False)
    assert streamed == whole
    thinking, text = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("", "I see.")
    # The model sees them again when the client hands the block back; thoughts of another server it does not.
    foreign = {"type": "thinking", "thinking": "", "signature": "EqQBCgIYAhIM"}
    messages = [*HI, {"role": "assistant", "content": [foreign, *whole["content"]]}, *HI]
    assert messages_of(messages)[1]["reasoning_content"] == "Hm."
    body = {"type": "enabled", "display": "omitted", "budget_tokens": 1024}
    asking = MessagesRequest.model_validate({"messages": HI, "thinking": body})
    assert not asking.shows_thoughts


def tool(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "description": "A tool.", "input_schema": {"type": "object"}} | options


@pytest.mark.parametrize("ask", [asked, streamed])
def test_tools_are_called_and_their_results_are_read(served: Served, ask: Any) -> None:
    tools = [tool("read", cache_control={"type": "ephemeral"}), tool("list", type="custom")]
    options: Any = {"tools": tools, "max_tokens": 400}
    with saying(f"I look.\n{CALLS}"):
        message = ask(served, messages=HI, **options)
    text, *calls = message.content
    assert text.text == "I look." and message.stop_reason == "tool_use"
    assert [(call.name, call.input) for call in calls] == [("read", {"path": "a b"}), ("list", {})]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "x"} for call in calls]
    messages = [
        *HI,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    with saying("It is x."):
        answer = ask(served, messages=messages, **options)
    assert text_of(answer) == "It is x." and answer.stop_reason == "end_turn"
    with saying(CALLS):  # the model may call none
        message = ask(served, messages=HI, tool_choice={"type": "none"}, **options)
    assert text_of(message) == CALLS and message.stop_reason == "end_turn"


def test_required_calls_fit_their_schemas(served: Served) -> None:
    path = {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}, "required": ["path"]}
    schema = path | {"additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}
    tools = [tool("read", input_schema=schema), tool("list", input_schema=schema)]
    one = {"disable_parallel_tool_use": True}
    for choice, names in (
        ({"type": "any"} | one, {"read", "list"}),
        ({"type": "tool", "name": "list"}, {"list"}),
    ):
        options: Any = {"messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 300}
        message = asked(served, **options)
        (call,) = message.content
        assert call.name in names and call.input in ({"path": "a"}, {"path": "b"})
        assert message.stop_reason == "tool_use"
        (again,) = streamed(served, **options).content
        assert (again.name, again.input) == (call.name, call.input)


def test_a_session_of_claude_code(served: Served) -> None:
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}

    def answer(body: dict[str, Any], text: str) -> tuple[list[Any], dict[str, Any]]:
        """The content of an answer, and the counts of its tokens."""
        with saying(text):
            status, stream, _ = served.call(f"{MESSAGES}?beta=true", body, **headers)
        assert status == 200, stream
        content: list[Any] = []
        for event in events(stream):
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
            elif event["type"] == "content_block_delta":
                field = next(key for key in event["delta"] if key != "type")
                content[-1][field] = content[-1].get(field, "") + event["delta"][field]
            elif event["type"] == "message_delta":
                usage = event["usage"]
        for block in content:
            if "partial_json" in block:
                block["input"] = json.loads(block.pop("partial_json"))
        return content, usage

    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    text = "\n".join([call % ("Read", '{"file_path": "a.txt"}'), call % ("Glob", '{"pattern": "*"}')])
    content, first = answer(claude_code.question(), f"<think>Hm.</think>{text}")
    assert [block["type"] for block in content] == ["thinking", "tool_use", "tool_use"]
    assert content[1]["input"] == {"file_path": "a.txt"}
    turns = claude_code.results([{"type": "text", "text": "1: Ishmael"}], "no files", calls=content[1:])
    body = claude_code.question({"role": "assistant", "content": content}, *turns, bill="0aaa9")
    content, second = answer(body, "Ishmael.")
    assert content == [{"type": "text", "text": "Ishmael."}]
    read = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] > 0.9 * read  # although what is written for bills differs
    counted = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
    count = served.anthropic().messages.count_tokens(**counted).input_tokens
    assert count == second["input_tokens"] + second["cache_read_input_tokens"]


# --------------------------------------------------------------------------------------- requests


def chat_of(**body: Any) -> dict[str, Any]:
    """The fields of the chat completion that a request is translated to."""
    return MessagesRequest.model_validate(message_fields(body)).chat().model_dump(exclude_unset=True)


def messages_of(messages: Sequence[Any], **body: Any) -> list[Any]:
    """The messages of the chat completion, with their contents as texts."""
    found: list[Any] = chat_of(messages=messages, **body)["messages"]
    return [{**one, "content": "\n".join(part["text"] for part in one["content"])} for one in found]


def test_messages_become_those_of_a_chat_completion() -> None:
    text = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}, "citations": None}
    source = {"type": "text", "media_type": "text/plain", "data": "Call me Ishmael."}
    document = {"type": "document", "source": source, "title": "Moby", "citations": {"enabled": False}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    parts = {"type": "content", "content": [{"type": "text", "text": "b"}]}
    messages = [
        {"role": "user", "content": [document, text]},
        {"role": "user", "content": "Read it."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                text,
                CALL,
                {**CALL, "id": "toolu_2", "name": "list", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": "no file", "is_error": True},
                {
                    **result,
                    "tool_use_id": "toolu_2",
                    "content": [text, {"type": "document", "source": parts}],
                },
                {**result, "tool_use_id": "toolu_2"},
                {"type": "text", "text": "Go on."},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "I"},
        {"role": "assistant", "content": [{"type": "text", "text": "see"}]},
    ]

    def made(identity: str, name: str, arguments: object) -> dict[str, Any]:
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert messages_of(messages, system=[text]) == [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": "Moby\nCall me Ishmael.\nLook.\nRead it."},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "Hm.",
            "tool_calls": [made("toolu_1", "read", {"path": "a"}), made("toolu_2", "list", {})],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error:\nno file"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Look.\nb"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
        {"role": "user", "content": "Go on."},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "I\nsee"},
    ]


def test_options_become_those_of_a_chat_completion() -> None:
    chat = chat_of(
        messages=HI,
        tools=[tool("read", strict=True, description=None)],
        tool_choice={"type": "tool", "name": "read", "disable_parallel_tool_use": True},
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    function = {"name": "read", "strict": True, "parameters": {"type": "object"}}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "read"}}
    assert chat["parallel_tool_calls"] is False and chat["reasoning_effort"] == "max"
    assert chat["chat_template_kwargs"] == {"enable_thinking": True} and chat["thinking_budget"] == 1024
    choices = {kind: chat_of(messages=HI, tool_choice={"type": kind}) for kind in ("auto", "any", "none")}
    assert [one["tool_choice"] for one in choices.values()] == ["auto", "required", "none"]
    assert choices["auto"]["parallel_tool_calls"] is True
    thinking = [chat_of(messages=HI, thinking={"type": kind}) for kind in ("disabled", "adaptive")]
    assert [one["chat_template_kwargs"] for one in thinking] == [{"enable_thinking": False}, {}]
    assert chat_of(messages=HI)["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("as_blocks", [True, False])
def test_what_claude_code_writes_for_bills_is_no_part_of_the_prompt(as_blocks: bool) -> None:
    texts = ["x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690;", "Be brief."]
    system = [{"type": "text", "text": text} for text in texts] if as_blocks else "\n".join(texts)
    assert messages_of(HI, system=system)[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(HI, system=[{"type": "text", "text": texts[0]}])[0]["role"] == "user"


# --------------------------------------------------------------------------------------- refusals


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}}
REFUSED: list[tuple[Any, str]] = [
    (b"{", "the body is not JSON"),
    ({}, "messages: Field required"),
    ({"messages": []}, "messages []: give a list"),
    ({"messages": [1]}, "messages.0 is 1: give an object of role and content"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages.0.role is []: use user, assistant, system"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is 'tool': use user, assistant"),
    ({"messages": [{"role": "user"}]}, "messages.0.content is None: give a text or a list"),
    (user("x"), "messages.0.content.0 is 'x': give a content block"),
    (user({"type": "text", "text": 1}), "messages.0.content.0.text is 1: give a text"),
    (user(IMAGE), "messages.0.content.0 is a block of type 'image', which is not supported"),
    (user(PDF), "messages.0.content.0.source is of type 'base64': only documents of type 'text'"),
    (user(PDF | {"citations": {"enabled": True}}), "messages.0.content.0.citations are not supported"),
    (
        {"messages": [*HI, {"role": "assistant", "content": [CALL]}]},
        "messages.1 calls tools, and no results follow: add a message of the user",
    ),
    (
        {"messages": [*HI, {"role": "assistant", "content": [CALL | {"input": "a"}]}]},
        "messages.1.content.0.input is 'a': give an object",
    ),
    (user({"type": "tool_result"}), "messages.0.content.0.tool_use_id is None: give a text"),
    ({"messages": HI, "tools": ["read"]}, "tools.0 is 'read': give an object of name"),
    (
        {"messages": HI, "tools": [tool("a"), {"type": "web_search_20250305", "name": "web_search"}]},
        "tools.1 is of type 'web_search_20250305', which is not supported by this server",
    ),
    ({"messages": HI, "tools": [tool("a", input_schema=None)]}, "tools.0.input_schema is None"),
    ({"messages": HI, "tools": [tool("a", defer_loading=True)]}, "tools.0.defer_loading is not supported"),
    ({"messages": HI, "tools": [tool("a"), tool("a")]}, "'a' is given twice: rename one"),
    ({"messages": HI, "tool_choice": {"type": "any"}}, "tool_choice 'required' needs tools"),
    (
        {"messages": HI, "tools": [tool("a")], "tool_choice": {"type": "tool"}},
        "has no name: give that of a tool",
    ),
    (
        {"messages": HI, "tools": [tool("a")], "tool_choice": {"type": "tool", "name": "b"}},
        "tool_choice 'b' is no tool: use none, auto, required, or one of a",
    ),
    ({"messages": HI, "system": [IMAGE]}, "system.0 is a block of type 'image'"),
    ({"messages": HI, "max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    ({"messages": HI, "temperatur": 1}, "unknown parameter temperatur"),
    ({"messages": HI, "temperature": -1}, "temperature -1.0 is out of range"),
    ({"messages": HI, "stop_sequences": [""]}, "stop string is empty"),
    ({"messages": HI, "mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported by this server"),
    ({"messages": HI, "thinking": {"type": "sometimes"}}, "thinking.type: Input should be 'enabled', "),
    (
        {"messages": HI, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0 'clear_tool_uses_20250919' is not supported",
    ),
    (
        {"messages": [{"role": "user", "content": 9000 * "x"}]},
        "prompt is too long: at least 9018 prompt tokens",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refusals_name_what_is_wrong(served: Served, body: Any, message: str) -> None:
    status, answer = post(served, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in answer["error"]["message"]
    if isinstance(body, dict):
        assert post(served, body | {"stream": True})[0] == 400
    assert not served.worker.running


def test_the_client_raises_the_errors_of_its_api(served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match="a block of type 'image'") as refused:
        asked(served, messages=user(IMAGE)["messages"])
    assert refused.value.type == "invalid_request_error"
    assert refused.value.body["request_id"] == refused.value.request_id  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        streamed(served, messages=[{"role": "user", "content": 9000 * "x"}])


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    nothing: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
    }
    nothing |= {"container": None, "mcp_servers": [], "betas": ["a"], "diagnostics": None, "speed": "fast"}
    nothing |= {"tools": [], "stop_sequences": [], "thinking": {"type": "disabled"}, "stream": None}
    nothing["context_management"] = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    plain = {"messages": HI, "max_tokens": 3}
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    answers = [
        post(served, plain),
        post(served, plain | nothing, f"{MESSAGES}?beta=true", **headers),
    ]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["content"] == answers[1][1]["content"]


def test_errors_outside_of_an_answer_have_the_same_form() -> None:
    with serving(layers=1, api_key="key", body_bytes=1000) as served:
        body = {"messages": HI, "max_tokens": 1}
        key = {"x-api-key": "key"}
        assert post(served, body, **key)[0] == 200
        refused: list[tuple[Any, str, dict[str, str], int, str]] = [
            (body, MESSAGES, {}, 401, "authentication_error"),
            (body | {"system": 2000 * "x"}, MESSAGES, key, 413, "request_too_large"),
            (body, MESSAGES, key | {"content-type": "text/plain"}, 415, "invalid_request_error"),
            (body, f"{MESSAGES}/batches", key, 404, "not_found_error"),
            (None, MESSAGES, key, 405, "invalid_request_error"),
        ]
        for sent, path, headers, status, kind in refused:
            found, text, answered = served.call(path, sent, **headers | {"x-request-id": "a-7"})
            answer = json.loads(text)
            assert (found, answer["error"]["type"]) == (status, kind)
            assert answer["type"] == "error" and answer["error"]["message"]
            assert answer["request_id"] == answered["request-id"] == answered["x-request-id"] == "a-7"
        with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
            asked(served)
        status, answer = post(served, body, "/v1/chat/completions")
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"


def test_a_body_that_does_not_come_is_an_error_of_the_api() -> None:
    sent = list[Any]()

    async def never() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = None  # is not reached
    limits = Limits(
        app, api_key=None, body_bytes=99, hosts=None, on_answer=lambda status: None, body_timeout_s=0.01
    )
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": MESSAGES, "headers": headers}
    asyncio.run(limits(scope, never, send))
    assert sent[0]["status"] == 408 and json.loads(sent[1]["body"])["error"]["type"] == "timeout_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_of_the_engine_is_an_error_of_the_api(
    monkeypatch: pytest.MonkeyPatch, served: Served, stream: bool
) -> None:
    def fail(engine: Engine, sequences: Any) -> Any:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        with pytest.raises(anthropic.APIStatusError, match="the engine failed: device lost") as failed:
            (streamed if stream else asked)(served)
    assert failed.value.type == "api_error" and failed.value.request_id
    served.idle()
    assert text_of(asked(served))


def test_a_full_queue_is_a_rate_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(parallel=1, waiting=0, layers=1) as served, ThreadPoolExecutor(1) as pool:
        with steps_held_after(monkeypatch, 0):
            first = pool.submit(asked, served)
            served.wait_until(lambda: served.worker.running == 1)
            with pytest.raises(anthropic.RateLimitError, match="too many requests are waiting"):
                asked(served, messages=HI)
        assert first.result().content


def test_a_stream_in_the_queue_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload_rt.server.answering.KEEP_ALIVE_S", 0.05)
    with serving(parallel=1, waiting=1, layers=1) as served, ThreadPoolExecutor(1) as pool:
        with steps_held_after(monkeypatch, 0):
            first = pool.submit(asked, served)
            served.wait_until(lambda: served.worker.running == 1)
            connection = served.connect()
            body = json.dumps({"messages": HI, "max_tokens": 2, "stream": True})
            connection.request("POST", MESSAGES, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            ping = [b"event: ping\n", b'data: {"type": "ping"}\n', b"\n"]
            assert [answer.readline() for _ in range(6)] == 2 * ping
        kinds = [event["type"] for event in events(answer.read().decode()) if event["type"] != "ping"]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert first.result().content


def test_a_client_that_goes_away_frees_its_turn() -> None:
    with serving(parallel=1, layers=1) as served:
        for stream in (True, False):
            connection = served.connect()
            body = json.dumps({"messages": HI, "max_tokens": 4000, "stream": stream})
            connection.request("POST", MESSAGES, body, {"content-type": "application/json"})
            if stream:
                connection.getresponse().readline()
            served.wait_until(lambda: served.worker.running == 1)
            connection.close()
            assert text_of(asked(served, max_tokens=3))
            served.idle()
        assert served.metrics.generated_tokens < 4000
