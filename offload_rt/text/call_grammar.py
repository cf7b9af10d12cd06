"""Grammars of answers that call tools, in the format of a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from offload_rt.text.calls import CallMarks
from offload_rt.text.lark import Lark
from offload_rt.text.thoughts import FINAL, MESSAGE
from offload_rt.text.tools import Tools


def call_grammar(marks: CallMarks, tools: Tools, schema: str | Mapping[str, Any] | None = None) -> str:
    """Returns what an answer may be, as a grammar for `JsonGrammars.calls`.

    Arguments fit the schemas of their tools. An answer consists of calls where they are forced. Otherwise it
    is a text, and calls may end it.

    Args:
        schema: JSON schema of an answer without calls; None: any text.
    """
    lark, form = Lark(marks.token), marks.format
    first = form.openings(True)[0]
    opening, calls = lark.mark(first), form.calls(lark, tools)
    spoken = lark.any_text()
    if schema is not None:
        spoken = lark.json(json.loads(schema) if isinstance(schema, str) else schema)
    if form.messages:
        header = f"{lark.text(FINAL)} {lark.mark(MESSAGE)}"
        return lark.source(f"{opening} ({calls if tools.forced else f'{calls} | {header} {spoken}'})")
    blanks = lark.rule(r"/\n{0,2}/")  # as models write them behind thoughts
    called = f"{blanks} {opening} {calls}"
    if tools.forced:
        return lark.source(called)
    if schema is not None:
        return lark.source(f"{spoken} | {called}")
    if first not in form.openings(False):  # it begins a call only where it begins the answer
        other = lark.rule(rf"/[ \t\r\n]*[^ \t\r\n{first}](?s:.)*/")
        return lark.source(f"({other} | {called})?")
    if lark.is_token(first):
        return lark.source(f"{spoken} ({opening} {calls})?")
    return lark.source(f"{spoken} | {lark.text_up_to(first)} {calls}")
