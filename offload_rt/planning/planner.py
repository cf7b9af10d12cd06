"""What goes where, and how fast that will be: decided and predicted before anything is loaded.

Of all placements that fit, the one with the least predicted time a token is taken: how much of the context
the CPU attends, how deep the staging ring is, and how many tokens are drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offload_rt.config import Config
from offload_rt.planning.assumptions import machine, reckoning
from offload_rt.planning.placement import (
    Placement,
    PlanRequest,
    gpu_memory,
    host_memory,
    resident_capacity,
    shortage,
)
from offload_rt.planning.prediction import Predictor
from offload_rt.planning.sharing import choices

MOST_GPUS = 8
SMALLEST_BUDGET_SHARE = 0.25  # of the config's: a smaller cache would be another composition


@dataclass(frozen=True)
class Prediction:
    """Times of a plan, in ms; `plain_ms_per_token` is for the same placement without speculation."""

    pass_ms: float
    draft_ms: float
    round_ms: float
    tokens_per_round: float
    ms_per_token: float
    prefill_ms: float
    bottleneck: str
    plain_ms_per_token: float


@dataclass(frozen=True)
class Plan:
    """What goes where, and what that costs.

    Attributes:
        request: as it was asked.
        config: with the retrieval budget, ring and γ2 of the plan.
        refusal: why it does not fit, and the nearest plans that do; None where it fits.
        gpus, host: bytes of memory by part.
        predicted: None where it does not fit.
        assumptions: what the figures rest on, as sentences.
    """

    request: PlanRequest
    config: Config
    placement: Placement
    refusal: str | None
    gpus: tuple[dict[str, int], ...]
    host: dict[str, int]
    predicted: Prediction | None
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.refusal is None

    def to_json(self) -> dict[str, object]:
        """As JSON values; `refusal` is there only where the plan does not fit."""
        names = Prediction.__dataclass_fields__
        report: dict[str, object] = {
            "fits": self.fits,
            "placement": self.placement.to_json(),
            "memory": {"gpus": [dict(parts) for parts in self.gpus], "host": dict(self.host)},
            "predicted": {name: getattr(self.predicted, name, None) for name in names},
            "assumptions": list(self.assumptions),
        }
        return report if self.fits else report | {"refusal": self.refusal}


def plan(request: PlanRequest) -> Plan:
    """The fastest placement that fits, or why there is none and what comes nearest."""
    fitting = _with_fitting_budget(request)
    if fitting is None:
        store, context = request.config.store, request.context
        cpu = context if request.in_place else 0
        placement = Placement(0, cpu, context - cpu, store.ring_buffers, store.segment_tokens, request.target)
        why = f"{shortage(request)}; {_nearest(request)}"
        return _plan(request, request.config, placement, why, None, machine(request))
    predictor = Predictor(fitting)
    placement, best = min(choices(predictor), key=lambda found: found[1].ms_per_token)
    config = replace(fitting.config, store=replace(fitting.config.store, ring_buffers=placement.ring_buffers))
    if fitting.levels:
        speculation = replace(config.speculation, levels=fitting.levels, gamma2=best.gamma)
        config = replace(config, speculation=speculation)
    plain = predictor.verification(placement, 0)
    predicted = Prediction(
        pass_ms=best.verification.ms,
        draft_ms=best.draft.ms,
        round_ms=best.ms,
        tokens_per_round=best.tokens,
        ms_per_token=best.ms_per_token,
        prefill_ms=predictor.prefill_ms(),
        bottleneck=predictor.bottleneck(best),
        plain_ms_per_token=plain.ms,
    )
    said = (*machine(request), *reckoning(request, fitting, placement, best, plain.ms))
    return _plan(request, config, placement, None, predicted, said)


def _plan(
    request: PlanRequest,
    config: Config,
    placement: Placement,
    refusal: str | None,
    predicted: Prediction | None,
    assumptions: tuple[str, ...],
) -> Plan:
    planned = replace(request, config=config)
    gpus = tuple(
        {
            "resident_kv": placement.resident_bytes // planned.parts,
            **gpu_memory(planned, number, placement.ring_buffers),
        }
        for number in range(len(planned.hardware.gpus))
    )
    host = host_memory(planned)
    return Plan(request, config, placement, refusal, gpus, host, predicted, assumptions)


# What comes nearest.


def _with_fitting_budget(request: PlanRequest) -> PlanRequest | None:
    """The request, with a smaller retrieved cache if only that fits; None if nothing does."""
    if shortage(request) is None:
        return request
    least = int(SMALLEST_BUDGET_SHARE * request.config.retrieval.budget)
    budget = _largest_budget(request)
    return request.with_budget(budget) if budget >= max(1, least) else None


def _largest_budget(request: PlanRequest) -> int:
    """Entries of the largest retrieved cache that fits, below the config's; 0 where none does."""
    if not request.retrieves:
        return 0
    retrieval = request.config.retrieval
    chunk, least = retrieval.chunk, retrieval.chunk + retrieval.recent
    sizes = [least, *range((least // chunk + 1) * chunk, retrieval.budget, chunk)]
    count = _most(len(sizes), lambda n: shortage(request.with_budget(sizes[n - 1])) is None)
    return sizes[count - 1] if count else 0


def _nearest(request: PlanRequest) -> str:
    """Plans that fit and differ in one thing, as the end of a sentence."""
    others = []
    page = request.config.store.page
    pages = _most(
        (request.context - 1) // page,
        lambda n: _with_fitting_budget(request.with_context(n * page)) is not None,
    )
    if pages:
        others.append(f"a context of {pages * page} tokens")
    if request.given_resident:
        resident = resident_capacity(request, request.config.store.ring_buffers)
        offload = replace(request.config.offload, resident_tokens=resident)
        fewer = replace(request, config=replace(request.config, offload=offload))
        if resident < request.given_resident and shortage(fewer) is None:
            others.append(f"--set offload.resident_tokens={resident}")
    if budget := _largest_budget(request):
        others.append(f"--set retrieval.budget={budget}")
    gpus = request.hardware.gpus
    for count in range(len(gpus) + 1, MOST_GPUS + 1 if gpus else 0):
        if request.target.kv_heads % count or request.target.heads % count:
            continue
        hardware = replace(request.hardware, gpus=(*gpus, *gpus[:1] * (count - len(gpus))))
        if _with_fitting_budget(replace(request, hardware=hardware)) is not None:
            others.append(f"{count} such GPUs")
            break
    if request.target.dtype == torch.float32:
        target, draft = (
            shape and replace(shape, dtype=torch.bfloat16) for shape in (request.target, request.draft)
        )
        assert target is not None
        if _with_fitting_budget(replace(request, target=target, draft=draft)) is not None:
            others.append("--dtype bfloat16")
    if not others:
        return "no shorter context, more GPUs or smaller numbers fit either: take a smaller model"
    return f"what fits: {', or '.join(others)}"


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 .. limit that fits, where all smaller ones fit too; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
