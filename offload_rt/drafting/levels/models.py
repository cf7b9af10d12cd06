"""Levels that run a model over a bounded cache: the small model, or the target over a part of its KV.

Caches and drafters are imported where they are built: a plan needs neither, nor torch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from offload_rt.caches.sizes import (
    SPECULATIVE_ENTRIES,
    RetrievedSize,
    bounded_bytes,
    choosing_bytes,
    gathering_bytes,
    mean_slots_for,
    score_bytes,
    shared_bytes,
)
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import (
    DRAFT_PLANE_REJECTIONS,
    SAME_MODEL_ACCEPTANCE,
    SMALL_MODEL_ACCEPTANCE,
    rejections,
)
from offload_rt.drafting.levels.base import Cost, Level, Memory, PassCosts, Resources, Sizes, local_memory
from offload_rt.errors import UsageError
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.shape import ModelShape

if TYPE_CHECKING:
    from offload_rt.caches.base import CachedModel
    from offload_rt.caches.bounded import BoundedCache
    from offload_rt.caches.selection import Selection
    from offload_rt.caches.split import SplitCache
    from offload_rt.drafting.base import Drafter
    from offload_rt.drafting.head_model import Heads
    from offload_rt.drafting.model_drafter import ModelDrafter
    from offload_rt.model.runner import CausalModel
    from offload_rt.system.second_device import SecondDevice

CHOOSING_NS = 10
"""Time on the host to choose chunks, for each score of a layer and KV head: 7 to 22 on one server core."""

REPLACED_SHARE = 0.23
"""Share of the chosen chunks that a refresh replaces. Measured on three books with the demo target, 512 of
8,192 tokens and a refresh every 32."""

DECODED_SHARE = 0.9
"""Least time of attention on the CPU over quantised entries, as a share of that over 16 bits: it decodes."""


class ModelLevel(Level):
    """A model over a bounded cache."""

    splits: ClassVar[bool] = True
    """Its cache may be split by layers between two devices."""

    def model(self, resources: Resources) -> CausalModel:
        """Returns the model that it runs."""
        return resources.target

    def shape(self, sizes: Sizes) -> ModelShape:
        """Returns the shape of that model."""
        return sizes.target

    def load(self, target: CausalModel, heads: Heads) -> None:
        if self.of_target and not target.kinds.full:
            raise UsageError(
                f"config {self.config.name}: {self.name} drafts with a part of the target's KV, and no"
                f" layer of {target.name} attends to more than a window; use config lookup, naive or plain"
            )

    @property
    def drafter_class(self) -> type[ModelDrafter]:
        """The class of its drafter."""
        from offload_rt.drafting.model_drafter import ModelDrafter

        return ModelDrafter

    @abstractmethod
    def cache(self, model: CachedModel, resources: Resources) -> BoundedCache:
        """Builds the cache that it attends to.

        Args:
            model: what it needs to know of the model's layers.
        """

    def entries(self, sizes: Sizes) -> int:
        """Returns the number of entries that its cache holds beside speculative ones."""
        return 0

    def acceptance(self, sizes: Sizes | None = None) -> float:
        if sizes is None:
            return SAME_MODEL_ACCEPTANCE
        return max(0.0, sizes.same_model_acceptance - self._plane_rejections(sizes))

    def _plane_rejections(self, sizes: Sizes) -> float:
        """Returns the share of its drafts that is rejected as it reads one plane of the weights."""
        return DRAFT_PLANE_REJECTIONS if self.of_target and sizes.target.planes else 0.0

    def pass_cost(self, costs: PassCosts, queries: int, *, first: bool = False) -> Cost:
        sizes, order = costs.request, self._on_two(costs.request)
        if order is None:
            return costs.pass_cost(self.running(sizes, first), queries, self._attended(sizes), graph=True)
        order = order.in_turn() if first and self.settings.calibrate else order
        return costs.pass_cost_on_two(self._drafting(sizes), order, queries, self._attended(sizes))

    def _drafting(self, sizes: Sizes) -> ModelShape:
        """Returns the shape of its model as it drafts: of a target in two planes, by one of them."""
        shape = self.shape(sizes)
        return replace(shape, draft_plane=True) if self.of_target and shape.planes else shape

    def groups_on_two(self, sizes: Sizes) -> LayerOrder | None:
        shape = self.shape(sizes)
        order = LayerOrder.parse(self.settings.layers, shape.layers) if self.splits else None
        order = None if order is None or shape.kinds.local else order.on_two_devices()
        return order if order is not None and order.remote else None

    def _on_two(self, sizes: Sizes) -> LayerOrder | None:
        """Returns `groups_on_two` where that is what the config says."""
        return self.groups_on_two(sizes) if self.config.offload.group_devices == 2 else None

    def cache_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes of its cache for all layers."""
        return 0

    def _cache_here(self, sizes: Sizes) -> int:
        """Returns the bytes of its cache on the first device."""
        order, layers = self._on_two(sizes), self.shape(sizes).layers
        return self.cache_bytes(sizes) * (layers - (len(order.remote) if order else 0)) // layers

    def second_memory(self, sizes: Sizes) -> Memory:
        if (order := self._on_two(sizes)) is None:
            return {}
        weights = len(order.remote) * self.shape(sizes).attention_bytes
        return {
            "group_weights": weights,
            "group_caches": self.cache_bytes(sizes) - self._cache_here(sizes),
        }

    def running(self, sizes: Sizes, first: bool) -> ModelShape:
        """Returns the shape of the layers that a pass runs."""
        shape = self._drafting(sizes)
        order = (
            None
            if first and self.settings.calibrate
            else LayerOrder.parse(self.settings.layers, shape.layers)
        )
        return shape if order is None else shape.running(order)

    def _attended(self, sizes: Sizes) -> int:
        return min(self.entries(sizes), sizes.context)

    def drafter(
        self, below: Drafter, shape_below: DraftShape, shape: DraftShape, resources: Resources
    ) -> Drafter:
        from offload_rt.caches.bounded import BoundedCache

        model = self.model(resources)
        order = model.layer_order(self.settings.layers)
        second = resources.shared.second if self.splits and self.config.offload.group_devices == 2 else None
        if order is not None and second is not None:
            order = order.on_two_devices()
        if self.of_target:
            order = model.drafting(order)
        cache: BoundedCache | SplitCache
        if order is not None and order.remote and second is not None:
            cache = self._split_cache(model, resources, order, second)
        else:
            cache = self.cache(model, resources)
        resources.caches.append(cache)
        if self.of_target:
            resources.full.derived.append(cache)
        orders = [order]
        if order and self.settings.calibrate and (in_turn := order.in_turn()) != order:
            orders.append(in_turn)
        # The cache lacks the last token, and where all was accepted perhaps the one before it.
        depth = shape_below.depth
        recurring = range(1, shape_below.size + 3) if depth else sorted({1, 2, shape.per_pass} - {0})
        alone = len(self.config.speculation.levels) == 1
        if alone and shape.kind == "chain" and not resources.full.transfer.link.in_place:
            recurring = range(1, max(2, self.config.offload.ahead) + 1)  # as many chains are drawn together
        if isinstance(cache, BoundedCache):
            for layer_order in orders:
                model.prepare(cache, recurring, layer_order)
        first_order = orders[1] if len(orders) > 1 else None
        return self.drafter_class(
            self.name,
            model,
            cache,
            below,
            resources.sampling,
            orders[0],
            first_order,
            shape_below=shape_below,
        )

    def _split_cache(
        self, model: CausalModel, resources: Resources, order: LayerOrder, second: SecondDevice
    ) -> SplitCache:
        """Builds the cache in two parts, each on the device that attends its layers."""
        from offload_rt.caches.split import ModelLayers, SourceLayers

        model.remote_blocks.take(second, sorted(order.remote))
        home = [layer for layer in range(model.layers) if layer not in order.remote]
        # A pass streams its segments to the first device alone, and both parts must be refreshed together.
        level = type(self)(self.config.having("offload.refresh_from", "store"), self.settings)
        with ExitStack() as closing:

            def part(layers: Sequence[int], device: SecondDevice | None) -> BoundedCache:
                part_resources = resources
                if self.of_target:
                    source = SourceLayers(resources.full, layers, device)
                    closing.callback(source.transfer.close)
                    part_resources = replace(resources, part=source)
                return level.cache(ModelLayers.of(model, layers, device), part_resources)

            home_cache = part(home, None)
            with second.on_stream():
                away_cache = part(sorted(order.remote), second)
            close = closing.pop_all().close
        return self.split_class(home_cache, away_cache, second, order.remote, model.layers, close)

    @property
    def split_class(self) -> type[SplitCache]:
        """The class of its cache on two devices."""
        from offload_rt.caches.split import SplitCache

        return SplitCache


