"""The interface of a level of a composition, and the registry of all kinds.

A composition is a list of levels below the target over its full cache; each drafts for the next one. A kind
of level is one class: it says what it needs, how much memory and time it takes, and how it drafts. Planning
and the engine ask the class and never branch on a name, so that a new cache policy or drafter is one file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.schema import Config, LevelConfig
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.shape import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offload_rt.caches.base import CacheSource
    from offload_rt.caches.bounded import BoundedCache
    from offload_rt.caches.full import FullCache
    from offload_rt.caches.split import SplitCache
    from offload_rt.drafting.base import Drafter
    from offload_rt.drafting.head_model import Heads
    from offload_rt.drafting.resources import SharedResources
    from offload_rt.drafting.verifier import Sampling
    from offload_rt.model.runner import CausalModel

Memory = dict[str, int]
"""Bytes by purpose."""

WINDOWS = 2
"""Room for the KV of a layer with a sliding window, in windows: what has left it is seldom moved out."""
STATES = 4
"""Copies of a recurrent state on the device: of the verified tokens, at the end of a pass, and of drafts."""

LEVELS: dict[str, type[Level]] = {}
"""All kinds of levels by name, from the cheapest to the most expensive."""


@dataclass(frozen=True)
class Cost:
    """Time of a processor in ms: reading and computing, and launching kernels."""

    busy_ms: float = 0.0
    launch_ms: float = 0.0

    @property
    def ms(self) -> float:
        return self.busy_ms + self.launch_ms

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.busy_ms + other.busy_ms, self.launch_ms + other.launch_ms)

    def __mul__(self, count: float) -> Cost:
        return Cost(count * self.busy_ms, count * self.launch_ms)


class Sizes(Protocol):
    """Sizes that the memory of a level depends on; a `PlanRequest` is one."""

    @property
    def target(self) -> ModelShape: ...
    @property
    def draft(self) -> ModelShape | None: ...
    @property
    def context(self) -> int:
        """Tokens of the prompt."""

    @property
    def new_tokens(self) -> int:
        """New tokens to make room for after the prompt."""

    @property
    def in_place(self) -> bool:
        """True without a GPU: the CPU computes, and there is no link."""

    @property
    def refreshes_from_stream(self) -> bool:
        """True where a refresh of a retrieved cache copies its entries from a pass into a second buffer."""

    @property
    def retrieved_share(self) -> float:
        """Share of the context that a retrieved cache holds, at most 1."""

    @property
    def small_model_acceptance(self) -> float: ...
    @property
    def same_model_acceptance(self) -> float: ...


class PassCosts(Protocol):
    """Predicts what passes and parts of them cost; the planner's `CostModel` is one."""

    @property
    def request(self) -> Sizes: ...

    def pass_cost(self, shape: ModelShape, queries: int, entries: int = 0, *, graph: bool = False) -> Cost:
        """Returns the cost of a pass of `queries` tokens over a bounded cache of `entries`.

        Args:
            graph: the pass is launched as one CUDA graph.
        """

    def pass_cost_on_two(self, shape: ModelShape, order: LayerOrder, queries: int, entries: int) -> Cost:
        """Returns the cost of such a pass in an order on two devices."""

    def host_attention_ms(self, tokens: int, queries: int) -> float:
        """Returns the time in which the CPU attends `queries` tokens of the target over `tokens` of its KV.

        With a GPU that is beside a stream over the link.
        """

    def device_read_ms(self, size: float) -> float:
        """Returns the time in which the device that computes reads `size` bytes of its memory."""

    def host_read_ms(self, size: float) -> float:
        """Returns the time in which the host reads `size` bytes of its memory."""

    def gather_ms(self, size: float) -> float:
        """Returns the time in which chunks of `size` bytes are gathered over the link; 0 without a link."""


@dataclass(frozen=True)
class Resources:
    """Models, caches and settings that the composition of a sequence is built from.

    Attributes:
        target: the runner for sequences of this length.
        full: the target's full cache, to which derived caches are added.
        pages: pages of the full cache that the sequence may grow to.
        shared: what it shares with other sequences.
        part: the layers of the full cache that a cache is built for; None: all.
        caches: the bounded caches of its levels, which these add.
    """

    config: Config
    target: CausalModel
    full: FullCache
    sampling: Sampling
    pages: int
    shared: SharedResources
    part: CacheSource | None = None
    caches: list[BoundedCache | SplitCache] = field(default_factory=list)

    @property
    def source(self) -> CacheSource:
        """What a cache of the target reads."""
        return self.full if self.part is None else self.part


