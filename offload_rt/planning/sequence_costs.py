"""Predicted times of passes and drafts, for the controller of a sequence while it is decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from offload_rt.caches.sizes import GpuTier, Tiers
from offload_rt.config.draft_shape import DraftShape
from offload_rt.planning.cost_model import CostModel
from offload_rt.planning.memory import Placement
from offload_rt.planning.request import PlanRequest

LENGTH_STEP = 1.1  # costs are predicted anew when a sequence has grown by this factor


class SequenceCosts:
    """Predicted times of passes and drafts of one composition over one sequence at any length.

    Args:
        request: the composition, models and machine; its context is the first length.
        tiers: where the sequence's KV lies.
    """

    def __init__(self, request: PlanRequest, tiers: Tiers) -> None:
        self.request = request
        self._tiers = tiers
        self._predicted: dict[tuple[object, ...], tuple[float, float, CostModel]] = {}

    def pass_ms(self, length: int, shape: DraftShape) -> float:
        """Time in ms to verify a draft of `shape` behind `length` tokens."""
        return self._costs(length, shape)[0]

    def draft_ms(self, length: int, shape: DraftShape) -> float:
        """Time in ms to make such a draft."""
        return self._costs(length, shape)[1]

    def ahead_ms(self, length: int, shape: DraftShape, outcomes: int) -> Sequence[float]:
        """Times in ms at which such drafts for several outcomes of a pass are complete."""
        return self._costs(length, shape)[2].ahead_ms(shape, outcomes)

    def _costs(self, length: int, shape: DraftShape) -> tuple[float, float, CostModel]:
        step = round(math.log(max(1, length), LENGTH_STEP))
        key = step, shape.kind, shape.depth, shape.widths, shape.nodes
        if key not in self._predicted:
            context = max(1, min(round(LENGTH_STEP**step), self.request.target.max_positions))
            costs = CostModel(replace(self.request, context=context, new_tokens=0))
            verification = costs.verification(self._placement(context), shape)
            self._predicted[key] = verification.ms, costs.draft(shape).ms, costs
        return self._predicted[key]

    def _placement(self, length: int) -> Placement:
        """Returns the placement of so many tokens."""
        remaining, tiers = length, self._tiers
        resident = min(remaining, tiers.resident_tokens)
        cpu = min(remaining - resident, tiers.cpu_tokens)
        remaining -= resident + cpu
        gpus = []
        for gpu in tiers.gpus:
            gpu_resident = min(remaining, gpu.resident_tokens)
            streamed = min(remaining - gpu_resident, gpu.streamed_tokens)
            gpus.append(GpuTier(gpu_resident, streamed))
            remaining -= gpu_resident + streamed
        packed = tiers.packed and self.request.store_layout.packed
        return Placement(resident, cpu, remaining, self.request.target, tuple(gpus), packed)
