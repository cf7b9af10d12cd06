"""Runs requests on an `LLM` in one thread: a queue, batches of decode steps, and prefixes that are kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from offload_rt.api.llm import LLM
from offload_rt.engine.output import OutputProcessor, step
from offload_rt.engine.results import GenerationResult, PromptScore, TokenEvent
from offload_rt.engine.scoring import PromptScorer
from offload_rt.engine.sequence import TokenSequence
from offload_rt.errors import UsageError, first_line
from offload_rt.sampling.params import SamplingParams
from offload_rt.server.jobs.metrics import Metrics
from offload_rt.server.jobs.prefixes import PrefixPool
from offload_rt.system import clock
from offload_rt.text.tokenize import common_beginning

PAUSE_S = 1.0
"""Time for which running sequences wait while a piece of another prompt is read, about."""
LEAST_PIECE = 256
"""Fewest tokens of such a piece: fewer are not read in less time. Over a link, which all KV before a piece
crosses, they are `prefill.chunk`."""


@dataclass(frozen=True)
class Queued:
    """A place in the queue.

    Attributes:
        position: number of requests whose turn comes first.
    """

    position: int


@dataclass(frozen=True)
class PromptProgress:
    """Progress of reading a prompt, in tokens; sent first when the request's turn comes.

    Attributes:
        cached: number of tokens whose KV was there already.
        processed: number of tokens whose KV is there by now.
        ms: time since the request's turn came.
    """

    total: int
    cached: int
    processed: int
    ms: float


@dataclass(frozen=True)
class Finished:
    """The end of a generation.

    Attributes:
        cached: number of prompt tokens whose KV was there already.
    """

    result: GenerationResult
    cached: int


Event = Queued | PromptProgress | PromptScore | TokenEvent | Finished | Exception


class QueueFull(Exception):
    """As many requests are waiting as may wait."""


class Closing(Exception):
    """The server is shutting down and takes no more requests."""


class _Cancelled(Exception):
    """Raised in a piece that is not read to its end."""


@dataclass(eq=False)
class Job:
    """One prompt to continue.

    Attributes:
        params: with a seed.
        send: called in the worker's thread with each event; the last one is `Finished` or an exception,
            unless the job was cancelled.
        scored: number of likeliest tokens that the log probabilities of the prompt come with; None: it is not
            scored.
        cancelled: the client has gone away; set by any thread.
    """

    tokens: list[int]
    params: SamplingParams
    send: Callable[[Event], object]
    scored: int | None = None
    cancelled: bool = False
    cached: int = field(default=0, init=False)


@dataclass(eq=False)
class Reading:
    """A job whose prompt is being read.

    Attributes:
        started: when its turn came.
        scorer: scores the prompt; None: nobody asked for it.
        rate: tokens that were read per second, of the newest piece.
    """

    job: Job
    sequence: TokenSequence
    started: float
    scorer: PromptScorer | None = None
    rate: float = 0.0
    _common: dict[Job, int] = field(default_factory=dict, init=False)

    def common(self, job: Job) -> int:
        """Returns the number of tokens with which both prompts begin; the same job is compared once."""
        if job not in self._common:
            self._common[job] = common_beginning(job.tokens, self.job.tokens)
        return self._common[job]

    def known(self, job: Job) -> bool:
        """Returns whether all that another job's prompt has in common with this one is read."""
        return self.common(job) <= self.sequence.full.verified_length + 1