class WindowLevel(ModelLevel):
    """A model over attention sinks and a recent window (StreamingLLM)."""

    def entries(self, sizes: Sizes) -> int:
        return self._window

    def cache_bytes(self, sizes: Sizes) -> int:
        return bounded_bytes(self.shape(sizes).layout(1), self._window)

    @property
    def split_class(self) -> type[SplitCache]:
        from offload_rt.caches.split import SplitStreamingCache

        return SplitStreamingCache

    @property
    def _window(self) -> int:
        return self.config.streaming.sinks + self.config.streaming.window

    def cache(self, model: CachedModel, resources: Resources) -> BoundedCache:
        from offload_rt.attention.selector import choose_backend
        from offload_rt.caches.local import LocalState
        from offload_rt.caches.streaming import StreamingCache

        streaming, source, device = self.config.streaming, resources.source, model.rotary_frequencies.device
        return StreamingCache(
            model.kv_layout(),
            model.rotary_frequencies,
            sinks=streaming.sinks,
            window=streaming.window,
            backend=source.backend if device == source.device else choose_backend(device),
            source=source if self.of_target else None,
            pool=resources.shared.pool,
            local=None if self.of_target else LocalState(model.local_layers, source.backend),
        )


class SmallModelLevel(WindowLevel):
    """A small model (TriForce's first level, EasySpec's draft model)."""

    name = "draft:streaming"
    rank = 40
    needs_draft_model = True

    @property
    def drafter_class(self) -> type[ModelDrafter]:
        from offload_rt.drafting.model_drafter import SmallModelDrafter

        return SmallModelDrafter

    def model(self, resources: Resources) -> CausalModel:
        assert (
            resources.shared.draft is not None
        )  # a level without its model is left out before anything is composed
        return resources.shared.draft.for_length(self._window, 0)  # it sees no more tokens at a time

    def shape(self, sizes: Sizes) -> ModelShape:
        assert sizes.draft is not None
        return sizes.draft

    def acceptance(self, sizes: Sizes | None = None) -> float:
        return SMALL_MODEL_ACCEPTANCE if sizes is None else sizes.small_model_acceptance

    def memory(self, sizes: Sizes) -> Memory:
        shape = self.shape(sizes)
        cache = self._cache_here(sizes) + sum(local_memory(shape, SPECULATIVE_ENTRIES).values())
        weights = shape.weight_bytes if sizes.in_place else shape.gpu_bytes
        return {"draft_weights": weights, "draft_cache": cache}


