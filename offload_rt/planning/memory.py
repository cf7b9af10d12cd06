"""The memories of a machine, in bytes: what a request needs of each, and how much KV has room beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from cpu_kv import KVSizes
from cpu_kv.sizes import PROMPT_WRITES, READ_TOKENS, page_locked_bytes
from offload_rt.caches.sizes import MOST_POINTS, PORTION_BYTES, GpuTier, tail_bytes
from offload_rt.drafting.levels.base import Memory, kept_means, local_memory
from offload_rt.kernels.sizes import PASS_ROWS
from offload_rt.model.quantization import GATHERED_PAIRS
from offload_rt.model.shape import ModelShape
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import GIB, Gpu

GPU_RESERVE_BYTES = 2**29  # at least: graphs, fragments, libraries' workspaces
HOST_RESERVE_BYTES = GIB
VERDICT_BYTES = 40
"""Bytes for each logit that a verdict needs at its peak, counted on a CPU: sorting for top-p takes most."""
RESERVE_SHARE = 0.03


class MemoryBudget:
    """What a request needs of each memory, and how much KV has room beside it."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request

    @cached_property
    def remote_mlps(self) -> int:
        """MLP blocks of the target whose weights are on the second GPU: as few as make room on the first."""
        request = self.request
        if request.given_remote_mlps is not None:
            return request.given_remote_mlps
        if not request.other_gpus:
            return 0
        free = self._with_remote_mlps(0).free_bytes(0, request.given_resident or 0)
        if free >= 0:
            return 0
        # Decided before weights are loaded, for sequences that are planned afterwards: then less may be free.
        target, sizes = request.target, (GPU_RESERVE_BYTES - free, -free)
        roomy, least = (min(target.layers, -(-size // target.mlp_bytes)) for size in sizes)
        return roomy if self._with_remote_mlps(roomy).shortage is None else least

    def _with_remote_mlps(self, count: int) -> MemoryBudget:
        return MemoryBudget(replace(self.request, given_remote_mlps=count))

    @cached_property
    def resident(self) -> KVSizes:
        """The layout of KV that stays on GPUs: as it is stored, but unpacked where all of it fits.

        Then nothing else bounds a pass, and unpacking would only make it longer.
        """
        raw = replace(self.request.store_layout, packed=False)
        return raw if sum(self._capacities(raw)) >= self.request.context else self.request.store_layout

    @cached_property
    def capacities(self) -> list[int]:
        """Tokens of the context that each GPU can keep: whole pages, or on the first one all of it.

        On the first one while decoding, when the memory of the prefill is free again but for what reading
        more tokens behind the prompt needs.
        """
        return self._capacities(self.resident)

    def _capacities(self, layout: KVSizes) -> list[int]:
        context, gpus = self.request.context, self.request.hardware.gpus
        page, page_bytes = layout.page_size, layout.reserved_bytes(1)
        if not page_bytes:
            return [context] * len(gpus)
        rooms = [max(0, self.free_bytes(number)) for number in range(len(gpus))]
        if rooms:
            freed = self.gpu(0)["prefill"] - self._chunk_bytes()
            rooms[0] += freed if self.free_bytes(0) >= 0 else 0
        tokens = [room // page_bytes * page for room in rooms]
        if rooms and rooms[0] >= layout.layers * layout.layer_bytes(context):
            tokens[0] = context
        return tokens

    def placement(self, resident: int, cpu: int) -> Placement:
        """Returns the placement with `resident` tokens on the first GPU and `cpu` attended by the CPU.

        Of the rest, other GPUs keep what they have room for. What is left is streamed over all links
        at once.
        """
        request = self.request
        remaining, resident_tokens = request.context - resident - cpu, list[int]()
        for capacity in self.capacities[1:]:
            resident_tokens.append(min(capacity, remaining))
            remaining -= resident_tokens[-1]
        rate = sum(gpu.to_device_rate for gpu in request.hardware.gpus)
        streamed = [int(remaining * gpu.to_device_rate / rate) for gpu in request.other_gpus]
        remaining -= sum(streamed)
        tiers = tuple(map(GpuTier, resident_tokens, streamed))
        return Placement(resident, cpu, remaining, request.target, tiers, self.resident.packed)

    def gpu(self, number: int, resident: int = 0) -> Memory:
        """Returns the bytes that one GPU holds with so many tokens of the context resident there.

        On the first one, resident KV takes the place of what only the prefill needs, where it must.
        """
        request, target = self.request, self.request.target
        memory = {
            "resident_kv": self._resident_bytes(resident),
            "staging_ring": request.ring_bytes,
            "reserve": _gpu_reserve(request.hardware.gpus[number]),
        }
        if number == 1 and self.remote_mlps:
            chunk = min(request.config.prefill.chunk, request.context)
            memory["weights"] = self.remote_mlps * target.mlp_bytes
            memory["prefill"] = chunk * (2 * target.hidden + 3 * target.intermediate) * target.dtype.itemsize
        for level in request.levels if number == 1 else ():
            for name, size in level.second_memory(request).items():
                memory[name] = memory.get(name, 0) + size
        if number:
            return memory
        layout = target.layout(request.config.store.page)
        memory["newest_tokens"] = tail_bytes(layout, target.heads, request.longest_draft + 1)
        memory |= self._computing()
        if resident:
            late = self._resident_bytes(self._late_tokens(resident))
            memory["prefill"] = max(0, memory["prefill"] - late)
        return memory

    def free_bytes(self, number: int, resident: int = 0) -> int:
        """Returns the bytes left on a GPU beside so many resident tokens; negative where they do not fit."""
        return self.request.hardware.gpus[number].memory_bytes - sum(self.gpu(number, resident).values())

    @property
    def host(self) -> Memory:
        """Bytes that the host holds. With a GPU, `kv` is page-locked."""
        request, target = self.request, self.request.target
        layout, tokens = request.store_layout, request.context + request.new_tokens
        memory = {"kv": layout.reserved_bytes(tokens)}
        if means := layout.means_bytes(tokens, *kept_means(request.config)):
            memory["summaries"] = means
        if request.in_place:
            memory |= self._computing()
        else:
            memory["embeddings"] = sum(model.host_embedding_bytes for model in request.used_models)
            memory["page_locked_buffers"] = len(request.hardware.gpus) * self._buffer_bytes()
        available = request.hardware.host.memory_bytes
        memory["reserve"] = max(HOST_RESERVE_BYTES, int(RESERVE_SHARE * available))
        if point := target.window_bytes() + target.state_bytes:
            points = (available - sum(memory.values())) // point
            memory["rewind_points"] = max(1, min(MOST_POINTS, points)) * point
        return memory

    @property
    def shortage(self) -> str | None:
        """Which memory is too small even with the least KV on the GPU, in figures; None if all fits."""
        request, memory = self.request, self.host
        needs = list[tuple[str, int, Memory]]()
        for number, gpu in enumerate(request.hardware.gpus):
            resident = 0 if number else request.given_resident or 0
            needs.append((f"GPU {number} ({gpu.name})", gpu.memory_bytes, self.gpu(number, resident)))
        host = request.hardware.host
        for place, available, parts in (*needs, ("host memory", host.memory_bytes, memory)):
            if (needed := sum(parts.values())) > available:
                return (
                    f"{place} has {available / GIB:.1f} GiB and would need {needed / GIB:.1f} GiB "
                    f"(most of it: {largest(parts, 1, count=3)})"
                )
        if not request.in_place and memory["kv"] > host.lockable_bytes:
            return (
                f"{memory['kv'] / GIB:.1f} GiB of KV have to be page-locked and"
                f" {host.lockable_bytes / GIB:.1f} GiB may be: raise the limit (ulimit -l, or memlock in"
                " /etc/security/limits.conf)"
            )
        return None

    def _resident_bytes(self, tokens: int) -> int:
        """Returns the bytes of so many tokens on a GPU."""
        return self.resident.layers * self.resident.layer_bytes(tokens) if tokens else 0

    def _late_tokens(self, resident: int) -> int:
        """Returns how many of `resident` tokens of the first GPU have room only after the prefill."""
        page, page_bytes = self.resident.page_size, self.resident.reserved_bytes(1)
        if not page_bytes:
            return 0
        return max(0, resident - max(0, self.free_bytes(0)) // page_bytes * page)

    def _computing(self) -> Memory:
        """Returns the bytes that the processor that computes holds."""
        request, target = self.request, self.request.target
        weights = target.weight_bytes if request.in_place else target.gpu_bytes
        memory = {"weights": weights - self.remote_mlps * target.mlp_bytes}
        for level in request.levels:
            for name, size in level.memory(request).items():  # two levels may give a purpose the same name
                memory[name] = memory.get(name, 0) + size
        rows = request.longest_draft + 1
        memory |= local_memory(target, rows)
        # The prompt's hidden states, and on a GPU the KV of the full layer under way.
        memory["prefill"] = request.context * target.hidden * target.dtype.itemsize + self._chunk_bytes()
        if not request.in_place and target.paged_layers:
            memory["prefill"] += request.context * target.layer_token_bytes
        if target.gathers_experts:
            memory["experts"] = ceil(min(GATHERED_PAIRS, rows * target.chosen_experts) * target.expert_bytes)
        if target.planes and not request.in_place:  # passes of more rows than a kernel's multiply with them
            memory["expanded"] = target.intermediate * target.hidden * target.dtype.itemsize
        padded = 0 if request.in_place or not target.dense else -rows % PASS_ROWS
        padding = padded * target.vocabulary * target.dtype.itemsize
        return memory | {"logits": verdict_bytes(rows, target) + padding}

    def piece_fits(self, piece: int) -> bool:
        """Returns whether so many tokens may be read as one chunk, in the memory of a whole prompt."""
        if piece > self.request.context:
            return False
        alone = replace(self.request.having("prefill.chunk", piece), context=piece, new_tokens=0)
        return MemoryBudget(alone)._computing()["prefill"] <= self._computing()["prefill"]

    def _chunk_bytes(self) -> int:
        """Returns the bytes of a chunk of a prefill: activations, and on a GPU KV on its way to the store."""
        request, target = self.request, self.request.target
        attended = max(2 * (target.heads + kind.kv_heads) * kind.head_dim for kind in target.kinds.kinds)
        token = (4 * target.hidden + attended + 3 * target.intermediate) * target.dtype.itemsize
        if target.recurrence is not None:  # a mixer and an MLP work one after the other
            mixing = 4 * target.hidden * target.dtype.itemsize + target.recurrence.working_bytes
            token = max(token, mixing)
        chunk = min(request.config.prefill.chunk, request.context)
        written = not request.in_place and target.paged_layers
        paged = (PROMPT_WRITES + 1) * chunk if written else 0
        pages = paged * target.layer_token_bytes
        if request.store_layout.packed:
            pages += request.store_layout.layer_bytes(paged)
        return chunk * token + pages

    def _buffer_bytes(self) -> int:
        """Returns the page-locked bytes that copies of a link go through: two buffers out, one back."""
        request = self.request
        outwards = READ_TOKENS * request.target.token_bytes
        if request.retrieves:
            outwards = max(outwards, PORTION_BYTES)
        inwards = (request.longest_draft + 1) * request.target.token_bytes
        return 2 * page_locked_bytes(outwards) + page_locked_bytes(inwards)


def _gpu_reserve(gpu: Gpu) -> int:
    return max(GPU_RESERVE_BYTES, int(RESERVE_SHARE * gpu.memory_bytes))


def shared_gpu(gpu: Gpu, sequences: int, loaded_bytes: int) -> Gpu:
    """Returns a GPU as one of several sequences sees it: they share what is free beside the models."""
    common = loaded_bytes + _gpu_reserve(gpu)
    memory = common + max(0, gpu.memory_bytes - common) // sequences
    return replace(gpu, name=f"{gpu.name}, shared by {sequences} sequences", memory_bytes=memory)


def verdict_bytes(rows: int, target: ModelShape) -> int:
    """Returns the bytes of the logits of a pass, and of what a verdict makes of them and of the draft's
    probabilities."""
    return rows * target.vocabulary * (target.dtype.itemsize + VERDICT_BYTES)


def largest(memory: Memory, digits: int, count: int | None = None) -> str:
    """Returns the largest parts, `count` of them or all, in GiB as text."""
    parts = sorted(memory.items(), key=lambda part: -part[1])[:count]
    return ", ".join(f"{name.replace('_', ' ')} {size / GIB:.{digits}f}" for name, size in parts if size)


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
        other_gpus = sum(gpu.resident_tokens for gpu in self.gpus)
        return (self.resident_tokens + other_gpus) * self.shape.token_bytes

    @property
    def cpu_attended_bytes(self) -> int:
        return self.cpu_tokens * self.shape.token_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that cross all links together for every pass."""
        other_gpus = sum(gpu.streamed_tokens for gpu in self.gpus)
        return (self.streamed_tokens + other_gpus) * self.shape.token_bytes
