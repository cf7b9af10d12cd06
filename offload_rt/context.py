"""A text that was read, with its KV: what a user appends to, continues, and takes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from offload_rt.config import Config
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.output import OutputProcessor, step
from offload_rt.results import GenerationResult, SamplingParams, TokenEvent, integer, with_changes

GREEDY = SamplingParams()
Prompt = str | Sequence[int]


class Host(Protocol):
    """The part of an `LLM` that a context needs."""

    engine: Engine

    def prompt_ids(self, prompt: Prompt, *, behind: bool = False) -> list[int]: ...

    def checked_params(self, params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams: ...

    def continuation(self, params: SamplingParams) -> Continuation: ...

    def writer(self, sequence: TokenSequence, params: SamplingParams, start: int) -> OutputProcessor: ...

    def composition(self, config: str | None, overrides: Mapping[str, object]) -> Config | None: ...


class Context:
    """Tokens that were read, and those that were generated behind them, with their KV. Made by `LLM.read`.

    Several contexts of an `LLM` may be open, and several threads may use them. A context makes one text at a
    time: to use it otherwise ends a stream of it that is still open. Closed explicitly, by `with`, or with
    its `LLM`.

    Attributes:
        closed: its KV was given back.
    """

    def __init__(self, host: Host, sequence: TokenSequence) -> None:
        self._host = host
        self._engine = host.engine
        self._session = sequence
        self._stream: TokenStream | None = None
        self.closed = False

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token ids: those that were read, and those that were generated."""
        with self._engine.lock:
            made = self._stream
            if made is None:
                return list(self._session.tokens)
            return [*self._session.tokens[: self._session.start], *made.tokens]

    @property
    def placement(self) -> dict[str, int]:
        """Number of tokens of each layer by tier: resident, CPU, other GPUs, streamed."""
        return self._session.placement

    def append(self, prompt: Prompt) -> None:
        """Reads a text or token ids behind what is there. Where that fails, the context is as it was.

        Raises:
            UsageError: it does not fit, or the context is closed.
        """
        tokens = self._host.prompt_ids(prompt, behind=True)
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._session, len(tokens))
            self._engine.read(self._session, tokens)

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
            config: another composition than the LLM's own, for this continuation alone. It uses the same KV,
                so the means that it retrieves by (`retrieval.rest`, `.select`) must have been kept.
            overrides: config values by full key, of a `config` that is named.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.
        """
        stream = self.stream(prompt, params, config, overrides, **changes)
        deque(stream, maxlen=0)
        assert stream.result is not None
        return stream.result

    def stream(
        self,
        prompt: Prompt = (),
        params: SamplingParams = GREEDY,
        config: str | None = None,
        overrides: Mapping[str, object] = {},
        **changes: Any,
    ) -> TokenStream:
        """Like `generate`, token by token. Closing the stream stops it; what was taken of it stands."""
        params = with_changes(params, changes)
        settings = self._host.composition(config, overrides)
        tokens = self._host.prompt_ids(prompt, behind=True) if len(prompt) else []
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._session, len(tokens) + params.max_tokens)
            sequence, start, params = self._session, len(self._session.tokens), params.seeded()
            if tokens:
                self._engine.read(sequence, tokens)
            self._engine.begin(sequence, settings, self._host.continuation(params))
            self._stream = TokenStream(self._engine, self._host.writer(sequence, params, start))
            return self._stream

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on, and their KV.

        Raises:
            UsageError: there are fewer tokens, or none would be left.
        """
        length = integer("length", length)
        with self._engine.lock:
            self._turn_to_use()
            there = len(self._session.tokens)
            if not 1 <= length <= there:
                raise UsageError(f"rewind to {length}: the context has {there} tokens; give 1 to {there}")
            self._session.check_length(length)
            self._engine.rewind(self._session, length)

    def _turn_to_use(self) -> None:
        """Ends the newest stream; the context keeps the tokens that were taken. UsageError if closed."""
        self._engine.check_open()
        if self.closed:
            raise UsageError("this context is closed: read the text again")
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            self._engine.rewind(self._session, self._session.start + len(stream.tokens))

    def close(self) -> None:
        """Gives the KV back. Idempotent."""
        with self._engine.lock:
            if self.closed:
                return
            self.closed = True
            if self._stream is not None:
                self._stream.close()
            self._engine.close_sequence(self._session)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class TokenStream(Iterator[TokenEvent]):
    """Streaming output of one sequence: an iterator of its events. Using or closing its context ends it.

    Args:
        on_end: called once when the stream has ended.

    Attributes:
        result: tokens and statistics, once the stream has ended.
    """

    def __init__(
        self, engine: Engine, writer: OutputProcessor, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self.result: GenerationResult | None = None
        self._engine = engine
        self._writer = writer
        self._on_end = on_end
        self._events: Iterator[TokenEvent] = iter(())

    @property
    def tokens(self) -> list[int]:
        """Token ids that were taken."""
        return self._writer.tokens

    def __next__(self) -> TokenEvent:
        try:
            while self.result is None:
                if (event := next(self._events, None)) is not None:
                    return event
                if self._writer.ended:
                    break
                with self._engine.lock:
                    if self.result is None:  # no other thread has closed it
                        (self._events,) = step(self._engine, [self._writer])
        except BaseException:
            self.close()
            raise
        if self.result is None:
            self.close()
            if self._writer.error is not None:
                raise self._writer.error
        raise StopIteration

    def close(self) -> None:
        """Ends the stream; the tokens taken from it are kept. Idempotent, from any thread."""
        with self._engine.lock:
            if self.result is None:
                try:
                    self._engine.stop(
                        self._writer.sequence
                    )  # the link would go on into a pass nobody asks for
                finally:  # also where a second interrupt cuts that short
                    self.result = self._writer.result()
                    self._on_end()
