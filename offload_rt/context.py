"""A context: tokens that were read, with their KV. A user appends to it, continues it and rewinds it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from offload_rt.config import Config
from offload_rt.engine.engine import Engine
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.errors import UsageError
from offload_rt.output import OutputProcessor, step
from offload_rt.planning.placement import check_positions
from offload_rt.results import GenerationResult, SamplingParams, TokenEvent, integer

GREEDY = SamplingParams()
Prompt = str | Sequence[int]


class Host(Protocol):
    """The interface of an `LLM` that a context uses."""

    engine: Engine

    def prompt_ids(self, prompt: Prompt, *, behind: bool = False) -> list[int]: ...

    def checked_params(self, params: SamplingParams, changes: Mapping[str, Any]) -> SamplingParams: ...

    def continuation(self, params: SamplingParams) -> Continuation: ...

    def output(self, sequence: TokenSequence, params: SamplingParams, start: int) -> OutputProcessor: ...

    def composition(self, config: str | None, overrides: Mapping[str, object]) -> Config | None: ...


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of tokens with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices is faster than comparing token by token
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


class Context:
    """Tokens that were read, and those that were generated after them, with their KV. Made by `LLM.read`.

    Several contexts of an `LLM` may be open, and several threads may use them. A context has one open stream
    at most: any other use of the context closes it. A context is closed by `close`, by `with`, or with its
    `LLM`.

    Attributes:
        closed: its KV was given back.
        messages: the chat messages that it was read from, and those of the chat since then; None: it was
            read from a text or token IDs.
    """

    def __init__(self, host: Host, sequence: TokenSequence) -> None:
        self._host = host
        self._engine = host.engine
        self._sequence = sequence
        self._stream: TokenStream | None = None
        self.messages: list[dict[str, Any]] | None = None
        self.closed = False

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Token IDs that were read, and those that were generated."""
        with self._engine.lock:
            made = self._stream
            if made is None:
                return list(self._sequence.tokens)
            return [*self._sequence.tokens[: self._sequence.start], *made.tokens]

    @property
    def placement(self) -> dict[str, int]:
        """Number of tokens of each layer by tier: resident, CPU, other GPUs, streamed."""
        return self._sequence.placement

    def append(self, prompt: Prompt) -> None:
        """Appends a text or token IDs and reads them. Where that fails, the context is as it was.

        Raises:
            UsageError: it does not fit, or the context is closed.
        """
        tokens = self._host.prompt_ids(prompt, behind=True)
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._sequence, len(tokens))
            self._engine.read(self._sequence, tokens)

    def update(self, prompt: Prompt) -> int:
        """Makes the context hold exactly `prompt`; reads only what follows their longest common beginning.

        Where that fails, the context holds the common beginning alone.

        Returns:
            Number of tokens that were kept.

        Raises:
            UsageError: the prompt does not fit, or the context is closed.
        """
        wanted = self._host.prompt_ids(prompt)
        with self._engine.lock:
            self._turn_to_use()
            sequence = self._sequence
            check_positions(self._engine.target, len(wanted), 0)
            kept = common_beginning(sequence.tokens, wanted)
            self._engine.check_growth(sequence, len(wanted) - len(sequence.tokens))
            self._engine.rewind(sequence, kept)
            if kept < len(wanted):
                self._engine.read(sequence, wanted[kept:])
            return kept

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
            config: another config than the LLM's own, for this call alone. It uses the same KV, so the means
                that it retrieves by (`retrieval.rest`, `.select`) must have been kept.
            overrides: config values by full key, for a `config` that is named.
            changes: fields of `SamplingParams` with other values than in `params`, e.g. `max_tokens=64`.

        Raises:
            UsageError: the prompt does not fit, `config` cannot continue this context, or it is closed.
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
        """Like `generate`, token by token. Closing the stream stops it; the tokens that were taken stay."""
        params = self._host.checked_params(params, changes)
        settings = self._host.composition(config, overrides)
        tokens = self._host.prompt_ids(prompt, behind=True) if len(prompt) else []
        with self._engine.lock:
            self._turn_to_use()
            self._engine.check_growth(self._sequence, len(tokens) + params.max_tokens)
            sequence, start, params = self._sequence, len(self._sequence.tokens), params.seeded()
            if settings is not None:
                settings = sequence.retrievable(settings)  # refused before the prompt is appended
            if tokens:
                self._engine.read(sequence, tokens)
            self._engine.begin(sequence, settings, self._host.continuation(params))
            self._stream = TokenStream(self._engine, self._host.output(sequence, params, start))
            return self._stream

    def rewind(self, length: int) -> None:
        """Forgets the tokens from position `length` on, and their KV.

        Raises:
            UsageError: there are fewer tokens, or none would be left.
        """
        length = integer("length", length)
        with self._engine.lock:
            self._turn_to_use()
            there = len(self._sequence.tokens)
            if not 1 <= length <= there:
                raise UsageError(f"rewind to {length}: the context has {there} tokens; give 1 to {there}")
            self._sequence.check_length(length)
            self._engine.rewind(self._sequence, length)

    def _turn_to_use(self) -> None:
        """Closes the open stream, of which taken tokens are kept. Raises UsageError where this is closed."""
        self._engine.check_open()
        if self.closed:
            raise UsageError("this context is closed: read the text again")
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
            self._engine.rewind(self._sequence, self._sequence.start + len(stream.tokens))

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
        on_end: called once when the stream has ended.

    Attributes:
        result: the text with its statistics, once the stream has ended.
    """

    def __init__(
        self, engine: Engine, output: OutputProcessor, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self.result: GenerationResult | None = None
        self._engine = engine
        self._output = output
        self._on_end = on_end
        self._events: Iterator[TokenEvent] = iter(())

    @property
    def tokens(self) -> list[int]:
        """Token IDs that were taken."""
        return self._output.tokens

    def __next__(self) -> TokenEvent:
        try:
            while self.result is None:
                if (event := next(self._events, None)) is not None:
                    return event
                if self._output.ended:
                    break
                with self._engine.lock:
                    if self.result is None:  # no other thread has closed it
                        (self._events,) = step(self._engine, [self._output])
        except BaseException:
            self.close()
            raise
        if self.result is None:
            self.close()
            if self._output.error is not None:
                raise self._output.error
        raise StopIteration

    def close(self) -> None:
        """Ends the stream; the tokens that were taken stay. Idempotent, from any thread."""
        with self._engine.lock:
            if self.result is None:
                try:
                    # The link would go on into a pass that nobody asks for.
                    self._engine.stop(self._output.sequence)
                finally:  # also where a second interrupt cuts that short
                    self.result = self._output.result()
                    self._on_end()
