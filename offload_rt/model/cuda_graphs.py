"""Passes over bounded caches as CUDA graphs: one launch for what are hundreds.

A pass of so many new tokens over a bounded cache runs the same operations on the same memory every time, but
for a few numbers: the tokens, their positions, how many entries the cache has, and which of the speculative
ones each token sees. Those stand in one tensor on the device, and the rest is captured once and replayed: a
tree as well as a chain. The cache is told of every pass as always, so whatever it does in `begin` (choose its
entries anew, grow, turn to another buffer) happens before a replay.

A graph belongs to a buffer, not to the cache or the text that uses it. What is expected to recur is recorded
before a text's first pass (`prepare`), once for all texts that use the buffer after one another.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv.mapped import computed_copy
from cpu_kv.streams import device_streams
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.base import NewTokens
from offload_rt.caches.bounded import (
    CACHE_INPUTS,
    MASK_WORDS,
    MAX_RECORDED_SPECULATION,
    BoundedCache,
    fixed_shape_attention,
)
from offload_rt.caches.buffers import KVBuffer
from offload_rt.host import to_device
from offload_rt.model.architecture import Rotary
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel

Results = tuple[Tensor, Tensor]
Step = Callable[[], Results]
Capture = Callable[[Step], tuple[Callable[[], object], Results]]
"""Records a step, which reads and writes tensors that stay where they are.

Returns what runs it again, and the tensors in which its results stand then. The step may run now, any number
of times or never. Raises RuntimeError where it cannot be recorded.
"""


class CudaCapture:
    """Captures CUDA graphs, all in one private memory pool: they never run at the same time."""

    WARM_UP = 2  # libraries set themselves up at first use, which cannot be captured

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = device_streams(device).capture
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[Callable[[], object], Results]:
        # Not `torch.cuda.graph`: it waits for the whole device, and leaves the thread on the capture stream
        # where a capture fails.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph, out = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(self.WARM_UP):
                    step()
                # Of this thread alone: another one may be in the middle of a pass over the full cache.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    out = step()
                finally:
                    self._end(graph)
        finally:
            current.wait_stream(self._stream)  # the warm-up has written where the next pass does
        assert out is not None
        return graph.replay, out

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. One that has become invalid raises RuntimeError."""
        try:
            graph.capture_end()
        except RuntimeError:
            # torch leaves allocation to the pool open then, and from there on would never give back memory
            # that several streams have used. Its filter for host memory refers to the graph, which stays.
            _INVALID.append(graph)
            for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    give_back(self._stream.device.index, self._pool)
            raise


_INVALID: list[torch.cuda.CUDAGraph] = []

_Key = tuple[int, LayerPlan | None, Rotary]
"""New tokens, order of layers, and rotary frequencies, which very long texts have others of."""


Pass = Callable[[Tensor, PassInput], PassOutput]
"""A recorded pass of one text's part, which has begun in its cache, with the numbers that are its own."""


def recorded(
    model: CausalModel,
    buffer: KVBuffer,
    backend: AttentionBackend,
    key: _Key,
    numbers: Tensor,
    capture: Capture,
) -> Pass:
    """Passes over a buffer of a bounded cache.

    Args:
        numbers: tokens, positions, and what the cache says of a pass (`BoundedCache.numbers`).
    """
    count, plan, _ = key
    inputs = numbers.clone()
    ids, positions, of_cache = inputs.tensor_split([count, 2 * count])

    def step() -> tuple[Tensor, Tensor]:
        frame = fixed_shape_attention(buffer, backend, count, of_cache)
        hidden = model.compute(frame, ids, positions, plan, range(count))
        return model.logits(hidden), hidden[0]

    replay, (logits, hidden) = capture(step)

    def run(numbers: Tensor, part: PassInput) -> PassOutput:
        # By kernels: `copy_` and `clone` would use a copy engine, which has bulk copies to make.
        computed_copy(numbers, out=inputs)
        replay()
        # Copied: the next replay writes there.
        states = computed_copy(hidden[-part.rows :]) if part.hidden else None
        return PassOutput(computed_copy(logits[-part.rows :]), states)

    return run


