"""Runs requests on an `LLM` in one thread: a queue, batches of decode steps, and prefixes that are kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from offload_rt.api.llm import LLM
from offload_rt.engine.output import OutputProcessor, step
from offload_rt.engine.results import GenerationResult, TokenEvent
from offload_rt.errors import UsageError, first_line
from offload_rt.sampling.params import SamplingParams
from offload_rt.server.metrics import Metrics
from offload_rt.server.prefixes import PrefixPool
from offload_rt.system import clock


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


Event = Queued | PromptProgress | TokenEvent | Finished | Exception


class QueueFull(Exception):
    """As many requests are waiting as may wait."""


class Closing(Exception):
    """The server is shutting down and takes no more requests."""


class _Cancelled(Exception):
    """Raised in a prefill whose client has gone away."""


@dataclass(eq=False)
class Job:
    """One prompt to continue.

    Attributes:
        params: with a seed.
        send: called in the worker's thread with each event; the last one is `Finished` or an exception,
            unless the job was cancelled.
        cancelled: the client has gone away; set by any thread.
    """

    tokens: list[int]
    params: SamplingParams
    send: Callable[[Event], object]
    cancelled: bool = False
    cached: int = field(default=0, init=False)


class Worker:
    """The only thread that uses an LLM: admits jobs from a queue, and steps all running ones as a batch.

    A job whose prompt begins like an earlier one continues from the KV of their common beginning,
    which exists once however many sequences share it (`PrefixPool`). A prefill holds up the running
    sequences; each step of the loop admits one job at most, so that they go on between two prefills.

    Args:
        parallel: most jobs that run at a time.
        waiting: most jobs that wait.
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
        log: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._llm = llm
        self._prefixes = prefixes
        self._metrics = metrics
        self._parallel = parallel
        self._most_waiting = waiting
        self._log = log
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: dict[Job, OutputProcessor] = {}
        self._prefilling: tuple[Job, float] | None = None  # the job, and when its prefill began
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
        return len(self._running) + (self._prefilling is not None)

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
            for job in (*self._running, *([self._prefilling[0]] if self._prefilling else [])):
                job.cancelled = True
            self._changed.notify()
        self._thread.join()
        self._prefixes.close()

    # In the worker's thread:

    def _work(self) -> None:
        try:
            while (job := self._next()) is not None or self._running:
                if job is not None:
                    self._admit(job)
                if self._running:
                    self._step()
        finally:  # also after a defect: no client waits for a thread that has ended
            with self._changed:
                self._closing = True
                unfinished = (*self._running, *self._waiting)
            for job in unfinished:
                job.send(Closing())

    def _next(self) -> Job | None:
        """Returns a job to admit; waits for one while nothing runs. None: nothing is to be admitted now."""
        with self._changed:
            while not self._closing:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._waiting and len(self._running) < self._parallel and not self._full:
                    job = self._waiting.popleft()
                    self._prefilling = job, clock.now()
                    return job
                if self._running:
                    return None
                self._changed.wait()
            return None

    def _admit(self, job: Job) -> None:
        """Prefills a job's prompt behind the longest cached prefix, and begins its continuation."""
        try:
            output = self._open(job)
        except _Cancelled:
            pass
        except Exception as error:
            if isinstance(error, UsageError) and self._running:  # there may be room once one has ended
                self._full = True
                with self._changed:
                    self._waiting.appendleft(job)
            else:
                self._report(job, error)
        else:
            self._running[job] = output
        finally:
            self._prefilling = None

    def _open(self, job: Job) -> OutputProcessor:
        llm, engine, params = self._llm, self._llm.engine, job.params
        with ExitStack() as failed:
            prefix, job.cached = self._prefixes.prepare(job.tokens, params.max_tokens)
            self._progress("prefill", 0, 1)
            sequence = engine.open(
                job.tokens,
                params.max_tokens,
                sequences=self._parallel - len(self._running),
                prefix=prefix,
            )
            failed.callback(engine.close_sequence, sequence)
            # Kept at once, so that requests that come meanwhile share it.
            self._prefixes.add(engine.snapshot(sequence))
            engine.begin(sequence, sequence.plan, llm.continuation(params, job.tokens))
            output = llm.output(sequence, params, 0)
            failed.pop_all()
        self._metrics.prompt(len(job.tokens), job.cached)
        return output

    def _progress(self, phase: str, done: int, total: int) -> None:
        """Sends the progress of a prefill to the job that is prefilled."""
        if self._prefilling is None or phase != "prefill":
            return
        job, started = self._prefilling
        if job.cancelled:
            raise _Cancelled
        count = len(job.tokens)
        processed = job.cached + (count - job.cached) * done // total
        job.send(PromptProgress(count, job.cached, processed, 1e3 * (clock.now() - started)))

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
