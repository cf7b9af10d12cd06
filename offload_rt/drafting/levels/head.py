"""The level of a draft head on the target's hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offload_rt.caches.sizes import LONGEST_HEAD_WINDOW, USUAL_HEAD_WINDOW, bounded_bytes
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import HEAD_ACCEPTANCE, MTP_ACCEPTANCE
from offload_rt.config.schema import MTP
from offload_rt.config.validation import require
from offload_rt.drafting.levels.base import Cost, Level, Memory, PassCosts, Resources, Sizes
from offload_rt.model.shape import head_shape

if TYPE_CHECKING:
    from offload_rt.drafting.base import Drafter
    from offload_rt.drafting.head_model import Heads
    from offload_rt.model.runner import CausalModel


class HeadLevel(Level):
    """A head proposes from the states of the level above, over a window of KV of its own."""

    name = "head"
    rank = 30
    needs_target_states = True
    verifies = False

    def acceptance(self, sizes: Sizes | None = None) -> float:
        return MTP_ACCEPTANCE if self._mtp else HEAD_ACCEPTANCE

    @property
    def _mtp(self) -> bool:
        return self.config.head.path == MTP

    @property
    def _entries(self) -> int:
        return self.config.head.sinks + self._window

    @property
    def _window(self) -> int:
        return self.config.head.window or (LONGEST_HEAD_WINDOW if self._mtp else USUAL_HEAD_WINDOW)

    def memory(self, sizes: Sizes) -> Memory:
        shape, head = head_shape(sizes.target, mtp=self._mtp), self.config.head
        shared = shape.embedding_parameters * shape.dtype.itemsize if self._mtp else 0  # with the target
        taken = 1 if self._mtp else 3  # hidden states of a prompt's end, while it is read
        states = (head.sinks + (2 + taken) * self._window) * shape.hidden * shape.dtype.itemsize
        return {
            "head_weights": shape.weight_bytes - shared,
            "head_cache": bounded_bytes(shape.layout(1), self._entries) + states,
        }

    def pass_cost(self, costs: PassCosts, queries: int, *, first: bool = False) -> Cost:
        sizes = costs.request
        entries = min(self._entries, sizes.context)
        return costs.pass_cost(
            head_shape(sizes.target, mtp=self._mtp), queries, entries, graph=not sizes.in_place
        )

    def drafter(
        self, below: Drafter, shape_below: DraftShape, shape: DraftShape, resources: Resources
    ) -> Drafter:
        from offload_rt.caches.head import HeadCache  # with torch, which a plan does not need
        from offload_rt.drafting.head_drafter import HeadDrafter

        model, head = resources.shared.heads.of(self.config.head, resources.target), self.config.head
        assert resources.full.states is not None  # the head was loaded with the engine
        cache = HeadCache(
            model.head.kv_layout(),
            model.head.rotary_frequencies,
            model.head.state_size,
            sinks=head.sinks,
            window=head.window or model.head.window,
            backend=resources.shared.backend,
            pool=resources.shared.pool,
        )
        resources.caches.append(cache)
        model.prepare(cache, range(1, shape.per_pass + 2))
        return HeadDrafter(model, cache, resources.full.states, resources.sampling)

    def check(self, key: str) -> None:
        require(self.settings.layers == "all", f"{key}.layers", self.settings.layers, "must be all for head")

    def load(self, target: CausalModel, heads: Heads) -> None:
        heads.of(self.config.head, target)
