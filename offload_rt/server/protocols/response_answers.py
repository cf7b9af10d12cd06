"""The answer of OpenAI's responses: its items, the events of a stream, and the response that they make up."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from transformers import PreTrainedTokenizerBase

from offload_rt.engine.results import TokenEvent
from offload_rt.server.jobs.worker import Finished
from offload_rt.server.protocols.answer import Answer, Json, Message, sealed
from offload_rt.server.protocols.completion_answers import timings
from offload_rt.server.protocols.errors import sendable
from offload_rt.server.protocols.logprobs import TokenEntries, TokensOfText
from offload_rt.server.protocols.responses import INPUT, Callee, ResponseRequest
from offload_rt.text.answers import AnswerPart, AnswerSplitter, CallArguments, CallBegin, Thought

ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's code of an error that ends a stream, by HTTP status; that of all others is `server_error`."""

RETURNED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "service_tier", "temperature", "tool_choice", "tools", "top_logprobs"),
    *("top_p", "user"),
)
"""Fields of a request that its response repeats."""


class Event(NamedTuple):
    """An event of a stream, without its sequence number.

    Attributes:
        name: its type, without "response." in front.
    """

    name: str
    data: Json


class OutputItem(ABC):
    """An item of an answer, which grows.

    Args:
        index: its place in the output.

    Attributes:
        status: in_progress, completed or incomplete.
    """

    prefix: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.status = "in_progress"
        self._index = index
        self._id = _new_id(self.prefix)

    @abstractmethod
    def json(self) -> Json:
        """Returns the item as it is now."""

    def begin(self) -> list[Event]:
        """Returns the first events of the item."""
        return [Event("output_item.added", {"output_index": self._index, "item": self.json()})]

    def end(self, status: str) -> list[Event]:
        """Returns the last events of the item.

        Args:
            status: completed, or incomplete where the text was cut.
        """
        self.status = status
        return [Event("output_item.done", {"output_index": self._index, "item": self.json()})]

    def _event(self, name: str, /, **data: object) -> Event:
        return Event(name, {"item_id": self._id, "output_index": self._index} | data)


@dataclass(frozen=True)
class TextForm:
    """How a text is written.

    Attributes:
        part: type of the part that has it.
        part_events, text_events: beginnings of the names of its events.
        index: name of the part's place in the item.
    """

    part: str
    part_events: str
    text_events: str
    index: str = "content_index"


ANSWER = TextForm("output_text", "content_part", "output_text")
REASONING = TextForm("reasoning_text", "content_part", "reasoning_text")
SUMMARY = TextForm("summary_text", "reasoning_summary_part", "reasoning_summary_text", "summary_index")


class TextItem(OutputItem):
    """An item with one part, a text."""

    form: TextForm

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._text = ""

    def begin(self) -> list[Event]:
        added = super().begin()
        return [*added, self._text_event(f"{self.form.part_events}.added", part=self._part())]

    def push(self, text: str) -> list[Event]:
        """Adds to the text."""
        self._text += text
        return [self._text_event(f"{self.form.text_events}.delta", delta=text)]

    def end(self, status: str) -> list[Event]:
        return [
            self._text_event(f"{self.form.text_events}.done", text=self._text),
            self._text_event(f"{self.form.part_events}.done", part=self._part()),
            *super().end(status),
        ]

    def _part(self) -> Json:
        return {"type": self.form.part, "text": self._text}

    def _parts(self) -> list[Json]:
        """Returns the part; none before it has begun."""
        return [] if self.status == "in_progress" else [self._part()]

    def _text_event(self, name: str, /, **data: object) -> Event:
        return self._event(name, **{self.form.index: 0}, **data)


class ReasoningItem(TextItem):
    """Thoughts.

    Args:
        summary: they are written as their summary.
        encrypted: `encrypted_content` holds them, too.
    """

    prefix = "rs"

    def __init__(self, index: int, *, summary: bool, encrypted: bool) -> None:
        self.form = SUMMARY if summary else REASONING
        self._encrypted = encrypted
        super().__init__(index)

    def json(self) -> Json:
        written = {"summary" if self.form is SUMMARY else "content": self._parts()}
        item = {"id": self._id, "type": "reasoning", "status": self.status, "summary": []} | written
        return item | ({"encrypted_content": sealed(self._text)} if self._encrypted else {})


