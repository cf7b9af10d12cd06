"""Plans sequences of loaded models: what drafts for each, where its KV lies, and whether there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

from cpu_kv import ElementType
from offload_rt.caches.sizes import EVERYTHING_STREAMED, GpuTier, Tiers
from offload_rt.config.schema import Config
from offload_rt.config.validation import InvalidValue
from offload_rt.drafting.levels.base import kept_means
from offload_rt.drafting.resources import SharedResources
from offload_rt.errors import UsageError
from offload_rt.machine.inspection import usable_hardware
from offload_rt.model.config_shapes import shape_of
from offload_rt.model.host_embedding import host_bytes
from offload_rt.model.runner import CausalModel
from offload_rt.model.shape import ModelShape
from offload_rt.planning.cost_model import CostModel
from offload_rt.planning.memory import MemoryBudget, shared_gpu
from offload_rt.planning.planner import Plan, comparison, ranked, with_budget
from offload_rt.planning.request import PlanRequest, check_positions
from offload_rt.planning.sequence_costs import SequenceCosts
from offload_rt.system.hardware import NO_GPU, Hardware, behind_a_link, named_hardware
from offload_rt.system.memory import available_memory

LEFT_OPEN = {
    "prefill.piece": 0,
    "offload.refresh_from": "auto",
    "retrieval.bits": "auto",
    "offload.group_devices": 0,
}
"""Keys that another config takes from the sequence's own, with the values by which it leaves them open."""


@dataclass(frozen=True)
class SequencePlan:
    """What is decided about a sequence before its prefill. Made by `of` and `adapted`.

    Attributes:
        request: the models, a config that leaves nothing open, and the hardware that costs are predicted for.
        tiers: number of tokens in each tier but the streamed one.
    """

    request: PlanRequest
    tiers: Tiers

    @classmethod
    def of(cls, request: PlanRequest, tiers: Tiers) -> SequencePlan:
        """Decides what the config leaves open: in which pieces to read, and how many entries to retrieve."""
        request = request.having("prefill.piece", CostModel(request).piece_tokens())
        if not request.chooses_budget:
            return cls(request, tiers)
        with_tiers = request.having("offload.resident_tokens", tiers.resident_tokens)
        with_tiers = with_tiers.having("offload.cpu_tokens", tiers.cpu_tokens)
        budget = with_budget(with_tiers).config.retrieval.budget
        return cls(request.having("retrieval.budget", budget), tiers)

    @property
    def config(self) -> Config:
        return self.request.config

    def adapted(self, config: Config) -> SequencePlan:
        """Returns the plan for another config over the same KV.

        What that config leaves open is as planned, for which there is room. Its keys for the store and the
        tiers come too late.

        Raises:
            UsageError: it retrieves in chunks that do not divide the pages of the KV.
        """
        planned = self.config
        if config is planned:
            return self
        retrieves = replace(self.request, config=config).retrieves
        retrieval = config.retrieval if retrieves else planned.retrieval
        tiers = {name: getattr(planned.offload, name) for name in ("resident_tokens", "cpu_tokens")}
        offload = replace(config.offload, **tiers)
        try:
            # The weights are as they are, in planes or not.
            config = replace(
                config, store=planned.store, weights=planned.weights, retrieval=retrieval, offload=offload
            )
        except InvalidValue as error:
            raise UsageError(f"config {config.name} does not suit what was read: {error}") from error
        for key, left_open in LEFT_OPEN.items():
            if config.value(key) == left_open:
                config = config.having(key, planned.value(key))
        budget = planned.retrieval.budget
        if config.retrieval.budget == 0 and budget >= config.retrieval.always_held:
            config = config.having("retrieval.budget", budget)
        return SequencePlan.of(replace(self.request, config=config), self.tiers)

    def costs(self, tokens: int) -> SequenceCosts:
        """Returns what rounds behind so many tokens and more are expected to take."""
        return SequenceCosts(replace(self.request, context=tokens, new_tokens=0), self.tiers)


