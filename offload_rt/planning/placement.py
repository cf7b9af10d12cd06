"""Placement of KV and weights in the memories of a machine, in bytes.

All KV lies in host memory. With a GPU the first tokens of every layer are kept there as well (resident), the
CPU attends the next ones where they lie, and the rest is streamed through the staging ring for every pass:
the same ranges of tokens in all layers. The first GPU computes; others keep KV, stream KV over links of their
own, and attend it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cpu_kv import KVSizes
from cpu_kv.sizes import PROMPT_WRITES, READ_TOKENS, page_locked_bytes
from offload_rt.caches.sizes import MOST_POINTS, PORTION_BYTES, GpuTier, stored_layout, tail_bytes
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.priors import DEMO_ACCEPTANCE, SAME_MODEL_ACCEPTANCE, SMALL_MODEL_ACCEPTANCE
from offload_rt.config.schema import Config, SpeculationConfig
from offload_rt.drafting.levels.base import Level, Memory, kept_means, levels_of, local_memory
from offload_rt.drafting.levels.models import RetrievedLevel
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.shape import ModelShape, yarn_hint
from offload_rt.system.hardware import GIB, Gpu, Hardware

if TYPE_CHECKING:
    from offload_rt.model.runner import CausalModel

PADDING = 0.01  # share of a vocabulary by which two paddings of it may differ
GPU_RESERVE_BYTES = 2**29  # at least: graphs, fragments, libraries' workspaces
HOST_RESERVE_BYTES = GIB
VERDICT_BYTES = 40
"""Bytes for each logit that a verdict needs at its peak, counted on a CPU: sorting for top-p takes most."""
RESERVE_SHARE = 0.03


@dataclass(frozen=True)
class PlanRequest:
    """A model pair, a config and a context to be planned, and the machine to plan them for.

    Raises:
        UsageError: for values out of range, and for models or GPUs that do not go together.
    """

    target: ModelShape
    draft: ModelShape | None  # the small model; None leaves out the config's level for it
    config: Config  # the planner chooses γ2 where it is 0, and shares that are -1
    context: int  # tokens of the prompt
    new_tokens: int  # to make room for after it
    hardware: Hardware
    expected_acceptance: float | None = None  # of a token the target drafts over 1/32 of its KV; None: usual
    small_model_acceptance: float = SMALL_MODEL_ACCEPTANCE  # of a token the small model drafts
    measured_acceptance: float | None = None  # of the last level's tokens, where it is known for this config
    given_remote_mlps: int | None = None  # `remote_mlps`, once that is decided

    def __post_init__(self) -> None:
        for what, value, least in (("context", self.context, 1), ("new tokens", self.new_tokens, 0)):
            if value < least:
                raise UsageError(f"{what} {value}: must be at least {least}")
        for rate in (self.same_model_acceptance, self.small_model_acceptance):
            if not 0 <= rate <= 1:
                raise UsageError(f"acceptance {rate:g}: must be from 0 to 1")
        check_positions(self.target, self.context, self.new_tokens)
        if self.draft is not None:
            check_vocabulary(self.draft, self.target)
        available(self.config, self.draft is not None)  # refuses what drafts with nothing else
        if self.config.offload.group_devices == 2 and not self.other_gpus:
            raise UsageError(
                "offload.group_devices = 2: there is no second GPU; name two (--device cuda:0,cuda:1, or"
                " --gpus 2 for a plan), or leave it 0"
            )

    @property
    def same_model_acceptance(self) -> float:
        """Chance that a token which the target drafts over 1/32 of its KV is accepted."""
        if self.expected_acceptance is not None:
            return self.expected_acceptance
        return DEMO_ACCEPTANCE if self.target.name == DEMO else SAME_MODEL_ACCEPTANCE

    @cached_property
    def speculation(self) -> SpeculationConfig:
        """The config's, with the levels that can be had."""
        return available(self.config, self.draft is not None).speculation

    @cached_property
    def levels(self) -> list[Level]:
        """The levels that can be had, from the cheapest to the most expensive."""
        return levels_of(available(self.config, self.draft is not None))

    @property
    def used_models(self) -> list[ModelShape]:
        """The target, and the small model where a level runs it."""
        runs = any(level.needs_draft_model for level in self.levels)
        return [self.target, self.draft] if runs and self.draft is not None else [self.target]

    @property
    def retrieves(self) -> bool:
        """One of the levels attends over a retrieved cache."""
        return any(isinstance(level, RetrievedLevel) for level in self.levels)

    @property
    def chooses_budget(self) -> bool:
        """How many entries are retrieved is left to the planner."""
        return self.config.retrieval.budget == 0 and self.retrieves

    @property
    def retrieved_share(self) -> float:
        """Share of the context that a retrieved cache holds."""
        return min(1.0, self.config.retrieval.budget / self.context)

    @property
    def groups(self) -> list[LayerOrder]:
        """Plans of groups of layers that two devices may share; empty where there is one device, or none."""
        found = [level.groups_on_two(self) for level in self.levels] if self.other_gpus else []
        return [plan for plan in found if plan is not None]

    @property
    def refreshes_from_stream(self) -> bool:
        """A refresh of the retrieved cache takes its entries from a pass, into a second buffer."""
        offload = self.config.offload
        split = offload.group_devices == 2 and any(
            isinstance(level, RetrievedLevel) and level.groups_on_two(self) for level in self.levels
        )
        return not self.in_place and not split and offload.refreshes_from_stream

    @property
    def ring_bytes(self) -> int:
        """Bytes of a GPU's staging ring; 0 where nothing is paged."""
        if not self.target.paged_layers:
            return 0
        layout, tokens = self.stored, self.segment_tokens
        unpacked = tokens * layout.layer_token_bytes if layout.packed else 0
        return self.config.store.ring_buffers * layout.layer_bytes(tokens) + unpacked

    @cached_property
    def stored(self) -> KVSizes:
        """The layout of the KV in the store: in 12 bits a value where it is packed."""
        layout = self.target.layout(self.config.store.page)
        triton = all(gpu.triton for gpu in self.hardware.gpus)
        return stored_layout(layout, self.config.store.code, over_link=not self.in_place, triton=triton)

    @cached_property
    def resident(self) -> KVSizes:
        """The layout of KV that stays on GPUs: as it is stored, but unpacked where all of it fits.

        Then nothing else bounds a pass, and unpacking would only make it longer.
        """
        raw = replace(self.stored, packed=False)
        return raw if sum(self._capacities(raw)) >= self.context else self.stored

    @property
    def segment_tokens(self) -> int:
        """Tokens that are copied and attended at a time."""
        layout = self.target.layout(self.config.store.page)
        tokens = layout.pages(self.context + self.new_tokens) * self.config.store.page
        return layout.segment_tokens(self.config.store.segment_bytes, tokens)

    @property
    def in_place(self) -> bool:
        """No GPU: the CPU computes, and attends KV in place."""
        return not self.hardware.gpus

    @cached_property
    def remote_mlps(self) -> int:
        """MLP blocks of the target whose weights are on the second GPU: as few as make room on the first."""
        if self.given_remote_mlps is not None:
            return self.given_remote_mlps
        left = (
            _left(replace(self, given_remote_mlps=0), 0, self.given_resident or 0) if self.other_gpus else 0
        )
        if left >= 0:
            return 0
        # Decided before weights are loaded, for sequences that are planned afterwards: then less may be free.
        missing = (GPU_RESERVE_BYTES - left, -left)
        roomy, least = (min(self.target.layers, -(-size // self.target.mlp_bytes)) for size in missing)
        return roomy if shortage(replace(self, given_remote_mlps=roomy)) is None else least

    @property
    def other_gpus(self) -> tuple[Gpu, ...]:
        """GPUs that keep and attend KV, and compute nothing else."""
        return self.hardware.gpus[1:]

    @cached_property
    def drafts(self) -> list[DraftShape]:
        """Shapes of drafts for the full cache, to choose among."""
        return (
            allowed_drafts(self.speculation.shapes[-1], self.target, self.draft) if self.levels else [CHAIN]
        )

    @cached_property
    def longest_draft(self) -> int:
        """Tokens of the longest draft that a pass may verify."""
        merged = bool(self.levels and self.speculation.levels[-1].merge)  # as deep a chain again
        return max(shape.size + merged * shape.depth for shape in self.drafts)

    @property
    def given_resident(self) -> int | None:
        """Tokens that have to be kept on the GPU; None: the planner decides."""
        return 0 if self.in_place else self._given(self.config.offload.resident_tokens)

    @property
    def given_cpu(self) -> int | None:
        """Tokens that the CPU has to attend; None: the planner decides."""
        return self.context if self.in_place else self._given(self.config.offload.cpu_tokens)

    def _given(self, tokens: int) -> int | None:
        return None if tokens < 0 else min(tokens, self.context)

    @property
    def acceptance(self) -> float:
        """Chance that the full cache accepts a drafted token; 0 where nothing drafts."""
        if self.measured_acceptance is not None:
            return self.measured_acceptance
        return self.levels[-1].acceptance(self) if self.levels else 0.0

    @cached_property
    def capacities(self) -> list[int]:
        """Tokens of the context that each GPU can keep: whole pages, or on the first one all of it.

        On the first one while decoding, when the memory of the prefill is free again but for what reading
        more tokens behind the prompt needs.
        """
        return self._capacities(self.resident)

    def _capacities(self, layout: KVSizes) -> list[int]:
        page, page_bytes = layout.page_size, layout.reserved_bytes(1)
        if not page_bytes:
            return [self.context] * len(self.hardware.gpus)
        rooms = [max(0, _left(self, number)) for number in range(len(self.hardware.gpus))]
        if rooms:
            freed = gpu_memory(self, 0)["prefill"] - _chunk_memory(self)
            rooms[0] += freed if _left(self, 0) >= 0 else 0
        tokens = [room // page_bytes * page for room in rooms]
        if rooms and rooms[0] >= layout.layers * layout.layer_bytes(self.context):
            tokens[0] = self.context
        return tokens

    def late_tokens(self, resident: int) -> int:
        """Returns how many of `resident` tokens of the first GPU have room only after the prefill."""
        page, page_bytes = self.resident.page_size, self.resident.reserved_bytes(1)
        if not page_bytes:
            return 0
        return max(0, resident - max(0, _left(self, 0)) // page_bytes * page)

    def placement(self, resident: int, cpu: int) -> Placement:
        """Returns the placement with `resident` tokens on the first GPU and `cpu` attended by the CPU.

        Of the rest, other GPUs keep what they have room for. What is left is streamed over all links
        at once.
        """
        left, kept = self.context - resident - cpu, list[int]()
        for capacity in self.capacities[1:]:
            kept.append(min(capacity, left))
            left -= kept[-1]
        rate = sum(gpu.to_device_rate for gpu in self.hardware.gpus)
        streamed = [int(left * gpu.to_device_rate / rate) for gpu in self.other_gpus]
        left -= sum(streamed)
        tiers = tuple(map(GpuTier, kept, streamed))
        return Placement(resident, cpu, left, self.target, tiers, self.resident.packed)

    def having(self, key: str, value: object) -> PlanRequest:
        """Returns the request with another value of one key of the config."""
        return replace(self, config=self.config.having(key, value))


@dataclass(frozen=True)
class Placement:
    """Number of context tokens by where they are attended; the same in every layer."""

    resident_tokens: int  # the first ones, kept on the first GPU
    cpu_tokens: int  # the next ones, attended by the CPU
    streamed_tokens: int  # the last ones, which cross the first GPU's link for every pass
    shape: ModelShape
    gpus: tuple[GpuTier, ...] = ()  # of the other GPUs in turn, between the CPU's and the last ones
    packed: bool = False  # what is kept on GPUs is

    @property
    def resident_bytes(self) -> int:
        """Bytes kept on all GPUs together."""
        others = sum(gpu.resident_tokens for gpu in self.gpus)
        return (self.resident_tokens + others) * self.shape.token_bytes

    @property
    def cpu_attended_bytes(self) -> int:
        return self.cpu_tokens * self.shape.token_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross all links together for every pass."""
        others = sum(gpu.streamed_tokens for gpu in self.gpus)
        return (self.streamed_tokens + others) * self.shape.token_bytes


def allowed_drafts(shape: DraftShape, *models: ModelShape | None) -> list[DraftShape]:
    """Returns the drafts of a shape to choose among that the models which make and verify them allow.

    A layer with a recurrent state keeps one for each branch of a draft, which may be as large as the KV of
    2,000 tokens. Such models draft chains, and sequences side by side; a chain takes the place of a tree.
    """
    found = shape.candidates()
    if all(model is None or model.drafts_trees for model in models):
        return found
    return [one for one in found if one.kind in ("chain", "sequences")] or CHAIN.candidates()


def check_positions(model: ModelShape | CausalModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raises UsageError where a sequence has more tokens than the model has positions."""
    limit = model.max_positions
    if prompt_tokens + new_tokens <= limit:
        return
    fitting = [f"{limit - new_tokens} prompt tokens"] if new_tokens < limit else []
    if prompt_tokens < limit:
        fitting.append(f"{limit - prompt_tokens} new tokens")
    raise UsageError(
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones are more than the {limit} positions of "
        f"{model.name}: use at most {' or '.join(fitting) or f'{limit} together'}"
        + yarn_hint(model, prompt_tokens + new_tokens)
    )


def check_vocabulary(draft: ModelShape | CausalModel, target: ModelShape | CausalModel) -> None:
    """Raises UsageError where a draft's tokens are not the target's.

    Embeddings of one tokenizer may be padded to different sizes: Qwen2.5 has 151,936 entries at 0.5B and
    152,064 at 7B.
    """
    if abs(draft.vocabulary - target.vocabulary) > PADDING * target.vocabulary:
        raise UsageError(
            f"draft {draft.name} has {draft.vocabulary} tokens in its vocabulary, the target "
            f"{target.name} has {target.vocabulary}: a draft must share the target's tokenizer"
        )


def available(config: Config, draft_model: bool) -> Config:
    """Returns `config` without the levels that need a draft model if there is none.

    Raises:
        UsageError: no level is left.
    """
    kept = tuple(level.settings for level in levels_of(config) if draft_model or not level.needs_draft_model)
    if config.speculation.levels and not kept:
        raise UsageError(
            f"config {config.name} drafts with a small model, and there is none: name one with --draft, "
            "or use config retrieval or lookup"
        )
    return config.having("speculation.levels", kept)


def gpu_memory(request: PlanRequest, gpu: int, resident: int = 0) -> Memory:
    """Returns the bytes that one GPU holds with so many tokens of the context resident there.

    On the first one, resident KV takes the place of what only the prefill needs, where it must.
    """
    target, store = request.target, request.config.store
    memory = {
        "resident_kv": _resident_bytes(request, resident),
        "staging_ring": request.ring_bytes,
        "reserve": _gpu_reserve(request.hardware.gpus[gpu]),
    }
    if gpu == 1 and request.remote_mlps:
        chunk = min(request.config.prefill.chunk, request.context)
        memory["weights"] = request.remote_mlps * target.mlp_bytes
        memory["prefill"] = chunk * (2 * target.hidden + 3 * target.intermediate) * target.dtype.itemsize
    for level in request.levels if gpu == 1 else ():
        for name, size in level.second_memory(request).items():
            memory[name] = memory.get(name, 0) + size
    if gpu:
        return memory
    newest = tail_bytes(target.layout(store.page), target.heads, request.longest_draft + 1)
    memory |= _computing_memory(request) | {"newest_tokens": newest}
    if resident:
        late = _resident_bytes(request, request.late_tokens(resident))
        memory["prefill"] = max(0, memory["prefill"] - late)
    return memory


def _resident_bytes(request: PlanRequest, tokens: int) -> int:
    """Returns the bytes of so many tokens on a GPU."""
    return request.resident.layers * request.resident.layer_bytes(tokens) if tokens else 0


def _chunk_memory(request: PlanRequest) -> int:
    """Bytes for a chunk of a prefill: its activations, and on a GPU its KV, packed into pages and written."""
    target = request.target
    attended = max(2 * (target.heads + kind.kv_heads) * kind.head_dim for kind in target.kinds.kinds)
    token = (4 * target.hidden + attended + 3 * target.intermediate) * target.dtype.itemsize
    if target.recurrence is not None:  # a mixer and an MLP work one after the other
        token = max(token, 4 * target.hidden * target.dtype.itemsize + target.recurrence.working_bytes)
    chunk = min(request.config.prefill.chunk, request.context)
    written = not request.in_place and target.paged_layers
    paged = (PROMPT_WRITES + 1) * chunk if written else 0
    pages = paged * target.layer_token_bytes
    if request.stored.packed:
        pages += request.stored.layer_bytes(paged)
    return chunk * token + pages


def _gpu_reserve(gpu: Gpu) -> int:
    return max(GPU_RESERVE_BYTES, int(RESERVE_SHARE * gpu.memory_bytes))


def shared_gpu(gpu: Gpu, sequences: int, loaded_bytes: int) -> Gpu:
    """Returns a GPU as one of several sequences sees it: they share what is free beside the models."""
    common = loaded_bytes + _gpu_reserve(gpu)
    memory = common + max(0, gpu.memory_bytes - common) // sequences
    return replace(gpu, name=f"{gpu.name}, shared by {sequences} sequences", memory_bytes=memory)


def host_memory(request: PlanRequest) -> Memory:
    """Returns the bytes that the host holds. With a GPU, `kv` is page-locked."""
    target, tokens = request.target, request.context + request.new_tokens
    layout = request.stored
    memory = {"kv": layout.reserved_bytes(tokens)}
    if means := layout.means_bytes(tokens, *kept_means(request.config)):
        memory["summaries"] = means
    if request.in_place:
        memory |= _computing_memory(request)
    else:
        memory["embeddings"] = sum(one.host_embedding_bytes for one in request.used_models)
        memory["page_locked_buffers"] = len(request.hardware.gpus) * _buffer_bytes(request)
    available = request.hardware.host.memory_bytes
    memory["reserve"] = max(HOST_RESERVE_BYTES, int(RESERVE_SHARE * available))
    if point := target.window_bytes() + target.state_bytes:
        points = (available - sum(memory.values())) // point
        memory["rewind_points"] = max(1, min(MOST_POINTS, points)) * point
    return memory


def _buffer_bytes(request: PlanRequest) -> int:
    """Bytes of page-locked memory that copies of one link go through: two buffers outwards, one inwards."""
    outwards = READ_TOKENS * request.target.token_bytes
    if request.retrieves:
        outwards = max(outwards, PORTION_BYTES)
    inwards = (request.longest_draft + 1) * request.target.token_bytes
    return 2 * page_locked_bytes(outwards) + page_locked_bytes(inwards)


def _computing_memory(request: PlanRequest) -> Memory:
    """Returns the bytes that the processor that computes holds."""
    target = request.target
    weights = target.weight_bytes if request.in_place else target.gpu_bytes
    memory = {"weights": weights - request.remote_mlps * target.mlp_bytes}
    for level in request.levels:
        for name, size in level.memory(request).items():  # two levels may give a purpose the same name
            memory[name] = memory.get(name, 0) + size
    memory |= local_memory(target, request.longest_draft + 1)
    # The prompt's hidden states, and on a GPU the KV of the full layer under way.
    memory["prefill"] = request.context * target.hidden * target.dtype.itemsize + _chunk_memory(request)
    if not request.in_place and target.paged_layers:
        memory["prefill"] += request.context * target.layer_token_bytes
    return memory | {"logits": verdict_bytes(request.longest_draft + 1, target)}


def verdict_bytes(rows: int, target: ModelShape) -> int:
    """Returns the bytes of the logits of a pass, and of what a verdict makes of them and of the draft's
    probabilities."""
    return rows * target.vocabulary * (target.dtype.itemsize + VERDICT_BYTES)


def largest(memory: Memory, digits: int, most: int | None = None) -> str:
    """Returns the largest parts, `most` of them or all, in GiB as text."""
    parts = sorted(memory.items(), key=lambda part: -part[1])[:most]
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.{digits}f}" for name, size in parts if size)


def _left(request: PlanRequest, gpu: int, resident: int = 0) -> int:
    """Returns the bytes left on a GPU beside so many resident tokens; negative where they do not fit."""
    return request.hardware.gpus[gpu].memory_bytes - sum(gpu_memory(request, gpu, resident).values())


def shortage(request: PlanRequest) -> str | None:
    """Returns which memory is too small even with the least KV on the GPU, in figures; None if all fits."""
    host, memory = request.hardware.host, host_memory(request)
    needs = list[tuple[str, int, Memory]]()
    for number, gpu in enumerate(request.hardware.gpus):
        resident = 0 if number else request.given_resident or 0
        needs.append((f"GPU {number} ({gpu.name})", gpu.memory_bytes, gpu_memory(request, number, resident)))
    for where, available, parts in (*needs, ("host memory", host.memory_bytes, memory)):
        if (needed := sum(parts.values())) > available:
            return (
                f"{where} has {available / GIB:.1f} GiB and would need {needed / GIB:.1f} GiB "
                f"(most of it: {largest(parts, 1, most=3)})"
            )
    if not request.in_place and memory["kv"] > host.lockable_bytes:
        return (
            f"{memory['kv'] / GIB:.1f} GiB of KV have to be page-locked and {host.lockable_bytes / GIB:.1f} "
            "GiB may be: raise the limit (ulimit -l, or memlock in /etc/security/limits.conf)"
        )
    return None
