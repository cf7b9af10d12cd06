"""Anthropic's requests for messages, and their translation to requests for chat completions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from offload_rt.errors import UsageError, briefly
from offload_rt.server.protocols.answer import Json, unsealed
from offload_rt.server.protocols.completions import ChatRequest, Number, supported

IGNORED = frozenset(
    {"metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "betas"}
    | {"anthropic_beta", "anthropic_version", "user_profile_id", "workspace_id", "billing_policy"}
    | {"fallbacks", "fallback_credit_token"}
)
"""Fields that change nothing about an answer here: prefixes are cached without being marked, for example."""
UNSUPPORTED = frozenset({"container", "mcp_servers", "compaction", "thread"})
message_fields = partial(supported, ignored=IGNORED, unsupported=UNSUPPORTED)
"""Returns the fields of `MessagesRequest` among those of a body; see `supported`."""

BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""What Claude Code writes at the beginning of its system prompt, for Anthropic's bills: it is no part of the
prompt, and as it differs in every request, no request would begin like an earlier one."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""OpenAI's name of each way to choose tools, beside the name of one."""
EFFECTIVE_TOOL_FIELDS = ("defer_loading", "input_examples")
"""Fields of a tool that would change what the model sees."""


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Thinking(_Fields):
    """Whether the model thinks before it answers, for how long, and whether its thoughts are shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: StrictInt | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(_Fields):
    """Which tools an answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool = False

    @property
    def openai(self) -> str | Json:
        """The choice in OpenAI's form."""
        if self.type != "tool":
            return TOOL_CHOICES[self.type]
        if self.name is None:
            raise UsageError("tool_choice of type 'tool' has no name: give that of a tool")
        return {"type": "function", "function": {"name": self.name}}


class OutputFormat(_Fields):
    """The JSON schema that an answer fits."""

    type: Literal["json_schema"]
    content: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Fields):
    """How much the model thinks, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextManagement(_Fields):
    """What is removed from a long chat before the model reads it."""

    edits: list[Any] = []


class MessagesRequest(_Fields):
    """The body of a request for a message, or for the number of its tokens.

    Attributes:
        model: any name: the model that is served answers.
    """

    model: StrictStr | None = None
    messages: list[Any]
    system: StrictStr | list[Any] | None = None
    max_tokens: StrictInt | None = Field(None, ge=1)
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    stop_sequences: list[Any] | None = None
    stream: StrictBool | None = None
    tools: list[Any] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer holds the text of its thoughts."""
        return self.thinking is None or self.thinking.display != "omitted"

    def chat(self) -> ChatRequest:
        """Returns the request for a chat completion that asks the same.

        Raises:
            UsageError: a message, a tool or an edit of the context is not valid or not supported; names it.
        """
        self._check_edits()
        choice = self.tool_choice
        chat: Json = {
            "messages": [*_system(self.system), *chat_messages(self.messages)],
            "tools": chat_tools(self.tools),
            "tool_choice": None if choice is None else choice.openai,
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "chat_template_kwargs": self._template_variables,
            "thinking_budget": None if self.thinking is None else self.thinking.budget_tokens,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        schema = self.output_config.format or self.output_format
        if schema is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema.content}}
        return ChatRequest.model_validate({name: value for name, value in chat.items() if value is not None})

    @property
    def _template_variables(self) -> Json:
        """What the chat template is to know of thoughts; they are off unless they are asked for."""
        if self.thinking is not None and self.thinking.type == "adaptive":
            return {}
        return {"enable_thinking": self.thinking is not None and self.thinking.type == "enabled"}

    def _check_edits(self) -> None:
        """Raises UsageError for an edit. Thoughts of earlier turns may be cleared: chat templates do so."""
        edits = () if self.context_management is None else self.context_management.edits
        for number, edit in enumerate(edits):
            kind = edit.get("type") if isinstance(edit, Mapping) else edit
            if not isinstance(kind, str) or not kind.startswith("clear_thinking_"):
                place = f"context_management.edits.{number}"
                raise UsageError(f"{place} {briefly(kind)} is not supported by this server: leave it out")


def _system(system: str | list[Any] | None) -> list[Json]:
    """Returns the system message, if there is one."""
    if system is None:
        return []
    texts = [BILLING_HEADER.sub("", _text(*placed)) for placed in _blocks("system", system)]
    return [_message("system", texts)] if (texts := [text for text in texts if text]) else []