class MessageItem(TextItem):
    """The text of an answer."""

    prefix = "msg"
    form = ANSWER

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._logprobs: list[Json] = []

    def push(self, text: str, logprobs: Sequence[Json] = ()) -> list[Event]:
        """Adds to the text, with the log probabilities of its tokens."""
        self._logprobs += logprobs
        (event,) = super().push(text)
        return [Event(event.name, event.data | {"logprobs": list(logprobs)})]

    def end(self, status: str) -> list[Event]:
        done, *others = super().end(status)
        return [Event(done.name, done.data | {"logprobs": self._logprobs}), *others]

    def _part(self) -> Json:
        return super()._part() | {"annotations": [], "logprobs": list(self._logprobs)}

    def json(self) -> Json:
        item = {"id": self._id, "type": "message", "status": self.status, "role": "assistant"}
        return item | {"content": self._parts()}


class CallItem(OutputItem):
    """A call of a function. It is never cut, as only whole calls are taken out of a text."""

    prefix = "fc"

    def __init__(self, index: int, callee: Callee) -> None:
        super().__init__(index)
        self._callee = callee
        self._call_id = _new_id("call")
        self._arguments = ""

    def push(self, arguments: str) -> list[Event]:
        """Adds to the arguments."""
        self._arguments += arguments
        return [self._event("function_call_arguments.delta", delta=arguments)]

    def end(self, status: str) -> list[Event]:
        done = {"name": self._callee.name, "arguments": self._arguments}
        return [self._event("function_call_arguments.done", **done), *super().end("completed")]

    def json(self) -> Json:
        return self._json("function_call", arguments=self._arguments)

    def _json(self, kind: str, **given: str) -> Json:
        item = {"id": self._id, "type": kind, "status": self.status, "call_id": self._call_id}
        item |= {"name": self._callee.name} | given
        return item | ({"namespace": self._callee.namespace} if self._callee.namespace else {})


class CustomCallItem(CallItem):
    """A call of a custom tool, whose input is certain once its arguments are."""

    prefix = "ctc"

    def push(self, arguments: str) -> list[Event]:
        self._arguments += arguments
        return []

    def end(self, status: str) -> list[Event]:
        *_, last = super().end(status)
        return [
            self._event("custom_tool_call_input.delta", delta=self._input()),
            self._event("custom_tool_call_input.done", input=self._input()),
            last,
        ]

    def json(self) -> Json:
        return self._json("custom_tool_call", input=self._input())

    def _input(self) -> str:
        """Returns the input; of arguments that have another form, their text."""
        try:
            return str(json.loads(self._arguments)[INPUT])
        except (ValueError, KeyError, TypeError):
            return self._arguments


