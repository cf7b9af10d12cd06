"""How models write calls of tools: a class for each format, which reads calls and writes their grammar."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from offload_rt.text.lark import Lark
from offload_rt.text.reading import Cursor, Mismatch, Reading, decoded, elements, members
from offload_rt.text.schema_types import admits, kinds_of
from offload_rt.text.tools import Tool, ToolCall, Tools

NEWLINE = "\n"
NAME_LETTER = re.compile(r"[A-Za-z0-9_.:/-]")
LONGEST_HEADER = 400
"""Characters of the header of a message (harmony)."""
ARGUMENTS = ("arguments", "parameters")
"""Names by which models call the arguments of a call that is a JSON object."""


class CallFormat(ABC):
    """The form in which a family of models writes calls of tools.

    Attributes:
        telling: marks by which the format is recognised; all of them are in the chat template.
        marks: marks that may be special tokens, which texts keep.
        ends: tokens that end an answer behind a call.
        messages: a call is a message of its own (harmony), and so stands beside thoughts instead of in the
            answer.
        separator: what the model writes between two calls; None: an answer has one call.
    """

    telling: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    messages: ClassVar[bool] = False
    separator: ClassVar[str | None] = "\n"

    @abstractmethod
    def openings(self, first: bool) -> tuple[str, ...]:
        """Returns marks with which a call may begin; the first one is that of grammars.

        Args:
            first: nothing but calls and white space comes before it.
        """

    @abstractmethod
    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        """Reads calls that begin with an opening mark. Raises Mismatch where there are none."""

    @abstractmethod
    def call(self, lark: Lark, tool: Tool) -> str:
        """Returns the grammar of a call of a tool, without the opening mark."""

    def calls(self, lark: Lark, tools: Tools) -> str:
        """Returns the grammar of all calls of an answer, without the first opening mark."""
        one = lark.rule(lark.any_of(self.call(lark, tool) for tool in tools.callable))
        if tools.most_calls == 1 or self.separator is None:
            return one
        between = f"{lark.text(self.separator)} " if self.separator else ""
        return f"{one} ({between}{lark.mark(self.openings(True)[0])} {one})*"


def known(name: str, tools: Tools) -> Tool:
    """Returns the tool of a name that an answer may call. Raises Mismatch where there is none."""
    tool = next((tool for tool in tools.callable if tool.name == name), None)
    if tool is None:
        raise Mismatch
    return tool


def json_call(text: str, tools: Tools) -> ToolCall:
    """Returns the call that a JSON object of name and arguments describes. Raises Mismatch where none."""
    given = members(text)
    tool = known(decoded(given.get("name", "null")), tools)
    arguments = next((given[name] for name in ARGUMENTS if name in given), "{}")
    if arguments.startswith('"'):  # the text of an object
        arguments = str(decoded(arguments)).strip()
        if re.search("[\ud800-\udfff]", arguments):  # half of a surrogate pair, which no reply can carry
            raise Mismatch
    if not isinstance(decoded(arguments), dict):
        raise Mismatch
    return ToolCall(tool.name, arguments)


class HermesCalls(CallFormat):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3."""

    telling = marks = ("<tool_call>", "</tool_call>")

    def openings(self, first: bool) -> tuple[str, ...]:
        return ("<tool_call>",)

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        yield from text.expect("<tool_call>")
        yield from text.blanks()
        call = json_call((yield from text.json()), tools)
        yield from text.blanks()
        yield from text.expect("</tool_call>")
        return [call]

    def call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        return (
            f"{name} {lark.arguments(tool.parameters)} {lark.text('}' + NEWLINE)} {lark.mark('</tool_call>')}"
        )