def chat_messages(messages: Sequence[object]) -> list[Json]:
    """Returns messages of content blocks in OpenAI's form; joins consecutive ones of one role.

    Raises:
        UsageError: a message is not valid; names the block, as in "messages.2.content.0".
    """
    chat = list[Json]()
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if not isinstance(message, Mapping):
            raise UsageError(f"{place} is {briefly(message)}: give an object of role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in TURNS:
            raise UsageError(f"{place}.role is {briefly(role)}: use {', '.join(TURNS)}")
        for new in TURNS[role](_blocks(f"{place}.content", message.get("content"))):
            if chat and chat[-1]["role"] == new["role"] != "tool":
                for key in new.keys() - {"role"}:
                    chat[-1][key] = [*chat[-1].get(key, ()), *new[key]]
            else:
                chat.append(new)
    if chat and "tool_calls" in chat[-1]:
        remedy = "add a message of the user with tool_result blocks"
        raise UsageError(f"messages.{len(messages) - 1} calls tools, and no results follow: {remedy}")
    for message in chat:
        if thoughts := message.get("reasoning_content"):
            message["reasoning_content"] = "\n".join(filter(None, thoughts))
    return chat


Blocks = Iterable[tuple[str, Mapping[str, Any]]]
"""Content blocks, each with its place, which errors name."""


def _system_turn(blocks: Blocks) -> Iterator[Json]:
    yield _message("system", [_text(*placed) for placed in blocks])


def _user_turn(blocks: Blocks) -> Iterator[Json]:
    """Yields what the user says and the results of tools, in the order of the blocks."""
    for place, block in blocks:
        if block["type"] == "tool_result":
            yield _tool_result(place, block)
        else:
            yield _message("user", [_text(place, block)])


def _assistant_turn(blocks: Blocks) -> Iterator[Json]:
    """Yields an answer; redacted thoughts are not readable, and left out."""
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for place, block in blocks:
        if block["type"] == "thinking":
            thoughts.append(_thoughts(place, block))
        elif block["type"] == "tool_use":
            calls.append(_tool_use(place, block))
        elif block["type"] != "redacted_thinking":
            texts.append(_text(place, block))
    message = _message("assistant", texts)
    if any(thoughts):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    yield message


TURNS: Mapping[str, Callable[[Blocks], Iterator[Json]]] = {
    "user": _user_turn,
    "assistant": _assistant_turn,
    "system": _system_turn,
}
"""What makes OpenAI's messages of a message, by its role."""


def _message(role: str, texts: Sequence[str]) -> Json:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def _thoughts(place: str, block: Mapping[str, Any]) -> str:
    """Returns thoughts; where they were not shown, their signature holds them."""
    return _string(f"{place}.thinking", block.get("thinking")) or unsealed(block.get("signature"))


def _tool_use(place: str, block: Mapping[str, Any]) -> Json:
    identity, name = (_string(f"{place}.{key}", block.get(key)) for key in ("id", "name"))
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise UsageError(f"{place}.input is {briefly(arguments)}: give an object")
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(place: str, block: Mapping[str, Any]) -> Json:
    content = block.get("content")
    texts = [_text(*placed) for placed in _blocks(f"{place}.content", "" if content is None else content)]
    if block.get("is_error"):
        texts = ["Error:", *texts]
    return _message("tool", texts) | {
        "tool_call_id": _string(f"{place}.tool_use_id", block.get("tool_use_id"))
    }


def _blocks(place: str, content: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the content blocks of a content, which may be a text, each with its place."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise UsageError(f"{place} is {briefly(content)}: give a text or a list of content blocks")
    for number, block in enumerate(content):
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise UsageError(
                f"{place}.{number} is {briefly(block)}: give a content block, an object with a type"
            )
        yield f"{place}.{number}", block


def _text(place: str, block: Mapping[str, Any]) -> str:
    """Returns the text of a block. Raises UsageError for one that is not text."""
    if block["type"] == "text":
        return _string(f"{place}.text", block.get("text"))
    if block["type"] == "document":
        return _document(place, block)
    raise UsageError(
        f"{place} is a block of type {briefly(block['type'])}, which is not supported here: use text"
    )


def _document(place: str, block: Mapping[str, Any]) -> str:
    """Returns the text of a document behind its title and its context."""
    citations, source = block.get("citations"), block.get("source")
    if isinstance(citations, Mapping) and citations.get("enabled"):
        raise UsageError(f"{place}.citations are not supported: leave them out")
    kind = source.get("type") if isinstance(source, Mapping) else source
    if isinstance(source, Mapping) and kind == "text":
        texts = [_string(f"{place}.source.data", source.get("data"))]
    elif isinstance(source, Mapping) and kind == "content":
        texts = [_text(*placed) for placed in _blocks(f"{place}.source.content", source.get("content"))]
    else:
        remedy = "only documents of type 'text' or 'content' are supported, so send the text"
        raise UsageError(f"{place}.source is of type {briefly(kind)}: {remedy}")
    heads = [_string(f"{place}.{key}", block[key]) for key in ("title", "context") if block.get(key)]
    return "\n".join([*heads, *texts])


def _string(place: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{place} is {briefly(value)}: give a text (str)")
    return value


def chat_tools(tools: Sequence[object]) -> list[Json]:
    """Returns tools in OpenAI's form.

    Raises:
        UsageError: a tool is not valid, or one that Anthropic's servers or clients define; names it.
    """
    return [_tool(f"tools.{number}", tool) for number, tool in enumerate(tools)]


def _tool(place: str, tool: object) -> Json:
    if not isinstance(tool, Mapping):
        raise UsageError(f"{place} is {briefly(tool)}: give an object of name, description and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        remedy = "leave it out, or describe a tool of your own with an input_schema"
        raise UsageError(
            f"{place} is of type {briefly(kind)}, which is not supported by this server: {remedy}"
        )
    for key in EFFECTIVE_TOOL_FIELDS:
        if tool.get(key):
            raise UsageError(f"{place}.{key} is not supported by this server: leave it out")
    if not isinstance(tool.get("input_schema"), Mapping):
        raise UsageError(f"{place}.input_schema is {briefly(tool.get('input_schema'))}: give a JSON schema")
    function = {key: tool[key] for key in ("name", "description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
