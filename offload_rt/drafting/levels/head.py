"""The level of a draft head on the target's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import HEAD_ACCEPTANCE
from offload_rt.config.validation import require
from offload_rt.drafting.levels.base import Cost, Level, Memory, PassCosts, Resources, Sizes
from offload_rt.model.shape import head_shape

if TYPE_CHECKING:
    from offload_rt.drafting.base import Drafter
    from offload_rt.drafting.head_drafter import Heads
    from offload_rt.model.runner import CausalModel


class HeadLevel(Level):
    """A head proposes from the newest hidden state of the level above, without KV of its own."""

    name = "head"
    rank = 30
    needs_target_states = True
    verifies = False

    def acceptance(self, sizes: Sizes | None = None) -> float:
        return HEAD_ACCEPTANCE

    def memory(self, sizes: Sizes) -> Memory:
        head = head_shape(sizes.target)  # its output head is the target's own
        return {"head_weights": head.weight_bytes - head.embedding_parameters * head.dtype.itemsize}

    def pass_cost(self, costs: PassCosts, queries: int, *, first: bool = False) -> Cost:
        return costs.pass_cost(head_shape(costs.request.target), queries)

    def drafter(
        self, below: Drafter, shape_below: DraftShape, shape: DraftShape, resources: Resources
    ) -> Drafter:
        from offload_rt.drafting.head_drafter import HeadDrafter  # with torch, which a plan does not need

        return HeadDrafter(resources.shared.heads.of(self.config.head, resources.target), resources.sampling)

    def check(self, key: str) -> None:
        require(self.settings.layers == "all", f"{key}.layers", self.settings.layers, "must be all for head")

    def load(self, target: CausalModel, heads: Heads) -> None:
        heads.of(self.config.head, target)