class LlamaCalls(CallFormat):
    """`{"name": …, "parameters": {…}}` in place of an answer, or behind `<|python_tag|>`: Llama 3."""

    telling = marks = ("<|python_tag|>",)
    ends = ("<|eom_id|>",)
    separator = None

    def openings(self, first: bool) -> tuple[str, ...]:
        return ("{", "<|python_tag|>") if first else ("<|python_tag|>",)

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        yield from text.take("<|python_tag|>")
        yield from text.blanks()
        calls = [json_call((yield from text.json()), tools)]
        end = text.at
        yield from text.blanks()
        if not (yield from text.take(";")):
            text.at = end
        return calls

    def call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(f'"name": {json.dumps(tool.name)}, "parameters": ')
        return f"{name} {lark.arguments(tool.parameters)} {lark.text('}')}"


class MistralCalls(CallFormat):
    """`[TOOL_CALLS]name[ARGS]{…}` for each call: Mistral Small 3.2, Magistral 1.1, Devstral and later."""

    telling: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]")
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    separator = ""

    def openings(self, first: bool) -> tuple[str, ...]:
        return ("[TOOL_CALLS]",)

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        yield from text.expect("[TOOL_CALLS]")
        yield from text.blanks()
        name = yield from text.word(NAME_LETTER)
        if not name:
            return [json_call(call, tools) for call in elements((yield from text.json()))] or _none()
        yield from text.blanks()
        if (yield from text.take("[CALL_ID]")):
            yield from text.word(NAME_LETTER)
        yield from text.take("[ARGS]")
        yield from text.blanks()
        arguments = yield from text.json()
        if not arguments.startswith("{"):
            raise Mismatch
        return [ToolCall(known(name, tools).name, arguments)]

    def call(self, lark: Lark, tool: Tool) -> str:
        return f"{lark.text(tool.name)} {lark.mark('[ARGS]')} {lark.arguments(tool.parameters)}"


