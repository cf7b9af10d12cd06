"""Builds OpenAI's chunks and completions from the events of a generation."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

import offload_rt
from offload_rt.engine.results import FinishReason, TokenEvent
from offload_rt.server.answers import Answer, Json, Message
from offload_rt.server.logprobs import TokenEntries
from offload_rt.server.worker import Finished, PromptProgress, Queued
from offload_rt.text.thoughts import ThoughtSplitter

FINISH_REASONS: dict[FinishReason, str] = {"length": "length", "eos": "stop", "stop": "stop"}
"""OpenAI's name of each way in which a generation ends."""


class Reply(ABC):
    """Turns events of one choice into OpenAI's objects; keeps what the whole answer needs.

    Args:
        request_id: the same for all choices of an answer.
        with_logprobs: the log probabilities of tokens were asked for.

    Attributes:
        finished: the end of the generation, once it has come.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request_id: str,
        model: str,
        index: int,
        tokenizer: PreTrainedTokenizerBase | None,
        with_logprobs: bool,
    ) -> None:
        self.index = index
        self.finished: Finished | None = None
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        self._base["system_fingerprint"] = f"offload-rt-{offload_rt.__version__}"
        self._entries = TokenEntries(tokenizer)
        self._with_logprobs = with_logprobs
        self._tokens: list[TokenEvent] = []

    @abstractmethod
    def token(self, event: TokenEvent) -> Json | None:
        """Returns the chunk of a token; None where it adds nothing that is sent."""

    @abstractmethod
    def finish(self, finished: Finished) -> list[Json]:
        """Returns the last chunks; the very last one has the finish reason."""

    @abstractmethod
    def choice(self) -> Json:
        """Returns the whole choice, of an answer that is not streamed."""

    def chunk(self, choices: Sequence[Json], **fields: object) -> Json:
        """Returns a chunk of the stream."""
        return self._base | {"object": self.chunk_object, "choices": list(choices)} | fields

    def whole(self, choices: Sequence[Json], **fields: object) -> Json:
        """Returns a whole answer."""
        return self._base | {"object": self.whole_object, "choices": list(choices)} | fields

    def progress(self, event: Queued | PromptProgress) -> Json:
        """Returns a chunk with the place in the queue, or with llama.cpp's `prompt_progress`."""
        if isinstance(event, Queued):
            return self.chunk([], queue={"position": event.position})
        progress = {"total": event.total, "cache": event.cached, "processed": event.processed}
        return self.chunk([], prompt_progress=progress | {"time_ms": round(event.ms)})

    @property
    def _finish_reason(self) -> str:
        assert self.finished is not None
        return FINISH_REASONS.get(self.finished.result.finish_reason, "stop")


class ChatReply(Reply):
    """A chat completion; the thoughts of a thinking model come apart, as `reasoning_content`."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *base: Any, thoughts: ThoughtSplitter) -> None:
        super().__init__(*base)
        self._split = thoughts
        self._parts = {"reasoning_content": "", "content": ""}
        self._begun = False

    def token(self, event: TokenEvent) -> Json | None:
        self._tokens.append(event)
        return self._delta(*self._split.push(event.text), [event])

    def finish(self, finished: Finished) -> list[Json]:
        self.finished = finished
        last = self._delta(*self._split.finish(), [])
        ended = {"index": self.index, "delta": {}, "logprobs": None, "finish_reason": self._finish_reason}
        return [*([last] if last else []), self.chunk([ended])]

    def _delta(self, thoughts: str, answer: str, events: Sequence[TokenEvent]) -> Json | None:
        new = {"reasoning_content": thoughts, "content": answer}
        delta: Json = {name: text for name, text in new.items() if text}
        for name, text in delta.items():
            self._parts[name] += text
        if not self._begun:
            delta, self._begun = {"role": "assistant", "content": ""} | delta, True
        if not delta and not (self._with_logprobs and events):
            return None
        logprobs = self._logprobs(events)
        return self.chunk(
            [{"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": None}]
        )

    def choice(self) -> Json:
        message: Json = {"role": "assistant"} | self._parts
        if not message["reasoning_content"]:
            del message["reasoning_content"]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self._tokens),
            "finish_reason": self._finish_reason,
        }

    def _logprobs(self, events: Sequence[TokenEvent]) -> Json | None:
        if not self._with_logprobs:
            return None
        return {"content": [self._entries.entry(event) for event in events]}


class CompletionReply(Reply):
    """A completion of a text."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, *base: Any) -> None:
        super().__init__(*base)
        self._offset = 0  # characters of the tokens whose log probabilities were given

    def token(self, event: TokenEvent) -> Json | None:
        self._tokens.append(event)
        if not event.text and not self._with_logprobs:
            return None
        return self.chunk([self._choice(event.text, [event], None)])

    def finish(self, finished: Finished) -> list[Json]:
        self.finished = finished
        return [self.chunk([self._choice("", [], self._finish_reason)])]

    def choice(self) -> Json:
        assert self.finished is not None
        self._offset = 0
        return self._choice(self.finished.result.text, self._tokens, self._finish_reason)

    def _choice(self, text: str, events: Sequence[TokenEvent], reason: str | None) -> Json:
        logprobs = self._logprobs(events) if self._with_logprobs else None
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, events: Sequence[TokenEvent]) -> Json:
        logprobs: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for event in events:
            text = self._entries.text(event.token)
            best = {self._entries.text(token): logprob for token, logprob in event.alternatives}
            logprobs["tokens"].append(text)
            logprobs["token_logprobs"].append(event.logprob)
            logprobs["top_logprobs"].append(best)
            logprobs["text_offset"].append(self._offset)
            self._offset += len(text)
        return logprobs


