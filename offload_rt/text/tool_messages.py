"""Calls of tools and their results in chat messages: their check, and the forms that templates take."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from offload_rt.errors import UsageError, briefly
from offload_rt.text.reading import Mismatch, decoded
from offload_rt.text.tools import NAME

Message = dict[str, Any]
"""A checked message: `role` and `content`, a str. An answer may have `tool_calls`, a result of a call has
`tool_call_id` and `name` where they are known."""


def checked_calls(place: str, value: object) -> list[dict[str, Any]]:
    """Returns the `tool_calls` of an answer in OpenAI's form, with their arguments as dicts.

    Raises:
        UsageError: begins with `place`, and says what is wrong.
    """
    if not isinstance(value, list | tuple):
        raise UsageError(f"{place} has the tool_calls {briefly(value)}: give a list")
    return [_checked_call(f"{place}, tool call {number}", call) for number, call in enumerate(value, 1)]


def _checked_call(place: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        remedy = 'give {"id": …, "type": "function", "function": {"name": …, "arguments": …}}'
        raise UsageError(f"{place} is {briefly(call)}: {remedy}")
    if call.get("type", "function") != "function":
        raise UsageError(f"{place} has the type {briefly(call['type'])}: only 'function' is supported")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UsageError(f"{place} has the name {briefly(name)}: give the name of the tool")
    try:
        values = decoded(arguments or "{}") if isinstance(arguments, str | None) else arguments
        values = decoded(json.dumps(values, allow_nan=False))
    except (Mismatch, TypeError, ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UsageError(f"{place} has the arguments {briefly(arguments)}: give a JSON object, or its text")
    checked: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": values}}
    return checked | _identifier(place, "id", call.get("id"))


def checked_result(place: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a message of the role tool has beside its content: what it is the result of."""
    named = {"tool_call_id": message.get("tool_call_id"), "name": message.get("name")}
    return {
        key: text for name, value in named.items() for key, text in _identifier(place, name, value).items()
    }


def _identifier(place: str, key: str, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, str):
        raise UsageError(f"{place} has the {key} {briefly(value)}: give a str")
    return {key: value}


def named_results(messages: Sequence[Message]) -> list[Message]:
    """Returns messages whose results have the name of their tool, which some templates write."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
        if "id" in call
    }
    return [
        message | {"name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in messages
    ]


def call_forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yields forms of calls that templates take: several in a message or one in each, with any IDs or with
    nine letters and digits (Mistral), with arguments as a dict or as text."""
    if not any("tool_calls" in message for message in messages):
        yield list(messages)
        return
    for as_text, short_ids, one_each in product((False, True), repeat=3):
        form = one_call_each(messages) if one_each else list(messages)
        if short_ids:
            form = [_with_short_ids(message) for message in form]
        if as_text:
            form = [_with_texts(message) for message in form]
        yield form


def one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with one call in each answer, its result right behind it."""
    results = {one["tool_call_id"]: one for one in messages if "tool_call_id" in one}
    split, placed = list[Message](), set[str]()
    for message in messages:
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            if message.get("tool_call_id") not in placed:
                split.append(message)
            continue
        for number, call in enumerate(calls):
            split.append(message | {"content": "" if number else message["content"], "tool_calls": [call]})
            if (result := results.get(call.get("id", ""))) is not None:
                split.append(result)
                placed.add(call["id"])
    return split


def _with_short_ids(message: Message) -> Message:
    def short(identifier: str) -> str:
        return f"{zlib.crc32(identifier.encode()):09x}"

    if "tool_call_id" in message:
        message = message | {"tool_call_id": short(message["tool_call_id"])}
    if "tool_calls" in message:
        calls = [call | {"id": short(call.get("id", ""))} for call in message["tool_calls"]]
        message = message | {"tool_calls": calls}
    return message


def _with_texts(message: Message) -> Message:
    def written(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        return call | {"function": function | {"arguments": text}}

    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [written(call) for call in message["tool_calls"]]}


DESCRIPTION = """\
# Tools

You can call these functions. Each line is one of them, with a JSON schema of its arguments:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, \
several times for several calls:
<tool_call>
{{"name": "the function", "arguments": {{}}}}
</tool_call>
The results follow between <tool_response> and </tool_response>."""


def described(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Returns messages for a template that takes no tools: these are in the system message, calls are in the
    contents of answers, and results in messages of the user."""
    told = list[Message]()
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("results"):  # roles alternate
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "results": True})
            continue
        content, calls = message["content"], message.get("tool_calls", ())
        for call in calls:
            written = json.dumps(call["function"], ensure_ascii=False)
            content += f"{chr(10) if content else ''}<tool_call>\n{written}\n</tool_call>"
        told.append({"role": message["role"], "content": content})
    told = [{"role": message["role"], "content": message["content"]} for message in told]
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        description = DESCRIPTION.format(tools=lines)
        if told and told[0]["role"] == "system":
            description = f"{told.pop(0)['content']}\n\n{description}"
        told.insert(0, {"role": "system", "content": description})
    return told
