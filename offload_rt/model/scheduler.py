"""What texts ask of models, and the one place where it is answered, for many texts at once.

The work of a text (propose, verify, draft ahead) is a generator that yields requests: a pass of a model, a
read of results, a pass that runs in the background. `BatchRunner` advances any number of them in step: passes
that are asked of one model at one moment are one pass, and all reads are one wait. So the code of a text
reads as if it were alone, and a batch needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from cpu_kv import CopyFailed
from cpu_kv.streams import device_streams
from offload_rt.caches.full import FullCache
from offload_rt.host import to_host
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.timeline import Timeline

T = TypeVar("T")
R = TypeVar("R")


class Model(Protocol):
    """What is asked of a model (see `model.CausalModel`)."""

    device: torch.device
    dtype: torch.dtype

    def forward(self, parts: Sequence[PassInput], plan: LayerPlan | None = None) -> list[PassOutput]: ...

    def raise_nan(self, part: PassInput) -> NoReturn: ...


@dataclass
class LevelStats:
    """What one level of a composition did.

    Attributes:
        name: level, as in the config (`draft:streaming`, `target:retrieved`, `target:full`).
        passes: of its model.
        proposed: tokens that the level below proposed to it.
        accepted: how many of them it accepted.
        ms: time in its passes and reads, without those of the levels below; of a pass over several texts an
            equal share. On a GPU the host's time: what the device still has to do counts where it is read.
        nominal_ms: the same by the shapes of its passes, at nominal rates (`costs.py`).
        host_reads: how often the host waited for its results.
    """

    name: str
    passes: int = 0
    proposed: int = 0
    accepted: int = 0
    ms: float = 0.0
    nominal_ms: float = 0.0
    host_reads: int = 0


@dataclass(frozen=True)
class Forward:
    """Asks for a pass; the answer is an `PassOutput`."""

    model: Model
    part: PassInput
    plan: LayerPlan | None
    stats: LevelStats


@dataclass(frozen=True)
class Read:
    """Asks for tensors on the host; the answer is a list of them."""

    tensors: Sequence[Tensor]
    stats: LevelStats


@dataclass(frozen=True)
class StartPass:
    """Asks for a pass over the full cache to run in the background; the answer is a `BackgroundPass`."""

    forward: Forward
    full: FullCache


@dataclass(frozen=True)
class AwaitPass:
    """Asks for the result of a background pass; the answer is an `PassOutput`."""

    running: BackgroundPass


Outputs = dict[int, PassOutput]
"""By the number of a text's work."""

Passed = tuple[Outputs, float]
"""Outputs of a background pass, and when it ended, in seconds of `time.perf_counter`."""


@dataclass(eq=False)
class BackgroundPass:
    """A pass in the background, perhaps of several texts.

    Attributes:
        passed: what it computed, once it is over.
        number: of this text's work.
        texts: whose pass it is.
        started: seconds of `time.perf_counter`.
    """

    passed: Future[Passed]
    number: int
    texts: int
    started: float

    @property
    def done(self) -> bool:
        return self.passed.done()

    @property
    def ms(self) -> float:
        """How long it took, once it is over."""
        _, ended = self.passed.result()
        return 1e3 * (ended - self.started)


Request = Forward | Read | StartPass | AwaitPass
Work = Generator[Request, Any, T]


class PassThread:
    """The thread in which passes over full caches run, with a stream of high priority on a GPU.

    Compute that was enqueued before `start` comes before the pass, and a pass whose future is done is done
    on the device too.
    """

    def __init__(self, device: torch.device, timeline: Callable[[], Timeline]) -> None:
        self._device = device
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-pass")
        self._newest: Future[Passed] | None = None
        self._stream = device_streams(device).verification if device.type == "cuda" else None

    @property
    def running(self) -> bool:
        """Whether a pass has been started and is not over."""
        return self._newest is not None and not self._newest.done()

    def start(self, caches: Sequence[FullCache], forward: Callable[[], Outputs]) -> Future[Passed]:
        """Runs a pass over these caches."""
        fence = None
        if self._stream is not None:
            fence = torch.cuda.Event()
            fence.record(torch.cuda.current_stream(self._device))
        self._newest = self._thread.submit(self._run, caches, forward, fence)
        return self._newest

    def _run(
        self, caches: Sequence[FullCache], forward: Callable[[], Outputs], fence: torch.cuda.Event | None
    ) -> Passed:
        with self._timeline().span("pass", "verify"):
            if self._stream is None or fence is None:
                return forward(), perf_counter()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(fence)
                try:
                    outputs = forward()
                except BaseException:
                    # What it has enqueued still uses memory that is let go now.
                    with suppress(CopyFailed):
                        _finish_compute(caches)
                    raise
                _finish_compute(caches)
            return outputs, perf_counter()

    def join(self) -> None:
        """Waits until nothing runs, also what an interrupt kept its starter from knowing of."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for the thread and lets it go. Idempotent."""
        self._thread.shutdown(wait=True)