class ResponseAnswer(Answer):
    """The answer to a request for a response.

    Args:
        model: name of the model.
        splitter: of the text behind the prompt.
        tokenizer: None: tokens are written as their IDs.
    """

    def __init__(
        self,
        request: ResponseRequest,
        model: str,
        splitter: AnswerSplitter,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        super().__init__()
        self._request = request
        self._callees = {callee.function: callee for callee, _ in request.functions}
        self._splitter = splitter
        self._entries = TokenEntries(tokenizer)
        self._tokens = TokensOfText() if request.with_logprobs else None
        self._items: list[OutputItem] = []
        self._events = 0
        self._unclear_tokens = self._thought_tokens = 0
        self._response = _described(request) | {"id": _new_id("resp"), "model": model}

    @property
    def waiting(self) -> str:
        """A comment before the response has begun, then an event: some clients time out without one."""
        if not self._events:
            return super().waiting
        return self._message(self._lifecycle("in_progress")).line

    def begin(self) -> Sequence[Message]:
        return self._messages([self._lifecycle("created"), self._lifecycle("in_progress")])

    def token(self, choice: int, event: TokenEvent) -> list[Message]:
        if self._tokens is not None:
            self._tokens.push(event)
        self._unclear_tokens += 1
        return self._messages(self._taken(self._splitter.push(event.text)))

    def finish(self, choice: int, finished: Finished) -> list[Message]:
        whole = finished.result.finish_reason != "length"
        events = self._taken(self._splitter.finish())
        events += self._end_item("completed" if whole else "incomplete")
        self._response |= {"usage": self._usage(finished), "timings": timings(finished)}
        if whole:
            self._response["completed_at"] = int(time.time())
        else:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._messages([*events, self._lifecycle("completed" if whole else "incomplete")])

    def failed(self, status: int, message: str, code: str, param: str | None) -> Message:
        if self._items and self._items[-1].status == "in_progress":
            self._items[-1].status = "incomplete"
        error = {"code": ERROR_CODES.get(status, "server_error"), "message": sendable(message)}
        self._response["error"] = error
        return self._message(self._lifecycle("failed"))

    def whole(self) -> Json:
        return self._response

    def _taken(self, parts: Sequence[AnswerPart]) -> list[Event]:
        """Returns the events of parts of the text."""
        events = list[Event]()
        for part in parts:
            if isinstance(part, Thought):
                self._thought_tokens += self._unclear_tokens
            self._unclear_tokens = 0
            events += self._added(part)
        return events

    def _added(self, part: AnswerPart) -> list[Event]:
        """Returns the events of a part, which may begin an item."""
        item = self._items[-1] if self._items else None
        if isinstance(part, CallBegin):
            callee = self._callees[part.name]
            new: OutputItem = (CustomCallItem if callee.custom else CallItem)(len(self._items), callee)
            return self._begin_item(new)
        if isinstance(part, CallArguments):
            assert isinstance(item, CallItem)
            return item.push(part.text)
        begun = list[Event]()
        if isinstance(part, Thought):
            if not isinstance(item, ReasoningItem):
                summary, encrypted = self._request.with_summary, self._request.with_encrypted_thoughts
                item = ReasoningItem(len(self._items), summary=summary, encrypted=encrypted)
                begun = self._begin_item(item)
            return [*begun, *item.push(part.text)]
        if not isinstance(item, MessageItem):
            item = MessageItem(len(self._items))
            begun = self._begin_item(item)
        return [*begun, *item.push(part.text, self._logprobs(part.text))]

    def _logprobs(self, text: str) -> list[Json]:
        """Returns the log probabilities of a text's tokens; none where they were not asked for."""
        if self._tokens is None:
            return []
        return [self._entries.entry(event) for event in self._tokens.take(text)]

    def _begin_item(self, item: OutputItem) -> list[Event]:
        ended = self._end_item("completed")
        self._items.append(item)
        return [*ended, *item.begin()]

    def _end_item(self, status: str) -> list[Event]:
        """Returns the events that end the item under way, if there is one."""
        return self._items[-1].end(status) if self._items else []

    def _lifecycle(self, status: str) -> Event:
        """Returns an event of the whole response, which has this status from now on."""
        self._response |= {
            "status": "in_progress" if status == "created" else status,
            "output": [item.json() for item in self._items],
        }
        return Event(status, {"response": dict(self._response)})

    def _messages(self, events: Sequence[Event]) -> list[Message]:
        return [self._message(event) for event in events]

    def _message(self, event: Event) -> Message:
        """Returns the message of the next event."""
        name, number = f"response.{event.name}", self._events
        self._events += 1
        return Message({"type": name, "sequence_number": number} | event.data, name)

    def _usage(self, finished: Finished) -> Json:
        prompt, cached = finished.result.prompt_tokens, finished.cached
        generated = len(finished.result.tokens)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens},
            "total_tokens": prompt + generated,
        }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _described(request: ResponseRequest) -> Json:
    """Returns the fields of a response that say what was asked for, and those that have not come yet."""
    form = request.text.format
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "usage": None,
        "previous_response_id": None,
        "store": False,
        "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"}
        | ({} if form is None else {"format": form.model_dump(by_alias=True, exclude_none=True)}),
        "reasoning": request.reasoning.model_dump(include={"effort", "summary"}),
    } | {name: getattr(request, name) for name in RETURNED}
