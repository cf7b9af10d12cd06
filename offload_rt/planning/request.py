"""What is planned: models, a config and a context, and the machine to plan them for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cpu_kv import KVSizes
from offload_rt.caches.sizes import stored_layout
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.config.priors import DEMO_ACCEPTANCE, SAME_MODEL_ACCEPTANCE, SMALL_MODEL_ACCEPTANCE
from offload_rt.config.schema import Config, SpeculationConfig
from offload_rt.drafting.levels.base import Level, levels_of
from offload_rt.drafting.levels.models import RetrievedLevel
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.shape import ModelShape, yarn_hint
from offload_rt.system.hardware import Gpu, Hardware

if TYPE_CHECKING:
    from offload_rt.model.runner import CausalModel


PADDING = 0.01  # share of a vocabulary by which two paddings of it may differ


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
    given_remote_mlps: int | None = None  # MLP blocks on the second GPU, once that is decided

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self.target.in_planes(self.config.weights.planes == "on"))
        for name, value, least in (("context", self.context, 1), ("new tokens", self.new_tokens, 0)):
            if value < least:
                raise UsageError(f"{name} {value}: must be at least {least}")
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
    def may_split_weights(self) -> bool:
        """Planes of the target's weights may gain: by their size, or as the target drafts for itself.

        A GPU needs room for all weights as they are loaded, and splits them there. Where there are several,
        MLP blocks are spread over them before that.
        """
        if self.in_place:
            return self.target.splits and any(level.of_target for level in self.levels)
        whole = self.target.in_planes(False).gpu_bytes
        alone = len(self.hardware.gpus) == 1
        return self.target.splits and alone and whole < self.hardware.gpus[0].memory_bytes

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
        plans = [level.groups_on_two(self) for level in self.levels] if self.other_gpus else []
        return [plan for plan in plans if plan is not None]

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
        layout, tokens = self.store_layout, self.segment_tokens
        unpacked = tokens * layout.layer_token_bytes if layout.packed else 0
        return self.config.store.ring_buffers * layout.layer_bytes(tokens) + unpacked

    @cached_property
    def store_layout(self) -> KVSizes:
        """The layout of the KV in the store: in 12 bits a value where it is packed."""
        layout = self.target.layout(self.config.store.page)
        triton = all(gpu.triton for gpu in self.hardware.gpus)
        return stored_layout(layout, self.config.store.code, over_link=not self.in_place, triton=triton)

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

    def having(self, key: str, value: object) -> PlanRequest:
        """Returns the request with another value of one key of the config."""
        return replace(self, config=self.config.having(key, value))


def allowed_drafts(shape: DraftShape, *models: ModelShape | None) -> list[DraftShape]:
    """Returns the drafts of a shape to choose among that the models which make and verify them allow.

    A layer with a recurrent state keeps one for each branch of a draft, which may be as large as the KV of
    2,000 tokens. Such models draft chains, and sequences side by side; a chain takes the place of a tree.
    """
    shapes = shape.candidates()
    if all(model is None or model.drafts_trees for model in models):
        return shapes
    return [kind for kind in shapes if kind.kind in ("chain", "sequences")] or CHAIN.candidates()


class ContextTooLong(UsageError):
    """Raised for a sequence of more tokens than its model has positions."""


def check_positions(model: ModelShape | CausalModel, prompt_tokens: int, new_tokens: int) -> None:
    """Raises ContextTooLong where a sequence has more tokens than the model has positions."""
    limit = model.max_positions
    if prompt_tokens + new_tokens <= limit:
        return
    fitting = [f"{limit - new_tokens} prompt tokens"] if new_tokens < limit else []
    if prompt_tokens < limit:
        fitting.append(f"{limit - prompt_tokens} new tokens")
    new = f" and {new_tokens} new ones" if new_tokens else ""
    raise ContextTooLong(
        f"{prompt_tokens} prompt tokens{new} are more than the {limit} positions of "
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
    settings = tuple(
        level.settings for level in levels_of(config) if draft_model or not level.needs_draft_model
    )
    if config.speculation.levels and not settings:
        raise UsageError(
            f"config {config.name} drafts with a small model, and there is none: name one with --draft, "
            "or use config retrieval or lookup"
        )
    return config.having("speculation.levels", settings)
