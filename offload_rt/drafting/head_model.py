"""Runs passes of a draft head over the caches of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NoReturn, cast

import torch
from torch import Tensor

from offload_rt.caches.head import HeadCache
from offload_rt.caches.target_states import TargetStates
from offload_rt.config.schema import AUTO, NO_DRAFT, HeadConfig
from offload_rt.errors import UsageError
from offload_rt.model.attention_hook import AttentionPass
from offload_rt.model.cuda_graphs import PassGraphs
from offload_rt.model.decoder import NotANumber
from offload_rt.model.draft_head import DraftHead
from offload_rt.model.head_files import load_head
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.local_heads import find_head
from offload_rt.model.passes import BatchedAttention, PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.system.device_copies import joined, to_device


class HeadModel:
    """A head: a `work.Model` over `HeadCache`s.

    A token needs the state of its parent, so a pass over tokens below each other is computed in parts, unless
    the target's states before them are given.

    Args:
        graphs: record and replay recurring passes; None: every pass is computed.
    """

    def __init__(self, head: DraftHead, name: str, graphs: PassGraphs | None = None) -> None:
        self.name = name
        self.head = head
        self.graphs = graphs
        self.dtype = head.dtype
        self.device = head.rotary_frequencies.device

    @torch.inference_mode()
    def forward(self, inputs: Sequence[PassInput], order: LayerOrder | None = None) -> list[PassOutput]:
        """Runs one pass of new tokens of several sequences; their KV is pending in the caches afterwards."""
        ends, found = [_ends(one) for one in inputs], [list[PassOutput]() for _ in inputs]
        for part in range(max(map(len, ends))):
            running = [number for number, stops in enumerate(ends) if part < len(stops)]
            parts = [_begun(inputs[number], ends[number], part) for number in running]
            for number, output in zip(running, self._forward_part(parts), strict=True):
                found[number].append(output)
        return [_joined(one, outputs) for one, outputs in zip(inputs, found, strict=True)]

    def _forward_part(self, inputs: Sequence[PassInput]) -> list[PassOutput]:
        """Runs tokens none of which needs the state of another one."""
        caches = [cast(HeadCache, one.cache) for one in inputs]
        before = joined([_states_before(one) for one in inputs])
        if len(inputs) == 1 and self.graphs is not None:
            whole = replace(inputs[0], rows=inputs[0].new.count, states=True)
            if (output := self.graphs.replay(self.compute, whole, before=before)) is not None:
                assert output.states is not None
                caches[0].pending = output.states
                first = len(before) - inputs[0].rows
                return [PassOutput(output.logits[first:], output.states[first:])]
        batch = BatchedAttention(inputs)
        attention: AttentionPass = caches[0] if len(inputs) == 1 else batch
        ids = joined([one.ids(self.device) for one in inputs])
        positions = to_device([at for one in inputs for at in one.positions], self.device)
        rows, start = list[int](), 0
        for one in inputs:
            start += one.new.count
            rows += range(start - one.rows, start)
        states = self.head(self.head.embed(ids), before, positions, attention.attend)
        for cache, own in zip(caches, states.split([one.new.count for one in inputs]), strict=True):
            cache.pending = own
        wanted = states if len(rows) == len(states) else states[to_device(rows, self.device)]
        logits = self.head.logits(wanted) if rows else wanted[:0]
        counts = [one.rows for one in inputs]
        split = zip(logits.split(counts), wanted.split(counts), batch.errors, strict=True)
        return [PassOutput(*parts) for parts in split]

    def compute(
        self,
        attention: AttentionPass,
        ids: Tensor,
        positions: Tensor,
        before: Tensor,
        rows: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Computes logits `[tokens, vocabulary]` and states `[tokens, state_size]`, after `begin`.

        Args:
            before: states before the tokens, `[tokens, state_size]`.
        """
        states = self.head(self.head.embed(ids), before, positions, attention.attend)
        return self.head.logits(states), states

    @torch.inference_mode()
    def prepare(self, cache: HeadCache, counts: Iterable[int]) -> None:
        """Records recurring passes of `counts` tokens over `cache`, which is still empty."""
        if self.graphs is not None:
            self.graphs.prepare(self.compute, cache, counts, before=cache.states)

    def raise_nan(self, pass_input: PassInput) -> NoReturn:
        raise NotANumber(
            f"{self.name}: its logits are NaN with {self.dtype}; try a wider dtype, or another head"
        )