class Completions(Answer):
    """The answer of OpenAI's chat completions and completions.

    Args:
        replies: one for each choice.
        prompts: number of prompts; each has as many choices.
        with_usage: a stream ends with the token counts.
        with_progress: a stream tells the place in the queue, and how much of the prompt was read.
    """

    def __init__(
        self, replies: Sequence[Reply], *, prompts: int, with_usage: bool, with_progress: bool
    ) -> None:
        super().__init__(len(replies))
        self._replies = replies
        self._prompts = prompts
        self._with_usage = with_usage
        self._with_progress = with_progress

    def progress(self, choice: int, event: Queued | PromptProgress) -> list[Message]:
        return [Message(self._replies[choice].progress(event))] if self._with_progress else []

    def token(self, choice: int, event: TokenEvent) -> list[Message]:
        chunk = self._replies[choice].token(event)
        return [] if chunk is None else [Message(chunk)]

    def finish(self, choice: int, finished: Finished) -> list[Message]:
        *chunks, last = self._replies[choice].finish(finished)
        return [Message(chunk) for chunk in (*chunks, last | self._timings() if self.ended else last)]

    def end(self) -> Sequence[Message]:
        usage = [Message(self._replies[0].chunk([], usage=self._usage))] if self._with_usage else []
        return [*usage, Message("[DONE]")]

    def whole(self) -> Json:
        choices = [reply.choice() for reply in self._replies]
        return self._replies[0].whole(choices, usage=self._usage) | self._timings()

    @property
    def _usage(self) -> Json:
        return usage([self.finished[choice] for choice in sorted(self.finished)], self._prompts)

    def _timings(self) -> Json:
        return {"timings": timings(self.finished[0])} if len(self._replies) == 1 else {}


def new_id(kind: str) -> str:
    """Returns a fresh ID of an answer, as OpenAI writes them."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage(finished: Sequence[Finished], prompts: int = 1) -> Json:
    """Returns the token counts of all choices.

    Args:
        prompts: number of prompts; the choices of a prompt count it once.
    """
    firsts = finished[:: max(1, len(finished) // prompts)]
    prompt_tokens = sum(choice.result.prompt_tokens for choice in firsts)
    completion_tokens = sum(len(choice.result.tokens) for choice in finished)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached for choice in firsts)},
    }


def timings(finished: Finished) -> Json:
    """Returns llama.cpp's `timings` of a generation, and its exactness."""
    result = finished.result
    measured = result.timings
    return {
        "prompt_n": measured.prefill_tokens,
        "prompt_ms": measured.prefill_ms,
        "predicted_n": measured.new_tokens,
        "predicted_ms": measured.decode_ms,
        "predicted_per_second": measured.tokens_per_second,
        "draft_n": measured.drafted_tokens,
        "draft_n_accepted": measured.accepted_tokens,
        "cache_n": finished.cached,
        "exactness": result.exactness,
    } | ({"exactness_reason": result.exactness_reason} if result.exactness_reason else {})
