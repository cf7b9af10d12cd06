"""Requests in the form in which programs send them, with all their fields, are answered.

Those of Codex are as version 0.171 was seen to send them, with the tool `apply_patch` that it gives to models
it knows. The others follow the sources of Zed (crates/open_ai), of Open WebUI (routers/openai.py) and of
Continue (core/llm/openaiTypeConverters.ts).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.serving import NAME, Served, saying, serving

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(layers=1) as one:
        yield one


def stream(served: Served, path: str, body: dict[str, Any], says: str = "Done.") -> list[dict[str, Any]]:
    """The events or chunks of an answer."""
    with saying(says, pieces=9):
        status, text, _ = served.call(path, body | {"stream": True})
    assert status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def item(role: str, text: str, **fields: Any) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]} | fields


def function(name: str, strict: bool | None = None, **properties: str) -> dict[str, Any]:
    """A tool whose arguments are all required, each with its type."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": kind} for argument, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }
    tool = {"type": "function", "name": name, "description": f"The tool {name}.", "parameters": parameters}
    return tool | ({} if strict is None else {"strict": strict})


# ------------------------------------------------------------------------------------------ Codex

CODEX_TOOLS: list[Any] = [
    function("exec_command", strict=False, cmd="string"),
    function("write_stdin", strict=False, session_id="number", chars="string"),
    function("request_user_input", strict=False, questions="array"),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Use the `apply_patch` tool to edit files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
    },
    function("view_image", strict=False, path="string"),
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": "Tools for spawning and managing sub-agents.",
        "tools": [function("spawn_agent", strict=False, task="string"), function("wait_agent", strict=False)],
    },
]
CODEX: dict[str, Any] = {
    "model": NAME,
    "input": [
        item("developer", "You are a coding agent running in the Codex CLI.", id="msg_1"),
        item("developer", "<skills_instructions>\n## Skills\n</skills_instructions>", id="msg_2"),
        item("user", "<environment_context>\n  <cwd>/repo</cwd>\n</environment_context>", id="msg_3"),
        item("user", "Fix the test.", id="msg_4"),
    ],
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22867-691c-7ab3-9749-24b49caac817",
    "client_metadata": {"turn_id": "t1", "x-codex-turn-metadata": '{"request_kind":"turn"}'},
}
CALL = (
    '<think>Look first.</think><tool_call>{"name": "exec_command", "arguments": {"cmd": "make"}}</tool_call>'
)


def test_codex_calls_a_tool_and_answers(served: Served) -> None:
    found = stream(served, RESPONSES, CODEX, CALL)
    thoughts, call = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [part["text"] for part in thoughts["summary"]] == ["Look first."]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "exec_command",
        {"cmd": "make"},
    )
    usage = found[-1]["response"]["usage"]
    assert found[-1]["type"] == "response.completed" and usage["total_tokens"] > usage["input_tokens"]
    # Codex returns what it understands of the items, and null for the rest.
    kept = ("type", "id", "summary", "encrypted_content")
    turn = [
        *CODEX["input"],
        {key: thoughts[key] for key in kept} | {"content": None},
        {key: call[key] for key in ("type", "status", "id", "name", "arguments", "call_id")},
        {
            "type": "function_call_output",
            "id": "fco_1",
            "call_id": call["call_id"],
            "output": "Process exited with code 0\nOutput:\nok",
        },
    ]
    found = stream(served, RESPONSES, CODEX | {"input": turn}, "It passes.")
    (last,) = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert last["content"][0]["text"] == "It passes."
    again = found[-1]["response"]["usage"]
    assert again["input_tokens_details"]["cached_tokens"] >= usage["input_tokens"] - len("[assistant]")


def test_codex_reads_the_parts_of_a_result_and_the_calls_of_other_tools(served: Served) -> None:
    named = {"type": "function_call", "namespace": "multi_agent_v1", "name": "spawn_agent", "call_id": "c1"}
    turn = [
        *CODEX["input"],
        named | {"arguments": '{"task":"x"}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {
            "type": "custom_tool_call",
            "name": "apply_patch",
            "call_id": "c2",
            "input": "*",
            "status": "completed",
        },
        {"type": "custom_tool_call_output", "call_id": "c2", "name": "apply_patch", "output": "Success."},
        item("assistant", "Done.", phase="final_answer", id="msg_1"),
        item("user", "Once more.", internal_chat_message_metadata_passthrough={"turn_id": "t2"}),
    ]
    found = stream(
        served, RESPONSES, CODEX | {"input": turn, "reasoning": None, "text": {"verbosity": "medium"}}
    )
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Done."


def test_codex_asks_for_json(served: Served) -> None:
    form = {
        "type": "json_schema",
        "name": "codex_output_schema",
        "strict": True,
        "schema": {"enum": ["a", "b"]},
    }
    status, text, _ = served.call(RESPONSES, CODEX | {"tools": [], "text": {"format": form}, "stream": False})
    assert status == 200 and json.loads(text)["output"][0]["content"][0]["text"] in ('"a"', '"b"')


