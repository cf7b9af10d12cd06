"""Passes over bounded caches as CUDA graphs: one launch for what are hundreds.

A pass of so many new tokens over a bounded cache runs the same operations on the same memory every time, but
for a few numbers: the tokens, their positions, how many entries the cache has, and which of the speculative
ones each token sees. Those stand in one tensor on the device, and the rest is captured once and replayed: a
tree as well as a chain. The cache is told of every pass as always, so
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

from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import FIXED_SPECULATION, BoundedCache
from offload_rt.host import to_device
from offload_rt.layers import LayerPlan
from offload_rt.model import CausalModel
from offload_rt.parts import Output, Part

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
    """A recorded pass of `count` tokens of one text, which has begun in `cache`."""

    def __init__(
        self,
        model: CausalModel,
        cache: BoundedCache,
        count: int,
        plan: LayerPlan | None,
        numbers: Tensor,
        capture: Capture,
    ) -> None:
        self._inputs = numbers.clone()
        ids, positions = self._inputs[:count], self._inputs[count : 2 * count]

        def step() -> Tensor:
            cache.fix(self._inputs[2 * count :])
            self._hidden = model.compute(cache, ids, positions, plan, range(count))
            return model.logits(self._hidden)

        self._replay, self._logits = capture(step)

    def run(self, numbers: Tensor, part: Part) -> Output:
        """The pass of `part`.

        Args:
            numbers: tokens, positions, and what the cache says of the pass (`BoundedCache.numbers`).
        """
        self._inputs.copy_(numbers)
        self._replay()
        # Copied: the next replay writes there.
        hidden = self._hidden[0, -part.rows :].clone() if part.hidden else None
        return Output(self._logits[-part.rows :].clone(), hidden)


_Key = tuple[int, int, int, int, LayerPlan | None]
"""Addresses of keys and values, entries they have room for, new tokens, order of layers."""


@dataclass
class _CacheGraphs:
    """What is known of the passes over one cache."""

    seen: Counter[_Key] = field(default_factory=Counter)
    graphs: OrderedDict[_Key, StepGraph] = field(default_factory=OrderedDict)


class GraphedModel(CausalModel):
    """A model whose recurring short passes over bounded caches are recorded and replayed.

    Long passes, those of several texts, those over the full cache and those over very much speculation run
    as they come, and everything does where nothing can be captured: on a CPU, or after a capture has failed.

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
    def forward(self, parts: Sequence[Part], plan: LayerPlan | None = None) -> list[Output]:
        part, cache = parts[0], parts[0].cache
        told = len(cache.held) + part.new.count <= FIXED_SPECULATION
        short = part.new.count <= self.LONGEST and told
        if self._capture is None or len(parts) > 1 or not isinstance(cache, BoundedCache) or not short:
            return super().forward(parts, plan)
        cache.begin(part.new)
        numbers = to_device([*part.positions, *cache.numbers(part.new)], self.device)
        numbers = torch.cat([part.ids(self.device), numbers])
        graph = self._graph(cache, part.new, plan, numbers, self._capture)
        if graph is None:
            return super().forward(parts, plan)
        return [graph.run(numbers, part)]

    def _graph(
        self,
        cache: BoundedCache,
        new: NewTokens,
        plan: LayerPlan | None,
        numbers: Tensor,
        capture: Capture,
    ) -> StepGraph | None:
        """Of the pass that has begun; None where it is to run as it comes."""
        known = self._of_cache.setdefault(cache, _CacheGraphs())
        room = cache.keys.shape[2]
        key = (cache.keys.data_ptr(), cache.values.data_ptr(), room, new.count, plan)
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
            known.graphs[key] = StepGraph(self, cache, new.count, plan, numbers, capture)
        except RuntimeError as error:
            self._give_up(error)
            return None
        if len(known.graphs) > self.MOST:
            known.graphs.popitem(last=False)
        return known.graphs[key]

    def _give_up(self, error: RuntimeError) -> None:
        self._capture = None
        self._of_cache.clear()
        reason = str(error).partition("\n")[0]
        self._on_notice(f"{self.name}: no CUDA graphs, which makes drafting slower: {reason}")