class StreamingLevel(WindowLevel):
    """The target itself over attention sinks and a recent window."""

    name = "target:streaming"
    rank = 50
    of_target = True

    def memory(self, sizes: Sizes) -> Memory:
        return {"streaming_cache": self._cache_here(sizes)}


class RetrievedLevel(ModelLevel):
    """The target over chunks of the full KV that are chosen by attention (TriForce's middle level)."""

    name = "target:retrieved"
    rank = 60
    of_target = True

    def entries(self, sizes: Sizes) -> int:
        return self.config.retrieval.budget + self._means(sizes.target, sizes.context + sizes.new_tokens)

    def acceptance(self, sizes: Sizes | None = None) -> float:
        if sizes is None:
            return super().acceptance()
        seldom = rejections(sizes.retrieved_share, self.config.retrieval.entry_bits)
        rejected = (1 - sizes.same_model_acceptance) * seldom + self._plane_rejections(sizes)
        return 1 - min(1.0, rejected)

    def _size(self, target: ModelShape) -> RetrievedSize:
        retrieval, layout = self.config.retrieval, target.layout(self.config.store.page)
        return RetrievedSize.of(
            layout, retrieval.budget, retrieval.chunk, retrieval.recent, retrieval.entry_bits
        )

    def _attended(self, sizes: Sizes) -> int:
        retrieval, size, layout = self.config.retrieval, self._size(sizes.target), sizes.target.layout(1)
        entries = super()._attended(sizes)
        if size.quantized is None or not layout.token_bytes:
            return entries
        share = size.quantized.nbytes(layout) / (size.quantized.entries * layout.token_bytes)
        share = max(share, DECODED_SHARE) if sizes.in_place else share
        retrieved = max(0, min(retrieval.budget, sizes.context) - retrieval.recent)
        return entries - round(retrieved * (1 - share))

    def _means(self, target: ModelShape, tokens: int) -> int:
        """Returns the number of page means that stand for tokens which are not retrieved."""
        pages = target.layout(self.config.store.page).pages(tokens)
        return mean_slots_for(pages) if self.config.retrieval.rest else 0

    def memory(self, sizes: Sizes) -> Memory:
        target, tokens = sizes.target, sizes.context + sizes.new_tokens
        memory = {"retrieved_caches": self._cache_here(sizes)}
        retrieval, layout = self.config.retrieval, target.layout(1)
        scored = retrieval.select != "mean_keys"
        chunks, count = tokens // retrieval.chunk, retrieval.budget // retrieval.chunk
        if scored:
            memory["scores"] = score_bytes(layout, target.heads, chunks)
        if sizes.in_place:
            return memory
        if scored:
            buffers = 2 if sizes.refreshes_from_stream else 1
            memory["scores"] += choosing_bytes(target.paged_layers, target.kv_heads, chunks, count, buffers)
        return memory | {"gathering": gathering_bytes(retrieval.budget * layout.layer_token_bytes)}

    def cache_bytes(self, sizes: Sizes) -> int:
        target, layout = sizes.target, sizes.target.layout(1)
        size, means = self._size(target), self._means(target, sizes.context + sizes.new_tokens)
        buffers = 2 if sizes.refreshes_from_stream else 1  # one in use, one that is filled
        buffer = size.nbytes(layout, means)
        return buffers * buffer + size.staging_bytes(layout)

    def refresh_cost(self, costs: PassCosts, tokens: float, apart: float) -> tuple[float, float]:
        sizes, retrieval, target = costs.request, self.config.retrieval, costs.request.target
        everything = sizes.context + sizes.new_tokens <= retrieval.budget
        # How often acceptance falls too low is not known beforehand.
        if everything or retrieval.refresh.kind == "acceptance":
            return 0.0, 0.0
        share = 1 / max(1, math.ceil(retrieval.refresh.value / tokens))
        replaced = 1.0 if retrieval.entry_bits == 4 else REPLACED_SHARE  # 4 bits: whole groups, all of them
        retrieved = max(0, retrieval.budget - retrieval.recent)
        entries = (retrieval.recent + replaced * retrieved) * target.token_bytes
        moves = 2 if retrieval.entry_bits == 16 else 3  # read and written; to be quantised, read again
        copying, gathering = moves * costs.device_read_ms(entries), costs.gather_ms(entries)
        if sizes.refreshes_from_stream:
            # Entries are in the stream of a pass, but for those that other processors attend.
            return share, copying + apart * gathering
        chunks = sizes.context // retrieval.chunk
        if retrieval.select == "mean_keys":
            choosing = costs.host_read_ms(chunks * target.token_bytes // 2)
        else:
            # Chosen where the scores are: on a GPU for all layers at once, on the host layer by layer.
            scores = chunks * target.paged_layers * target.kv_heads
            choosing = scores * CHOOSING_NS / 1e6 if sizes.in_place else 0.0
        return share, choosing + copying + gathering

    @property
    def kept_means(self) -> tuple[int | None, bool]:
        retrieval = self.config.retrieval
        return retrieval.chunk if retrieval.select == "mean_keys" else None, retrieval.rest

    def cache(self, model: CachedModel, resources: Resources) -> BoundedCache:
        from offload_rt.caches.retrieved import RetrievedCache

        retrieval, in_place = self.config.retrieval, resources.full.transfer.link.in_place
        return RetrievedCache(
            resources.source,
            budget=retrieval.budget,
            chunk=retrieval.chunk,
            recent=retrieval.recent,
            refresh=retrieval.refresh,
            selection=self._selection(resources),
            mean_slots=mean_slots_for(resources.pages) if retrieval.rest else 0,
            from_stream=self.config.offload.refreshes_from_stream and not in_place,
            pool=resources.shared.pool,
            bits=retrieval.entry_bits,
        )

    def _selection(self, resources: Resources) -> Selection:
        from offload_rt.caches.selection import DECAY, AttentionScores, MeanKeyScores

        retrieval, source = self.config.retrieval, resources.source
        if retrieval.select == "mean_keys":
            return MeanKeyScores(source)
        decay = DECAY if retrieval.select == "attention" else 1.0
        # Where passes of the full cache take the attention mass.
        device = resources.target.device
        return AttentionScores(source.layout, device, retrieval.chunk, decay, resources.pages)


class SharedLevel(ModelLevel):
    """The target over the full KV, usually with layers left out (Draft & Verify)."""

    name = "target:shared"
    rank = 70
    of_target = True
    drafts_on_host = True
    splits = False  # the CPU attends it

    def memory(self, sizes: Sizes) -> Memory:
        return {"shared_cache": shared_bytes(sizes.target.layout(self.config.store.page))}

    def pass_cost(self, costs: PassCosts, queries: int, *, first: bool = False) -> Cost:
        sizes = costs.request
        shape = self.running(sizes, first)
        whole = max(1, sizes.target.paged_layers)
        attending = costs.host_attention_ms(sizes.context, queries) * shape.paged_layers / whole
        return costs.pass_cost(shape, queries) + Cost(attending)

    def cache(self, model: CachedModel, resources: Resources) -> BoundedCache:
        from offload_rt.caches.shared import SharedCache

        return SharedCache(resources.source, resources.shared.pool)
