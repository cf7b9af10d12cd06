"""Chat messages: their check, and the tokenizer's chat template."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from offload_rt.errors import UsageError, first_line
from offload_rt.text import common_beginning, encode
from offload_rt.thoughts import ThoughtMarks, ThoughtSplitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant")
TAKEN = ("role", "content", "reasoning_content")
"""Keys of a message that may have a value."""
Message = dict[str, str]
Messages = Sequence[Mapping[str, Any]]
"""Chat messages as a user gives them; see `checked_messages`."""


def is_messages(prompt: object) -> TypeGuard[Messages]:
    """Returns whether `prompt` is a list of chat messages, to judge by the first one."""
    return isinstance(prompt, list | tuple) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_messages(messages: object) -> list[Message]:
    """Returns chat messages with their contents as strings; joins the parts of a content by line breaks.

    Args:
        messages: mappings of `role` (system, user or assistant) and `content`: a str, or OpenAI's list of
            parts `{"type": "text", "text": …}`. Other keys may be there if their value is None or empty, and
            the `reasoning_content` of an answer, which is not read again.

    Raises:
        UsageError: names the number of the message, from 1, and what is wrong with it.
    """
    if not isinstance(messages, list | tuple) or not messages:
        remedy = 'give a list of messages like {"role": "user", "content": "Who is Ahab?"}'
        raise UsageError(f"messages {reprlib.repr(messages)}: {remedy}")
    return [_checked(f"message {number}", message) for number, message in enumerate(messages, 1)]


def _checked(where: str, message: object) -> Message:
    if not isinstance(message, Mapping):
        raise UsageError(f"{where} is {reprlib.repr(message)}: give a dict of role and content")
    others = [key for key, value in message.items() if value and key not in TAKEN]
    if others:
        raise UsageError(f"{where} has {reprlib.repr(others[0])}, which is not supported: leave it out")
    if (role := message.get("role")) not in ROLES:
        raise UsageError(f"{where} has the role {reprlib.repr(role)}: use {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "\n".join(_part(f"{where}, part {number}", part) for number, part in enumerate(content, 1))
    if not isinstance(content, str):
        raise UsageError(f"{where} has the content {reprlib.repr(content)}: give a text (str)")
    return {"role": str(role), "content": content}


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if not isinstance(part, Mapping) or kind != "text":
        raise UsageError(f"{where} is {reprlib.repr(kind)}: only parts of type 'text' are supported")
    if not isinstance(text := part.get("text"), str):
        raise UsageError(f"{where} has the text {reprlib.repr(text)}: give a str")
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
        raise UsageError(f"the question is {reprlib.repr(question)}: give a text")
    if messages and messages[-1]["role"] == "user":
        *before, last = messages
        content = f"{last['content']}\n\n{question}" if last["content"] else question
        return [*before, {"role": "user", "content": content}]
    return [*messages, {"role": "user", "content": question}]


class ChatTemplate:
    """The chat template of a tokenizer: turns messages into token IDs.

    Args:
        model_name: names the model in messages to the user.
        on_notice: called with a line for the user, once for each cause.

    Raises:
        UsageError: there is no tokenizer, or it has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        model_name: str,
        on_notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            lacking = "tokenizer" if tokenizer is None else "chat template"
            raise UsageError(
                f"model {model_name} has no {lacking} and so cannot chat: take an instruct model, or let this"
                " one continue a text with offload-rt generate (llm.generate)"
            )
        self._tokenizer = tokenizer
        self._name = model_name
        self._on_notice = on_notice
        self._noticed: set[str] = set()
        self._marks = ThoughtMarks(tokenizer)

    def encode(self, messages: Messages, *, answer: bool = True, thinking: bool | None = None) -> list[int]:
        """Returns the token IDs of messages, with the one beginning-of-text token that the template writes.

        Args:
            answer: the beginning of the assistant's answer follows the last message.
            thinking: whether the model shall think before it answers; None: as the template has it.

        Raises:
            UsageError: the messages are not valid, or the template fails.
        """
        return self._tokens(self.render(messages, answer=answer, thinking=thinking))

    def render(self, messages: Messages, *, answer: bool = True, thinking: bool | None = None) -> str:
        """Returns the text whose tokens `encode` returns."""
        checked = checked_messages(messages)
        if thinking is not None and not self._has_switch:
            self._notice("has no switch for thoughts: the model thinks as it is used to")
        system = [one["content"] for one in checked if one["role"] == "system"]
        try:
            rendered = self._apply(checked, answer, thinking)
            if all(content.strip() in rendered for content in system):
                return rendered
            failure = "it leaves the system message out"
        except Exception as error:  # whatever the template does
            failure = first_line(error)
        if system and (folded := _folded(checked)):
            try:
                rendered = self._apply(folded, answer, thinking)
            except Exception:
                pass  # the system message is not what it fails at
            else:
                self._notice("takes no system message: its text stands before the first user message")
                return rendered
        raise UsageError(f"the chat template of {self._name} fails: {failure}")

    def _apply(self, messages: list[Message], answer: bool, thinking: bool | None) -> str:
        switch: dict[str, Any] = (
            {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        )
        rendered = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, **switch
        )
        assert isinstance(rendered, str)
        return rendered

    def _tokens(self, rendered: str) -> list[int]:
        return encode(self._tokenizer, rendered, special=False)

    def shared_beginning(self, messages: Messages, thinking: bool | None = None) -> int:
        """Returns the number of tokens with which all chats begin that ask about these messages.

        A notice says so where something that depends on the question stands before the end of the longest
        message, the document: then each question reads it again.
        """
        checked = checked_messages(messages)
        asked = [with_question(checked, question) for question in ("Who?", "1 or 2?")]
        asked.append(with_question([*asked[0], {"role": "assistant", "content": "Ahab."}], "What?"))
        rendered = [self.render(one, thinking=thinking) for one in asked]
        shared = _shared(rendered)
        document = max((one["content"].strip() for one in checked), key=len)
        if shared < max(rendered[0].find(document), 0) + len(document):
            self._notice("puts what depends on the question before the document: each question reads it anew")
        return _shared([self._tokens(one) for one in rendered])

    def thoughts(self, thinking: bool | None, json_schema: object) -> bool | None:
        """Returns whether the model shall think, as `encode` takes it.

        Before an answer that fits a schema it does so only where its thoughts are known to come first.

        Raises:
            UsageError: both are wanted, and they are not.
        """
        if json_schema is None:
            return thinking
        if thinking:
            prompt = self.encode([{"role": "user", "content": "Who?"}], thinking=True)
            if self._marks.come_first(prompt):
                return True
            raise UsageError("json-schema leaves no room for thoughts: leave it out, or do not ask for them")
        return False if self._has_switch else thinking

    @property
    def _has_switch(self) -> bool:
        """Returns whether the template asks whether the model shall think."""
        return "thinking" in str(self._tokenizer.chat_template)

    def splitter(self, prompt: Sequence[int]) -> ThoughtSplitter:
        """Returns the splitter of an answer to a prompt into its thoughts and the answer proper."""
        return self._marks.splitter(prompt)

    def _notice(self, text: str) -> None:
        if text not in self._noticed:
            self._noticed.add(text)
            self._on_notice(f"the chat template of {self._name} {text}")


def _shared(chats: Sequence[Sequence[object]]) -> int:
    """Returns the number of tokens or characters with which all begin."""
    first, *others = chats
    return min(common_beginning(first, other) for other in others)


def _folded(messages: Sequence[Message]) -> list[Message]:
    """Returns messages with the system's text in front of the first user message; [] where there is none."""
    system = [one["content"] for one in messages if one["role"] == "system"]
    others = [one for one in messages if one["role"] != "system"]
    first = next((at for at, one in enumerate(others) if one["role"] == "user"), None)
    if first is None:
        return []
    content = "\n\n".join(filter(None, [*system, others[first]["content"]]))
    return [*others[:first], {"role": "user", "content": content}, *others[first + 1 :]]
