"""Passes over bounded caches as CUDA graphs: one launch for what are hundreds.

A pass of so many new tokens over a bounded cache runs the same operations on the same memory every time, but
for a few numbers: the tokens, their positions, and how many entries the cache has. Those stand in one tensor
on the device, and the rest is captured once and replayed. The cache is told of every pass as always, so
whatever it does in `begin` (choose its entries anew, grow, turn to another buffer) happens before a replay.

A graph is bound to addresses. It is found by those of the buffers in use, and every buffer of a cache is laid
out alike: a graph is right for whichever buffer of its cache stands there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt.caches.base import Cache, NewTokens
from offload_rt.caches.bounded import BoundedCache
from offload_rt.model import CausalModel

Step = Callable[[], Tensor]


class Capture(Protocol):
    """Records a step, which reads and writes tensors that stay where they are."""

    def __call__(self, step: Step) -> tuple[Callable[[], object], Tensor]:
        """What runs the step again, and the tensor in which its result stands then.

        The step may run now, any number of times or never. Raises RuntimeError where it cannot be recorded.
        """


class CudaCapture:
    """Captures CUDA graphs, all in one private memory pool: they never run at the same time."""

    WARM_UP = 2  # libraries set themselves up at first use, which cannot be captured

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[Callable[[], object], Tensor]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UP):
                step()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Of this thread alone: another one may be in the middle of a pass over the full cache.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            out = step()
        return graph.replay, out


class StepGraph:
    """A recorded pass of `count` tokens in a chain, which has begun in `cache`."""

    def __init__(
        self, model: CausalModel, cache: BoundedCache, count: int, numbers: Tensor, capture: Capture
    ) -> None:
        self._inputs = numbers.clone()
        ids, places, (end,) = self._inputs.split([count, count, 1])

        def step() -> Tensor:
            cache.fix(end)
            return model.compute(cache, ids, places, count)

        self._replay, self._logits = capture(step)

    def run(self, numbers: Tensor, rows: int) -> Tensor:
        """Logits `[rows, vocabulary]` after the last tokens.

        Args:
            numbers: `[2 count + 1]`: tokens, positions, entries of the cache.
        """
        self._inputs.copy_(numbers)
        self._replay()
        return self._logits[-rows:].clone()  # the next replay writes there


_Key = tuple[int, int, int, int]
"""Addresses of keys and values, entries they have room for, new tokens."""


@dataclass
class _CacheGraphs:
    """What is known of the passes over one cache."""

    seen: Counter[_Key] = field(default_factory=Counter)
    graphs: OrderedDict[_Key, StepGraph] = field(default_factory=OrderedDict)


class GraphedModel(CausalModel):
    """A model whose recurring short passes over bounded caches are recorded and replayed.

    Trees, long passes and passes over the full cache run as they come, and everything does where nothing
    can be captured: on a CPU, or after a capture has failed.

    Args:
        on_notice: told, once, why nothing is captured.
        capture: how to record; None: as CUDA graphs on a GPU, not at all on a CPU.
    """

    LONGEST = 32
    """New tokens in a pass: more than any γ that pays."""
    RARE = 2
    """A capture costs several passes: a shape that came no more often than this is not worth one."""
    MOST = 64
    """Graphs of one cache; the one that was unused for longest goes."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        on_notice: Callable[[str], None],
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, name)
        if capture is None and self.device.type == "cuda":
            capture = CudaCapture(self.device)
        self._capture = capture
        self._on_notice = on_notice
        self._of_cache: WeakKeyDictionary[BoundedCache, _CacheGraphs] = WeakKeyDictionary()

    @torch.inference_mode()
    def forward(
        self,
        cache: Cache,
        tokens: Sequence[int],
        positions: Sequence[int],
        new: NewTokens,
        rows: int,
        drawn: Tensor | None = None,
    ) -> Tensor:
        if self._capture is None or not isinstance(cache, BoundedCache):
            return super().forward(cache, tokens, positions, new, rows, drawn)
        cache.begin(new)
        numbers = self._numbers(tokens, [*positions, cache.end], drawn)
        graph = self._graph(cache, new, numbers, self._capture)
        if graph is None:
            ids, places, _ = numbers.split([new.count, new.count, 1])
            return self.compute(cache, ids, places, rows)
        return graph.run(numbers, rows)

    def _graph(
        self, cache: BoundedCache, new: NewTokens, numbers: Tensor, capture: Capture
    ) -> StepGraph | None:
        """Of the pass that has begun; None where it is to run as it comes."""
        if new.is_tree or new.count > self.LONGEST:
            return None
        known = self._of_cache.setdefault(cache, _CacheGraphs())
        room = cache.keys.shape[2]
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), room, new.count)
        if key in known.graphs:
            known.graphs.move_to_end(key)
            return known.graphs[key]
        known.seen[key] += 1
        if known.seen[key] <= self.RARE:
            return None
        # A buffer that grew never comes back as it was.
        for old in [old for old in known.graphs if old[2] != room]:
            del known.graphs[old]
        try:
            known.graphs[key] = StepGraph(self, cache, new.count, numbers, capture)
        except RuntimeError as error:
            self._give_up(cache, new, error)
            return None
        if len(known.graphs) > self.MOST:
            known.graphs.popitem(last=False)
        return known.graphs[key]

    def _give_up(self, cache: BoundedCache, new: NewTokens, error: RuntimeError) -> None:
        self._capture = None
        self._of_cache.clear()
        reason = str(error).partition("\n")[0]
        self._on_notice(f"{self.name}: no CUDA graphs, which makes drafting slower: {reason}")
        cache.begin(new)  # the pass that was recorded has left its shapes there
