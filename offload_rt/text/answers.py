"""The parts of an answer: thoughts, content and calls of tools, as the text arrives or of a whole text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from offload_rt.text.calls import CallMarks, CallSplitter
from offload_rt.text.thoughts import ThoughtMarks, ThoughtSplitter
from offload_rt.text.tools import ToolCall, Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Thought:
    """A piece of the thoughts."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer proper."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A call of a tool begins; the pieces of its arguments follow.

    Attributes:
        index: number of the call in the answer, from 0.
    """

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments of a call; all pieces of a call joined are the text of a JSON object."""

    index: int
    text: str


AnswerPart = Thought | Content | CallBegin | CallArguments


class AnswerMarks:
    """How a model marks the parts of its answers: its thoughts and its calls of tools."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.thoughts = ThoughtMarks(tokenizer)
        self.calls = CallMarks(tokenizer)

    def special(self, tools: Tools | None = None) -> dict[int, str]:
        """Returns the texts of special tokens that the text of an answer keeps."""
        return self.thoughts.special | (self.calls.special if tools and tools.callable else {})

    def splitter(self, prompt: Sequence[int], tools: Tools | None = None) -> AnswerSplitter:
        """Returns the splitter of an answer to a prompt, which may have opened thoughts.

        Args:
            tools: those that the answer may call; None: no part of it is a call.
        """
        thoughts = self.thoughts.splitter(prompt)
        if tools is None or not tools.callable:
            return AnswerSplitter(thoughts)
        form = self.calls.format
        return AnswerSplitter(thoughts, CallSplitter(form, tools), calls_first=form.messages)


class AnswerSplitter:
    """Splits an answer that arrives in pieces into thoughts, content and calls, without their marks.

    However a text is cut into pieces, the parts of a kind joined are the same. Calls within thoughts are
    thoughts. See `CallSplitter` for what is a call: its parts are returned when it is complete.

    Args:
        calls: None: no part of the answer is a call.
        calls_first: calls are messages beside thoughts, and so are taken out of the text before them.
    """

    def __init__(
        self, thoughts: ThoughtSplitter, calls: CallSplitter | None = None, calls_first: bool = False
    ) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._calls_first = calls_first
        self._count = 0

    def push(self, text: str) -> list[AnswerPart]:
        """Returns the parts that are certain with this piece of text."""
        if self._calls is None:
            return list(_plain(*self._thoughts.push(text)))
        if self._calls_first:
            return list(self._beside_thoughts(self._calls.push(text)))
        thoughts, answer = self._thoughts.push(text)
        return [*_plain(thoughts, ""), *self._in_answer(self._calls.push(answer))]

    def finish(self) -> list[AnswerPart]:
        """Returns what was held back, as no text follows."""
        if self._calls is None:
            return list(_plain(*self._thoughts.finish()))
        if self._calls_first:
            parts = list(self._beside_thoughts(self._calls.finish()))
            return [*parts, *_plain(*self._thoughts.finish())]
        thoughts, answer = self._thoughts.finish()
        found = [*self._calls.push(answer), *self._calls.finish()]
        return [*_plain(thoughts, ""), *self._in_answer(found)]

    def _beside_thoughts(self, found: Iterable[str | ToolCall]) -> Iterator[AnswerPart]:
        for part in found:
            yield from self._call(part) if isinstance(part, ToolCall) else _plain(*self._thoughts.push(part))

    def _in_answer(self, found: Iterable[str | ToolCall]) -> Iterator[AnswerPart]:
        for part in found:
            yield from self._call(part) if isinstance(part, ToolCall) else _plain("", part)

    def _call(self, call: ToolCall) -> Iterator[AnswerPart]:
        yield CallBegin(self._count, call.name)
        yield CallArguments(self._count, call.arguments)
        self._count += 1


def _plain(thoughts: str, answer: str) -> Iterator[AnswerPart]:
    if thoughts:
        yield Thought(thoughts)
    if answer:
        yield Content(answer)


@dataclass(frozen=True)
class Answer:
    """A whole answer in its parts."""

    thoughts: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def split_answer(text: str, splitter: AnswerSplitter) -> Answer:
    """Returns the parts of a whole text, as a fresh splitter finds them."""
    thoughts, content, names, arguments = "", "", list[str](), list[str]()
    for part in [*splitter.push(text), *splitter.finish()]:
        match part:
            case Thought(piece):
                thoughts += piece
            case Content(piece):
                content += piece
            case CallBegin(_, name):
                names.append(name)
                arguments.append("")
            case CallArguments(index, piece):
                arguments[index] += piece
    calls = tuple(ToolCall(*call) for call in zip(names, arguments, strict=True))
    return Answer(thoughts, content, calls)