class Level(ABC):
    """A level of a composition. A subclass that sets `name` is registered under it.

    Attributes:
        name: as in a config, `model:cache` or one word.
        rank: its place among all kinds, in steps of 10; a level drafts for levels of higher ranks only.
        shapes: kinds of drafts that it may be told to propose; empty: all.
        needs_draft_model: it runs the small model.
        needs_target_states: it goes on from hidden states that a level of the target left.
        of_target: it runs the target model.
        verifies: it can verify what a level below it drafts.
        guesses: it can say what a verification of its drafts may yield, so that the next draft may begin
            before the verdict.
        drafts_on_host: the CPU attends while it drafts, so that drafts wait for the CPU's share of a pass.
    """

    name: ClassVar[str]
    rank: ClassVar[int]
    shapes: ClassVar[tuple[str, ...]] = ()
    needs_draft_model: ClassVar[bool] = False
    needs_target_states: ClassVar[bool] = False
    of_target: ClassVar[bool] = False
    verifies: ClassVar[bool] = True
    guesses: ClassVar[bool] = True
    drafts_on_host: ClassVar[bool] = False

    def __init__(self, config: Config, level: LevelConfig) -> None:
        self.config = config
        self.settings = level

    @property
    def merged(self) -> Level | None:
        """The look-up whose finds join its drafts; None without one."""
        return self._beside(self.config, self.settings.merge)

    @property
    def preferred(self) -> Level | None:
        """The look-up whose finds replace its drafts; None without one."""
        lookup = self.config.lookup
        sizes = replace(
            lookup, min_ngram=lookup.prefer_ngram, max_ngram=max(lookup.max_ngram, lookup.prefer_ngram)
        )
        return self._beside(replace(self.config, lookup=sizes), self.settings.prefer)

    @staticmethod
    def _beside(config: Config, name: str) -> Level | None:
        return LEVELS[name](config, LevelConfig(name)) if name else None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in cls.__dict__:
            by_rank = sorted({**LEVELS, cls.name: cls}.items(), key=lambda item: item[1].rank)
            LEVELS.clear()
            LEVELS.update(by_rank)

    @abstractmethod
    def acceptance(self, sizes: Sizes | None = None) -> float:
        """Returns the chance that a verifier accepts one of its tokens, before anything has been measured.

        Args:
            sizes: holds the rates that the user expects; None: the usual rate.
        """

    @abstractmethod
    def drafter(
        self, below: Drafter, shape_below: DraftShape, shape: DraftShape, resources: Resources
    ) -> Drafter:
        """Builds the drafter.

        Args:
            below: the drafter of the level below; it proposes nothing where there is none.
            shape_below: shape of those drafts.
            shape: shape of its own drafts; its depth is 0 where that is chosen while decoding.
            resources: what it is built from; it adds its cache there.
        """

    def memory(self, sizes: Sizes) -> Memory:
        """Returns the bytes that it holds on the device that computes, by purpose."""
        return {}

    def second_memory(self, sizes: Sizes) -> Memory:
        """Returns the bytes that it holds on the second GPU, by purpose."""
        return {}

    def groups_on_two(self, sizes: Sizes) -> LayerOrder | None:
        """Returns its order of groups of layers on two devices; None: it has no groups that could be."""
        return None

    def pass_cost(self, costs: PassCosts, queries: int, *, first: bool = False) -> Cost:
        """Returns the cost of one pass over `queries` tokens.

        Args:
            first: the first pass of a draft, which may run all layers where the others do not.
        """
        return Cost()

    def refresh_cost(self, costs: PassCosts, tokens: float, apart: float) -> tuple[float, float]:
        """Returns how often its cache is refreshed while decoding, and what that costs.

        Args:
            tokens: expected number that a round yields.
            apart: share of the context that the CPU or another GPU attends, so that no stream carries it.

        Returns:
            Share of rounds that refresh it, and by how many ms such a round is longer.
        """
        return 0.0, 0.0

    @property
    def kept_means(self) -> tuple[int | None, bool]:
        """Means that the store must keep beside the KV.

        Returns:
            The chunk size, in tokens, of mean keys (None: none are kept), and whether pages have means.
        """
        return None, False

    def check(self, key: str) -> None:  # noqa: B027
        """Refuses settings that this kind cannot have.

        Args:
            key: of the level in its config.

        Raises:
            InvalidValue: names the key and the value.
        """

    def check_files(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None) -> None:  # noqa: B027
        """Opens the files that it names, before any weights are read. Raises UsageError."""

    def load(self, target: CausalModel, heads: Heads) -> None:  # noqa: B027
        """Reads what it needs beside the models, before a prefill. Raises UsageError."""


def local_memory(shape: ModelShape, queries: int) -> Memory:
    """Returns the bytes of what layers without paged KV keep of a sequence, on the device that computes.

    Args:
        queries: tokens of a pass at most, whose KV follows that of the window.
    """
    token = shape.window_bytes(1)
    memory = {
        "sliding_windows": WINDOWS * shape.window_bytes() + queries * token,
        "recurrent_states": STATES * shape.state_bytes,
    }
    return {name: size for name, size in memory.items() if size}


def levels_of(config: Config) -> list[Level]:
    """Returns the levels of a config, from the cheapest to the most expensive."""
    return [LEVELS[level.name](config, level) for level in config.speculation.levels]


def used_levels(config: Config) -> list[Level]:
    """Returns the levels of a config, and the look-ups whose finds join or replace a draft."""
    levels = levels_of(config)
    return [used for level in levels for used in (level, level.merged, level.preferred) if used is not None]


def needs_draft_model(configs: Iterable[Config]) -> bool:
    """Returns whether a level of one of the configs runs a small model."""
    return any(level.needs_draft_model for config in configs for level in levels_of(config))


def possible(configs: Sequence[Config], draft_model: bool, paged: bool = True) -> list[Config]:
    """Returns the configs that can run: without a draft model, those that need none.

    A single config is always kept: what it lacks is told, or refused, by `planning.request.available`.

    Args:
        paged: the target has KV that its levels could read a part of.
    """
    if len(configs) == 1:
        return list(configs)
    return [
        config
        for config in configs
        if (draft_model or not needs_draft_model([config]))
        and (paged or not any(level.of_target for level in levels_of(config)))
    ]


def kept_means(config: Config) -> tuple[int | None, bool]:
    """Returns the means that the store must keep for all levels of a config; see `Level.kept_means`."""
    means = [level.kept_means for level in levels_of(config)]
    return next((chunk for chunk, _ in means if chunk), None), any(pages for _, pages in means)
