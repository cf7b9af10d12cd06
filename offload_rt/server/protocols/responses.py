"""Requests of OpenAI's responses: their schema, and the request for a chat completion that each one is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from offload_rt.errors import briefly
from offload_rt.sampling.params import MOST_ALTERNATIVES
from offload_rt.server.protocols import completions
from offload_rt.server.protocols.answer import Json, unsealed
from offload_rt.server.protocols.completions import ChatRequest, Effort, SampledRequest
from offload_rt.server.protocols.errors import ApiError

IGNORED = frozenset(
    {"access_programs", "background_options", "client_metadata", "image", "max_tool_calls"}
    | {"prompt_cache_options", "prompt_cache_retention"}
)
"""Fields that change nothing about an answer here."""
STORED = ("previous_response_id", "conversation", "prompt")
"""Fields that name what an earlier request has stored."""
UNSUPPORTED = frozenset({"background", "context_management", "modalities", "moderation"})
NEUTRAL_VERBOSITY = "medium"
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` that add something to an answer; the others are of tools that run at OpenAI."""
CUT = ("in_progress", "incomplete")
"""The `status` of a message that is continued."""
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MERGED_NAMESPACE = "functions"
"""The namespace whose tools clients call by their own names."""
INPUT = "input"
"""The only argument of a custom tool."""


class Reasoning(BaseModel):
    model_config = ConfigDict(extra="forbid")

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the summary's earlier name
    context: StrictStr | None = None  # the chat template decides which thoughts it shows


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"]
    content: dict[str, Any] | None = Field(default=None, alias="schema")
    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None  # an answer fits the schema, whatever it says


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


@dataclass(frozen=True)
class Callee:
    """A tool as its client names it.

    Attributes:
        custom: it takes a text instead of arguments.
    """

    name: str
    namespace: str | None = None
    custom: bool = False

    @property
    def function(self) -> str:
        """The name under which the model sees the tool."""
        if self.namespace in (None, MERGED_NAMESPACE):
            return self.name
        return f"{self.namespace}{'' if self.namespace.endswith('__') else '__'}{self.name}"


class ResponseRequest(SampledRequest):
    """The body of a request for a response."""

    input: StrictStr | list[Any]
    instructions: StrictStr | None = None
    tools: list[Any] = Field(default_factory=list)
    tool_choice: StrictStr | dict[str, Any] = "auto"
    parallel_tool_calls: StrictBool = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include: list[Any] = Field(default_factory=list)
    max_output_tokens: StrictInt | None = Field(default=None, ge=1)
    top_logprobs: StrictInt = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] | None = None
    # Nothing is stored, and prompts are never truncated, whatever these say.
    store: StrictBool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Returned as they came:
    metadata: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_key: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    service_tier: StrictStr | None = None
    user: StrictStr | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether the log probabilities of the answer's tokens are asked for."""
        return LOGPROBS in self.include

    @property
    def with_encrypted_thoughts(self) -> bool:
        """Whether thoughts are asked for in a form that a client hands back without reading it."""
        return ENCRYPTED in self.include

    @property
    def with_summary(self) -> bool:
        """Whether thoughts are asked for as their summary."""
        return bool(self.reasoning.summary or self.reasoning.generate_summary)

    @cached_property
    def functions(self) -> list[tuple[Callee, Json]]:
        """The tools, each with the function that the model sees.

        Raises:
            ApiError: a tool is not valid or not supported; names it.
        """
        return _tools("tools", self.tools)

    def chat(self) -> ChatRequest:
        """Returns the request for a chat completion with the same answer.

        Raises:
            ApiError: a field is not valid or not supported; names it.
        """
        if self.text.verbosity not in (None, NEUTRAL_VERBOSITY):
            place = "text.verbosity"
            raise _refused(place, f"{place} {self.text.verbosity!r} is not supported: leave it out")
        if self.top_logprobs and not self.with_logprobs:
            message = f"top_logprobs is given without log probabilities: add {LOGPROBS!r} to include"
            raise _refused("top_logprobs", message)
        tools, choice = self._chosen()
        fields: Json = {name: getattr(self, name) for name in SampledRequest.model_fields}
        fields |= {
            "messages": _messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort,
            "continue_final_message": self._continues,
            "chat_template_kwargs": self.chat_template_kwargs,
            "logprobs": self.with_logprobs,
            "top_logprobs": self.top_logprobs,
        }
        if tools:
            fields |= {"tools": tools, "parallel_tool_calls": self.parallel_tool_calls}
        if tools or choice not in ("none", "auto"):
            fields["tool_choice"] = choice
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )

    @property
    def _continues(self) -> bool:
        """Whether the input ends with a message that was cut."""
        last = self.input[-1] if self.input else None
        return isinstance(last, Mapping) and last.get("role") == "assistant" and last.get("status") in CUT

    def _response_format(self) -> Json | None:
        form = self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.content is None:
            place = "text.format.schema"
            raise _refused(place, f"{place} is missing: give a JSON schema")
        return {"type": "json_schema", "json_schema": {"schema": form.content}}

    def _chosen(self) -> tuple[list[Json], str | Json]:
        """Returns the tools that may be called, as functions, and the choice among them."""
        functions, choice = [function for _, function in self.functions], self.tool_choice
        if isinstance(choice, str):
            return functions, choice
        if choice.get("type") == "allowed_tools":
            allowed = [_named("tool_choice.tools", tool) for tool in _list(choice, "tool_choice", "tools")]
            chosen = [function for callee, function in self.functions if callee.function in allowed]
            return chosen, str(choice.get("mode", "auto"))
        return functions, {"type": "function", "function": {"name": _named("tool_choice", choice)}}


