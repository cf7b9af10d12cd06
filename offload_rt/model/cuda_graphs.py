"""CUDA graphs for passes over bounded caches: one launch instead of hundreds.

Passes with the same number of new tokens over a bounded cache run the same operations on the same memory.
They differ in a few integers: the tokens, their positions, the number of entries, and the bit masks of what
each token sees. These are one tensor on the device, and the other work is captured once and replayed, for
trees as well as chains. `begin` of the cache is called as always, so that it may refresh its entries, grow or
switch to another buffer before a replay.

A graph belongs to a buffer, not to the cache or the sequence that uses it. Passes that will recur are
recorded before a sequence's first pass (`prepare`), once for all sequences that use the buffer in turn.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cpu_kv.mapped import computed_copy
from cpu_kv.streams import capture_section, device_streams
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.bounded import (
    CACHE_INPUTS,
    MASK_WORDS,
    MAX_RECORDED_SPECULATION,
    BoundedCache,
    fixed_shape_attention,
)
from offload_rt.caches.buffers import KVBuffer
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.model.attention_hook import AttentionPass
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.system.device_copies import to_device

Results = tuple[Tensor, Tensor]
"""Logits `[rows, vocabulary]` and states `[rows, state_size]`."""
Compute = Callable[[AttentionPass, Tensor, Tensor, Any, Sequence[int]], Results]
"""Computes a pass that was begun in its cache, see `CausalModel.compute` and `HeadModel.compute`.

Its fourth argument is the order of layers of a model, or the states before the tokens of a head."""
Step = Callable[[], Results]
Capture = Callable[[Step], tuple[Callable[[], object], Results]]
"""Records a step that reads and writes tensors at fixed addresses.

Returns a function that replays it, and the tensors that hold its results afterwards. May run the step any
number of times, or never. Raises RuntimeError if it cannot be recorded.
"""


class CudaCapture:
    """Captures CUDA graphs in one private memory pool, as they never run at the same time."""

    WARM_UP = 2  # libraries initialise themselves at first use, which cannot be captured

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = device_streams(device).capture
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> tuple[Callable[[], object], Results]:
        # Not `torch.cuda.graph`: it waits for the whole device, and leaves the thread on the capture stream
        # if the capture fails.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph, out = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(self.WARM_UP):
                    step()
                with capture_section():
                    # In this thread alone, as another one may be running a pass over the full cache.
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    try:
                        out = step()
                    finally:
                        self._end(graph)
        finally:
            current.wait_stream(self._stream)  # the warm-up has written to the memory of the next pass
        assert out is not None
        return graph.replay, out

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a capture. Raises RuntimeError if it has become invalid."""
        try:
            graph.capture_end()
        except RuntimeError:
            # torch would keep allocating from the pool, and never free memory that several streams have used.
            # Its filter for host memory refers to the graph, so the graph is kept alive.
            _INVALID.append(graph)
            for give_back in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    give_back(self._stream.device.index, self._pool)
            raise


_INVALID: list[torch.cuda.CUDAGraph] = []

_Key = tuple[Compute, int, LayerOrder | None]
"""What computes a pass (very long sequences have another runner), number of new tokens, order of layers."""


Pass = Callable[[Tensor, Tensor | None, PassInput], PassOutput]
"""Runs a recorded pass that was begun in its cache, given the integers and the states that are its own."""


def recorded(
    buffer: KVBuffer,
    backend: AttentionBackend,
    key: _Key,
    numbers: Tensor,
    before: Tensor | None,
    capture: Capture,
) -> Pass:
    """Records passes over a buffer of a bounded cache.

    Args:
        numbers: ids, positions, and `BoundedCache.graph_inputs` of a pass, int64 on the device.
        before: of a head, the states before the tokens, `[count, state_size]`.
    """
    compute, count, order = key
    inputs, states = numbers.clone(), None if before is None else before.clone()
    ids, positions, cache_inputs = inputs.tensor_split([count, 2 * count])

    def step() -> tuple[Tensor, Tensor]:
        attention = fixed_shape_attention(buffer, backend, count, cache_inputs)
        return compute(attention, ids, positions, order if states is None else states, range(count))

    replay, (logits, after) = capture(step)

    def run(numbers: Tensor, before: Tensor | None, pass_input: PassInput) -> PassOutput:
        # By kernels: `copy_` and `clone` would wait for bulk copies in a copy engine.
        computed_copy(numbers, out=inputs)
        if before is not None and states is not None:
            computed_copy(before, out=states)
        replay()
        # Copied, as the next replay overwrites them.
        first = count - pass_input.rows
        wanted = computed_copy(after[first:]) if pass_input.states else None
        return PassOutput(computed_copy(logits[first:]), wanted)

    return run


@dataclass
class _BufferGraphs:
    """The passes seen and recorded over one buffer."""

    passes: Counter[_Key] = field(default_factory=Counter)
    graphs: OrderedDict[_Key, Pass] = field(default_factory=OrderedDict)