@pytest.mark.parametrize("kind", ["web_search", "image_generation", "tool_search", "local_shell"])
def test_codex_reads_which_of_its_tools_to_turn_off(served: Served, kind: str) -> None:
    body = CODEX | {"tools": [*CODEX_TOOLS, {"type": kind, "external_web_access": True}]}
    status, text, _ = served.call(RESPONSES, body)
    error = json.loads(text)["error"]
    assert (status, error["param"]) == (400, "tools[6].type")
    assert f"tools[6] of type '{kind}' is not supported" in error["message"]


# ---------------------------------------------------------------------------- Zed and Open WebUI


def test_zed_by_responses(served: Served) -> None:
    body = {
        "model": NAME,
        "input": [
            item("system", "You are Zed."),
            item("user", "Read it."),
            item("assistant", "I do."),
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path":"a"}'},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [{"type": "input_text", "text": "b"}],
            },
        ],
        "temperature": 1.0,
        "max_output_tokens": 200,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [function("read", path="string")],
        "prompt_cache_key": "thread",
        "reasoning": {"effort": "high", "summary": "auto"},
    }
    assert stream(served, RESPONSES, body)[-1]["type"] == "response.completed"


def test_open_webui_by_responses(served: Served) -> None:
    reasoning = {
        "type": "reasoning",
        "id": "r_1",
        "status": "completed",
        "start_tag": "<think>",
        "attributes": {"type": "reasoning_content"},
        "content": [{"type": "output_text", "text": "Hm."}],
        "summary": None,
        "started_at": 1.0,
        "duration": 2,
    }
    body = {
        "model": NAME,
        "instructions": "Be brief.",
        "input": [item("user", "Hi"), reasoning, item("assistant", "Hello."), item("user", "Who?")],
        "max_output_tokens": 50,
        "temperature": 0.2,
        "tools": [function("search", strict=False, query="string")],
    }
    assert stream(served, RESPONSES, body)[-1]["response"]["output"][0]["content"][0]["text"] == "Done."


def said(chunks: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks if one["choices"])


def called(chunks: list[dict[str, Any]]) -> tuple[str, Any]:
    """The name and the arguments of the only call of an answer."""
    deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    assert {piece["index"] for piece in pieces} == {0} and pieces[0]["id"]
    assert [one["choices"][0]["finish_reason"] for one in chunks if one["choices"]][-1] == "tool_calls"
    arguments = "".join(piece["function"].get("arguments", "") for piece in pieces)
    return pieces[0]["function"]["name"], json.loads(arguments)


def chat_tool(name: str, **properties: str) -> dict[str, Any]:
    return {"type": "function", "function": function(name, None, **properties)}


READ = '<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>'
EARLIER: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "b"},
    {"role": "assistant", "content": "It is b.", "reasoning_content": "Hm."},
    {"role": "user", "content": "Again."},
]


def test_open_webui_by_chat_completions(served: Served) -> None:
    body = {
        "model": NAME,
        "messages": EARLIER,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "temperature": 0.2,
        "top_k": 40,
        "logit_bias": None,
        "tools": [chat_tool("read", path="string")],
    }
    chunks = stream(served, CHAT, body)
    assert said(chunks) == "Done." and chunks[-1]["usage"]["completion_tokens"] > 0
    assert called(stream(served, CHAT, body, READ)) == ("read", {"path": "a"})
    task = {"model": NAME, "messages": [{"role": "user", "content": "A title?"}], "stream": False}
    status, text, _ = served.call(CHAT, task | {"max_completion_tokens": 5})
    assert status == 200 and json.loads(text)["choices"][0]["message"]["content"]


def test_zed_by_chat_completions(served: Served) -> None:
    body = {
        "model": NAME,
        "messages": EARLIER,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 50,
        "temperature": 1.0,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "tools": [chat_tool("read", path="string")],
        "prompt_cache_key": "thread",
        "reasoning_effort": "high",
    }
    assert said(stream(served, CHAT, body)) == "Done."
    assert called(stream(served, CHAT, body, READ)) == ("read", {"path": "a"})


def test_continue_by_chat_completions_and_completions(served: Served) -> None:
    body = {
        "model": NAME,
        "messages": [*EARLIER, {"role": "assistant", "content": " "}, {"role": "user", "content": "Go on."}],
        "max_tokens": 50,
        "temperature": 0.5,
        "stop": [],
        "tools": [chat_tool("read", path="string")],
    }
    assert called(stream(served, CHAT, body, READ)) == ("read", {"path": "a"})
    completion = {"model": NAME, "prompt": "def f(", "max_tokens": 50, "stop": ["\n\n"], "temperature": 0.01}
    chunks = stream(served, "/v1/completions", completion)
    assert "".join(one["choices"][0]["text"] for one in chunks) == "Done."
