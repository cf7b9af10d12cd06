"""The answers of OpenAI's chat completions and completions: whole, or as the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers import PreTrainedTokenizerBase

import offload_rt
from offload_rt.engine.results import Alternatives, FinishReason, PromptScore, TokenEvent
from offload_rt.server.jobs.worker import Finished, PromptProgress, Queued
from offload_rt.server.protocols.answer import Answer, Json, Message
from offload_rt.server.protocols.logprobs import TokenEntries, TokensOfText, TokenTable, prompt_logprobs
from offload_rt.text.answers import (
    AnswerPart,
    AnswerSplitter,
    CallArguments,
    CallBegin,
    Content,
    Thought,
)

FINISH_REASONS: dict[FinishReason, str] = {"length": "length", "eos": "stop", "stop": "stop"}
"""OpenAI's name of each way in which a generation ends."""


class Reply(ABC):
    """Turns events of one choice into OpenAI's objects; keeps what the whole answer needs.

    Args:
        request_id: the same for all choices of an answer.
        alternatives: number of alternatives whose log probabilities come with each token's; None: none do.
        prompt_alternatives: the same of the prompt's tokens, as vLLM writes them.

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
        alternatives: int | None,
        prompt_alternatives: int | None = None,
    ) -> None:
        self.index = index
        self.finished: Finished | None = None
        self._base = {"id": request_id, "created": int(time.time()), "model": model}
        self._base["system_fingerprint"] = f"offload-rt-{offload_rt.__version__}"
        self._entries = TokenEntries(tokenizer)
        self._alternatives = alternatives
        self._prompt_alternatives = prompt_alternatives
        self._score: PromptScore | None = None

    def scored(self, score: PromptScore) -> list[Json]:
        """Takes the scores of the prompt; returns the chunks that they make."""
        self._score = score
        if self._prompt_alternatives is None:
            return []
        return [self.chunk([], prompt_logprobs=self._prompt_logprobs)]

    @property
    def _prompt_logprobs(self) -> list[Json | None]:
        assert self._score is not None and self._prompt_alternatives is not None
        return prompt_logprobs(self._score, self._prompt_alternatives, self._entries)

    @abstractmethod
    def token(self, event: TokenEvent) -> list[Json]:
        """Returns the chunks of a token."""

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
    def new_tokens(self) -> int:
        """Number of tokens of the choice, once it has ended."""
        assert self.finished is not None
        return len(self.finished.result.tokens)

    @property
    def _finish_reason(self) -> str:
        assert self.finished is not None
        return FINISH_REASONS.get(self.finished.result.finish_reason, "stop")


class ChatReply(Reply):
    """A chat completion: its content, the thoughts before it (`reasoning_content`) and the calls of tools.

    The log probabilities are those of the content's tokens.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *base: Any, splitter: AnswerSplitter) -> None:
        super().__init__(*base)
        self._splitter = splitter
        self._tokens = TokensOfText()
        self._thoughts = self._content = ""
        self._calls: list[Json] = []
        self._logprobs: list[Json] = []
        self._begun = False

    def token(self, event: TokenEvent) -> list[Json]:
        if self._alternatives is not None:
            self._tokens.push(event)
        begun = self._begin()
        return begun + [self._part(part) for part in self._splitter.push(event.text)]

    def finish(self, finished: Finished) -> list[Json]:
        self.finished = finished
        chunks = self._begin() + [self._part(part) for part in self._splitter.finish()]
        return [*chunks, self._chunk({}, reason=self._finish_reason)]

    def choice(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content}
        if self._thoughts:
            message["reasoning_content"] = self._thoughts
        if self._calls:
            message |= {"content": self._content or None, "tool_calls": self._calls}
        logprobs = None if self._alternatives is None else {"content": self._logprobs}
        choice = {"index": self.index, "message": message, "logprobs": logprobs}
        return choice | {"finish_reason": self._finish_reason}

    def whole(self, choices: Sequence[Json], **fields: object) -> Json:
        if self._score is not None:
            fields["prompt_logprobs"] = self._prompt_logprobs
        return super().whole(choices, **fields)

    @property
    def _finish_reason(self) -> str:
        reason = super()._finish_reason
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _begin(self) -> list[Json]:
        """Returns the chunk with the role, once."""
        begun, self._begun = self._begun, True
        return [] if begun else [self._chunk({"role": "assistant", "content": ""})]

    def _part(self, part: AnswerPart) -> Json:
        """Returns the chunk of a part of the answer."""
        match part:
            case Thought(text):
                self._thoughts += text
                return self._chunk({"reasoning_content": text})
            case Content(text):
                self._content += text
                if self._alternatives is None:
                    return self._chunk({"content": text})
                new = [self._entries.entry(event) for event in self._tokens.take(text)]
                self._logprobs += new
                return self._chunk({"content": text}, {"content": new})
            case CallBegin(index, name):
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self._calls.append(call | {"function": {"name": name, "arguments": ""}})
                function = {"name": name, "arguments": ""}
                return self._chunk({"tool_calls": [{"index": index} | call | {"function": function}]})
            case CallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text
                return self._chunk({"tool_calls": [{"index": index, "function": {"arguments": text}}]})

    def _chunk(self, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self.chunk([choice])


class CompletionReply(Reply):
    """A completion of a text.

    Args:
        echo: the text of the prompt, which comes first; None: it does not.
        continues: text is generated behind the prompt. Otherwise the token is left out with which every
            sequence begins.
    """

    whole_object = chunk_object = "text_completion"

    def __init__(self, *base: Any, echo: str | None = None, continues: bool = True) -> None:
        super().__init__(*base)
        self._echo = echo
        self._continues = continues
        self._text = ""
        self._logprobs = TokenTable()
        self._offset = 0  # characters of the tokens so far

    def token(self, event: TokenEvent) -> list[Json]:
        chunks = self._echoed()
        if not self._continues or (not event.text and self._alternatives is None):
            return chunks
        table = TokenTable()
        if self._alternatives is not None:
            self._add(table, event.token, self._entries.text(event), event.logprob, event.alternatives)
        return [*chunks, self._chunk(event.text, table)]

    def finish(self, finished: Finished) -> list[Json]:
        self.finished = finished
        return [*self._echoed(), self._chunk("", TokenTable(), self._finish_reason)]

    def choice(self) -> Json:
        choice = self._choice(self._text, self._logprobs, self._finish_reason)
        if self._prompt_alternatives is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs
        return choice

    @property
    def new_tokens(self) -> int:
        return super().new_tokens if self._continues else 0

    @property
    def _finish_reason(self) -> str:
        return super()._finish_reason if self._continues else "length"

    def _echoed(self) -> list[Json]:
        """Returns the chunk with the prompt, once, with the log probabilities of its tokens."""
        echo, self._echo = self._echo, None
        if echo is None:
            return []
        table, score = TokenTable(), self._score
        if score is not None and self._alternatives is not None:
            texts = self._entries.prompt_texts(score.tokens, echo)
            for token in zip(score.tokens, texts, score.logprobs, score.alternatives, strict=True):
                self._add(table, *token)
            self._offset = len(echo)
        return [self._chunk(echo, table)]

    def _add(
        self, table: TokenTable, token: int, text: str, logprob: float | None, likeliest: Alternatives
    ) -> None:
        """Adds the next token to a table."""
        table.tokens.append(text)
        table.token_logprobs.append(logprob)
        table.text_offset.append(self._offset)
        self._offset += len(text)
        if logprob is None:
            table.top_logprobs.append(None)
        else:
            shown = dict(likeliest[: self._alternatives]) | {token: logprob}
            names = self._entries.names(list(shown))
            table.top_logprobs.append(dict(zip(names, shown.values(), strict=True)))

    def _chunk(self, text: str, table: TokenTable, reason: str | None = None) -> Json:
        self._text += text
        self._logprobs.extend(table)
        return self.chunk([self._choice(text, table, reason)])

    def _choice(self, text: str, table: TokenTable, reason: str | None) -> Json:
        logprobs = None if self._alternatives is None else asdict(table)
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class CompletionAnswer(Answer):
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

    def scored(self, choice: int, score: PromptScore) -> list[Message]:
        return [Message(chunk) for chunk in self._replies[choice].scored(score)]

    def token(self, choice: int, event: TokenEvent) -> list[Message]:
        return [Message(chunk) for chunk in self._replies[choice].token(event)]

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
        finished = [self.finished[choice] for choice in sorted(self.finished)]
        new_tokens = sum(self._replies[choice].new_tokens for choice in self.finished)
        return usage(finished, self._prompts, new_tokens)

    def _timings(self) -> Json:
        return {"timings": timings(self.finished[0])} if len(self._replies) == 1 else {}


def new_id(kind: str) -> str:
    """Returns a fresh ID of an answer, as OpenAI writes them."""
    return f"{kind}-{uuid.uuid4().hex}"


def usage(finished: Sequence[Finished], prompts: int, completion_tokens: int) -> Json:
    """Returns the token counts of all choices.

    Args:
        prompts: number of prompts; the choices of a prompt count it once.
    """
    firsts = finished[:: max(1, len(finished) // prompts)]
    prompt_tokens = sum(choice.result.prompt_tokens for choice in firsts)
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
