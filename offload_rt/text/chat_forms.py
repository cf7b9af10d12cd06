"""How chat templates take messages: forms of them, what a template leaves out, and the date it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import dropwhile
from string import ascii_letters
from typing import Any

from offload_rt.text.thoughts import THINK
from offload_rt.text.tool_messages import Message, call_forms


@dataclass(frozen=True)
class Rendering:
    """Messages as a template renders them.

    Attributes:
        missing: indices of the messages that are not in `text`.
        notice: what the user is told if this rendering is used.
    """

    text: str
    messages: Sequence[Message]
    missing: list[int]
    notice: str | None


def forms(messages: Sequence[Message]) -> Iterator[tuple[Sequence[Message], str | None]]:
    """Yields forms of messages that templates take: contents as strings, as lists of parts, with a system
    message only at the beginning or without any, and calls of tools as `call_forms` yields them; each with a
    notice."""
    for form in call_forms(messages):
        yield from _content_forms(form)


def _content_forms(messages: list[Message]) -> Iterator[tuple[Sequence[Message], str | None]]:
    yield messages, None
    yield _in_parts(messages), None
    if (early := _system_first(messages)) != messages:
        notice = "takes a system message only at the beginning: the text of later ones is the user's"
        yield early, notice
        yield _in_parts(early), notice
    if folded := _folded(early):
        notice = "takes no system message: its text is placed before the first user message"
        yield folded, notice
        yield _in_parts(folded), notice


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def _system_first(messages: list[Message]) -> list[Message]:
    """Returns messages in which the user says, in their places, what later system messages say."""
    turns = list(dropwhile(_of_system, messages))
    if not any(map(_of_system, turns)):
        return messages
    early = messages[: len(messages) - len(turns)]
    for message in turns:
        if _of_system(message):
            message = message | {"role": "user"}
        if early and early[-1]["role"] == message["role"] == "user":  # roles alternate
            message = message | {"content": f"{early.pop()['content']}\n\n{message['content']}"}
        early.append(message)
    return early


def _of_system(message: Message) -> bool:
    return bool(message["role"] == "system")


def _folded(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the system's text in front of the first user message; [] without either."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    first = next((at for at, message in enumerate(rest) if message["role"] == "user"), None)
    if first is None or not system:
        return []
    content = "\n\n".join(filter(None, [*system, rest[first]["content"]]))
    return [*rest[:first], {"role": "user", "content": content}, *rest[first + 1 :]]


@dataclass(frozen=True)
class _Mark:
    """Characters around a content or the name of a tool that is called, and the least number of characters
    between them that are not blank."""

    start: str
    end: str
    least: int


def marked_contents(messages: Sequence[Message]) -> tuple[list[Message], dict[int, list[_Mark]]]:
    """Returns messages with marks around what is to be in the rendering, and the marks by message.

    Blank ends of contents, which templates trim, and thoughts, which they drop, stay outside.
    """
    contents = [form["content"] for form in messages]
    texts = [form if isinstance(form, str) else form[0]["text"] for form in contents]
    characters = set(re.findall("[\U000f0000-\U0010fffd]", "".join(texts)))
    unused = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in characters)
    marked, marks = list[Message](), dict[int, list[_Mark]]()

    def mark(text: str, least: int) -> tuple[str, _Mark]:
        around = _Mark(next(unused), next(unused), least)
        return f"{around.start}{text}{around.end}", around

    for number, (message, text) in enumerate(zip(messages, texts, strict=True)):
        found = list[_Mark]()
        before, closed, spoken = (
            text.rpartition(THINK.closing_mark) if message["role"] == "assistant" else ("", "", text)
        )
        if core := spoken.strip():
            # What a system message says may be a switch that the template takes out (/no_think).
            shown, around = mark(core, 0 if message["role"] == "system" else _visible(core))
            found.append(around)
            before_core, right = spoken[: spoken.index(core)], spoken[spoken.index(core) + len(core) :]
            text = f"{before}{closed}{before_core}{shown}{right}"
        content = text if isinstance(message["content"], str) else [{"type": "text", "text": text}]
        message = message | {"content": content}
        if "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                name, around = mark(call["function"]["name"], 1)
                found.append(around)
                calls.append(call | {"function": call["function"] | {"name": name}})
            message["tool_calls"] = calls
        marks[number] = found
        marked.append(message)
    return marked, marks


def missing(rendered: str, messages: Sequence[Message], marks: Mapping[int, Sequence[_Mark]]) -> list[int]:
    """Returns the indices of the messages that are not in a rendering of marked ones."""
    return [
        number
        for number, around in marks.items()
        if not all(_holds(rendered, mark) for mark in around)
        or any(_as_python(call, rendered) for call in messages[number].get("tool_calls", ()))
    ]


def _as_python(call: Mapping[str, Any], rendered: str) -> bool:
    """Returns whether a template writes arguments as Python writes a dict, as it expects their text."""
    arguments = call["function"]["arguments"]
    return isinstance(arguments, dict) and bool(arguments) and str(arguments) in rendered


def _holds(rendered: str, mark: _Mark) -> bool:
    """Returns whether a rendering has a whole content; a template may show a part of it elsewhere, too."""
    for quote in "'\"":  # a list of parts that the template writes as Python writes it
        rendered = rendered.replace(f"'text': {quote}{mark.start}", "")
    pieces = (piece.partition(mark.end) for piece in rendered.split(mark.start)[1:])
    return any(end and _visible(content) >= mark.least for content, end, _ in pieces)


def _visible(text: str) -> int:
    """Returns the number of characters that are not blank."""
    return len("".join(text.split()))


def with_date(template: str, date: datetime) -> str:
    """Returns the source of a template for which it is always that date."""
    if "strftime_now" not in template:
        return template
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    replaced = "".join(
        f"|replace({json.dumps(directive)}, {json.dumps(date.strftime(directive))})"
        for directive in directives
    )
    macro = f"{{%- macro strftime_now(format) -%}}{{{{ format{replaced} }}}}{{%- endmacro %}}"
    return f"{macro}{{{{ '' }}}}{template}"  # a line break right behind a block would be dropped