def _finish_compute(caches: Sequence[FullCache]) -> None:
    for cache in caches:
        cache.finish_compute()


class BatchRunner(Generic[T]):
    """Advances the work of any number of texts in step.

    Args:
        thread: where background passes run; None: they run at once, in the foreground.
    """

    def __init__(self, works: Sequence[Work[T]], thread: PassThread | None = None) -> None:
        self._works = works
        self._thread = thread
        self._begun: list[FullCache] = []
        self._asked: dict[int, Request] = {}  # by the number of the work that asks
        self._results: list[Any] = [None] * len(works)

    @torch.inference_mode()
    def run(self) -> list[T | Exception]:
        """Runs all to their ends; what one raises is its result, and the others go on."""
        try:
            self._answer(dict.fromkeys(range(len(self._works))))
            while self._asked:
                forwards, reads = self._of(Forward), self._of(Read)
                if forwards or reads:
                    self._forward(forwards)
                    self._read(reads)
                elif begins := self._of(StartPass):
                    # All texts that verify in this step are here now: they are one pass.
                    self._begin(begins)
                else:
                    self._finish(self._of(AwaitPass))
        except BaseException:
            for cache in self._begun:
                cache.cancel()
            if self._begun and self._thread is not None:
                self._thread.join()
            raise
        finally:
            for work in self._works:
                work.close()
        return self._results

    def _of(self, kind: type[R]) -> dict[int, R]:
        return {number: request for number, request in self._asked.items() if isinstance(request, kind)}

    def _answer(self, answers: Mapping[int, Any]) -> None:
        """Lets works go on to their next requests, or to their ends; an exception is raised in them."""
        for number, answer in answers.items():
            self._asked.pop(number, None)
            work = self._works[number]
            try:
                request = work.throw(answer) if isinstance(answer, Exception) else work.send(answer)
            except StopIteration as end:
                self._results[number] = end.value
            except Exception as error:
                self._results[number] = error
            else:
                self._asked[number] = request

    def _forward(self, asked: dict[int, Forward]) -> None:
        for model, plan, group in _by_model(asked):
            started = perf_counter()
            try:
                outputs = model.forward([request.part for request in group.values()], plan)
            except Exception as error:
                self._answer(dict.fromkeys(group, error))
                continue
            ms = 1e3 * (perf_counter() - started) / len(group)
            for request in group.values():
                request.stats.ms += ms
            self._answer(
                {number: output.error or output for number, output in zip(group, outputs, strict=True)}
            )

    def _read(self, asked: dict[int, Read]) -> None:
        if not asked:
            return
        started = perf_counter()
        try:
            read = iter(to_host(*(tensor for request in asked.values() for tensor in request.tensors)))
        except Exception as error:
            self._answer(dict.fromkeys(asked, error))
            return
        ms = 1e3 * (perf_counter() - started) / len(asked)
        for request in asked.values():
            request.stats.ms += ms
            request.stats.host_reads += 1
        self._answer({number: list(islice(read, len(one.tensors))) for number, one in asked.items()})

    def _begin(self, asked: dict[int, StartPass]) -> None:
        forwards = {number: request.forward for number, request in asked.items()}
        caches = [request.full for request in asked.values()]
        self._begun += caches

        def forward() -> Outputs:
            outputs: Outputs = {}
            for model, plan, group in _by_model(forwards):
                parts = [request.part for request in group.values()]
                outputs |= zip(group, model.forward(parts, plan), strict=True)
            return outputs

        started, passed = perf_counter(), Future[Passed]()
        if self._thread is not None:
            passed = self._thread.start(caches, forward)
        else:
            try:
                passed.set_result((forward(), perf_counter()))
            except Exception as error:
                passed.set_exception(error)
        self._answer({number: BackgroundPass(passed, number, len(asked), started) for number in asked})

    def _finish(self, asked: dict[int, AwaitPass]) -> None:
        for number, request in asked.items():
            try:
                outputs, _ = request.running.passed.result()
            except Exception as error:
                self._answer({number: error})
            else:
                output = outputs[request.running.number]
                self._answer({number: output.error or output})


def _by_model(
    asked: dict[int, Forward],
) -> Iterator[tuple[Model, LayerPlan | None, dict[int, Forward]]]:
    """The requests that are one pass each: of one model, in one order of layers."""
    for model, plan in dict.fromkeys((request.model, request.plan) for request in asked.values()):
        yield model, plan, {n: one for n, one in asked.items() if one.model is model and one.plan == plan}


def run_alone(work: Work[T]) -> T:
    """Runs one text's work, without background passes."""
    (result,) = BatchRunner([work]).run()
    if isinstance(result, Exception):
        raise result
    return result
