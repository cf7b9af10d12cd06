"""How chat templates take messages: forms of them, what a template leaves out, and the date it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from string import ascii_letters
from typing import Any

from offload_rt.text.thoughts import THINK

Message = dict[str, str]


@dataclass(frozen=True)
class Rendering:
    """Messages as a template renders them.

    Attributes:
        missing: indices of the messages that are not in `text`.
        notice: what the user is told if this rendering is used.
    """

    text: str
    messages: Sequence[Mapping[str, Any]]
    missing: list[int]
    notice: str | None


def forms(messages: list[Message]) -> Iterator[tuple[Sequence[Mapping[str, Any]], str | None]]:
    """Yields forms of messages that templates take: contents as strings, as lists of parts, without a system
    message; each with a notice."""
    yield messages, None
    yield _in_parts(messages), None
    if folded := _folded(messages):
        notice = "takes no system message: its text is placed before the first user message"
        yield folded, notice
        yield _in_parts(folded), notice


def _in_parts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


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
    """Characters around a content, and the least number of characters between them that are not blank."""

    start: str
    end: str
    least: int


def marked_contents(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], dict[int, _Mark]]:
    """Returns messages with marks around what is to be in the rendering, and the marks by message.

    Blank ends of contents, which templates trim, and thoughts, which they drop, stay outside.
    """
    contents = [form["content"] for form in messages]
    texts = [form if isinstance(form, str) else form[0]["text"] for form in contents]
    characters = set(re.findall("[\U000f0000-\U0010fffd]", "".join(texts)))
    unused = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in characters)
    marked, marks = list[Mapping[str, Any]](), dict[int, _Mark]()
    for number, (message, text) in enumerate(zip(messages, texts, strict=True)):
        before, closed, spoken = (
            text.rpartition(THINK.closing_mark) if message["role"] == "assistant" else ("", "", text)
        )
        if core := spoken.strip():
            # What a system message says may be a switch that the template takes out (/no_think).
            least = 0 if message["role"] == "system" else _visible(core)
            marks[number] = mark = _Mark(next(unused), next(unused), least)
            before_core, right = spoken[: spoken.index(core)], spoken[spoken.index(core) + len(core) :]
            text = f"{before}{closed}{before_core}{mark.start}{core}{mark.end}{right}"
        content = text if isinstance(message["content"], str) else [{"type": "text", "text": text}]
        marked.append({**message, "content": content})
    return marked, marks


def holds(rendered: str, mark: _Mark) -> bool:
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