class PassGraphs:
    """Records and replays recurring short passes of a model over bounded caches.

    Long passes, and passes over the full cache or over much speculation, are not recorded. Nothing is after a
    capture has failed.

    Args:
        name: of the model in messages.
        device: of the model.
        capture: how to record.
        on_notice: called with why capturing failed.

    Attributes:
        pass_running: returns whether a pass over the full cache runs in another thread. Nothing is captured
            meanwhile, as that would hold it up.
    """

    LONGEST = 32
    """Most new tokens of a recorded pass: more than any useful γ."""
    RARE = 2
    """A pass is recorded after occurring more often than this, as a capture costs several passes."""
    MOST = 12
    """Most graphs per buffer; the least recently used one is dropped. A graph of a large model has some 1,700
    nodes, for which the driver takes 5 to 15 MB of GPU memory (an estimate) that torch does not count."""
    LEAST_FREE = 2**27
    """Bytes of GPU memory that graphs leave free: with less, a new graph takes the place of another one."""

    def __init__(
        self, name: str, device: torch.device, capture: Capture, on_notice: Callable[[str], None]
    ) -> None:
        self._name = name
        self._device = device
        self._capture: Capture | None = capture  # None: one has failed
        self._on_notice = on_notice
        self.pass_running: Callable[[], bool] = lambda: False
        self._of_buffer: WeakKeyDictionary[KVBuffer, _BufferGraphs] = WeakKeyDictionary()

    def of_another(self, name: str) -> PassGraphs:
        """Returns such graphs for passes of another model on the device."""
        others = copy.copy(self)
        others._name = name
        others._of_buffer = WeakKeyDictionary()
        return others

    def forget(self) -> None:
        """Forgets all recorded passes."""
        self._of_buffer.clear()

    def replay(
        self,
        compute: Compute,
        pass_input: PassInput,
        order: LayerOrder | None = None,
        before: Tensor | None = None,
    ) -> PassOutput | None:
        """Replays a pass that was begun in its cache; None: it is neither recorded nor recurring.

        Args:
            before: see `recorded`.
        """
        cache, count = pass_input.cache, pass_input.new.count
        if self._capture is None or not isinstance(cache, BoundedCache) or not cache.recordable:
            return None
        if count > self.LONGEST or len(cache.speculative) + count > MAX_RECORDED_SPECULATION:
            return None
        recordings = self._of_buffer.setdefault(cache.buffer, _BufferGraphs())
        key = (compute, count, order)
        recordings.passes[key] += 1
        recurring = recordings.passes[key] > self.RARE and not self.pass_running()
        if key not in recordings.graphs and not recurring:
            return None
        numbers = to_device([*pass_input.positions, *cache.graph_inputs(pass_input.new)], self._device)
        numbers = torch.cat([pass_input.ids(self._device), numbers])
        graph = self._graph(cache.buffer, cache.backend, key, numbers, before)
        return None if graph is None else graph(numbers, before, pass_input)

    def prepare(
        self,
        compute: Compute,
        cache: BoundedCache,
        counts: Iterable[int],
        order: LayerOrder | None = None,
        before: Tensor | None = None,
    ) -> None:
        """Records passes over `cache`, which is still empty, with these numbers of new tokens.

        Args:
            before: of a head, any state before a token, `[1, state_size]`.
        """
        for count in counts if self._capture is not None and cache.recordable else ():
            if count <= self.LONGEST:
                numbers = to_device(
                    [0] * (2 * count + CACHE_INPUTS) + NewTokens.chain(count).words(MASK_WORDS), self._device
                )
                states = None if before is None else before.repeat(count, 1)
                for buffer in cache.buffers:
                    self._graph(buffer, cache.backend, (compute, count, order), numbers, states)
                    buffer.clear()

    def _graph(
        self, buffer: KVBuffer, backend: AttentionBackend, key: _Key, numbers: Tensor, before: Tensor | None
    ) -> Pass | None:
        """Returns a recorded pass, recording it if necessary; None if nothing can be recorded."""
        graphs = self._of_buffer.setdefault(buffer, _BufferGraphs()).graphs
        if key in graphs:
            graphs.move_to_end(key)
            return graphs[key]
        if self._capture is None or not self._make_room(graphs):
            return None
        try:
            graphs[key] = recorded(buffer, backend, key, numbers, before, self._capture)
        except RuntimeError as error:
            self._capture = None
            self._of_buffer.clear()
            reason = str(error).partition("\n")[0]
            self._on_notice(f"{self._name}: no CUDA graphs, which makes drafting slower: {reason}")
            return None
        return graphs[key]

    def _make_room(self, graphs: OrderedDict[_Key, Pass]) -> bool:
        """Returns whether one more graph may be recorded; drops the least recently used one if need be."""
        full = self._device.type == "cuda" and torch.cuda.mem_get_info(self._device)[0] < self.LEAST_FREE
        if graphs and (full or len(graphs) >= self.MOST):
            graphs.popitem(last=False)
            return True
        return not full
