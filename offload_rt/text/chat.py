"""Chat messages: their check, and the tokenizer's chat template."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeGuard

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.text.chat_forms import Message, Rendering, forms, holds, marked_contents, with_date
from offload_rt.text.control_tokens import GUARD, ControlTokens
from offload_rt.text.thoughts import ThoughtMarks, ThoughtSplitter
from offload_rt.text.tokenize import common_beginning

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
ALIASES = {"developer": "system"}
"""Roles that are others by a newer name."""
UNSUPPORTED_KEYS = ("tool_calls", "tool_call_id", "function_call", "audio", "images")
"""Keys of a message that would change what is read. Others change nothing, and are taken."""
SPECIAL_TEMPLATES = ("tool_use", "rag")
"""Names that templates for chats with tools or documents usually have."""
Messages = Sequence[Mapping[str, Any]]
"""Chat messages as a user gives them; see `checked_messages`."""


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Returns whether `prompt` is a list of chat messages, to judge by the first one."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(messages: object) -> list[Message]:
    """Returns chat messages with their contents as strings; joins the parts of a content by line breaks.

    Args:
        messages: mappings of `role` (system, which may be called developer, user or assistant) and `content`:
            a str, or OpenAI's list of parts `{"type": "text", "text": …}`; that of an answer may be None.
            Other keys are not read, such as the `name` of a participant or the `reasoning_content` of an
            answer; tool calls and the like are refused.

    Raises:
        UsageError: names the number of the message, from 1, and what is wrong with it.
    """
    if not isinstance(messages, list | tuple) or not messages:
        remedy = 'give a list of messages like {"role": "user", "content": "Who is Ahab?"}'
        raise UsageError(f"messages {briefly(messages)}: {remedy}")
    return [_checked(f"message {number}", message) for number, message in enumerate(messages, 1)]


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
    return {"role": str(role), "content": content}


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
        self._marks = ThoughtMarks(tokenizer)
        self._source = self._default_source(tokenizer.chat_template)
        form = self._marks.format
        self._control = ControlTokens(tokenizer, self._source, (form.opening_mark, form.closing_mark))

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

    def encode(self, messages: Messages, *, answer: bool = True, thinking: bool | None = None) -> list[int]:
        """Returns the token IDs of messages, with the one beginning-of-text token that the template writes.

        Args:
            answer: the beginning of the assistant's answer follows the last message.
            thinking: whether the model shall think before it answers; None: as the template has it.

        Raises:
            UsageError: the messages are not valid, the template fails, or it leaves out what was said last.
        """
        return self._control.encode(self._guarded(messages, answer, thinking))

    def render(self, messages: Messages, *, answer: bool = True, thinking: bool | None = None) -> str:
        """Returns the text whose tokens `encode` returns."""
        return self._guarded(messages, answer, thinking).replace(GUARD, "")

    def _guarded(self, messages: Messages, answer: bool, thinking: bool | None) -> str:
        """Returns rendered messages in which `ControlTokens.guard` has broken the control tokens of contents.

        Of several forms of the messages, the first is taken of which the template leaves out least.
        """
        checked = checked_messages(messages)
        if thinking is not None and not self._has_switch:
            self._notice("has no switch for thoughts: the model thinks as it is used to")
        failures, best = list[str](), None
        guarded = [
            {
                **message,
                "content": self._control.guard(message["content"], answer=message["role"] == "assistant"),
            }
            for message in checked
        ]
        for form, notice in forms(guarded):
            try:
                marked, marks = marked_contents(form)
                shown = self._apply(marked, answer, thinking)
                rendered = self._apply(form, answer, thinking)
            except Exception as error:  # whatever the template does
                failures.append(first_line(error))
                continue
            missing = [number for number, mark in marks.items() if not holds(shown, mark)]
            if best is None or len(missing) < len(best.missing):
                best = Rendering(rendered, form, missing, notice)
            if not missing:
                break
        if best is None:
            raise UsageError(f"the chat template of {self._name} fails: {failures[0]}")
        if best.missing:
            self._check_left_out(best)
        if best.notice:
            self._notice(best.notice)
        return best.text

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

    def _apply(self, messages: Sequence[Mapping[str, Any]], answer: bool, thinking: bool | None) -> str:
        switch: dict[str, Any] = (
            {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        )
        source = self._source if self.date is None else with_date(self._source, self.date)
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            chat_template=source,
            tokenize=False,
            add_generation_prompt=answer,
            **switch,
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
        guarded = [self._guarded(chat, True, thinking) for chat in chats]
        rendered = [chat.replace(GUARD, "") for chat in guarded]
        characters = _common_length(rendered)
        document = max((chat["content"].strip() for chat in checked), key=len)
        if characters < max(rendered[0].find(document), 0) + len(document):
            self._notice("puts what depends on the question before the document: each question reads it anew")
        return _common_length([self._control.encode(chat) for chat in guarded])

    def thoughts(self, thinking: bool | None, json_schema: object) -> bool | None:
        """Returns whether the model shall think, as `encode` takes it.

        Before an answer that fits a schema it does so only where its thoughts are known to come first.

        Raises:
            UsageError: both are wanted, and they are not.
        """
        if json_schema is None:
            return thinking
        if thinking:
            switch = thinking if self._has_switch else None
            prompt = self.encode([{"role": "user", "content": "Who?"}], thinking=switch)
            if self._marks.come_first(prompt):
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
        return self._marks.splitter(prompt)

    def _notice(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._on_notice(f"the chat template of {self._name} {text}")


def _common_length(chats: Sequence[Sequence[object]]) -> int:
    """Returns the number of tokens or characters with which all begin."""
    first, *rest = chats
    return min(common_beginning(first, chat) for chat in rest)