class MistralListCalls(MistralCalls):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`: Mistral 7B v0.3, Nemo and others of 2024."""

    telling = ("[TOOL_CALLS]",)

    def call(self, lark: Lark, tool: Tool) -> str:
        name = lark.text(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return f"{name} {lark.arguments(tool.parameters)} {lark.text('}')}"

    def calls(self, lark: Lark, tools: Tools) -> str:
        one = lark.rule(lark.any_of(self.call(lark, tool) for tool in tools.callable))
        more = "" if tools.most_calls == 1 else f" ({lark.text(', ')} {one})*"
        return f"{lark.text('[')} {one}{more} {lark.text(']')}"


class CoderCalls(CallFormat):
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`: Qwen3-Coder."""

    marks = ("<tool_call>", "</tool_call>")
    telling = ("<tool_call>", "<function=", "<parameter=")

    def openings(self, first: bool) -> tuple[str, ...]:
        return ("<tool_call>", "<function=")  # the model now and then omits the first

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        wrapped = yield from text.take("<tool_call>")
        yield from text.blanks()
        yield from text.expect("<function=")
        tool = known((yield from text.until(">")).strip(), tools)
        arguments = dict[str, str]()
        yield from text.blanks()
        while not (yield from text.take("</function>")):
            yield from text.expect("<parameter=")
            name = yield from text.until(">")
            value = yield from self._value(text)
            arguments[name.strip()] = argument(value, tool, name.strip())
            yield from text.blanks()
        if wrapped:
            yield from text.blanks()
            yield from text.expect("</tool_call>")
        return [ToolCall(tool.name, object_of(arguments))]

    def _value(self, text: Cursor) -> Reading[str]:
        """Reads a value, which may itself contain `</parameter>`: behind its end, the call goes on."""
        value = ""
        while True:
            value += yield from text.until("</parameter>")
            end = text.at
            yield from text.blanks()
            for following in ("<parameter=", "</function>"):
                start = text.at
                if (yield from text.take(following)):
                    text.at = start
                    return value.removeprefix("\n").removesuffix("\n")
            text.at = end
            value += "</parameter>"

    def call(self, lark: Lark, tool: Tool) -> str:
        def member(name: str, schema: Any) -> str:
            value = lark.value(schema, tool.parameters, "\n</parameter>\n")
            return f"{lark.text(f'<parameter={name}>{NEWLINE}')} {value}"

        name = lark.text(f"\n<function={tool.name}>\n")
        parameters, end = lark.members(tool.parameters, member), lark.text("</function>\n")
        return f"{name} {parameters} {end} {lark.mark('</tool_call>')}"


class GlmCalls(CallFormat):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

    marks = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    telling = ("<tool_call>", "<arg_key>")

    def openings(self, first: bool) -> tuple[str, ...]:
        return ("<tool_call>",)

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        yield from text.expect("<tool_call>")
        yield from text.blanks()
        tool = known((yield from text.word(NAME_LETTER)), tools)
        arguments = dict[str, str]()
        yield from text.blanks()
        while not (yield from text.take("</tool_call>")):
            yield from text.expect("<arg_key>")
            name = (yield from text.until("</arg_key>")).strip()
            yield from text.blanks()
            yield from text.expect("<arg_value>")
            arguments[name] = argument((yield from text.until("</arg_value>")), tool, name)
            yield from text.blanks()
        return [ToolCall(tool.name, object_of(arguments))]

    def call(self, lark: Lark, tool: Tool) -> str:
        newline = lark.text(NEWLINE)

        def member(name: str, schema: Any) -> str:
            key = f"{lark.mark('<arg_key>')} {lark.text(name)} {lark.mark('</arg_key>')}"
            value = lark.value(schema, tool.parameters, "</arg_value>")
            return f"{key} {newline} {lark.mark('<arg_value>')} {value} {newline}"

        parameters = lark.members(tool.parameters, member)
        return f"{lark.text(tool.name)} {newline} {parameters} {lark.mark('</tool_call>')}"


class HarmonyCalls(CallFormat):
    """`<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>`: gpt-oss."""

    telling = ("<|channel|>", "<|call|>")
    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
    ends = ("<|call|>",)
    messages = True
    separator = None

    def openings(self, first: bool) -> tuple[str, ...]:
        # A prompt ends with `<|start|>assistant`, behind which a recipient may come before the channel.
        return ("<|channel|>", "<|start|>", *(("to=functions.",) if first else ()))

    def read(self, text: Cursor, tools: Tools) -> Reading[list[ToolCall]]:
        header = yield from text.until("<|message|>", LONGEST_HEADER)
        if header.count("<|channel|>") != 1 or "<|end|>" in header or "<|call|>" in header:
            raise Mismatch
        recipient = re.search(r"\bto=functions\.([A-Za-z0-9_.:/-]+)", header)
        if recipient is None:
            raise Mismatch
        tool = known(recipient[1], tools)
        yield from text.blanks()
        arguments = yield from text.json()
        if not arguments.startswith("{"):
            raise Mismatch
        yield from text.blanks()
        if not (yield from text.take("<|call|>")):
            yield from text.take("<|end|>")
        return [ToolCall(tool.name, arguments)]

    def call(self, lark: Lark, tool: Tool) -> str:
        header = f"{lark.text(f'commentary to=functions.{tool.name} ')} {lark.mark('<|constrain|>')}"
        return f"{header} {lark.text('json')} {lark.mark('<|message|>')} {lark.arguments(tool.parameters)}"


def _none() -> list[ToolCall]:
    raise Mismatch


def argument(value: str, tool: Tool, name: str) -> str:
    """Returns the JSON text of an argument that is written as it is: a string, or JSON of another type."""
    schema = tool.parameters.get("properties", {}).get(name, {})
    kinds = kinds_of(schema, tool.parameters)
    with suppress(Mismatch):
        if kinds != {"string"} and admits(kinds, decoded(value)):
            return value.strip()
    return json.dumps(value, ensure_ascii=False)


def object_of(arguments: Mapping[str, str]) -> str:
    """Returns the text of a JSON object from the JSON texts of its members."""
    texts = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items())
    return f"{{{', '.join(texts)}}}"


CALL_FORMATS: tuple[CallFormat, ...] = (
    HarmonyCalls(),
    MistralCalls(),
    MistralListCalls(),
    GlmCalls(),
    CoderCalls(),
    HermesCalls(),
    LlamaCalls(),
)
