"""Opens models for an `LLM`: chooses devices, plans, and loads weights only where the plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from cpu_kv import CudaLink, ElementType, Link
from offload_rt.config.schema import AUTO, MTP, NO_DRAFT, Config
from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.drafting.levels.base import needs_draft_model, used_levels
from offload_rt.drafting.levels.configs import load_configs, with_head
from offload_rt.engine.engine import Engine, ProgressReport
from offload_rt.errors import UsageError
from offload_rt.machine.devices import DEVICES, choose_devices, choose_dtype
from offload_rt.machine.inspection import usable_hardware
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.embedded import DEMO, DEMO_DRAFT, model_name, model_source
from offload_rt.model.head_config import head_config
from offload_rt.model.loading import check_same_tokens, checked_config, load_model, load_tokenizer
from offload_rt.model.local_heads import find_head
from offload_rt.model.local_models import local_drafts
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.plane_weights import splits
from offload_rt.model.quantized_checkpoints import installed_quantization, refuse_dependent_rows
from offload_rt.model.rope import Yarn
from offload_rt.model.runner import CausalModel, open_runner
from offload_rt.model.shape import ModelShape
from offload_rt.planning.local_plans import choose_draft
from offload_rt.planning.planner import Plan, ranked, requests_for

SHORTEST_CONTEXT = 1024  # tokens: weights are spread over GPUs for no shorter one
Sizes = tuple[int, int]
"""Prompt tokens and new ones."""


@dataclass(frozen=True)
class LLMOptions:
    """What an `LLM` opens, and for which sizes; see `LLM` for the values."""

    model: str | Path | None = None
    draft: str | Path | None = None
    config: str = AUTO
    device: str = "auto"
    dtype: str = "auto"
    overrides: Mapping[str, object] = field(default_factory=dict)
    rope: str | Yarn | None = None
    size_hint: Sizes | None = None
    quantize: str = NO_QUANTIZATION


@dataclass(frozen=True)
class Opened:
    """Loaded models with their names, and what an engine needs beside them."""

    target: tuple[PreTrainedModel, str]
    draft: tuple[PreTrainedModel, str] | None
    tokenizer: PreTrainedTokenizerBase | None
    configs: Sequence[Config]
    other_links: Sequence[Link] = ()
    plan: Plan | None = None  # for the sizes that there must be room for; None: none were given
    notices: tuple[str, ...] = ()
    owned: bool = False  # the models were loaded for this LLM

    def engine(
        self, link: Link | None, on_progress: ProgressReport | None, on_notice: Callable[[str], None]
    ) -> Engine:
        """Returns an engine of the models. Where it refuses them, they are as they were."""
        vocabulary = getattr(self.target[0].config.get_text_config(), "vocab_size", None)
        check_files(self.configs, self.tokenizer, vocabulary)
        with ExitStack() as refused:
            models, planes = list[CausalModel](), self._splits_weights()
            for model_and_name in (self.target, self.draft) if self.draft is not None else (self.target,):
                refuse_dependent_rows(*model_and_name)
                split = planes and model_and_name is self.target
                models.append(open_runner(*model_and_name, on_notice, planes=split, owned=self.owned))
                refused.callback(models[-1].restore)
            small = models[1] if self.draft is not None else None
            configs = [config.having("weights.planes", "on" if planes else "off") for config in self.configs]
            engine = Engine(models[0], small, configs, link, on_progress, on_notice, self.other_links)
            refused.pop_all()
        return engine

    def _splits_weights(self) -> bool:
        """Returns whether the target's weights are to be in two planes."""
        gain = any(level.of_target for config in self.configs for level in used_levels(config))
        if self.plan is not None:
            gain = self.plan.request.target.planes
        return splits(self.configs[0].weights.planes, *self.target, gain=gain)