def _ends(one: PassInput) -> list[int]:
    """Returns the ends of the parts of a pass: a token whose parent's state is missing begins a new part."""
    held, given = len(one.cache.speculative), 0 if one.before is None else len(one.before)
    start, ends = 0, list[int]()
    for at, parent in enumerate(one.new.parents):
        if at >= given and parent >= held + start and at > start:
            ends.append(at)
            start = at
    return [*ends, one.new.count]


def _begun(one: PassInput, ends: Sequence[int], part: int) -> PassInput:
    """Begins a part of a pass over its cache, which takes the part before."""
    cache, start, stop = cast(HeadCache, one.cache), ends[part - 1] if part else 0, ends[part]
    if start:
        cache.commit(range(start))
    new = one.new if len(ends) == 1 else one.new.part(start, stop)
    before = None if one.before is None else one.before[start:stop]
    given = 0 if before is None else len(before)
    cache.begin_part(new, [at < given for at in range(new.count)], start)
    rows = max(0, stop - max(start, one.new.count - one.rows))
    return PassInput(cache, new, rows, True, before)


def _joined(one: PassInput, outputs: Sequence[PassOutput]) -> PassOutput:
    """Returns the output of a pass from those of its parts."""
    error = next((output.error for output in outputs if output.error is not None), None)
    wanted = [output for output in outputs if len(output.logits)] or outputs[-1:]  # others have no rows
    states = joined([output.states for output in wanted if output.states is not None])
    return PassOutput(joined([output.logits for output in wanted]), states if one.states else None, error)


def _states_before(one: PassInput) -> Tensor:
    """Returns the states before the tokens of a part, `[tokens, state_size]`."""
    cache, given = cast(HeadCache, one.cache), 0 if one.before is None else len(one.before)
    pieces = [] if one.before is None else [one.before]
    if given < one.new.count:
        rows = [1 + parent for parent in one.new.parents[given:]]
        pieces.append(cache.states[to_device(rows, cache.states.device)])
    return joined(pieces)


class Heads:
    """The head of a target, which is loaded once."""

    def __init__(self) -> None:
        self._models: dict[str, HeadModel] = {}

    def of(self, config: HeadConfig, target: CausalModel) -> HeadModel:
        """Returns the head that a config names.

        Raises:
            UsageError: there is none; see also `model.head_files.load_head`.
        """
        if config.path not in self._models:
            path = find_head(target.name, target.module.config) if config.path == AUTO else config.path
            if path is None or path == NO_DRAFT:
                raise UsageError(
                    f"{target.name} has no draft head in its checkpoint, and none for it was found in the"
                    " hub's cache and the settings' folders: name one with --head or head.path, or use"
                    " config retrieval or lookup"
                )
            if path not in self._models:
                head, name = load_head(path, target), f"head {path}"
                target.tap(head.tap)
                graphs = None if target.graphs is None else target.graphs.of_another(name)
                self._models[path] = HeadModel(head, name, graphs)
            self._models[config.path] = self._models[path]
        return self._models[config.path]

    def states(self, config: HeadConfig) -> TargetStates | None:
        """Returns a place for the states of a sequence of the target; None: no head is loaded."""
        head = next((model.head for model in self._models.values()), None)
        if head is None:
            return None
        device = head.rotary_frequencies.device
        window = config.window or head.window
        return TargetStates(head.tap.name, config.sinks, window, head.state_size, head.dtype, device)

    @property
    def weight_bytes(self) -> int:
        return sum(model.head.weight_bytes for model in set(self._models.values()))
