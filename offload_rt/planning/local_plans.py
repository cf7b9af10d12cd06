"""Plans for the models on this machine: the longest context, the speed, and the drafts that help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cpu_kv import ElementType
from offload_rt.config.schema import Config
from offload_rt.errors import UsageError
from offload_rt.model.local_models import LocalModel, drafts_for
from offload_rt.model.shape import ModelShape
from offload_rt.planning.planner import Plan, longest, ranked, requests_for
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import Hardware

NEW_TOKENS = 256
"""New tokens of a context that is planned, where it has twice as many."""


@dataclass(frozen=True)
class LocalPlan:
    """A model with what is planned for it; a model that does not run has no plans."""

    model: LocalModel
    longest: Plan | None = None  # for the longest context that fits
    plan: Plan | None = None  # for the context that is asked for, without a draft model
    drafts: tuple[tuple[LocalModel, Plan], ...] = ()  # for the same context, the fastest first

    @property
    def refusal(self) -> str | None:
        """Why the model does not run here; None where it does."""
        return self.model.refusal or (self.longest.refusal if self.longest is not None else None)

    def to_json(self) -> dict[str, object]:
        """Returns JSON values; figures of a model that does not run here are None."""
        model, shape = self.model, self.model.shape
        runs, plan = self.refusal is None, self.plan
        return {
            "name": model.name,
            "folder": str(model.folder),
            "architecture": model.architecture,
            "parameters": shape.parameters if shape is not None else None,
            "weight_bytes": model.weight_bytes,
            "runs": runs,
            "refusal": self.refusal,
            "positions": shape.max_positions if shape is not None else None,
            "longest_context": tokens(self.longest) if runs and self.longest is not None else None,
            "context": tokens(plan) if plan is not None and plan.fits else None,
            "ms_per_token": plan.ms_per_token if plan is not None and plan.fits else None,
            "drafts": [
                {"name": draft.name, "ms_per_token": plan.ms_per_token} for draft, plan in self.drafts
            ],
        }


def tokens(plan: Plan) -> int:
    """Returns the tokens of a plan, those of the prompt and new ones."""
    return plan.request.context + plan.request.new_tokens


def local_plans(
    models: Sequence[LocalModel],
    configs: Sequence[Config],
    hardware: Hardware,
    dtype: Callable[[ElementType], ElementType | None],
    context: int | None = None,
) -> list[LocalPlan]:
    """Returns what is planned for each model, those that run first, by name.

    Args:
        dtype: returns that of weights and KV for a checkpoint's own; None: the same.
        context: tokens that speeds are predicted for; None: the longest that fits.
    """
    plans = [_planned(model, models, configs, hardware, dtype, context) for model in models]
    return sorted(plans, key=lambda plan: (plan.refusal is not None, plan.model.name.lower()))


def _planned(
    model: LocalModel,
    models: Sequence[LocalModel],
    configs: Sequence[Config],
    hardware: Hardware,
    dtype: Callable[[ElementType], ElementType | None],
    context: int | None,
) -> LocalPlan:
    if model.shape is None:
        return LocalPlan(model)
    shape = replace(model.shape, dtype=dtype(model.shape.dtype) or model.shape.dtype)

    def requests(draft: ModelShape | None, length: int) -> list[PlanRequest]:
        new = min(NEW_TOKENS, length // 2)
        return requests_for(configs, shape, draft, (length - new, new), hardware)

    longest_plan = longest(requests(None, shape.max_positions))
    length = context or tokens(longest_plan)
    if not longest_plan.fits or length > shape.max_positions:
        return LocalPlan(model, longest_plan)
    drafts = []
    for draft in drafts_for(shape, model.tokenizer, models):
        if (planned := ranked(requests(draft.shape, length))[0]).fits:
            drafts.append((draft, planned))
    plan = ranked(requests(None, length))[0]
    return LocalPlan(model, longest_plan, plan, tuple(sorted(drafts, key=lambda pair: pair[1].ms_per_token)))


def choose_draft(
    drafts: Sequence[LocalModel], planned: Callable[[ModelShape | None], Plan]
) -> tuple[LocalModel | None, Plan, str]:
    """Returns the draft whose plan is predicted to be fastest, or None, with the plan and a note on them.

    Args:
        drafts: those that can draft for the target.
        planned: returns the fastest plan with a draft, or without one.

    Raises:
        UsageError: there is no plan with any of them, nor one without.
    """
    plans: list[tuple[LocalModel | None, Plan]] = []
    refused: UsageError | None = None
    for draft in (None, *drafts):
        try:
            plans.append((draft, planned(None if draft is None else draft.shape)))
        except UsageError as error:  # a config may need a draft, and a draft may not fit
            refused = refused or error
    if not plans:
        assert refused is not None
        raise refused
    # Without a given size, a plan is for the longest context that fits.
    best, plan = min(plans, key=lambda choice: (-choice[1].request.context, choice[1].ms_per_token))
    if best is None:
        why = f"{', '.join(draft.name for draft in drafts)} would not make it faster by the plan"
        return best, plan, f"draft auto: none; {why if drafts else 'no local model has its vocabulary'}"
    note = f"draft auto: {best.name}, {plan.ms_per_token:.1f} ms/token by the plan"
    without = next((plan.ms_per_token for draft, plan in plans if draft is None and plan.fits), None)
    gain = f", {without / plan.ms_per_token:.2f} times as fast as without a draft" if without else ""
    return best, plan, note + gain
