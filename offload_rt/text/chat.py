"""Chat messages: their check, and the tokenizer's chat template."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeGuard

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.text.answers import AnswerMarks, AnswerSplitter
from offload_rt.text.chat_forms import Rendering, forms, marked_contents, missing, with_date
from offload_rt.text.control_tokens import GUARD, ControlTokens
from offload_rt.text.thoughts import ThoughtSplitter
from offload_rt.text.tokenize import common_beginning, joined
from offload_rt.text.tool_messages import Message, checked_calls, checked_result, described, named_results
from offload_rt.text.tools import Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {"developer": "system"}
"""Roles that are others by a newer name."""
UNSUPPORTED_KEYS = ("function_call", "audio", "images")
"""Keys of a message that would change what is read. Others change nothing, and are taken."""
TOOL_TEMPLATE = "tool_use"
SPECIAL_TEMPLATES = (TOOL_TEMPLATE, "rag")
"""Names that templates for chats with tools or documents usually have."""
Messages = Sequence[Mapping[str, Any]]
"""Chat messages as a user gives them; see `checked_messages`."""


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Returns whether `prompt` is a list of chat messages, to judge by the first one."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(messages: object) -> list[Message]:
    """Returns chat messages with their contents as strings; joins the parts of a content by line breaks.

    Args:
        messages: mappings of `role` (system, which may be called developer, user, assistant or tool) and
            `content`: a str, or OpenAI's list of parts `{"type": "text", "text": …}`; that of an answer may
            be None. An answer may have `tool_calls` in OpenAI's form, with arguments as JSON text or a dict;
            and its thoughts as `reasoning_content`, which most templates show only behind the last question;
            the result of a call has the role tool, `tool_call_id` and perhaps `name`. Other keys are not
            read, such as the `name` of a participant.

    Raises:
        UsageError: names the number of the message, from 1, and what is wrong with it.
    """
    if not isinstance(messages, list | tuple) or not messages:
        remedy = 'give a list of messages like {"role": "user", "content": "Who is Ahab?"}'
        raise UsageError(f"messages {briefly(messages)}: {remedy}")
    checked = [_checked(f"message {number}", message) for number, message in enumerate(messages, 1)]
    return named_results(checked)


def _checked(place: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f"{place} is {briefly(message)}: give a dict of role and content")
    unsupported = [key for key in UNSUPPORTED_KEYS if message.get(key)]
    if unsupported:
        raise UsageError(f"{place} has {briefly(unsupported[0])}, which is not supported: leave it out")
    named = message.get("role")
    role = ALIASES.get(named, named) if isinstance(named, str) else named
    if role not in ROLES:
        raise UsageError(f"{place} has the role {briefly(role)}: use {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, list | tuple):
        content = "\n".join(_part(f"{place}, part {number}", part) for number, part in enumerate(content, 1))
    if not isinstance(content, str):
        raise UsageError(f"{place} has the content {briefly(content)}: give a text (str)")
    checked: Message = {"role": str(role), "content": content}
    if calls := message.get("tool_calls"):
        if role != "assistant":
            raise UsageError(f"{place} has tool_calls and the role {role}: only the assistant calls tools")
        checked["tool_calls"] = checked_calls(place, calls)
    if role == "assistant" and (thoughts := message.get("reasoning_content")):
        if not isinstance(thoughts, str):
            raise UsageError(f"{place} has the reasoning_content {briefly(thoughts)}: give a text (str)")
        checked["reasoning_content"] = thoughts
    return checked | (checked_result(place, message) if role == "tool" else {})


def _part(place: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or kind != "text":
        raise UsageError(f"{place} is {briefly(kind)}: only parts of type 'text' are supported")
    if not isinstance(text := part.get("text"), str):
        raise UsageError(f"{place} has the text {briefly(text)}: give a str")
    return text


def with_question(messages: Sequence[Message], question: str | None) -> list[Message]:
    """Returns the messages with a question: behind the user's last one, if it is the last, else a new one.

    So a document that the user gave stands before every question about it.

    Args:
        question: None: the last message is one, and the messages are returned as they are.

    Raises:
        UsageError: the question is empty, or None and the last message is not the user's.
    """
    if question is None and messages and messages[-1]["role"] == "user":
        return list(messages)
    if not isinstance(question, str) or not question.strip():
        raise UsageError(f"the question is {briefly(question)}: give a text")
    if messages and messages[-1]["role"] == "user":
        *before, last = messages
        content = f"{last['content']}\n\n{question}" if last["content"] else question
        return [*before, {"role": "user", "content": content}]
    return [*messages, {"role": "user", "content": question}]


PLACE = "\U0010fffe"
"""Stands for an answer that is continued. Like `GUARD`, it is no character of a text."""


@dataclass(frozen=True)
class _Settings:
    """What a rendering depends on beside messages; see `ChatTemplate.encode`."""

    answer: bool = True
    thinking: bool | None = None
    tools: Tools | None = None
    effort: str | None = None
    continue_final: bool = False


class ChatTemplate:
    """The chat template of a tokenizer: turns messages into token IDs.

    Control tokens act only where the template writes them; the contents of messages are plain text.

    Args:
        model_name: names the model in messages to the user.
        on_notice: called with a line for the user, once for each cause.
        date: the date and time that the template may write; None: those of each rendering.

    Raises:
        UsageError: there is no tokenizer, or it has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        model_name: str,
        on_notice: Callable[[str], None] = lambda text: None,
        date: datetime | None = None,
    ) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            lacking = "tokenizer" if tokenizer is None else "chat template"
            raise UsageError(
                f"model {model_name} has no {lacking} and so cannot chat: take an instruct model, or let this"
                " one continue a text with offload-rt generate (llm.generate)"
            )
        self.date = date
        self._tokenizer = tokenizer
        self._name = model_name
        self._on_notice = on_notice
        self._noticed: set[str] = set()
        self._marks = AnswerMarks(tokenizer)
        templates = tokenizer.chat_template
        self._source = self._tool_source = self._default_source(templates)
        if not isinstance(templates, str):
            self._tool_source = templates.get(TOOL_TEMPLATE, self._source)
        form = self._marks.thoughts.format
        sources = self._source + self._tool_source
        self._control = ControlTokens(tokenizer, sources, (form.opening_mark, form.closing_mark))

    def _default_source(self, templates: str | dict[str, str]) -> str:
        """Returns the source of the default template, or of the first one for chats without tools."""
        if isinstance(templates, str):
            return templates
        if "default" in templates:
            return templates["default"]
        name = next((name for name in templates if name not in SPECIAL_TEMPLATES), next(iter(templates)))
        self._notice(f"is one of {', '.join(templates)}, none of them the default: {name} is used")
        return templates[name]

    def dated(self, date: datetime | None) -> ChatTemplate:
        """Returns this template with another date, to render a chat as it was rendered then."""
        dated = copy.copy(self)  # they share what was told to the user
        dated.date = date
        return dated

    def encode(
        self,
        messages: Messages,
        *,
        answer: bool = True,
        thinking: bool | None = None,
        tools: Tools | None = None,
        effort: str | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Returns the token IDs of messages, with the one beginning-of-text token that the template writes.

        Args:
            answer: the beginning of the assistant's answer follows the last message.
            thinking: whether the model shall think before it answers; None: as the template has it.
            tools: what the model may call. A template that takes no tools gets them in the system message,
                and a notice says so.
            effort: how much the model shall think, for templates that ask (`reasoning_effort`; gpt-oss: low,
                medium or high); None: as the template has it. Other templates ignore it.
            continue_final: the last message is the beginning of an answer, which the model continues: the
                prompt ends with its content as it is written.

        Raises:
            UsageError: the messages are not valid, the template fails, or it leaves out what was said last.
        """
        settings = _Settings(answer, thinking, tools, effort, continue_final)
        return joined(self._control.encoded(self._guarded(messages, settings)))

    def encoded(self, messages: Messages, *, most: int | None = None, **settings: Any) -> Iterator[list[int]]:
        """Renders messages, and returns an iterator over the pieces of what `encode` returns.

        Args:
            most: number of tokens beyond which the caller refuses the messages; see `pieces`.
            settings: those of `encode`.
        """
        return self._control.encoded(self._guarded(messages, _Settings(**settings)), most)

    def render(self, messages: Messages, **settings: Any) -> str:
        """Returns the text whose tokens `encode` returns; takes its settings."""
        return self._guarded(messages, _Settings(**settings)).replace(GUARD, "")

    def _guarded(self, messages: Messages, settings: _Settings) -> str:
        """Returns rendered messages; `ControlTokens.guard` has broken the control tokens of contents."""
        checked = checked_messages(messages)
        unheard = settings.thinking or (settings.thinking is False and self._marks.thoughts.known)
        if unheard and not self._has_switch:
            self._notice("has no switch for thoughts: the model thinks as it is used to")
        if settings.continue_final:
            return self._continued(checked, settings)
        return self._rendered(checked, settings)

    def _continued(self, messages: list[Message], settings: _Settings) -> str:
        """Returns rendered messages up to the end of the last content, which the template never sees."""
        *before, last = messages
        if last["role"] != "assistant" or "tool_calls" in last:
            wrong = "calls tools" if "tool_calls" in last else f"has the role {last['role']}"
            remedy = "end the messages with an answer of the assistant, or leave it out"
            raise UsageError(f"continue_final_message: the last message {wrong}; {remedy}")
        content = self._control.guard(last["content"], answer=True)
        form = self._marks.thoughts.format
        if content.lstrip().startswith(form.opening_mark) or not content:
            prompt = self._rendered(before, replace(settings, answer=True)) if before else ""
            at = prompt.rfind(form.opening_mark)
            thoughts = prompt[at:].replace(form.opening_mark, "").replace(form.closing_mark, "")
            if content and at >= 0 and not thoughts.strip():  # the content has thoughts of its own
                prompt = prompt[:at]
            return prompt + content
        messages = [*before, last | {"content": PLACE}]
        rendered, place, _ = self._rendered(messages, replace(settings, answer=False)).rpartition(PLACE)
        assert place, "what a template leaves out was refused"
        return rendered + content

    def _rendered(self, messages: Sequence[Message], settings: _Settings) -> str:
        """Returns rendered messages, guarded.

        Of several forms of the messages, the first is taken of which the template leaves out least.
        """
        failures, best = list[str](), None
        guarded, tools = [self._guard_message(message) for message in messages], list[dict[str, Any]]()
        if settings.tools is not None:
            tools = [self._guard_strings(tool.json()) for tool in settings.tools.tools]
        if self._marks.calls.described and (tools or any(_about_tools(message) for message in messages)):
            guarded, tools = described(guarded, tools), []
            self._notice("takes no tools: they are described in the system message")
        for form, notice in forms(guarded):
            try:
                marked, marks = marked_contents(form)
                shown = self._apply(marked, tools, settings)
                rendered = self._apply(form, tools, settings)
            except Exception as error:  # whatever the template does
                failures.append(first_line(error))
                continue
            left_out = missing(shown, marked, marks)
            if best is None or len(left_out) < len(best.missing):
                best = Rendering(rendered, form, left_out, notice)
            if not left_out:
                break
        if best is None:
            raise UsageError(f"the chat template of {self._name} fails: {failures[0]}")
        if best.missing:
            self._check_left_out(best)
        if best.notice:
            self._notice(best.notice)
        return best.text

    def _guard_message(self, message: Message) -> Message:
        content = self._control.guard(message["content"], answer=message["role"] == "assistant")
        rest = {key: value for key, value in message.items() if key not in ("role", "content")}
        return {"role": message["role"], "content": content} | self._guard_strings(rest)

    def _guard_strings(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an object of JSON with all its strings guarded."""

        def guarded(value: Any) -> Any:
            if isinstance(value, str):
                return self._control.guard(value)
            if isinstance(value, list):
                return [guarded(item) for item in value]
            return self._guard_strings(value) if isinstance(value, dict) else value

        return {self._control.guard(key): guarded(value) for key, value in values.items()}

    def _check_left_out(self, rendering: Rendering) -> None:
        """Reports earlier messages that are left out. Raises UsageError where the last turn is."""
        roles = [message["role"] for message in rendering.messages]
        questions = [number for number, role in enumerate(roles) if role == "user"]
        system = all(roles[number] == "system" for number in rendering.missing)
        if system or not questions or rendering.missing[-1] >= questions[-1]:
            number = rendering.missing[-1]
            noun = "the system message" if roles[number] == "system" else f"message {number + 1}"
            raise UsageError(
                f"the chat template of {self._name} fails: it leaves {noun} out; use another model, or"
                " generate (llm.generate) with a prompt that you have formatted"
            )
        self._notice("leaves out earlier messages: the model sees only the last turn")

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], settings: _Settings
    ) -> str:
        variables: dict[str, Any] = {}
        if settings.thinking is not None:
            variables = {"enable_thinking": settings.thinking, "thinking": settings.thinking}
        if settings.effort is not None:
            variables["reasoning_effort"] = settings.effort
        source = self._tool_source if tools or any(map(_about_tools, messages)) else self._source
        if self.date is not None:
            source = with_date(source, self.date)
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=settings.answer,
            **variables,
        )
        assert isinstance(rendered, str)
        return rendered

    def shared_beginning(self, messages: Messages, thinking: bool | None = None) -> int:
        """Returns the number of tokens with which all chats begin that ask about these messages.

        A notice says so where something that depends on the question stands before the end of the longest
        message, the document: then each question reads it again.
        """
        checked = checked_messages(messages)
        chats = [with_question(checked, question) for question in ("Who?", "1 or 2?")]
        chats.append(with_question([*chats[0], {"role": "assistant", "content": "Ahab."}], "What?"))
        guarded = [self._guarded(chat, _Settings(thinking=thinking)) for chat in chats]
        rendered = [chat.replace(GUARD, "") for chat in guarded]
        characters = _common_length(rendered)
        document = max((chat["content"].strip() for chat in checked), key=len)
        if characters < max(rendered[0].find(document), 0) + len(document):
            self._notice("puts what depends on the question before the document: each question reads it anew")
        return _common_length([joined(self._control.encoded(chat)) for chat in guarded])

    def thoughts(self, thinking: bool | None, json_schema: object) -> bool | None:
        """Returns whether the model shall think, as `encode` takes it.

        Before an answer that fits a schema it does so only if that is wanted. Where the model opens its
        thoughts itself, `SamplingParams.thinking_budget` must allow them.

        Raises:
            UsageError: both are wanted, and it cannot be told where thoughts begin and end.
        """
        if json_schema is None:
            return thinking
        if thinking:
            switch = thinking if self._has_switch else None
            prompt = self.encode([{"role": "user", "content": "Who?"}], thinking=switch)
            if self._marks.thoughts.can_come_first(prompt):
                return True
            raise UsageError(
                "json-schema cannot be combined with thinking: omit the schema, or turn thinking off"
            )
        return False if self._has_switch else thinking

    @property
    def _has_switch(self) -> bool:
        """Returns whether the template asks whether the model shall think."""
        return "thinking" in self._source

    def splitter(self, prompt: Sequence[int]) -> ThoughtSplitter:
        """Returns the splitter of an answer to a prompt into its thoughts and the answer proper."""
        return self._marks.thoughts.splitter(prompt)

    def answers(self, prompt: Sequence[int], tools: Tools | None = None) -> AnswerSplitter:
        """Returns the splitter of an answer to a prompt into thoughts, content and calls of `tools`."""
        return self._marks.splitter(prompt, tools)

    @property
    def takes_effort(self) -> bool:
        """Returns whether the template asks how much the model shall think."""
        return "reasoning_effort" in self._source

    def _notice(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._on_notice(f"the chat template of {self._name} {text}")


def _about_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _common_length(chats: Sequence[Sequence[object]]) -> int:
    """Returns the number of tokens or characters with which all begin."""
    first, *rest = chats
    return min(common_beginning(first, chat) for chat in rest)