@dataclass
class _BufferGraphs:
    """What is known of the passes over one buffer."""

    seen: Counter[_Key] = field(default_factory=Counter)
    graphs: OrderedDict[_Key, Pass] = field(default_factory=OrderedDict)


class GraphedModel(CausalModel):
    """A model whose recurring short passes over bounded caches are recorded and replayed.

    Long passes, those of several texts, those over the full cache and those over very much speculation run
    as they come, and everything does where nothing can be captured: on a CPU, or after a capture has failed.

    Args:
        on_notice: told, once, why nothing is captured.
        capture: how to record; None: as CUDA graphs on a GPU, not at all on a CPU.

    Attributes:
        pass_running: returns whether a pass over the full cache runs in another thread. A capture would hold
            it up, so none is made meanwhile.
    """

    LONGEST = 32
    """New tokens in a pass: more than any γ that pays."""
    RARE = 2
    """A capture costs several passes: a shape that came no more often than this is not worth one."""
    MOST = 64
    """Graphs of one buffer; the one that was unused for longest goes."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        on_notice: Callable[[str], None],
        capture: Capture | None = None,
    ) -> None:
        super().__init__(model, name)
        if capture is None and self.device.type == "cuda" and not self.remote_mlps:
            capture = CudaCapture(self.device)
        self.pass_running: Callable[[], bool] = lambda: False
        self._capture = capture  # None, too, after one has failed
        self._on_notice = on_notice
        self._of_buffer: WeakKeyDictionary[KVBuffer, _BufferGraphs] = WeakKeyDictionary()

    @torch.inference_mode()
    def forward(self, parts: Sequence[PassInput], plan: LayerPlan | None = None) -> list[PassOutput]:
        part, cache = parts[0], parts[0].cache
        told = len(cache.speculative) + part.new.count <= MAX_RECORDED_SPECULATION
        alone = len(parts) == 1 and part.new.count <= self.LONGEST and told
        if self._capture is None or not alone or not isinstance(cache, BoundedCache) or not cache.recordable:
            return super().forward(parts, plan)
        cache.begin(part.new)
        numbers = to_device([*part.positions, *cache.graph_inputs(part.new)], self.device)
        numbers = torch.cat([part.ids(self.device), numbers])
        known = self._of_buffer.setdefault(cache.buffer, _BufferGraphs())
        key = (part.new.count, plan, self._rotary)
        known.seen[key] += 1
        if key in known.graphs or (known.seen[key] > self.RARE and not self.pass_running()):
            graph = self._graph(cache.buffer, cache.backend, key, numbers)
            if graph is not None:
                return [graph(numbers, part)]
        return super().forward(parts, plan)

    @torch.inference_mode()
    def prepare(self, cache: BoundedCache, counts: Iterable[int], plan: LayerPlan | None) -> None:
        for count in counts if self._capture is not None and cache.recordable else ():
            if count <= self.LONGEST:
                numbers = to_device(
                    [0] * (2 * count + CACHE_INPUTS) + NewTokens.chain(count).words(MASK_WORDS), self.device
                )
                for buffer in cache.buffers:
                    self._graph(buffer, cache.backend, (count, plan, self._rotary), numbers)
                    buffer.clear()

    def _graph(self, buffer: KVBuffer, backend: AttentionBackend, key: _Key, numbers: Tensor) -> Pass | None:
        """Recorded now, if it was not before; None where nothing can be."""
        graphs = self._of_buffer.setdefault(buffer, _BufferGraphs()).graphs
        if key in graphs:
            graphs.move_to_end(key)
            return graphs[key]
        if self._capture is None:
            return None
        try:
            graphs[key] = recorded(self, buffer, backend, key, numbers, self._capture)
        except RuntimeError as error:
            self._capture = None
            self._of_buffer.clear()
            reason = str(error).partition("\n")[0]
            self._on_notice(f"{self.name}: no CUDA graphs, which makes drafting slower: {reason}")
            return None
        if len(graphs) > self.MOST:
            graphs.popitem(last=False)
        return graphs[key]