def response_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that change something, or are returned.

    Raises:
        ApiError: it asks for something that is not supported; names the field.
    """
    for name in STORED:
        if body.get(name):
            remedy = "this server stores no responses; send the whole conversation in input"
            raise ApiError(400, f"{name} is not supported: {remedy}", "unsupported_parameter", name)
    stateless = {name: value for name, value in body.items() if name not in STORED}
    return completions.supported(stateless, ignored=IGNORED, unsupported=UNSUPPORTED)


# Tools:


def _tools(
    place: str, tools: Sequence[Any], namespace: str | None = None, about: str = ""
) -> list[tuple[Callee, Json]]:
    """Returns tools, those within namespaces too, each with the function that the model sees.

    Args:
        about: description of the namespace.
    """
    found = list[tuple[Callee, Json]]()
    for number, tool in enumerate(tools):
        here = f"{place}[{number}]"
        kind = _kind(here, tool)
        if kind == "namespace" and namespace is None:
            inner = _list(tool, here, "tools")
            found += _tools(f"{here}.tools", inner, _name(here, tool), tool.get("description") or "")
        elif kind in ("function", "custom"):
            callee = Callee(_name(here, tool), namespace, kind == "custom")
            found.append((callee, _function(here, callee, tool, about)))
        else:
            remedy = "turn it off in the client; this server takes the types function, custom and namespace"
            raise _refused(f"{here}.type", f"{here} of type {briefly(kind)} is not supported: {remedy}")
    return found


def _function(place: str, callee: Callee, tool: Mapping[str, Any], about: str) -> Json:
    """Returns a tool as a function in the form of chat completions."""
    texts = [tool.get("description"), about]
    parameters = tool.get("parameters")
    if callee.custom:
        form = tool.get("format") or {}
        if isinstance(form, Mapping) and form.get("type") == "grammar":
            texts.append(f"The input follows this {form.get('syntax')} grammar:\n{form.get('definition')}")
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    wrong = next((text for text in texts if not isinstance(text, str | None)), None)
    if wrong is not None:
        here = f"{place}.description"
        raise _refused(here, f"{here} is {briefly(wrong)}: give a text")
    function: Json = {"name": callee.function, "description": "\n\n".join(filter(None, texts))}
    function |= {"parameters": parameters, "strict": tool.get("strict")}
    return {"type": "function", "function": function}


def _named(place: str, choice: Any) -> str:
    """Returns the function that a choice among tools names."""
    kind = _kind(place, choice)
    if kind not in ("function", "custom"):
        remedy = "choose 'none', 'auto', 'required', or a tool of type function or custom"
        raise _refused(place, f"{place} of type {briefly(kind)} is not supported: {remedy}")
    return Callee(_name(place, choice), choice.get("namespace")).function


# Items of the input:


def _messages(instructions: str | None, items: str | Sequence[Any]) -> list[Json]:
    """Returns the messages of a conversation."""
    conversation = _Conversation()
    if instructions:
        conversation.message("instructions", {"role": "system", "content": instructions})
    if isinstance(items, str):
        conversation.message("input", {"role": "user", "content": items})
    else:
        for number, item in enumerate(items):
            conversation.add(f"input[{number}]", item)
    if not items:
        raise _refused("input", "input is empty: give a text, or a list of items")
    return conversation.messages


class _Conversation:
    """Builds chat messages from items: thoughts, text and calls of one answer become one message.

    Attributes:
        messages: those of the items so far.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def add(self, place: str, item: Any) -> None:
        """Adds an item. Raises ApiError, which names what is wrong with it."""
        kinds = {
            "message": self.message,
            "reasoning": self._reasoning,
            "function_call": self._function_call,
            "custom_tool_call": self._custom_call,
            "function_call_output": self._output,
            "custom_tool_call_output": self._output,
        }
        untyped = isinstance(item, Mapping) and "role" in item and item.get("type") is None
        kind = "message" if untyped else _kind(place, item)
        if not isinstance(kind, str) or kind not in kinds:
            remedy = f"use {', '.join(kinds)}"
            raise _refused(f"{place}.type", f"{place} of type {briefly(kind)} is not supported: {remedy}")
        kinds[kind](place, item)

    def message(self, place: str, item: Mapping[str, Any]) -> None:
        """Adds a message; one of the system joins those before it at the beginning."""
        role, parts = item.get("role"), _parts(f"{place}.content", item.get("content"))
        if role == "assistant":
            self._answer()["content"] += parts
        elif role not in ("system", "developer", "user"):
            here = f"{place}.role"
            raise _refused(here, f"{here} is {briefly(role)}: use system, developer, user or assistant")
        elif role != "user" and [message["role"] for message in self.messages] == ["system"]:
            self.messages[0]["content"] += parts
        else:
            self.messages.append({"role": "user" if role == "user" else "system", "content": parts})

    def _answer(self, begins: bool = False) -> Json:
        """Returns the message of the answer under way.

        Args:
            begins: what is added stands at the beginning of an answer.
        """
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and not (begins and (last["content"] or "tool_calls" in last)):
            return last
        self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]

    def _reasoning(self, place: str, item: Mapping[str, Any]) -> None:
        texts = [part["text"] for part in _parts(f"{place}.content", item.get("content") or [])]
        summary = [part["text"] for part in _parts(f"{place}.summary", item.get("summary") or [])]
        thoughts = "\n".join(texts) or unsealed(item.get("encrypted_content")) or "\n".join(summary)
        if thoughts:
            answer = self._answer(begins=True)
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = f"{before}\n{thoughts}" if before else thoughts

    def _function_call(self, place: str, item: Mapping[str, Any]) -> None:
        self._call(place, item, _text(item, place, "arguments"))

    def _custom_call(self, place: str, item: Mapping[str, Any]) -> None:
        self._call(place, item, json.dumps({INPUT: _text(item, place, "input")}, ensure_ascii=False))

    def _call(self, place: str, item: Mapping[str, Any], arguments: str) -> None:
        function = {
            "name": Callee(_name(place, item), item.get("namespace")).function,
            "arguments": arguments,
        }
        call = {"id": _text(item, place, "call_id"), "type": "function", "function": function}
        self._answer().setdefault("tool_calls", []).append(call)

    def _output(self, place: str, item: Mapping[str, Any]) -> None:
        content = _parts(f"{place}.output", item.get("output"))
        call = _text(item, place, "call_id")
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})


