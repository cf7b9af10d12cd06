"""Anthropic's message: whole, or as the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable

from offload_rt.engine.results import GenerationResult, TokenEvent
from offload_rt.server.jobs.worker import Finished, PromptProgress, Queued
from offload_rt.server.protocols.answer import Answer, Json, Message, sealed
from offload_rt.server.protocols.errors import anthropic_error_json
from offload_rt.text.answers import AnswerPart, AnswerSplitter, CallArguments, CallBegin, Content, Thought

DELTAS = {
    "text": "text_delta",
    "thinking": "thinking_delta",
    "signature": "signature_delta",
    "partial_json": "input_json_delta",
}
"""Types of the deltas of a block, by the field that they bring."""


class MessageAnswer(Answer):
    """The answer to a request for a message.

    Args:
        model: the name of the model that answers.
        prompt_tokens: number of tokens of the prompt.
        most_tokens: number of new tokens that were asked for; None: no number was.
        splitter: splits the text into its parts.
        shows_thoughts: the text of thoughts is returned.
        request_id: names the request in an error.
    """

    waiting = Message({"type": "ping"}, "ping").line

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        most_tokens: int | None,
        splitter: AnswerSplitter,
        *,
        shows_thoughts: bool,
        request_id: str,
    ) -> None:
        super().__init__()
        self._base: Json = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant"}
        self._base["model"] = model
        self._prompt_tokens = prompt_tokens
        self._most_tokens = most_tokens
        self._split = splitter
        self._shows_thoughts = shows_thoughts
        self._request_id = request_id
        self._begun = False
        self._blocks = list[Json]()
        self._open = False  # the last block may grow
        self._arguments = ""  # of the call in the last block, as far as they have come
        self._unseen = ""  # thoughts of the last block that are not shown

    def progress(self, choice: int, event: Queued | PromptProgress) -> list[Message]:
        """Returns the beginning of the message, once it is known how much of the prompt was cached."""
        if self._begun or isinstance(event, Queued):
            return []
        self._begun = True
        message = self._message([], None, None, event.cached, 0)
        return [_event("message_start", message=message)]

    def token(self, choice: int, event: TokenEvent) -> list[Message]:
        return self._write(self._split.push(event.text))

    def finish(self, choice: int, finished: Finished) -> list[Message]:
        messages = [*self._write(self._split.finish()), *self._close()]
        message = self.whole()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        messages.append(_event("message_delta", delta=delta, usage=message["usage"]))
        return [*messages, _event("message_stop")]

    def failed(self, status: int, message: str, code: str, param: str | None) -> Message:
        return Message(anthropic_error_json(status, message, code, self._request_id), "error")

    def whole(self) -> Json:
        finished = self.finished[0]
        result = finished.result
        reason = self._stop_reason(result)
        return self._message(self._blocks, reason, result.stop_string, finished.cached, len(result.tokens))

    def _message(
        self, content: list[Json], reason: str | None, stop: str | None, cached: int, output_tokens: int
    ) -> Json:
        usage = {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }
        end = {"stop_reason": reason, "stop_sequence": stop}
        return self._base | {"content": content} | end | {"usage": usage}

    def _stop_reason(self, result: GenerationResult) -> str:
        if result.finish_reason == "length":
            cut = self._most_tokens is not None and len(result.tokens) < self._most_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if result.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(block["type"] == "tool_use" for block in self._blocks) else "end_turn"

    def _write(self, parts: Iterable[AnswerPart]) -> list[Message]:
        """Adds parts to the content blocks; returns the events of it."""
        return [message for part in parts for message in self._part(part)]

    def _part(self, part: AnswerPart) -> list[Message]:
        match part:
            case Thought(text):
                if self._shows_thoughts:
                    return self._grow("thinking", text, signature="")
                self._unseen += text
                return self._grow("thinking", "", signature="")
            case Content(text):
                return self._grow("text", text)
            case CallBegin(_, name):
                call = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": name, "input": {}}
                begun = self._begin_block(call)
                self._arguments = ""
                return begun
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta("partial_json", text)]

    def _grow(self, kind: str, text: str, **fields: str) -> list[Message]:
        """Adds text to the last block, or to a new one where the last is of another kind.

        Args:
            kind: type of the block, and the name of the field that holds its text.
            fields: other fields of a new block.
        """
        messages = list[Message]()
        if not self._open or self._blocks[-1]["type"] != kind:
            messages = self._begin_block({"type": kind, kind: ""} | fields)
        self._blocks[-1][kind] += text
        return [*messages, *([self._delta(kind, text)] if text else [])]

    def _begin_block(self, block: Json) -> list[Message]:
        closed = self._close()
        self._open = True
        self._blocks.append(block)
        return [*closed, self._of_block("content_block_start", content_block=dict(block))]

    def _close(self) -> list[Message]:
        """Returns the events with which the open block ends."""
        if not self._open:
            return []
        self._open = False
        block, messages = self._blocks[-1], list[Message]()
        if block["type"] == "thinking":
            block["signature"], self._unseen = sealed(self._unseen), ""
            messages.append(self._delta("signature", block["signature"]))
        elif block["type"] == "tool_use" and self._arguments:
            block["input"] = json.loads(self._arguments)
        return [*messages, self._of_block("content_block_stop")]

    def _delta(self, field: str, text: str) -> Message:
        return self._of_block("content_block_delta", delta={"type": DELTAS[field], field: text})

    def _of_block(self, name: str, **fields: object) -> Message:
        """Returns an event of the last block."""
        return _event(name, index=len(self._blocks) - 1, **fields)


def _event(name: str, **fields: object) -> Message:
    return Message({"type": name} | fields, name)
