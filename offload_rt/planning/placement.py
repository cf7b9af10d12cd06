"""What a run keeps where, in bytes, and what does not fit.

All KV lies in host memory. With a GPU the first tokens of every layer are kept there as well (resident), the
CPU attends the next ones where they lie, and the rest is streamed through the staging ring for every pass:
the same ranges of tokens in all layers. Several GPUs share the heads of weights and KV evenly.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from offload_rt.caches.bounded import SPECULATIVE_ENTRIES
from offload_rt.config import DRAFT_STREAMING, LOOKUP, TARGET_RETRIEVED, TARGET_STREAMING, Config
from offload_rt.errors import UsageError
from offload_rt.expectations import (
    DRAFT_LENGTHS,
    LOOKUP_ACCEPTANCE,
    SAME_MODEL_ACCEPTANCE,
    SMALL_MODEL_ACCEPTANCE,
)
from offload_rt.machine.hardware import GIB, Hardware
from offload_rt.planning.shapes import ModelShape

LONGEST_DRAFT = max(DRAFT_LENGTHS)
GPU_RESERVE_BYTES = 2**29  # at least: the driver's context, graphs, fragments
HOST_RESERVE_BYTES = GIB
RESERVE_SHARE = 0.03
RETRIEVED_COPIES = 2  # on a GPU: one in use, one that fills from the stream

Memory = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class PlanRequest:
    """What is to run, and on what.

    Attributes:
        draft: the small model; None leaves out the config's level for it.
        config: composition and sizes; the planner chooses γ2 where it is 0, and shares that are -1.
        context: tokens of the prompt.
        new_tokens: generated tokens to make room for.
        same_model_acceptance: of a token the target drafts over a smaller cache.
        small_model_acceptance: of a token the small model drafts.

    Raises:
        UsageError: for values out of range, and for models or cards that do not go together.
    """

    target: ModelShape
    draft: ModelShape | None
    config: Config
    context: int
    new_tokens: int
    hardware: Hardware
    same_model_acceptance: float = SAME_MODEL_ACCEPTANCE
    small_model_acceptance: float = SMALL_MODEL_ACCEPTANCE

    def __post_init__(self) -> None:
        target, draft = self.target, self.draft
        for what, value, least in (("context", self.context, 1), ("new tokens", self.new_tokens, 0)):
            if value < least:
                raise UsageError(f"{what} {value}: must be at least {least}")
        for rate in (self.same_model_acceptance, self.small_model_acceptance):
            if not 0 <= rate <= 1:
                raise UsageError(f"acceptance {rate:g}: must be from 0 to 1")
        if target.kv_heads % self.parts or target.heads % self.parts:
            raise UsageError(
                f"{target.name} has {target.kv_heads} key heads, which {self.parts} GPUs cannot share "
                "evenly: plan with a number of GPUs that divides them"
            )
        if draft is not None and draft.vocabulary != target.vocabulary:
            raise UsageError(
                f"draft {draft.name} has {draft.vocabulary} tokens in its vocabulary, the target "
                f"{target.name} has {target.vocabulary}: a draft must share the target's tokenizer"
            )
        if self.config.speculation.names and not self.levels:
            raise UsageError(
                f"config {self.config.name} drafts with a small model, and there is none: name one with "
                "--draft, or use config retrieval or lookup"
            )

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels that can be had, from the cheapest to the dearest."""
        levels = self.config.speculation.names
        return levels if self.draft is not None else tuple(one for one in levels if one != DRAFT_STREAMING)

    @property
    def retrieves(self) -> bool:
        """One of the levels attends over a retrieved cache."""
        return TARGET_RETRIEVED in self.levels

    @property
    def in_place(self) -> bool:
        """No GPU: the CPU computes, and KV is attended where it lies."""
        return not self.hardware.gpus

    @property
    def parts(self) -> int:
        """Number of parts into which the heads of weights and KV are split."""
        return max(1, len(self.hardware.gpus))

    @property
    def longest_draft(self) -> int:
        """Tokens of the longest draft that a pass may verify."""
        return (self.config.speculation.gamma2 or LONGEST_DRAFT) if self.levels else 0

    @property
    def given_resident(self) -> int | None:
        """Tokens that the config keeps on the GPU; None: the planner decides."""
        given = self.config.offload.resident_tokens
        return None if given < 0 or self.in_place else min(given, self.context)

    @property
    def given_cpu(self) -> int | None:
        """Tokens that the config lets the CPU attend; None: the planner decides."""
        given = self.config.offload.cpu_tokens
        return None if given < 0 or self.in_place else min(given, self.context)

    def acceptance(self, level: str) -> float:
        """Chance that a token drafted by `level` is accepted."""
        if level == LOOKUP:
            return LOOKUP_ACCEPTANCE
        return self.small_model_acceptance if level == DRAFT_STREAMING else self.same_model_acceptance

    def placement(self, resident: int, cpu: int, ring_buffers: int) -> Placement:
        """So many tokens resident and so many attended by the CPU; the others are streamed."""
        streamed, segment = self.context - resident - cpu, self.config.store.segment_tokens
        return Placement(resident, cpu, streamed, ring_buffers, segment, self.target)

    def with_budget(self, budget: int) -> PlanRequest:
        """The same with a retrieved cache of another size."""
        retrieval = replace(self.config.retrieval, budget=budget)
        return replace(self, config=replace(self.config, retrieval=retrieval))