def open_models(
    options: LLMOptions, on_progress: ProgressReport | None, on_plan: Callable[[Plan], None] | None
) -> Opened:
    """Loads the models of an LLM.

    Args:
        on_progress, on_plan: see `LLM`.

    Raises:
        UsageError: the models, the config or the devices do not exist, do not go together or do not fit.
    """
    rope = Yarn.parse(options.rope) if isinstance(options.rope, str) else options.rope
    configs = load_configs(options.config, options.overrides)  # what is cheap to check comes first
    place, *other_devices = devices = choose_devices(options.device)
    source, name = model_source(options.model), model_name(options.model)
    if options.config == AUTO:
        configs = with_head(
            configs, options.overrides, chosen_head(options.overrides, name, model_config(source))
        )
    torch_dtype = choose_dtype(options.dtype, place, model_config(source).dtype)
    draft, size_hint, quantize = options.draft, options.size_hint, options.quantize
    if draft is None and (options.model is None or str(options.model) == DEMO):
        draft = DEMO_DRAFT
    if str(draft) == NO_DRAFT or not needs_draft_model(configs):
        draft = None
    tokenizer = load_tokenizer(source)
    check_files(configs, tokenizer)
    small_source = None if draft is None or str(draft) == AUTO else model_source(draft)
    if small_source is not None:
        check_same_tokens(tokenizer, name, load_tokenizer(small_source), str(draft))
    quantization = installed_quantization(model_config(source, rope), name, quantize)
    plan, notices = None, [quantization.notice] if quantization and quantization.notice else []
    if size_hint is not None or other_devices or str(draft) == AUTO:
        shape = find_shape(name, None if torch_dtype is None else ElementType.of(torch_dtype), rope, quantize)
        planning = partial(_plan, shape, configs, devices, size_hint, on_progress)
        if str(draft) == AUTO:
            local_draft, plan, note = choose_draft(local_drafts(shape, source, tokenizer), planning)
            draft, small_source = (
                (local_draft.name, local_draft.folder) if local_draft is not None else (None, None)
            )
            notices.append(note)
        else:
            plan = planning(None if draft is None else find_shape(str(draft), None))
        if size_hint is not None and on_plan is not None:
            checked_config(source, rope, quantize)  # first, as files that `load_model` refuses will not run
            on_plan(plan)
    mlps = plan.memory.remote_mlps if plan is not None else 0
    remote_mlps = (other_devices[0], mlps) if mlps else None
    planes = configs[0].weights.planes == "on"  # otherwise that is known once they are loaded
    target = load_model(
        *(source, place, torch_dtype, on_progress),
        remote_mlps=remote_mlps,
        rope=rope,
        quantize=quantize,
        planes=planes,
    )
    small = None
    if small_source is not None:
        small = load_model(small_source, place, target.dtype, on_progress, "load draft"), str(draft)
    if place.type == "cuda" and options.device in DEVICES and torch.cuda.device_count() > 1:
        notices.append("another GPU is idle: device cuda:0,cuda:1 lets it keep and attend KV, too")
    links = [CudaLink(device) for device in other_devices]
    plan_of_hint = None if size_hint is None else plan
    opened = (target, name), small, tokenizer, configs, links, plan_of_hint, tuple(notices)
    return Opened(*opened, owned=True)


def chosen_head(overrides: Mapping[str, object], name: str, config: PretrainedConfig) -> str | None:
    """Returns the head for a target that the user names, or that is found; None: there is none."""
    named = str(overrides.get("head.path", AUTO))
    if named == AUTO:
        return find_head(name, config)
    if named not in (NO_DRAFT, MTP):
        head_config(named)  # refuses what is no head
    return None if named == NO_DRAFT else named


def _plan(
    target: ModelShape,
    configs: Sequence[Config],
    devices: Sequence[torch.device],
    size_hint: Sizes | None,
    on_progress: ProgressReport | None,
    draft: ModelShape | None,
) -> Plan:
    """Returns the fastest plan of all configs for `size_hint`; without one, for a long sequence that fits.

    Raises:
        UsageError: `size_hint` does not fit.
    """
    place, *other_devices = devices
    hardware = usable_hardware(
        place, on_progress=on_progress, other_gpus=[(other, 0) for other in other_devices]
    )

    def planned_for(sizes: Sizes) -> Plan:
        return ranked(requests_for(configs, target, draft, sizes, hardware))[0]

    if size_hint is not None:
        planned = planned_for(size_hint)
        planned.check()
        return planned
    # Halved, and not the longest that fits: there only the leanest composition does, whatever is chosen.
    tokens = target.max_positions - 1
    while not (planned := planned_for((tokens, 1))).fits and tokens > SHORTEST_CONTEXT:
        tokens //= 2
    return planned


def check_files(
    configs: Iterable[Config], tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None = None
) -> None:
    """Raises UsageError where a file that a level needs is missing or does not go with the model."""
    for config in configs:
        for level in used_levels(config):
            level.check_files(tokenizer, vocabulary)


def name_of(model: PreTrainedModel) -> str:
    """Returns the name of a loaded model. Raises UsageError where it is none."""
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"model {model!r} is no transformers model; LLM(…) takes folders and hub ids")
    return model_name(getattr(model.config, "_name_or_path", "") or type(model).__name__)
