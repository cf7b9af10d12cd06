"""Chooses the placement of KV and weights and predicts its speed, before anything is loaded.

Of all placements that fit, the planner takes the one with the least predicted time per token: how much of the
context the CPU attends, how many tokens are drafted, how many entries are retrieved for drafting, and whether
a refresh of them fills a second buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from math import ceil, inf

from cpu_kv import ElementType
from offload_rt.config.priors import SMALL_MODEL_ACCEPTANCE
from offload_rt.config.schema import Config
from offload_rt.drafting.levels.base import Memory, possible
from offload_rt.errors import UsageError
from offload_rt.model.quantization import NF4, Quantization
from offload_rt.model.shape import ModelShape
from offload_rt.planning import assumptions
from offload_rt.planning.cost_model import CostModel, RoundTime
from offload_rt.planning.memory import RESERVE_SHARE, MemoryBudget, Placement
from offload_rt.planning.placement import best_round
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, Hardware

SMALLEST_BUDGET_SHARE = 0.25  # of the config's: a smaller cache would be another composition
THRIFTY = (("store.segment_bytes", 16 * 2**20), ("prefill.chunk", 512), ("retrieval.rest", False))
"""What saves memory and costs little time, given up in this order where memory is short."""
BUDGETS = tuple(2**power for power in range(10, 17))
"""Sizes of a retrieved cache to choose among."""
DRAFT_BITS = 8
"""Bits of retrieved entries on a GPU, which decodes them for nothing. On the demo pair and two books, 8 bits
lose at most 0.001 of acceptance, and 4 bits no less than half as many entries in 8 do."""
QUANTIZE = f"--quantize {NF4}"
"""The flag that takes the least memory for weights."""
PLANES = "--set weights.planes=on"
"""The flag that takes three quarters of the memory for weights, without loss."""
NOTHING_FITS = (
    "no shorter context, quantised weights, more GPUs or smaller numbers fit either: take a smaller model"
)


@dataclass(frozen=True)
class Prediction:
    """Predicted times in ms, tokens per round, and tokens of the pieces in which the prompt is read.

    `piece_tokens` is 0 where it is read in one piece.
    """

    pass_ms: float
    draft_ms: float
    round_ms: float
    tokens_per_round: float
    ms_per_token: float
    prefill_ms: float
    piece_tokens: int
    bottleneck: str
    plain_ms_per_token: float  # of the fastest plan without speculation


@dataclass(frozen=True)
class Plan:
    """A placement with its predicted times, or the reason why nothing fits."""

    request: PlanRequest  # with the retrieved cache that was chosen
    placement: Placement
    gamma: int  # tokens of a draft, γ2
    refusal: str | None  # why it does not fit, and the nearest plan that does; None where it fits
    predicted: Prediction | None  # None where it does not fit
    assumptions: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def ms_per_token(self) -> float:
        """Predicted ms per token; infinite where it does not fit."""
        return self.predicted.ms_per_token if self.predicted else inf

    @property
    def group_devices(self) -> int:
        """Number of devices that attention blocks of layers in groups run on; 0 without such groups."""
        return max(1, self.request.config.offload.group_devices) if self.request.groups else 0

    @cached_property
    def memory(self) -> MemoryBudget:
        """What is needed of each memory."""
        return MemoryBudget(self.request)

    @property
    def gpus(self) -> list[Memory]:
        """Bytes that each GPU holds, by purpose."""
        if self.request.in_place:
            return []
        placement = self.placement
        resident = placement.resident_tokens, *(gpu.resident_tokens for gpu in placement.gpus)
        return [self.memory.gpu(number, tokens) for number, tokens in enumerate(resident)]

    @property
    def host(self) -> Memory:
        """Bytes that the host holds, by purpose."""
        return self.memory.host

    def check(self) -> Prediction:
        """Returns the prediction. Raises UsageError where the plan does not fit."""
        if self.predicted is None:
            model, context = self.request.target.name, self.request.context
            raise UsageError(f"{model} at {context} tokens does not fit: {self.refusal}")
        return self.predicted

    def to_json(self) -> dict[str, object]:
        """Returns JSON values; `refusal` is there only where the plan does not fit."""
        unknown = dict.fromkeys(field.name for field in fields(Prediction))
        request, placement = self.request, self.placement
        place = "stream" if request.refreshes_from_stream else "store"
        store, kinds = request.config.store, request.target.kinds
        retrieved = {
            "budget": request.config.retrieval.budget,
            "bits": request.config.retrieval.entry_bits,
            "refresh_from": place,
        }
        report: dict[str, object] = {
            "fits": self.fits,
            "config": request.config.name,
            "retrieved": retrieved if request.retrieves else None,
            "layers": {
                "paged": len(kinds.full),
                "sliding_windows": len(kinds.windowed),
                "recurrent_states": len(kinds.recurrent),
            },
            "placement": {
                "resident_bytes": placement.resident_bytes,
                "streamed_bytes": placement.streamed_bytes,
                "cpu_attended_bytes": placement.cpu_attended_bytes,
                "ring_bytes": request.ring_bytes,
                "resident_tokens": placement.resident_tokens,
                "streamed_tokens": placement.streamed_tokens,
                "ring_buffers": store.ring_buffers,
                "segment_tokens": request.segment_tokens,
                "cpu_attended_tokens": placement.cpu_tokens,
                "other_gpus": [asdict(gpu) for gpu in placement.gpus],
                "remote_mlps": self.memory.remote_mlps,
                "group_devices": self.group_devices,
            },
            "memory": {"gpus": self.gpus, "host": self.host},
            "predicted": asdict(self.predicted) if self.predicted else unknown,
            "assumptions": list(self.assumptions),
        }
        return report if self.fits else report | {"refusal": self.refusal}


def requests_for(
    configs: Sequence[Config],
    target: ModelShape,
    draft: ModelShape | None,
    sizes: tuple[int, int],
    hardware: Hardware,
    expected_acceptance: float | None = None,
    small_model_acceptance: float = SMALL_MODEL_ACCEPTANCE,
) -> list[PlanRequest]:
    """Returns a request for each config that the models allow.

    Args:
        draft: gets the dtype of the target.
        sizes: tokens of the prompt, and new ones.
    """
    expected = expected_acceptance, small_model_acceptance
    small = None if draft is None else replace(draft, dtype=target.dtype)
    candidates = possible(configs, draft is not None, bool(target.paged_layers))
    return [PlanRequest(target, small, config, *sizes, hardware, *expected) for config in candidates]


def plan(request: PlanRequest) -> Plan:
    """Returns the fastest placement that fits, or why there is none and what comes nearest."""
    return ranked([request])[0]


def ranked(requests: Iterable[PlanRequest]) -> list[Plan]:
    """Returns plans of several compositions, the fastest first; those that do not fit come last.

    Where none fits, there is one plan: it says why, and which change of any of them comes nearest.
    """
    candidates = list(requests)
    plans = sorted(map(_fastest, candidates), key=lambda plan: plan.ms_per_token)
    return plans if plans[0].fits else [_refused(candidates)]


def _fastest(request: PlanRequest) -> Plan:
    """Returns the fastest placement of one composition, or the memory that is too small."""
    models = {way: CostModel(fitting) for way, fitting in _fitting_ways(request).items()}
    if not models:
        way = _ways(request)[0]
        return _unplanned(way, str(MemoryBudget(way).shortage))
    rounds = {way: best_round(costs) for way, costs in models.items()}
    best = min(rounds, key=lambda way: rounds[way].ms_per_token)
    return _planned(best, models[best], rounds[best])


def _fitting_ways(request: PlanRequest) -> dict[PlanRequest, PlanRequest]:
    """Returns the ways that fit, with the sizes that do.

    Weights are in planes where that is faster, but what fits depends on it only if the config says so:
    whether the kernels gain is known once the weights are loaded.
    """
    fitting = {way: sizes for way in _ways(request) if (sizes := _fitting(way))}
    given = request.config.weights.planes == "on"
    return fitting if given or not all(way.target.planes for way in fitting) else {}


def _ways(request: PlanRequest) -> list[PlanRequest]:
    """Returns the request with each value of the keys that its config leaves to the planner."""
    ways = [request]
    for key, values in _choices(request):
        ways = [way.having(key, value) for way in ways for value in values]
    return ways


def _choices(request: PlanRequest) -> Iterator[tuple[str, Sequence[object]]]:
    """Yields the keys that the config leaves to the planner, and their values."""
    retrieval, offload = request.config.retrieval, request.config.offload
    if request.chooses_budget:
        least = max(retrieval.always_held, BUDGETS[0])
        yield "retrieval.budget", [least, *(size for size in BUDGETS if least < size < 2 * request.context)]
    if request.retrieves and not request.in_place:
        if retrieval.bits == "auto":
            yield "retrieval.bits", [DRAFT_BITS]
        if offload.refresh_from == "auto":
            yield "offload.refresh_from", ["store", "stream"]
    if offload.group_devices == 0 and request.groups:
        yield "offload.group_devices", [1, 2]
    if request.config.weights.planes == "auto" and request.may_split_weights:
        yield "weights.planes", ["off", "on"]


def _unplanned(request: PlanRequest, refusal: str) -> Plan:
    placement = MemoryBudget(request).placement(0, request.context if request.in_place else 0)
    return Plan(request, placement, 0, refusal, None, tuple(assumptions.machine(request)))


def _planned(request: PlanRequest, costs: CostModel, best: RoundTime) -> Plan:
    """Returns the plan for a request, of whose sizes those of `costs` fit, with its best round."""
    fitting = costs.request
    plain = _fitting(request.having("speculation.levels", ())) or fitting.having("speculation.levels", ())
    predicted = Prediction(
        pass_ms=best.verification.ms,
        draft_ms=best.draft.ms,
        round_ms=best.ms,
        tokens_per_round=best.tokens,
        ms_per_token=best.ms_per_token,
        prefill_ms=costs.prefill_ms(),
        piece_tokens=costs.piece_tokens(),
        bottleneck=costs.bottleneck(best),
        plain_ms_per_token=best_round(CostModel(plain)).ms_per_token,
    )
    predictions = assumptions.predictions(request, fitting, best, predicted.plain_ms_per_token)
    notes = (*assumptions.machine(fitting), *predictions)
    return Plan(fitting, best.verification.placement, best.verification.gamma, None, predicted, notes)


def with_budget(request: PlanRequest) -> PlanRequest:
    """Returns the request with as many retrieved entries as its plan has, and otherwise as it is."""
    if not request.chooses_budget:
        return request
    return request.having("retrieval.budget", plan(request).request.config.retrieval.budget)


def longest(requests: Sequence[PlanRequest]) -> Plan:
    """Returns the fastest plan for the longest prompt, up to that of `requests`, that one of them fits.

    Where none fits, it is the plan of a page, which says why.
    """
    whole = requests[0].context
    tokens = whole if _any_fits(requests) else _longest_tokens(requests) or requests[0].config.store.page
    return ranked(_shortened(requests, min(tokens, whole)))[0]


def comparison(plans: Sequence[Plan]) -> str:
    """Returns the config that was chosen of `ranked` plans, and the predicted ms per token of the others."""
    first, *others = (
        f"{plan.request.config.name} {plan.predicted.ms_per_token:.1f}" for plan in plans if plan.predicted
    )
    return f"{first} ms per token, as predicted" + (f" ({', '.join(others)})" if others else "")


# The nearest plan that fits.


def _fitting(request: PlanRequest) -> PlanRequest | None:
    """Returns the request, with smaller sizes and a smaller retrieved cache if only that fits; else None."""
    for key, size in THRIFTY:
        if _fits(request):
            return request
        request = request.having(key, min(size, request.config.value(key)))
    if _fits(request):
        return request
    budget = _largest_budget(request)
    least = max(1, int(SMALLEST_BUDGET_SHARE * request.config.retrieval.budget))
    return request.having("retrieval.budget", budget) if budget >= least else None


def _fits(request: PlanRequest) -> bool:
    return MemoryBudget(request).shortage is None


def _largest_budget(request: PlanRequest) -> int:
    """Returns the largest retrieval budget below the config's that fits; 0 where none does."""
    if not request.retrieves:
        return 0
    retrieval = request.config.retrieval
    least = retrieval.chunk + retrieval.recent
    budgets = range(-(-least // retrieval.chunk) * retrieval.chunk, retrieval.budget, retrieval.chunk)
    fitting = _largest_fitting(
        len(budgets), lambda count: _fits(request.having("retrieval.budget", budgets[count - 1]))
    )
    return budgets[fitting - 1] if fitting else 0


def _refused(requests: Sequence[PlanRequest]) -> Plan:
    """Returns why none of several compositions fits, by the one that needs least, and what comes nearest."""
    plainest = min(requests, key=lambda request: len(request.levels))
    way = _ways(plainest)[0]
    return _unplanned(way, f"{MemoryBudget(way).shortage}; {_remedies(requests, way)}")


def _remedies(requests: Sequence[PlanRequest], plainest: PlanRequest) -> str:
    """Returns the change that makes a request fit and costs the user least, and the longest contexts."""
    flags = _flags(requests, plainest)
    change = _size(plainest) or next((flag for flag, changed in flags.items() if _any_fits(changed)), None)
    longest_tokens, remedies = _longest_tokens(requests), [f"what fits: {change}"] if change else []
    if change is None and flags:
        reach = {flag: _longest_tokens(changed) for flag, changed in flags.items()}
        flag = max(reach, key=lambda flag: reach[flag])
        if reach[flag] > longest_tokens:
            remedies.append(f"with {flag} up to {reach[flag]} tokens fit")
    if longest_tokens:
        remedies.append(f"the longest context that fits is {longest_tokens} tokens")
    gpus = plainest.hardware.gpus
    twice = [replace(request, hardware=replace(request.hardware, gpus=2 * gpus)) for request in requests]
    if not remedies and len(gpus) == 1 and _any_fits(twice):
        remedies = ["what fits: 2 such GPUs"]
    return "; ".join([*unquantized_experts(plainest), *remedies]) or NOTHING_FITS


def _size(request: PlanRequest) -> str | None:
    """Returns the smaller size that makes a request fit at its context; None where none does."""
    if request.given_resident:
        page = request.config.store.page
        # A capacity for all of the context is no whole pages.
        resident = MemoryBudget(request).capacities[0] // page * page
        fewer = request.having("offload.resident_tokens", resident)
        if resident < request.given_resident and _fits(fewer):
            return f"--set offload.resident_tokens={resident}"
    if budget := _largest_budget(request):
        return f"--set retrieval.budget={budget}"
    return None


def _flags(requests: Sequence[PlanRequest], plainest: PlanRequest) -> dict[str, list[PlanRequest]]:
    """Returns flags that save memory, those that cost least first, with the requests that they change."""
    flags = dict[str, list[PlanRequest]]()
    if plainest.target.dtype == ElementType.FLOAT32:
        flags["--dtype bfloat16"] = [_in_bfloat16(request) for request in requests]
    if plainest.target.splits and requests[0].config.weights.planes == "auto":
        flags[PLANES] = [request.having("weights.planes", "on") for request in requests]
    plain = [plainest.having("speculation.levels", ())] if plainest.levels else []
    if plain:
        flags["--config plain"] = plain
    if plainest.target.quantization is None:
        flags[QUANTIZE] = list(map(_quantized, requests))
        if plain:
            flags[f"--config plain {QUANTIZE}"] = list(map(_quantized, plain))
    return flags


def _in_bfloat16(request: PlanRequest) -> PlanRequest:
    draft = request.draft and replace(request.draft, dtype=ElementType.BFLOAT16)
    return replace(request, target=replace(request.target, dtype=ElementType.BFLOAT16), draft=draft)


def _quantized(request: PlanRequest) -> PlanRequest:
    """Returns the request with the target's weights in the smallest format."""
    return replace(request, target=request.target.with_weights(Quantization.named(NF4)))


def unquantized_experts(request: PlanRequest) -> Iterator[str]:
    """Yields what quantising does not change: experts that stay as they are, and the memory they need."""
    target = request.target
    if target.quantization is None or target.quantization.experts or not target.expert_parameters:
        return
    experts = target.all_experts * target.dtype.itemsize / GIB
    budget = MemoryBudget(request)
    memory = budget.host if request.in_place else budget.gpu(0)
    needed = ceil((sum(memory.values()) - memory["reserve"]) / (1 - RESERVE_SHARE) / GIB)
    yield (
        f"{target.quantization.name} leaves the experts in {target.dtype},"
        f" {experts:.1f} GiB: this needs {'a host' if request.in_place else 'a GPU'} of {needed} GiB, or"
        f" {QUANTIZE}, which quantizes experts too"
    )


def _any_fits(requests: Iterable[PlanRequest]) -> bool:
    return any(map(_fitting_ways, requests))


def _shortened(requests: Iterable[PlanRequest], tokens: int) -> list[PlanRequest]:
    return [replace(request, context=tokens) for request in requests]


def _longest_tokens(requests: Sequence[PlanRequest]) -> int:
    """Returns the longest prompt below that of the requests that one of them fits, in whole pages; or 0."""
    page = requests[0].config.store.page
    pages = (requests[0].context - 1) // page
    return page * _largest_fitting(pages, lambda count: _any_fits(_shortened(requests, count * page)))


def _largest_fitting(limit: int, fits: Callable[[int], object]) -> int:
    """Returns the largest of 1 … limit that fits, where all smaller ones fit too; 0 if none does."""
    return bisect_left(range(1, limit + 1), True, key=lambda n: not fits(n))
