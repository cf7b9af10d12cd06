"""A context: tokens that were read, with their KV. A user appends to it, continues it and rewinds it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from offload_rt.api.frontend import GREEDY, Frontend, Prompt
from offload_rt.engine.engine import Engine
from offload_rt.engine.output import OutputProcessor, step
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.results import GenerationResult, PromptScore, TokenEvent
from offload_rt.engine.saved_context import SavedContext, save_prefix
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError
from offload_rt.planning.request import check_positions
from offload_rt.planning.sequence_planner import SequencePlan
from offload_rt.sampling.params import SamplingParams, integer
from offload_rt.system import clock
from offload_rt.text.answers import AnswerSplitter
from offload_rt.text.chat import checked_messages, is_messages, with_question
from offload_rt.text.thoughts import ThoughtSplitter
from offload_rt.text.tokenize import common_beginning
from offload_rt.text.tool_messages import Message

ROOM = 2048
"""New tokens that a context is planned for where nothing else is said."""


class Context:
    """Tokens that were read, and those that were generated after them, with their KV. Made by `LLM.read`.

    Several contexts of an `LLM` may be open, and several threads may use them. A context has one open stream
    at most: any other use of the context closes it. A context is closed by `close`, by `with`, or with its
    `LLM`.

    Attributes:
        llm: the `LLM` that it belongs to.
        closed: its KV was given back.
        messages: the chat messages that it was read from, and those of the chat since then; None: it was
            read from a text or token IDs. `ask` goes by them: setting them to earlier ones takes questions
            and answers back.
        date: the date and time at which its messages were first rendered. A template that writes the date
            goes on writing this one, so that what was read stays valid, also on another day.
    """

    def __init__(self, llm: Frontend, sequence: TokenSequence) -> None:
        self.llm = llm
        self._engine = llm.engine
        self._sequence = sequence
        self._stream: TokenStream | None = None
        self.messages: list[Message] | None = None
        self.date = clock.date()
        self.closed = False

    @classmethod
    def open(cls, llm: Frontend, tokens: Sequence[int], room: int, prefix: KVPrefix | None = None) -> Context:
        """Reads tokens, but for those that `prefix` has; the engine's lock is held. See `LLM.read`."""
        most_room = llm.engine.target.max_length(len(tokens)) - len(tokens)
        least = 0 if prefix is not None else 1  # one that is full may be rewound
        return cls(llm, llm.engine.open(tokens, max(least, min(room, most_room)), prefix=prefix))

    @classmethod
    def load(
        cls, llm: Frontend, saved: SavedContext, room: int, tokens: Sequence[int] | None = None
    ) -> tuple[Context, int]:
        """Opens a context with the KV of a saved one.

        Args:
            tokens: its tokens, of which those that follow the longest common beginning with the saved ones
                are read; None: the saved ones.

        Returns:
            The context, and the number of tokens that were there.

        Raises:
            UsageError: the model or the memory does not fit, or the file is corrupt.
        """
        engine, prompt = llm.engine, llm.prompt_ids(saved.tokens if tokens is None else tokens)
        with engine.lock:
            room = max(0, min(room, engine.target.max_length(len(prompt)) - len(prompt)))
            engine.check_room([(len(prompt), room)])
            target = engine.target.for_length(len(prompt), room)
            saved.check(llm.fingerprint(target))
            common = common_beginning(saved.tokens, prompt)
            with saved.load(engine, target, common, engine.on_progress) as prefix:
                context = cls.open(llm, prompt, room, prefix)
        context.messages = saved.messages if tokens is None else None
        context.date = saved.date or context.date
        return context, common

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token IDs that were read, and those that were generated."""
        with self._engine.lock:
            stream = self._stream
            if stream is None:
                return list(self._sequence.tokens)
            return [*self._sequence.tokens[: self._sequence.start], *stream.tokens]

    @property
    def placement(self) -> dict[str, int]:
        """Number of tokens of each layer by tier: resident, CPU, other GPUs, streamed."""
        return self._sequence.placement

    def append(self, prompt: Prompt) -> None:
        """Appends a text or token IDs and reads them. Where that fails, the context is as it was.

        Raises:
            UsageError: it does not fit, or the context is closed.
        """
        tokens = self.llm.prompt_ids(prompt, behind=True)
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._sequence, len(tokens))
            self._engine.prefill(self._sequence, tokens)

    def update(self, prompt: Prompt) -> int:
        """Makes the context hold exactly `prompt`; reads only what follows their longest common beginning.

        Where that fails, the context holds what was read by then, and the same call reads on.

        Returns:
            Number of tokens that were kept and need not be read again.

        Raises:
            UsageError: the prompt does not fit, or the context is closed.
        """
        tokens = self.llm.prompt_ids(prompt, date=self.date)
        with self._engine.lock:
            self._turn_to_use()
            common = self._update(tokens, 0)
            self.messages = checked_messages(prompt) if is_messages(prompt) else None
            return common

    def _update(self, tokens: list[int], new_tokens: int) -> int:
        """Does what `update` does, where there is room for `new_tokens` more."""
        engine, sequence = self._engine, self._sequence
        check_positions(engine.target, len(tokens), new_tokens)
        common = common_beginning(sequence.tokens, tokens)
        engine.check_growth(sequence, len(tokens) + new_tokens - common, common)
        engine.rewind(sequence, common)
        cached = min(common, sequence.full.verified_length + 1)
        if common < len(tokens):
            engine.read_on(sequence, tokens[common:])
        return cached

    def generate(
        self,
        prompt: Prompt = (),
        params: SamplingParams = GREEDY,
        config: str | None = None,
        overrides: Mapping[str, object] = {},
        **changes: Any,
    ) -> GenerationResult:
        """Appends a prompt, if there is one, and continues the context, which then contains both.

        Args:
            config: another config than the LLM's own, for this call only. It uses the same KV; means of it
                that the config retrieves by are computed when they are first needed.
            overrides: config values by full key, for a `config` that is named.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.

        Raises:
            UsageError: the prompt does not fit, `config` cannot continue this context, or it is closed.
        """
        return self.stream(prompt, params, config, overrides, **changes).finish()

    def stream(
        self,
        prompt: Prompt = (),
        params: SamplingParams = GREEDY,
        config: str | None = None,
        overrides: Mapping[str, object] = {},
        **changes: Any,
    ) -> TokenStream:
        """Like `generate`, token by token. Closing the stream stops it; the tokens that were taken stay."""
        params = self.llm.checked_params(params, changes)
        settings = self.llm.composition(config, overrides)
        tokens = self.llm.prompt_ids(prompt, behind=True) if len(prompt) else []
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._sequence, len(tokens) + params.max_tokens)
            sequence, start = self._sequence, len(self._sequence.tokens)
            plan = sequence.plan if settings is None else sequence.plan.adapted(settings)
            if tokens:  # read last: a config that is refused leaves the context as it was
                self._engine.prefill(sequence, tokens)
            return self._begin(start, params, plan)

    def _begin(
        self,
        start: int,
        params: SamplingParams,
        plan: SequencePlan,
        on_end: Callable[[GenerationResult], object] = lambda result: None,
    ) -> TokenStream:
        """Begins to continue the context, which had `start` tokens before what it is asked for."""
        params = params.seeded()
        continuation = self.llm.continuation(params, self._sequence.tokens)
        self._engine.begin(self._sequence, plan, continuation)
        output = self.llm.output(self._sequence, params, start)
        self._stream = TokenStream(self._engine, output, on_end)
        return self._stream

    def ask(
        self,
        question: str | None,
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        **changes: Any,
    ) -> GenerationResult:
        """Answers a question about the messages of the context, and adds both to them.

        A question follows a document, the user's last message, in the same message; it is one of its own
        where the assistant's is the last. Only what the context does not hold yet is read. Where the call
        fails, `messages` are as before.

        Args:
            question: None: the last of the messages is one.
            params: None: the sampling that the model suggests, else greedy decoding.
            thinking: whether the model shall think before it answers; None: as the template has it.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.

        Raises:
            UsageError: the question does not fit, or the context was not read from messages, or it is closed.
        """
        stream = self.stream_ask(question, params, thinking=thinking, **changes)
        before = self.messages
        try:
            return stream.finish()
        except BaseException:
            self.messages = before
            raise

    def stream_ask(
        self,
        question: str | None,
        params: SamplingParams | None = None,
        *,
        thinking: bool | None = None,
        **changes: Any,
    ) -> TokenStream:
        """Like `ask`, token by token.

        The messages follow when the stream has ended or is closed, unless no token was taken.
        """
        params = self.llm.chat_params(params, changes)
        if params.tools is not None:
            raise UsageError("tools: a context is asked without tools; give the messages to llm.chat")
        with self._engine.lock:
            self._turn_to_use()  # an answer that is under way becomes a message
        if self.messages is None:
            remedy = 'read messages, llm.read([{"role": "user", "content": text}])'
            raise UsageError(f"this context was read from a text and cannot be asked: {remedy}")
        messages = with_question(self.messages, question)
        template = self.llm.chat_template.dated(self.date)
        thinking, params = self.llm.with_thoughts(thinking, params)
        tokens = self.llm.prompt_ids(template.encode(messages, thinking=thinking))
        with self._engine.lock:
            self._turn_to_use()
            cached = self._update(tokens, params.max_tokens)
            return self._begin(cached, params, self._sequence.plan, partial(self._answered, messages))

    def _answered(self, messages: list[Message], result: GenerationResult) -> None:
        if result.tokens and result.finish_reason != "error":
            self.messages = [*messages, {"role": "assistant", "content": result.answer}]

    def score(self, prompt: Prompt, *, top: int = 0) -> PromptScore:
        """Returns the log probability of each token of a prompt behind the context, which stays as it is.

        Only the prompt is read, so that several continuations of a document can be compared. The result also
        has the context's tokens, which are not scored.

        Args:
            top: number of likeliest tokens that are reported in the place of each, 0 to 20.

        Raises:
            UsageError: the prompt does not fit, or the context is closed.
        """
        tokens = self.llm.prompt_ids(prompt, behind=True)
        with self._engine.lock, self.snapshot() as prefix:
            return self.llm.scored([*prefix.tokens, *tokens], top, len(prefix.tokens), prefix)

    def fork(self, room: int = ROOM) -> Context:
        """Returns a second context of these tokens, at once: each goes on by itself.

        Their KV is shared until they differ.

        Args:
            room: new tokens that it is planned for. It may grow beyond, where memory allows.

        Raises:
            UsageError: there is no room for it, or the context is closed.
        """
        room = integer("room", room)
        with self._engine.lock, self.snapshot() as prefix:
            fork = Context.open(self.llm, prefix.tokens, room, prefix)
            fork.messages, fork.date = copy.deepcopy(self.messages), self.date
            return fork

    def save(self, path: str | Path) -> None:
        """Saves the tokens and their KV to a file, for `LLM.load`. Where that fails, the context goes on.

        The file is written to a new name, and renamed when it is on the disk.

        Raises:
            UsageError: it cannot be written, or the context is closed.
        """
        with self.snapshot() as prefix:  # other threads may use the engine while it is written
            fingerprint = self.llm.fingerprint(prefix.target)
            progress = self._engine.on_progress
            save_prefix(Path(path), prefix, fingerprint, self.messages, progress, date=self.date)

    def snapshot(self) -> KVPrefix:
        """Returns the tokens with their KV, which the context shares and goes on from; to be closed.

        Closes an open stream.
        """
        with self._engine.lock:
            self._turn_to_use()
            return self._engine.snapshot(self._sequence)

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on, and their KV.

        Raises:
            UsageError: there are fewer tokens, or none would be left.
        """
        length = integer("length", length)
        with self._engine.lock:
            self._turn_to_use()
            count = len(self._sequence.tokens)
            if not 1 <= length <= count:
                raise UsageError(f"rewind to {length}: the context has {count} tokens; give 1 to {count}")
            self._sequence.check_length(length)
            self._engine.rewind(self._sequence, length)

    def _turn_to_use(self) -> None:
        """Closes the open stream, of which taken tokens are kept. Raises UsageError where this is closed."""
        self._engine.check_open()
        if self.closed:
            raise UsageError("this context is closed: read the text again")
        if (stream := self._stream) is not None:
            stream.close()
            self._engine.rewind(self._sequence, self._sequence.start + len(stream.tokens))
            self._stream = None  # last: an interrupt before it leaves the stream to be closed

    def close(self) -> None:
        """Gives the KV back. Idempotent."""
        with self._engine.lock:
            if self.closed:
                return
            self.closed = True
            if self._stream is not None:
                self._stream.close()
            self._engine.close_sequence(self._sequence)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TokenStream(Iterator[TokenEvent]):
    """Streaming output of one sequence: an iterator of token events. Closing it or its context ends it.

    Args:
        on_end: called once with the result when the stream has ended.

    Attributes:
        output: turns the sequence's decode steps into events.
        result: the text with its statistics, once the stream has ended.
    """

    def __init__(
        self,
        engine: Engine,
        output: OutputProcessor,
        on_end: Callable[[GenerationResult], object] = lambda result: None,
    ) -> None:
        self.result: GenerationResult | None = None
        self._engine = engine
        self.output = output
        self._on_end = on_end
        self._events: Iterator[TokenEvent] = iter(())

    def splitter(self) -> ThoughtSplitter:
        """Returns a splitter of the text into its thoughts and its answer."""
        return self.output.splitter()

    def answers(self) -> AnswerSplitter:
        """Returns a splitter of the text into thoughts, content and calls of tools."""
        return self.output.answers()

    @property
    def tokens(self) -> list[int]:
        """Token IDs that were taken."""
        return self.output.tokens

    def __next__(self) -> TokenEvent:
        try:
            while self.result is None:
                if (event := next(self._events, None)) is not None:
                    return event
                if self.output.ended:
                    break
                with self._engine.lock:
                    if self.result is None:  # no other thread has closed it
                        (self._events,) = step(self._engine, [self.output])
        except BaseException:
            self.close()
            raise
        if self.result is None:
            self.close()
            if self.output.error is not None:
                raise self.output.error
        raise StopIteration

    def finish(self) -> GenerationResult:
        """Takes the tokens that are left; returns the result."""
        deque(self, maxlen=0)
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Ends the stream; the tokens that were taken stay. Idempotent, from any thread."""
        with self._engine.lock:
            if self.result is None:
                try:
                    # The link would go on into a pass that nobody asks for.
                    self._engine.stop(self.output.sequence)
                finally:  # also where a second interrupt cuts that short
                    self.result = self.output.result()
                    self._on_end(self.result)
