"""Output processing: turns decode steps into an event per token, and a result at the end."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from cpu_kv.sizes import dtype_name
from offload_rt.drafting.base import Round
from offload_rt.engine.engine import Engine
from offload_rt.engine.results import (
    Alternatives,
    FinishReason,
    GenerationResult,
    LevelStatistics,
    MemoryStatistics,
    Timings,
    TokenEvent,
    Transfer,
)
from offload_rt.engine.scoring import alternatives, log_probabilities
from offload_rt.engine.sequence import TokenSequence
from offload_rt.sampling.params import SamplingParams
from offload_rt.system import clock
from offload_rt.system.device_copies import to_host
from offload_rt.text.answers import AnswerMarks, split_answer
from offload_rt.text.tokenize import TextStream


def step(engine: Engine, outputs: Sequence[OutputProcessor]) -> Iterator[Iterator[TokenEvent]]:
    """Runs a decode step of every sequence that has not ended; yields the events of each, to be consumed."""
    going = [output for output in outputs if not output.ended]
    with engine.lock:  # the time excludes other threads, and the caller between two steps
        started = clock.now()
        rounds = engine.step([output.sequence for output in going])
        ms = 1e3 * (clock.now() - started)
        return iter([output.write(round, ms) for output, round in zip(going, rounds, strict=True)])


def finish(engine: Engine, outputs: Sequence[OutputProcessor]) -> None:
    """Runs decode steps until every sequence has ended; drops the events."""
    while not all(output.ended for output in outputs):
        for events in step(engine, outputs):
            deque(events, maxlen=0)


Likelihood = tuple[float, Alternatives]
"""Log probability of a token, and the likeliest ones in its place."""


@torch.inference_mode()
def likelihoods(round: Round, count: int) -> list[Likelihood]:
    """Returns the log probabilities of a round's tokens by the model's own logits. The host waits once.

    Args:
        count: number of likeliest tokens, whose log probabilities are returned too.
    """
    own, *best = to_host(*log_probabilities(round.logits, round.tokens, count))
    return list(zip(own.tolist(), alternatives(best, len(round.tokens)), strict=True))


class OutputProcessor:
    """Turns the decode steps of one sequence into events and, at the end, into a result.

    Args:
        notices: notices to the user so far; may grow.
        start: length of the context, in tokens, before this call's prompt.
        marks: how the model marks thoughts and calls; None: as its tokenizer has them.

    Attributes:
        tokens: token IDs that the caller has taken.
        error: the exception that ended the text early.
        splitter: returns a splitter of the text into its thoughts and its answer.
        answers: returns a splitter of the text into thoughts, content and calls of tools.
    """

    def __init__(
        self,
        engine: Engine,
        sequence: TokenSequence,
        params: SamplingParams,
        tokenizer: PreTrainedTokenizerBase | None,
        notices: Sequence[str],
        start: int = 0,
        marks: AnswerMarks | None = None,
    ) -> None:
        self.sequence = sequence
        self._engine = engine
        self._params = params
        self._notices = notices
        self._start = start
        marks = AnswerMarks(tokenizer) if marks is None else marks
        prompt = list(sequence.tokens)
        self._stream = TextStream(tokenizer, params.stop, prompt, marks.special(params.tools))
        self.splitter = partial(marks.thoughts.splitter, prompt)
        self.answers = partial(marks.splitter, prompt, params.tools)
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finish: FinishReason = "interrupted"
        self.error: Exception | None = None
        self._ms = 0.0

    @property
    def ended(self) -> bool:
        """Returns whether the text is complete."""
        return self._finish != "interrupted"

    def write(self, round: Round | Exception, ms: float) -> Iterator[TokenEvent]:
        """Returns the events of a decode step that took `ms`, up to the end of the text.

        Log probabilities, if they are wanted, are copied to the host at once.
        """
        self._ms += ms
        if isinstance(round, Exception):
            self._finish, self.error = "error", round
            return iter(())
        count = self._params.logprobs
        likely = [] if count is None else likelihoods(round, count)
        return self._events(round, likely)

    def _events(self, round: Round, likely: Sequence[Likelihood]) -> Generator[TokenEvent]:
        ends = self.sequence.stop_tokens
        for number, token in enumerate(round.tokens):
            self.tokens.append(token)
            logprob, alternatives = likely[number] if likely else (None, ())
            if logprob is not None:
                self._logprobs.append(logprob)
            text = "" if token in ends else self._stream.push(token)
            if token in ends:
                self._finish = "eos"
            elif self._stream.stopped or self.sequence.ends_at(len(self.tokens)):
                self._finish = "stop"
            elif len(self.tokens) == self._params.max_tokens:
                self._finish = "length"
            if self.ended and not self._stream.stopped:
                text += self._stream.finish()
            yield TokenEvent(token, text, number < round.accepted, logprob, alternatives)
            if self.ended:
                return

    def result(self) -> GenerationResult:
        """Returns the text with its statistics, also before it has ended."""
        if not self.ended:
            self._stream.finish()
        engine, sequence, params, ms = self._engine, self.sequence, self._params, self._ms
        target, draft, stats = engine.target, engine.draft, sequence.verifier.levels
        # A level's proposals are counted by the one above; the target over its full cache makes none.
        offered = [*((above.proposed, above.accepted) for above in stats[1:]), (0, 0)]
        notices = list(self._notices)
        if sequence.controller.fallbacks:
            plainly = f"{sequence.controller.plain_tokens} of {len(self.tokens)} tokens"
            notices.append(f"{plainly} used plain decoding, because drafting would have taken longer")
        with engine.lock:
            kv_bytes, kv_reserved_bytes = engine.store.used_bytes, engine.store.reserved_bytes
        answer = split_answer(self._stream.text, self.answers())
        counters, on_gpu = sequence.counters, target.device.type == "cuda"
        differs_by = sequence.differs_by
        return GenerationResult(
            model=target.name,
            draft=None if draft is None else draft.name,
            config=sequence.config.name,
            device=str(target.device),
            dtype=dtype_name(target.dtype),
            seed=params.seed,
            start=self._start,
            prompt_tokens=sequence.start,
            tokens=self.tokens,
            text=self._stream.text,
            thoughts=answer.thoughts,
            answer=answer.content,
            tool_calls=list(answer.tool_calls),
            finish_reason=self._finish,
            timings=Timings(
                prefill_tokens=sequence.prefill_tokens,
                prefill_ms=sequence.prefill_ms,
                new_tokens=len(self.tokens),
                decode_ms=ms,
                tokens_per_second=1e3 * len(self.tokens) / ms if ms > 0 else 0.0,
                drafted_tokens=stats[-1].proposed,
                accepted_tokens=stats[-1].accepted,
            ),
            rounds=len(sequence.rounds),
            levels=[
                LevelStatistics(level.name, level.passes, *counts, level.ms)
                for level, counts in zip(stats, offered, strict=True)
            ],
            transfer=Transfer(
                counters.bytes_to_device, counters.bytes_to_host, counters.bytes_abandoned, counters.wait_ms
            ),
            memory=MemoryStatistics(
                kv_bytes,
                kv_reserved_bytes,
                host_peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                device_peak_bytes=torch.cuda.max_memory_allocated(target.device) if on_gpu else 0,
            ),
            plain_tokens=sequence.controller.plain_tokens,
            notices=notices,
            stop_string=self._stream.stopped_by,
            error=None if self.error is None else str(self.error) or type(self.error).__name__,
            logprobs=None if params.logprobs is None else self._logprobs,
            exactness="bits" if differs_by is None else "distribution",
            exactness_reason=differs_by or "",
        )
