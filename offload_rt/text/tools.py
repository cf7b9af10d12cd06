"""Tools that a model may call: what a user gives, checked, and the calls in an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offload_rt.errors import UsageError, briefly, first_line

MODES = ("none", "auto", "required")
"""Values of a choice that name no tool."""
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""What the name of a tool may be."""
MOST_TOOLS = 512


@dataclass(frozen=True)
class Tool:
    """A function that a model may call.

    Attributes:
        parameters: JSON schema of the arguments, that of an object.
        strict: once a call begins, its arguments are forced to fit `parameters`.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}, hash=False
    )
    strict: bool = False

    def json(self) -> dict[str, Any]:
        """Returns the tool in OpenAI's form, which chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer.

    Attributes:
        arguments: the text of a JSON object.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class Tools:
    """The tools of a chat, and which of them an answer calls.

    Attributes:
        choice: "auto": the model decides whether it calls any; "required": the answer is one call or several;
            the name of a tool: the answer is one call of it; "none": the model sees the tools, so that the
            beginning of the prompt stays the same, but its answer is never read as calls.
        parallel: an answer may have several calls.

    Raises:
        UsageError: there are no tools, or `choice` is none of these.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    parallel: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.tools, tuple) or not all(isinstance(tool, Tool) for tool in self.tools):
            raise UsageError(
                f"tools {briefly(self.tools)}: give a tuple of Tool, as checked_tools returns it"
            )
        if not self.tools:
            raise UsageError("tools is empty: name at least one tool, or leave it out")
        names = [tool.name for tool in self.tools]
        if self.choice not in (*MODES, *names):
            named = ", ".join(names[:8])
            raise UsageError(
                f"tool_choice {briefly(self.choice)} is no tool: use {', '.join(MODES)}, or one of {named}"
            )
        if not isinstance(self.parallel, bool):
            raise UsageError(f"parallel_tool_calls must be True or False, got {briefly(self.parallel)}")

    @classmethod
    def of(cls, tools: object, choice: object = None, parallel: object = None) -> Tools | None:
        """Returns tools from OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.

        Args:
            tools: see `checked_tools`; None or an empty list: there are none, and None is returned.
            choice: a name or a mode, or `{"type": "function", "function": {"name": …}}`; None: "auto".
            parallel: None: True.

        Raises:
            UsageError: names the field that is wrong, its value and the remedy.
        """
        checked = () if tools is None else checked_tools(tools)
        named = _choice("auto" if choice is None else choice)
        if not checked:
            if named in ("none", "auto"):
                return None
            raise UsageError(f"tool_choice {briefly(named)} needs tools: give them in tools")
        return cls(checked, named, True if parallel is None else parallel)  # type: ignore[arg-type]

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice in MODES:
            return () if self.choice == "none" else self.tools
        return tuple(tool for tool in self.tools if tool.name == self.choice)

    @property
    def forced(self) -> bool:
        """Returns whether an answer consists of calls."""
        return self.choice not in ("none", "auto")

    @property
    def most_calls(self) -> int | None:
        """Most calls of an answer; None: any number."""
        return None if self.parallel and self.choice in MODES else 1

    @property
    def constrained(self) -> bool:
        """Returns whether a grammar must decide what an answer may be."""
        strict = any(tool.strict for tool in self.callable)
        return self.forced or (self.choice == "auto" and (strict or not self.parallel))


def _choice(choice: object) -> str:
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        named = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or not isinstance(named, str):
            remedy = 'give {"type": "function", "function": {"name": …}}'
            raise UsageError(f"tool_choice {briefly(choice)}: {remedy}, or {', '.join(MODES)}")
        return named
    if not isinstance(choice, str):
        raise UsageError(f"tool_choice {briefly(choice)}: give {', '.join(MODES)}, or the name of a tool")
    return choice


def checked_tools(value: object) -> tuple[Tool, ...]:
    """Returns the tools of OpenAI's list `{"type": "function", "function": {"name", "description",
    "parameters", "strict"}}`; items of type `Tool` are taken as well.

    Raises:
        UsageError: names what is wrong, as in "tools[3].function.name".
    """
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UsageError(f"tools {briefly(value)}: give a list of tools")
    if len(value) > MOST_TOOLS:
        raise UsageError(f"tools has {len(value)} tools: give at most {MOST_TOOLS}")
    tools: list[Tool] = []
    for number, item in enumerate(value):
        place = f"tools[{number}]"
        tool = _tool(place, item)
        if any(tool.name == other.name for other in tools):
            raise UsageError(f"{place}.function.name {tool.name!r} is given twice: rename one of the tools")
        tools.append(tool)
    return tuple(tools)


def _tool(place: str, item: object) -> Tool:
    if isinstance(item, Tool):
        item = item.json() | {"strict": item.strict}
    if not isinstance(item, Mapping):
        raise UsageError(f"{place} is {briefly(item)}: give a dict of type and function")
    if item.get("type") != "function":
        raise UsageError(f"{place}.type is {briefly(item.get('type'))}: only tools of type 'function' exist")
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise UsageError(f"{place}.function is {briefly(function)}: give a dict of name and parameters")
    place = f"{place}.function"
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        remedy = "use 1 to 128 letters, digits and _ . : / -"
        raise UsageError(f"{place}.name is {briefly(name)}: {remedy}")
    if name in MODES:
        raise UsageError(f"{place}.name {name!r} is a value of tool_choice: rename the tool")
    if description is not None and not isinstance(description, str):
        raise UsageError(f"{place}.description is {briefly(description)}: give a text (str)")
    strict = function.get("strict", item.get("strict"))
    if strict is not None and not isinstance(strict, bool):
        raise UsageError(f"{place}.strict must be True or False, got {briefly(strict)}")
    parameters = _parameters(f"{place}.parameters", function.get("parameters"))
    return Tool(name, description or "", parameters, bool(strict))


def _parameters(place: str, parameters: object) -> dict[str, Any]:
    if parameters is None or parameters == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise UsageError(f"{place} is {briefly(parameters)}: give a JSON schema, a dict")
    try:
        copied: dict[str, Any] = json.loads(json.dumps(parameters, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{place} {briefly(parameters)} is not JSON: {first_line(error)}") from None
    if copied.get("type", "object") != "object":
        raise UsageError(f"{place}.type is {briefly(copied['type'])}: arguments are of type 'object'")
    if not isinstance(copied.get("properties", {}), dict):
        raise UsageError(f"{place}.properties is {briefly(copied['properties'])}: give a dict of schemas")
    return {"type": "object", "properties": {}} | copied