@dataclass(frozen=True)
class Placement:
    """Where the tokens of the context lie or are attended; the same in every layer.

    Attributes:
        resident_tokens: the first ones, kept on the GPU.
        cpu_tokens: the next ones, attended by the CPU.
        streamed_tokens: the rest, which crosses the link for every pass.
        ring_buffers, segment_tokens: of the staging ring.
        shape: of the model whose KV it is.
    """

    resident_tokens: int
    cpu_tokens: int
    streamed_tokens: int
    ring_buffers: int
    segment_tokens: int
    shape: ModelShape = field(repr=False, compare=False)

    @property
    def resident_bytes(self) -> int:
        return self.resident_tokens * self.shape.token_bytes

    @property
    def cpu_attended_bytes(self) -> int:
        return self.cpu_tokens * self.shape.token_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross all links together for every pass."""
        return self.streamed_tokens * self.shape.token_bytes

    @property
    def ring_bytes(self) -> int:
        """Of the staging rings of all GPUs together."""
        return self.ring_buffers * self.segment_tokens * self.shape.layer_token_bytes

    def to_json(self) -> dict[str, int]:
        return {
            "resident_bytes": self.resident_bytes,
            "streamed_bytes": self.streamed_bytes,
            "cpu_attended_bytes": self.cpu_attended_bytes,
            "ring_bytes": self.ring_bytes,
            "resident_tokens": self.resident_tokens,
            "streamed_tokens": self.streamed_tokens,
            "cpu_attended_tokens": self.cpu_tokens,
            "ring_buffers": self.ring_buffers,
            "segment_tokens": self.segment_tokens,
        }


def gpu_memory(request: PlanRequest, gpu: int, ring_buffers: int) -> Memory:
    """What one GPU holds besides resident KV. The small model runs on the first GPU, whole."""
    target, store, parts = request.target, request.config.store, request.parts
    queries = request.longest_draft + 1
    newest = (store.page + queries) * target.token_bytes
    newest += queries * target.layers * target.heads * target.head_dim * target.dtype.itemsize
    return {
        "weights": -(-target.weight_bytes // parts),
        **_drafting_memory(request, with_small_model=gpu == 0, copies=RETRIEVED_COPIES),
        "staging_ring": ring_buffers * store.segment_tokens * target.layer_token_bytes // parts,
        "newest_tokens": newest // parts,
        "prefill": request.context * target.layer_token_bytes // parts + _activations(request),
        "logits": _logits(request),
        "reserve": max(GPU_RESERVE_BYTES, int(RESERVE_SHARE * request.hardware.gpus[gpu].memory_bytes)),
    }


def host_memory(request: PlanRequest) -> Memory:
    """What the host holds. With a GPU, `kv` is page-locked."""
    target, retrieval = request.target, request.config.retrieval
    tokens = request.context + request.new_tokens
    memory = {"kv": target.layout(request.config.store.page).reserved_bytes(tokens)}
    if request.retrieves:
        memory["summaries"] = tokens // retrieval.chunk * target.token_bytes // 2  # keys alone
    if request.in_place:
        memory["weights"] = target.weight_bytes
        memory |= _drafting_memory(request, with_small_model=True, copies=1)
        memory |= {"prefill": _activations(request), "logits": _logits(request)}
    memory["reserve"] = max(HOST_RESERVE_BYTES, int(RESERVE_SHARE * request.hardware.host.memory_bytes))
    return memory


def ring_fits(request: PlanRequest, ring_buffers: int) -> bool:
    """Whether each GPU has room for its part of such a ring, beside all else that is given."""
    return request.in_place or _left(request, ring_buffers) >= _given(request)["resident_kv"]


def resident_capacity(request: PlanRequest, ring_buffers: int) -> int:
    """Tokens of the context that the GPUs can keep: whole pages, or all of it; 0 without a GPU."""
    if request.in_place:
        return 0
    page, token_bytes = request.config.store.page, request.target.token_bytes // request.parts
    tokens = max(0, _left(request, ring_buffers)) // token_bytes
    return request.context if tokens >= request.context else tokens // page * page


def shortage(request: PlanRequest) -> str | None:
    """What does not fit even with the smallest ring and share of the GPU, in figures; None: all fits."""
    host, ring = request.hardware.host, request.config.store.ring_buffers
    needs = [
        (f"GPU {number} ({gpu.name})", gpu.memory_bytes, _given(request) | gpu_memory(request, number, ring))
        for number, gpu in enumerate(request.hardware.gpus)
    ]
    needs.append(("host memory", host.memory_bytes, host_memory(request)))
    for where, available, memory in needs:
        if (needed := sum(memory.values())) > available:
            largest = sorted(memory.items(), key=lambda part: -part[1])[:3]
            parts = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in largest)
            return (
                f"{where} has {available / GIB:.1f} GiB and would need {needed / GIB:.1f} GiB "
                f"(most of it: {parts})"
            )
    kv = memory["kv"]
    if not request.in_place and kv > host.lockable_bytes:
        return (
            f"{kv / GIB:.1f} GiB of KV have to be page-locked and {host.lockable_bytes / GIB:.1f} "
            "GiB may be: raise the limit (ulimit -l, or memlock in /etc/security/limits.conf)"
        )
    return None


def _left(request: PlanRequest, ring_buffers: int) -> int:
    """Bytes left for resident KV on the GPU that has the least."""
    return min(
        gpu.memory_bytes - sum(gpu_memory(request, number, ring_buffers).values())
        for number, gpu in enumerate(request.hardware.gpus)
    )


def _given(request: PlanRequest) -> Memory:
    """The KV that the config keeps on each GPU."""
    return {"resident_kv": (request.given_resident or 0) * request.target.token_bytes // request.parts}


def _drafting_memory(request: PlanRequest, *, with_small_model: bool, copies: int) -> Memory:
    """The small model and the bounded caches, on one of the processors that draft."""
    target, config, parts = request.target, request.config, request.parts
    streaming = config.draft.sinks + config.draft.window + SPECULATIVE_ENTRIES
    memory: Memory = {}
    if DRAFT_STREAMING in request.levels and request.draft is not None and with_small_model:
        memory["draft_weights"] = request.draft.weight_bytes
        memory["draft_cache"] = streaming * request.draft.token_bytes
    if TARGET_STREAMING in request.levels:
        memory["streaming_cache"] = streaming * target.token_bytes // parts
    if request.retrieves:
        entries = config.retrieval.budget + SPECULATIVE_ENTRIES
        memory["retrieved_caches"] = copies * entries * target.token_bytes // parts
    return memory


def _activations(request: PlanRequest) -> int:
    """Bytes of a prefill besides its KV: the prompt's hidden states, and the activations of one chunk."""
    target = request.target
    chunk = min(request.config.prefill.chunk, request.context)
    attended = 2 * target.heads * target.head_dim + 2 * target.kv_heads * target.head_dim
    width = 4 * target.hidden + (attended + 3 * target.intermediate) // request.parts
    return (request.context * target.hidden + chunk * width) * target.dtype.itemsize


def _logits(request: PlanRequest) -> int:
    """Bytes of the logits of a pass, and of their float32 probabilities before and after sorting."""
    return (request.longest_draft + 1) * request.target.vocabulary * (request.target.dtype.itemsize + 8)