class SequencePlanner:
    """Plans sequences of the models of an engine.

    Args:
        resources: the models, the store and the links.
        configs: to choose among; their keys for the store are those of the first one.
        triton: Triton kernels run on the GPUs.
        on_progress: called with the progress of measuring a machine for its first plan.
        on_notice: called with a line for the user.

    Attributes:
        target: the model that is planned for.
        configs: may be set to others over the same store.
    """

    def __init__(
        self,
        resources: SharedResources,
        configs: Sequence[Config],
        *,
        triton: bool,
        on_progress: Callable[[str, int, int], None],
        on_notice: Callable[[str], None],
    ) -> None:
        self.target = resources.target
        self._resources = resources
        self.configs = configs
        self._triton = triton
        self._on_progress = on_progress
        self._on_notice = on_notice
        self._announced = ""  # the config that a notice has named

    def plan(self, prompt: int, new_tokens: int, sequences: int = 1, shared_tokens: int = 0) -> SequencePlan:
        """Plans a sequence of so many tokens. What the config gives is kept.

        Args:
            sequences: number of sequences that share a GPU's free memory.
            shared_tokens: how many of its tokens have their KV in the store already.

        Raises:
            UsageError: it does not fit.
        """
        on_gpu, link = self.target.device.type == "cuda", self._resources.link
        request = self._request(self.configs[0], prompt, new_tokens, self._assumed_hardware)
        if on_gpu or len(self.configs) > 1:
            fastest = self._fastest(prompt, new_tokens, sequences, shared_tokens)
            request = replace(request, config=fastest.request.config)
        if link.in_place:
            return SequencePlan.of(request, EVERYTHING_STREAMED)
        if on_gpu:
            fastest.check()
            return SequencePlan.of(fastest.request, _tiers(fastest))
        offload, page = request.config.offload, request.config.store.page
        resident, cpu = max(0, offload.resident_tokens), max(0, offload.cpu_tokens)
        # Links of no known rate share evenly.
        others = len(self._resources.other_links)
        pages = max(0, request.context - resident - cpu) // page // (1 + others)
        packed = MemoryBudget(request).resident.packed
        return SequencePlan.of(request, Tiers(resident, cpu, (GpuTier(0, pages * page),) * others, packed))

    def plan_with(self, prompt: int, new_tokens: int, tiers: Tiers) -> SequencePlan:
        """Returns the plan of a sequence whose KV is placed as the caller says, by the first config."""
        return SequencePlan.of(
            self._request(self.configs[0], prompt, new_tokens, self._assumed_hardware), tiers
        )

    def check_room(self, sizes: Sequence[tuple[int, int]], shared_tokens: int = 0) -> None:
        """Refuses sequences that exceed the model's positions, or together the memory.

        Args:
            sizes: tokens of each prompt, and new ones.
            shared_tokens: how many of them have their KV in the store already; each sequence keeps its own
                means of it.

        Raises:
            UsageError: names what is available.
        """
        target, store = self.target, self._resources.store
        for prompt_tokens, new_tokens in sizes:
            check_positions(target, prompt_tokens, new_tokens)
        total, layout = sum(map(sum, sizes)) - shared_tokens, store.layout
        page = layout.page_size
        means = max(layout.means_bytes(page, *kept_means(config)) for config in self.configs) // page
        token_bytes = layout.stored_token_bytes + means
        if target.device.type == "cpu":
            token_bytes += target.hidden_size * target.dtype.itemsize  # the prompt's hidden states
        available = max(0, available_memory() + self._free_bytes - shared_tokens * means)
        needed = total * token_bytes
        if needed > available:
            opened = (
                f", beside {store.used_bytes / 2**30:.1f} GiB of open contexts" if store.used_bytes else ""
            )
            fits = "the longest context that fits is" if len(sizes) == 1 else "of all sequences together fit"
            raise UsageError(
                f"the KV of {total} tokens needs {needed / 2**30:.1f} GiB of memory and "
                f"{available / 2**30:.1f} GiB are available{opened}: {fits} {available // token_bytes} tokens"
            )

    @property
    def _free_bytes(self) -> int:
        """Bytes of the store's free pages, less those that open sequences are still to fill."""
        return self._resources.store.spare_bytes

    @cached_property
    def shapes(self) -> tuple[ModelShape, ModelShape | None]:
        """Shapes of the target and of the small model."""

        def shape(model: CausalModel) -> ModelShape:
            loaded = shape_of(model.module, ElementType.of(model.dtype), model.name)
            return replace(loaded, embedding_on_gpu=not host_bytes(model.module))

        draft = self._resources.draft
        return shape(self.target), None if draft is None else shape(draft)

    def _request(self, config: Config, prompt: int, new_tokens: int, hardware: Hardware) -> PlanRequest:
        remote = len(self.target.remote_mlps)
        return PlanRequest(*self.shapes, config, prompt, new_tokens, hardware, given_remote_mlps=remote)

    def _fastest(self, prompt: int, new_tokens: int, sequences: int, shared_tokens: int) -> Plan:
        """Returns the fastest plan for such a sequence; a notice names the composition that was chosen."""
        hardware = self._free_hardware(sequences, shared_tokens)
        plans = ranked(self._request(config, prompt, new_tokens, hardware) for config in self.configs)
        chosen = plans[0].request.config.name
        if len(plans) > 1 and plans[0].fits and chosen != self._announced:
            self._on_notice(f"config auto: {comparison(plans)}")
            self._announced = chosen
        return plans[0]

    def _free_hardware(self, sequences: int, shared_tokens: int) -> Hardware:
        """Returns the machine with the memory that one of several new sequences may take."""
        resources, models = self._resources, self._resources.models
        loaded_bytes = sum(model.weight_bytes for model in models) + resources.heads.weight_bytes
        loaded_bytes += resources.pool.free_bytes  # kept for this sequence, or let go before it takes others
        remote_weights = sum(block.weight_bytes for block in self.target.remote_mlps)  # on the second GPU
        copies = sum(model.remote_blocks.weight_bytes for model in models)
        others = [
            (link.device, 0 if at else remote_weights + copies)
            for at, link in enumerate(resources.other_links)
        ]
        hardware = usable_hardware(
            self.target.device, loaded_bytes - remote_weights, self._on_progress, others
        )
        reusable = self._free_bytes + shared_tokens * resources.store.layout.stored_token_bytes
        reusable += sum(host_bytes(model.module) for model in models)
        host = hardware.host
        host = replace(
            host, memory_bytes=host.memory_bytes + reusable, lockable_bytes=host.lockable_bytes + reusable
        )
        hardware = replace(hardware, host=host)
        if sequences > 1:
            weights = loaded_bytes - remote_weights, *(size for _, size in others)
            gpus = tuple(map(shared_gpu, hardware.gpus, repeat(sequences), weights))
            hardware = replace(hardware, gpus=gpus)
        return hardware

    @cached_property
    def _assumed_hardware(self) -> Hardware:
        """The hardware that costs are predicted for where no plan has measured any."""
        link, others = self._resources.link, len(self._resources.other_links)
        if link.in_place:
            return named_hardware(NO_GPU)
        if self.target.device.type == "cuda":
            named = named_hardware("rtx4090", 1 + others)
            return replace(named, gpus=tuple(replace(gpu, triton=self._triton) for gpu in named.gpus))
        rate = link.bytes_per_second
        return behind_a_link(None if rate is None else rate / 1e9, others)


def _tiers(plan: Plan) -> Tiers:
    """Returns the tiers of a plan for GPUs, in whole pages."""
    placement, offload, page = plan.placement, plan.request.config.offload, plan.request.config.store.page

    def up(tokens: int) -> int:
        return -(-tokens // page) * page

    cpu = max(0, offload.cpu_tokens)  # one that is given may be more than the prompt: all that follows too
    if offload.cpu_tokens < 0:
        cpu = placement.cpu_tokens // page * page
    gpus = (GpuTier(up(gpu.resident_tokens), gpu.streamed_tokens // page * page) for gpu in placement.gpus)
    return Tiers(up(placement.resident_tokens), cpu, tuple(gpus), plan.memory.resident.packed)