def _parts(place: str, content: object) -> list[Json]:
    """Returns the parts of a content as those of chat messages."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _refused(place, f"{place} is {briefly(content)}: give a text, or a list of parts")
    parts = []
    for number, part in enumerate(content):
        here = f"{place}[{number}]"
        kind = _kind(here, part)
        if kind not in (*TEXT_PARTS, "refusal"):
            remedy = "the model reads only text"
            raise _refused(f"{here}.type", f"{here} of type {briefly(kind)} is not supported: {remedy}")
        parts.append({"type": "text", "text": _text(part, here, "refusal" if kind == "refusal" else "text")})
    return parts


# Values:


def _refused(place: str, message: str) -> ApiError:
    return ApiError(400, message, "invalid_value", place)


def _kind(place: str, value: Any) -> object:
    if not isinstance(value, Mapping):
        raise _refused(place, f"{place} is {briefly(value)}: give an object")
    return value.get("type")


def _text(value: Mapping[str, Any], place: str, name: str) -> str:
    if not isinstance(text := value.get(name), str):
        here = f"{place}.{name}"
        raise _refused(here, f"{here} is {briefly(text)}: give a text")
    return text


def _name(place: str, value: Mapping[str, Any]) -> str:
    """Returns the name of a tool; that of its namespace must be a text, too."""
    if not isinstance(value.get("namespace"), str | None):
        _text(value, place, "namespace")
    return _text(value, place, "name")


def _list(value: Mapping[str, Any], place: str, name: str) -> list[Any]:
    if not isinstance(items := value.get(name), list):
        here = f"{place}.{name}"
        raise _refused(here, f"{here} is {briefly(items)}: give a list")
    return items