class Worker:
    """The only thread that uses an LLM: admits jobs from a queue, and steps all running ones as a batch.

    A job whose prompt begins like an earlier one continues from the KV of their common beginning,
    which exists once however many sequences share it (`PrefixPool`). Prompts are read in pieces, one of each
    in turn, and the running sequences are stepped between two pieces. What was read of a prompt whose client
    goes away is kept.

    Args:
        parallel: most jobs that run at a time.
        waiting: most jobs that wait.
        prefill_share: share of the time that reading takes while other sequences run.
        log: called with a line for each job that has ended.
    """

    def __init__(
        self,
        llm: LLM,
        prefixes: PrefixPool,
        metrics: Metrics,
        *,
        parallel: int = 1,
        waiting: int = 64,
        prefill_share: float = 0.5,
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._llm = llm
        self._prefixes = prefixes
        self._metrics = metrics
        self._parallel = parallel
        self._most_waiting = waiting
        self._prefill_share = prefill_share
        self._log = log
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._opening: Job | None = None
        self._reading: deque[Reading] = deque()  # the one whose turn it is first
        self._running: dict[Job, OutputProcessor] = {}
        self._full = False  # the memory has no room for the next job beside those that run
        self._closing = False
        llm.engine.on_progress = self._progress
        self._thread = threading.Thread(target=self._work, name="offload_rt-server")
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queues the jobs of one request.

        Raises:
            QueueFull: there is no room for them in the queue.
            Closing: the server is shutting down.
        """
        with self._changed:
            if self._closing:
                raise Closing
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            idle = self._parallel - self.running
            if len(self._waiting) + len(jobs) > self._most_waiting + max(0, idle):
                raise QueueFull
            self._waiting += jobs
            self._tell_positions()
            self._changed.notify()

    @property
    def most_jobs(self) -> int:
        """Most jobs of a request: an idle server takes them all."""
        return self._parallel + self._most_waiting

    @property
    def waiting(self) -> int:
        """Number of jobs in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of jobs that are prefilled or continued."""
        return len(self._running) + len(self._reading) + (self._opening is not None)

    @property
    def closing(self) -> bool:
        """Whether no more jobs are taken."""
        return self._closing

    @property
    def kept_prefixes(self) -> int:
        """Number of prefixes whose KV is kept in memory."""
        return len(self._prefixes)

    def close(self) -> None:
        """Ends the jobs that wait or run, and the thread. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._prefixes.close()

    # In the worker's thread:

    def _work(self) -> None:
        try:
            while self._wait():
                if (job := self._next()) is not None:
                    self._admit(job)
                began = clock.now()
                if self._reading:
                    self._read(self._reading[0])
                # Others run for their share of the time before the next piece is read.
                until = clock.now() + (clock.now() - began) * (1 / self._prefill_share - 1)
                while self._running:
                    self._step()
                    if not self._reading or self._closing or clock.now() >= until:
                        break
            for job, output in list(self._running.items()):
                self._end(job, output)
            while self._reading:
                reading = self._reading[0]
                self._stop_reading(reading)
                reading.job.send(Closing())
        finally:  # also after a defect: no client waits for a thread that has ended
            with self._changed:
                self._closing = True
                unfinished = (*self._running, *(one.job for one in self._reading), *self._waiting)
            for job in unfinished:
                job.send(Closing())

    def _wait(self) -> bool:
        """Waits for something to do; returns False where the server is to end."""
        with self._changed:
            while not (self._closing or self._waiting or self._reading or self._running):
                self._changed.wait()
            return not self._closing

    def _next(self) -> Job | None:
        """Returns the next job to admit; None: none can be admitted now.

        A job waits for a prompt that is being read and that begins like its own. Where KV crosses a link,
        one prompt is read at a time: the others have no memory of the device that they could plan with.
        """
        with self._changed:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            alone = self._reading and not self._llm.engine.in_place
            if alone or self._full or self.running >= self._parallel:
                return None
            for job in self._waiting:
                if all(one.known(job) for one in self._reading):
                    self._waiting.remove(job)
                    self._opening = job
                    self._tell_positions()
                    return job
            return None

    def _tell_positions(self) -> None:
        """Sends the jobs in the queue their places."""
        for position, job in enumerate(self._waiting):
            job.send(Queued(position))

    def _admit(self, job: Job) -> None:
        """Opens the sequence of a job behind the longest cached prefix; `_read` reads the rest."""
        started = clock.now()
        try:
            scorer = None
            if job.scored is None:
                self._keep_common(job)
                prefix, job.cached = self._prefixes.prepare(job.tokens, job.params.max_tokens)
            else:  # all of the prompt is read, as nothing is known of the likelihood of cached tokens
                prefix, job.cached = None, 0
                self._prefixes.make_room(len(job.tokens), job.params.max_tokens)
                scorer = PromptScorer(self._llm.engine.target, job.tokens, job.scored)
            job.send(PromptProgress(len(job.tokens), job.cached, job.cached, 0.0))
            sequences = self._parallel - len(self._running) - len(self._reading)
            sequence = self._llm.engine.start(
                job.tokens, job.params.max_tokens, sequences=sequences, prefix=prefix, scorer=scorer
            )
            self._reading.append(Reading(job, sequence, started, scorer))
        except Exception as error:
            if isinstance(error, UsageError) and self.running > 1:  # there may be room once one has ended
                self._full = True
                with self._changed:
                    self._waiting.appendleft(job)
                    self._tell_positions()
            else:
                self._report(job, error)
        finally:
            self._opening = None

    def _keep_common(self, job: Job) -> None:
        """Keeps what was read of a prompt by which a job's prompt begins further than by any prefix."""
        engine, page = self._llm.engine, self._llm.engine.store.layout.page_size
        for reading in self._reading:
            if reading.common(job) >= self._prefixes.begins(job.tokens, job.params.max_tokens) + page:
                self._prefixes.add(engine.snapshot(reading.sequence).without_unread())

    def _read(self, reading: Reading) -> None:
        """Reads the next piece of a prompt; begins its continuation once all is read."""
        engine, sequence, job = self._llm.engine, reading.sequence, reading.job
        self._reading.rotate(-1)
        try:
            if job.cancelled:
                self._stop_reading(reading)
                return
            before, began = sequence.full.verified_length, clock.now()
            if engine.read(sequence, self._piece_limit(reading)):
                self._begin(reading)
            else:
                reading.rate = (sequence.full.verified_length - before) / (clock.now() - began)
        except _Cancelled:
            if not self._closing:  # else all are stopped
                self._stop_reading(reading)
        except Exception as error:
            self._stop_reading(reading)
            self._report(job, error)

    def _piece_limit(self, reading: Reading) -> int | None:
        """Returns the most tokens of the next piece, so that running sequences wait for about `PAUSE_S`.

        None: none are running, and the piece is as long as planned.
        """
        if not self._running:
            return None
        in_place, plan = self._llm.engine.in_place, reading.sequence.plan
        least = LEAST_PIECE if in_place else plan.config.prefill.chunk
        return max(least, int(reading.rate * PAUSE_S) // LEAST_PIECE * LEAST_PIECE)

    def _begin(self, reading: Reading) -> None:
        """Begins to continue a prompt that is read."""
        llm, engine, job, sequence = self._llm, self._llm.engine, reading.job, reading.sequence
        # Kept at once, so that requests that come meanwhile share it.
        self._prefixes.add(engine.snapshot(sequence))
        if reading.scorer is not None:
            job.send(reading.scorer.score())
        engine.begin(sequence, sequence.plan, llm.continuation(job.params, job.tokens))
        output = llm.output(sequence, job.params, 0)
        self._reading.remove(reading)
        self._running[job] = output
        self._metrics.prompt(len(job.tokens), job.cached)

    def _stop_reading(self, reading: Reading) -> None:
        """Ends the reading of a prompt; the pieces that were read are kept."""
        engine, sequence = self._llm.engine, reading.sequence
        self._reading.remove(reading)
        self._full = False
        with suppress(Exception), ExitStack() as closing:  # of a broken link, say, which is reported
            closing.callback(engine.close_sequence, sequence)
            if sequence.full.verified_length > reading.job.cached:
                self._prefixes.add(engine.snapshot(sequence).without_unread())

    def _progress(self, phase: str, done: int, total: int) -> None:
        """Sends the progress of a prefill to the job that is prefilled."""
        if phase != "prefill" or not self._reading:
            return
        reading = self._reading[-1]  # those before it wait for their turns
        job, count = reading.job, len(reading.job.tokens)
        in_one_piece = not reading.sequence.plan.config.prefill.piece
        if self._closing or (in_one_piece and job.cancelled):
            raise _Cancelled
        processed = job.cached + (count - job.cached) * done // total
        job.send(PromptProgress(count, job.cached, processed, 1e3 * (clock.now() - reading.started)))

    def _step(self) -> None:
        """Runs a decode step of all running jobs, and sends what it yields."""
        for job, output in list(self._running.items()):
            if job.cancelled:
                self._end(job, output)
        running = list(self._running.items())
        try:
            stepped = list(step(self._llm.engine, [output for _, output in running]))
        except Exception as error:  # of the whole batch: the server goes on
            for job, output in running:
                output.error = error
                self._end(job, output)
            return
        for (job, output), events in zip(running, stepped, strict=True):
            try:
                for event in events:
                    job.send(event)
            except Exception as error:  # of its tokens' text
                output.error = error
            if output.ended or output.error is not None:
                self._end(job, output)

    def _end(self, job: Job, output: OutputProcessor) -> None:
        """Ends a job; its tokens and their KV are kept for requests that begin like it."""
        engine, sequence = self._llm.engine, output.sequence
        ended: Finished | Exception
        try:
            with ExitStack() as closing:
                closing.callback(engine.close_sequence, sequence)
                if output.error is not None:
                    raise output.error
                ended = Finished(output.result(), job.cached)
                # A round may end beyond a stop string, and beyond the token that a client took last.
                engine.rewind(sequence, sequence.start + len(output.tokens))
                self._prefixes.add(engine.snapshot(sequence))
        except Exception as error:
            ended = error
        del self._running[job]
        self._full = False
        self._report(job, ended)

    def _report(self, job: Job, ended: Finished | Exception) -> None:
        """Counts the end of a job, sends it and logs it."""
        if isinstance(ended, Finished):
            self._metrics.generated(ended.result)
            line = _described(ended.result, job.cached)
        else:
            self._metrics.errors += not isinstance(ended, UsageError)
            line = f"request    {len(job.tokens):,} prompt tokens: failed ({first_line(ended)})"
        job.send(ended)
        self._log(line)


def _described(result: GenerationResult, cached: int) -> str:
    """Returns a line about a generation."""
    timings = result.timings
    line = f"request    {result.prompt_tokens:,} prompt tokens ({cached:,} were there), read in"
    line += f" {timings.prefill_ms / 1e3:.1f} s; {timings.new_tokens} generated"
    if timings.new_tokens:
        line += f" at {timings.tokens_per_second:.1f} tokens/s"
    if timings.drafted_tokens:
        line += f", {timings.accepted_tokens / timings.drafted_tokens:.0%} of drafts accepted"
    return f"{line}; {result.finish_reason}"
