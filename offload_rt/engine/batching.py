"""Batching: runs the work of many sequences in step, and combines their passes.

The work of a sequence (propose, verify, draft ahead) is a generator that yields requests: for a pass of a
model, for results on the host, for a pass in the background. `BatchRunner` advances any number of them in
step: requests for passes of one model become one pass, and all copies to the host one wait of it. So the code
of a sequence is written as if it were alone, and a batch needs no code of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from cpu_kv import CopyFailed
from cpu_kv.streams import device_streams
from offload_rt.caches.full import FullCache
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.work import (
    AwaitPass,
    BackgroundPass,
    CopyToHost,
    Forward,
    Model,
    Outputs,
    Passed,
    Request,
    StartPass,
    T,
    Work,
)
from offload_rt.system import clock
from offload_rt.system.device_copies import to_host
from offload_rt.system.timeline import Timeline

R = TypeVar("R")


class PassThread:
    """The thread that runs passes over full caches, on a GPU in a stream of high priority.

    A pass starts after the compute enqueued before `start`. When its future is done, the device is done too.
    """

    def __init__(self, device: torch.device, timeline: Callable[[], Timeline]) -> None:
        self._device = device
        self._timeline = timeline
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offload_rt-pass")
        self._newest: Future[Passed] | None = None
        self._stream = device_streams(device).verification if device.type == "cuda" else None

    @property
    def running(self) -> bool:
        """True while a pass is running."""
        return self._newest is not None and not self._newest.done()

    def start(self, caches: Sequence[FullCache], forward: Callable[[], Outputs]) -> Future[Passed]:
        """Starts `forward`, a pass over these caches."""
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
                return forward(), clock.now()
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(fence)
                try:
                    outputs = forward()
                except BaseException:
                    # Enqueued work still uses memory that is freed now.
                    with suppress(CopyFailed):
                        _finish_compute(caches)
                    raise
                _finish_compute(caches)
            return outputs, clock.now()

    def join(self) -> None:
        """Waits for the running pass, including one started just before an interrupt."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for the thread and ends it. Idempotent."""
        self._thread.shutdown(wait=True)


def _finish_compute(caches: Sequence[FullCache]) -> None:
    for cache in caches:
        cache.finish_compute()


class BatchRunner(Generic[T]):
    """Advances the work of several sequences in step.

    Args:
        thread: runs background passes; None: they run in the foreground.
    """

    def __init__(self, works: Sequence[Work[T]], thread: PassThread | None = None) -> None:
        self._works = works
        self._thread = thread
        self._begun: list[FullCache] = []
        self._requests: dict[int, Request] = {}  # by the number of the work that asks
        self._results: list[Any] = [None] * len(works)

    @torch.inference_mode()
    def run(self) -> list[T | Exception]:
        """Runs all works to their ends; an exception of one is its result, and the others go on."""
        try:
            self._answer(dict.fromkeys(range(len(self._works))))
            while self._requests:
                forwards, copies = self._of(Forward), self._of(CopyToHost)
                if forwards or copies:
                    self._forward(forwards)
                    self._copy_to_host(copies)
                elif begins := self._of(StartPass):
                    # All sequences that verify in this step have arrived here: they share one pass.
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
        return {number: request for number, request in self._requests.items() if isinstance(request, kind)}

    def _answer(self, answers: Mapping[int, Any]) -> None:
        """Advances works to their next requests or ends; an exception as the answer is raised in the work."""
        for number, answer in answers.items():
            self._requests.pop(number, None)
            work = self._works[number]
            try:
                request = work.throw(answer) if isinstance(answer, Exception) else work.send(answer)
            except StopIteration as end:
                self._results[number] = end.value
            except Exception as error:
                self._results[number] = error
            else:
                self._requests[number] = request

    def _forward(self, requests: dict[int, Forward]) -> None:
        for model, order, group in _by_model(requests):
            started = clock.now()
            try:
                outputs = model.forward([request.input for request in group.values()], order)
            except Exception as error:
                self._answer(dict.fromkeys(group, error))
                continue
            ms = 1e3 * (clock.now() - started) / len(group)
            for request in group.values():
                request.stats.ms += ms
            self._answer(
                {number: output.error or output for number, output in zip(group, outputs, strict=True)}
            )

    def _copy_to_host(self, requests: dict[int, CopyToHost]) -> None:
        if not requests:
            return
        started = clock.now()
        try:
            copies = iter(to_host(*(tensor for request in requests.values() for tensor in request.tensors)))
        except Exception as error:
            self._answer(dict.fromkeys(requests, error))
            return
        ms = 1e3 * (clock.now() - started) / len(requests)
        for request in requests.values():
            request.stats.ms += ms
            request.stats.host_reads += 1
        self._answer(
            {number: list(islice(copies, len(request.tensors))) for number, request in requests.items()}
        )

    def _begin(self, requests: dict[int, StartPass]) -> None:
        forwards = {number: request.forward for number, request in requests.items()}
        for request in forwards.values():  # drafts for what follows read it too, in another stream
            request.input.upload(request.model.device)
        caches = [request.full for request in requests.values()]
        self._begun += caches

        def forward() -> Outputs:
            outputs: Outputs = {}
            for model, order, group in _by_model(forwards):
                inputs = [request.input for request in group.values()]
                outputs |= zip(group, model.forward(inputs, order), strict=True)
            return outputs

        started, passed = clock.now(), Future[Passed]()
        if self._thread is not None:
            passed = self._thread.start(caches, forward)
        else:
            try:
                passed.set_result((forward(), clock.now()))
            except Exception as error:
                passed.set_exception(error)
        self._answer({number: BackgroundPass(passed, number, len(requests), started) for number in requests})

    def _finish(self, requests: dict[int, AwaitPass]) -> None:
        for number, request in requests.items():
            try:
                outputs, _ = request.running.future.result()
            except Exception as error:
                self._answer({number: error})
            else:
                output = outputs[request.running.number]
                self._answer({number: output.error or output})


def _by_model(
    requests: dict[int, Forward],
) -> Iterator[tuple[Model, LayerOrder | None, dict[int, Forward]]]:
    """Yields the requests that share a pass: of one model, in one order of layers."""
    for model, order in dict.fromkeys((request.model, request.order) for request in requests.values()):
        group = {
            number: request
            for number, request in requests.items()
            if request.model is model and request.order == order
        }
        yield model, order, group


def run_alone(work: Work[T]) -> T:
    """Runs the work of one sequence, with background passes in the foreground."""
    (result,) = BatchRunner([work]).run()
    if isinstance(result, Exception):
        raise result
    return result
