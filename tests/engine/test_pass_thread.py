"""A pass in the background and drafts beside it read the same tokens, each in a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NoReturn

import pytest
import torch
from support.small_engine import ON_CUDA

from cpu_kv.mapped import computed_copy
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.engine.batching import BatchRunner, PassThread
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.work import AwaitPass, CopyToHost, Forward, LevelStats, StartPass, Work
from offload_rt.sampling.tokens import Tokens
from offload_rt.system.timeline import Timeline


class Echo:
    """A model whose logits are the IDs of its tokens; it waits for `begin`, and says when it has `read`."""

    dtype = torch.int64

    def __init__(self, device: torch.device, begin: threading.Event) -> None:
        self.device, self.begin, self.read = device, begin, threading.Event()

    def forward(self, inputs: Sequence[PassInput], order: LayerOrder | None = None) -> list[PassOutput]:
        assert self.begin.wait(30)
        outputs = [PassOutput(computed_copy(one.ids(self.device))) for one in inputs]
        self.read.set()
        return outputs

    def raise_nan(self, pass_input: PassInput) -> NoReturn:
        raise AssertionError("no logit is NaN")


class Full:
    """What a pass over a full cache asks of it."""

    def __init__(self, until: threading.Event, device: torch.device) -> None:
        self._until, self._device = until, device

    def finish_compute(self) -> None:
        assert self._until.wait(30)
        torch.cuda.current_stream(self._device).synchronize()

    def cancel(self) -> None:
        pass


@ON_CUDA
@pytest.mark.parametrize("first", ["pass", "draft"])
def test_both_read_tokens_that_the_host_knew(device: torch.device, first: str) -> None:
    """Whichever of them needs the tokens on the device first, and before the other's stream is through."""
    at_once, later = threading.Event(), threading.Event()
    at_once.set()
    passing, drafting = Echo(device, at_once), Echo(device, at_once)
    if first == "pass":
        drafting.begin = passing.read
    else:
        passing.begin = drafting.read
    draft, ids = Tokens([7, 8, 9]), [3]
    cache: Any = None
    given = PassInput(cache, NewTokens((-1, 0, 1, 2), (1, 3, 7, 15), ids, draft), 4)
    full: Any = Full(later, device)

    def work() -> Work[list[list[int]]]:
        stats = LevelStats("level")
        running = yield StartPass(Forward(passing, given, None, stats), full)
        drafted = yield Forward(drafting, given, None, stats)
        if first == "pass":
            (read,) = yield CopyToHost([drafted.logits], stats)
            later.set()
            output = yield AwaitPass(running)
        else:
            later.set()
            output = yield AwaitPass(running)
            (read,) = yield CopyToHost([drafted.logits], stats)
        (verified,) = yield CopyToHost([output.logits], stats)
        return [read.tolist(), verified.tolist()]

    thread = PassThread(device, Timeline)
    try:
        (result,) = BatchRunner([work()], thread).run()
    finally:
        thread.close()
    assert result == [[3, 7, 8, 9]] * 2
