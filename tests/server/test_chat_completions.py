"""Chat completions that call tools, continue answers and think, as the real `openai` client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.serving import NAME, Served, saying, serving

from offload_rt.server.jobs.worker import Job, QueueFull, Worker
from offload_rt.server.protocols.completions import ChatRequest, supported
from offload_rt.text.chat import ChatTemplate

HI: list[Any] = [{"role": "user", "content": "What does the file say?"}]
CALL = '<tool_call>{"name": "read_file", "arguments": {"path": "a.txt"}}</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(layers=1) as one:
        yield one


def reader(path: str | None = None, **fields: Any) -> dict[str, Any]:
    """A tool that reads a file; `path` is the only one that it takes."""
    kind: dict[str, Any] = {"type": "string"} if path is None else {"enum": [path]}
    schema: dict[str, Any] = {"type": "object", "properties": {"path": kind}, "required": ["path"]}
    schema["additionalProperties"] = False
    function = {"name": "read_file", "description": "Reads a file.", "parameters": schema}
    return {"type": "function", "function": function | fields}


def whole(served: Served, messages: list[Any], **options: Any) -> Any:
    """The choice of a whole answer, with the message as a dict that can be sent back."""
    options = {"tools": [reader()], "temperature": 0} | options
    client: Any = served.client()
    (choice,) = client.chat.completions.create(model=NAME, messages=messages, **options).choices
    message = choice.message.model_dump(exclude_none=True)
    return message | {"content": choice.message.content}, choice.finish_reason


def streamed(served: Served, messages: list[Any], **options: Any) -> Any:
    """The same of a stream, joined as clients join it."""
    options = {"tools": [reader()], "temperature": 0, "stream": True} | options
    client: Any = served.client()
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in client.chat.completions.create(model=NAME, messages=messages, **options):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason
        message["role"] = delta.role or message["role"]
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            if part.index == len(calls):
                assert part.id and part.type == "function" and part.function.name
                calls.append({"id": part.id, "type": part.type, "function": {"name": "", "arguments": ""}})
            function = calls[part.index]["function"]
            function["name"] += part.function.name or ""
            function["arguments"] += part.function.arguments or ""
    message["content"] = message["content"] or (None if calls else "")
    message |= {"tool_calls": calls} if calls else {}
    return {name: value for name, value in message.items() if value or name == "content"}, reason


@pytest.mark.parametrize("ask", [whole, streamed])
def test_an_agent_reads_a_file_and_answers(served: Served, tmp_path: Path, ask: Any) -> None:
    """The model is random: a grammar forces its call, whose path is the only one that the schema takes."""
    file = tmp_path / "a.txt"
    file.write_text("Call me Ishmael.")
    tools = [reader(str(file), strict=True)]
    message, reason = ask(
        served, HI, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=300
    )
    assert (message["role"], message["content"], reason) == ("assistant", None, "tool_calls")
    (call,) = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "read_file" and arguments == {"path": str(file)}
    result = {"role": "tool", "tool_call_id": call["id"], "content": Path(arguments["path"]).read_text()}
    messages = [*HI, message, result]
    answer, reason = ask(served, messages, tools=tools, max_tokens=12)
    assert reason == "length" and "tool_calls" not in answer
    expected = served.llm.chat(messages, tools=tools, max_tokens=12)
    assert answer["content"] == expected.text


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize(
    ("says", "content", "thoughts", "calls", "reason"),
    [
        (CALL, None, "", 1, "tool_calls"),
        (f"I look.\n{CALL}\n{CALL}", "I look.\n", "", 2, "tool_calls"),
        (f"<think>Hm {CALL}</think>\n\n    def f():", "def f():", f"Hm {CALL}", 0, "stop"),
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', ..., "", 0, "stop"),
        ("    def f():\n        return 1", ..., "", 0, "stop"),
        ("", "", "", 0, "stop"),
    ],
)
def test_parts_of_an_answer(
    served: Served, ask: Any, says: str, content: Any, thoughts: str, calls: int, reason: str
) -> None:
    with saying(says or "<think></think>", pieces=7):
        message, found = ask(served, HI, max_tokens=200)
    content = says if content is ... else content
    assert message["content"] == content or (
        content and calls and message["content"].strip() == content.strip()
    )
    assert (message.get("reasoning_content", ""), found) == (thoughts, reason)
    assert len(message.get("tool_calls", ())) == calls


def test_an_answer_that_ends_within_a_call_keeps_its_text(served: Served) -> None:
    with saying(CALL[:-5] + " " * 90, pieces=5):
        message, reason = whole(served, HI, max_tokens=16)
    assert reason == "length" and "tool_calls" not in message
    assert message["content"].startswith("<tool_call>")


def test_no_call_is_read_where_none_may_be_made(served: Served) -> None:
    without: tuple[dict[str, Any], ...] = ({"tool_choice": "none"}, {"tools": []})
    for options in without:
        with saying(CALL, pieces=7):
            message, reason = whole(served, HI, max_tokens=200, **options)
        assert (message["content"], reason) == (CALL, "stop")


# ------------------------------------------------------------------------------- continued answers

BEGUN: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The  whale "}]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "[user]Hi\n[assistant]The  whale "),  # as llama.cpp does
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "[user]Hi\n[assistant]The  whale ",
        ),
        ({"add_generation_prompt": True}, "[user]Hi\n[assistant]The  whale \n[assistant]"),
        ({"continue_final_message": False}, "[user]Hi\n[assistant]The  whale \n[assistant]"),
        (
            {"continue_final_message": False, "add_generation_prompt": False},
            "[user]Hi\n[assistant]The  whale \n",
        ),
    ],
)
def test_a_last_answer_is_continued_or_followed(
    served: Served, options: dict[str, bool], prompt: str
) -> None:
    expected = served.llm.generate(prompt, max_tokens=8)
    message, _ = whole(served, BEGUN, tools=[], max_tokens=8, extra_body=options)
    assert message["content"] == expected.text


# ---------------------------------------------------------------------------------------- thoughts


@pytest.mark.parametrize(
    ("body", "thinking", "effort", "budget"),
    [
        ({}, None, None, None),
        ({"reasoning_effort": "none"}, False, None, None),
        ({"reasoning_effort": "minimal"}, None, "low", None),
        ({"reasoning_effort": "xhigh"}, None, "high", None),
        ({"enable_thinking": True, "thinking_budget": 50}, True, None, 50),
        ({"thinking_budget_tokens": 0}, None, None, 0),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None, None),
        ({"chat_template_kwargs": {"thinking": True, "thinking_budget": 9}}, True, None, 9),
        ({"chat_template_kwargs": {"reasoning_effort": "medium"}}, None, "medium", None),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            None,
            "low",
            None,
        ),
    ],
)
def test_how_a_request_says_how_much_to_think(
    body: dict[str, Any], thinking: bool | None, effort: str | None, budget: int | None
) -> None:
    request = ChatRequest.model_validate(supported({"messages": HI} | body))
    assert (request.thinking, request.effort, request.budget) == (thinking, effort, budget)
    assert request.settings.get("thinking_budget") == budget


def test_json_after_thoughts_leaves_room_for_both(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted = list[Job]()

    def submit(worker: Worker, jobs: Sequence[Job]) -> None:
        submitted.extend(jobs)
        raise QueueFull

    monkeypatch.setattr(Worker, "submit", submit)
    monkeypatch.setattr(ChatTemplate, "thoughts", lambda template, thinking, schema: thinking)
    form = {"response_format": {"type": "json_object"}}
    for thoughts in ({}, {"enable_thinking": True}, {"enable_thinking": True, "thinking_budget": 9}):
        body = {"messages": HI, "max_tokens": 100} | form | thoughts
        assert served.call("/v1/chat/completions", body)[0] == 429
    assert [job.params.thinking_budget for job in submitted] == [None, 50, 9]


# ------------------------------------------------------------------------ requests of other programs

TURN = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "a.txt"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Call me Ishmael."}
PROGRAMS: dict[str, dict[str, Any]] = {
    "AutoGen": {
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "name": "user", "content": "Read a.txt."},
            {"role": "assistant", "name": "assistant", "content": None, "tool_calls": [TURN]},
            RESULT,
        ],
        "tools": [reader(strict=False)],
        "stream": False,
    },
    "LiteLLM": {
        "messages": [
            {"role": "user", "content": "Read a.txt."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [TURN],
                "function_call": None,
                "provider_specific_fields": None,
            },
            RESULT | {"name": "read_file"},
        ],
        "tools": [reader()],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "metadata": {"user_api_key": "x"},
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "Cline": {
        "messages": [
            {"role": "system", "content": "You are Cline, a software engineer."},
            {"role": "user", "content": [{"type": "text", "text": "<task>\nRead a.txt.\n</task>"}]},
            {"role": "assistant", "content": "I read it.", "tool_calls": [TURN]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Call me"}]},
        ],
        "temperature": 0,
        "tools": [reader(strict=False)],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning_effort": "medium",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_requests_of_other_programs_are_answered(served: Served, program: str) -> None:
    body = {"model": NAME, "max_tokens": 40} | PROGRAMS[program]
    with saying("It says: Call me.", pieces=5):
        status, text, _ = served.call("/v1/chat/completions", body)
    assert status == 200, text
    assert "Call me" in text or body["stream"]
    if body["stream"]:
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        said = [one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"]]
        assert "".join(said) == "It says: Call me." and chunks[-1]["usage"]["completion_tokens"] > 0
