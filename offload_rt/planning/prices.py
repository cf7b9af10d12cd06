"""Predicted times of passes and drafts, for the controller of a sequence while it is decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from offload_rt.caches.sizes import GpuTier, Tiers
from offload_rt.config.draft_shape import DraftShape
from offload_rt.planning.placement import Placement, PlanRequest
from offload_rt.planning.prediction import Predictor
from offload_rt.system.hardware import NO_GPU, Gpu, Hardware, named_hardware

LENGTH_STEP = 1.1  # a sequence that has grown by this factor is priced anew
UNKNOWN_LINK = 25.0  # GB/s of a link whose rate is not known


class Prices:
    """Predicted times of passes and drafts of one composition over one sequence at any length.

    Args:
        request: the composition, models and machine; its context is the length that is priced first.
        tiers: where the sequence's KV lies.
    """

    def __init__(self, request: PlanRequest, tiers: Tiers) -> None:
        self.request = request
        self._tiers = tiers
        self._found: dict[tuple[object, ...], tuple[float, float, Predictor]] = {}

    def pass_ms(self, length: int, shape: DraftShape) -> float:
        """Time in ms to verify a draft of `shape` behind `length` tokens."""
        return self._price(length, shape)[0]

    def draft_ms(self, length: int, shape: DraftShape) -> float:
        """Time in ms to make such a draft."""
        return self._price(length, shape)[1]

    def ahead_ms(self, length: int, shape: DraftShape, outcomes: int) -> Sequence[float]:
        """Times in ms at which such drafts for several outcomes of a pass are complete."""
        return self._price(length, shape)[2].ahead_ms(shape, outcomes)

    def _price(self, length: int, shape: DraftShape) -> tuple[float, float, Predictor]:
        step = round(math.log(max(1, length), LENGTH_STEP))
        key = step, shape.kind, shape.depth, shape.widths, shape.nodes
        if key not in self._found:
            priced = max(1, min(round(LENGTH_STEP**step), self.request.target.max_positions))
            predictor = Predictor(replace(self.request, context=priced, new_tokens=0))
            verification = predictor.verification(self._placement(priced), shape)
            self._found[key] = verification.ms, predictor.draft(shape).ms, predictor
        return self._found[key]

    def _placement(self, length: int) -> Placement:
        """Returns the placement of so many tokens."""
        left, tiers = length, self._tiers
        resident = min(left, tiers.resident_tokens)
        cpu = min(left - resident, tiers.cpu_tokens)
        left -= resident + cpu
        gpus = []
        for gpu in tiers.gpus:
            kept = min(left, gpu.resident_tokens)
            streamed = min(left - kept, gpu.streamed_tokens)
            gpus.append(GpuTier(kept, streamed))
            left -= kept + streamed
        packed = tiers.packed and self.request.stored.packed
        return Placement(resident, cpu, left, self.request.target, tuple(gpus), packed)


@lru_cache
def behind_a_link(rate: float | None, others: int = 0) -> Hardware:
    """Returns the hardware that an emulated link stands for: the host's processor at its end, as a GPU.

    Args:
        rate: GB/s of the link; None: not known.
        others: number of further such processors, each with its link.
    """
    host = named_hardware(NO_GPU).host
    link = rate or UNKNOWN_LINK
    processor = Gpu(
        name="the processor behind a link",
        memory_bytes=host.memory_bytes,
        memory_rate=host.attention[0].rate / 2,  # a pass and the drafts beside it share the cores
        compute_rate=host.compute_rate / 2e3,
        to_device_rate=link,
        to_host_rate=link,
        launch_ms=host.launch_ms,
        verdict_ms=0.0,
    )
    return Hardware(host, (processor,) * (1 + others), measured=False)
