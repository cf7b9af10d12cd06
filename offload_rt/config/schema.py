"""Configuration of a composition and of the sizes of its parts, as frozen dataclasses.

Every key is listed here, and nowhere else, with its default. `toml` reads them from files, which state what
differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from offload_rt.config.draft_shape import MOST_NODES, DraftShape
from offload_rt.config.validation import InvalidValue, nearest, require, require_type
from offload_rt.errors import UsageError

LONGEST_MATCH = 64
"""Most tokens of a sequence's end that a look-up compares; a datastore's suffixes are sorted by so many."""

AUTO = "auto"
NO_DRAFT = "none"
"""Stands for no draft model, where one may be named."""
MTP = "mtp"
"""Stands for the head in the target's own checkpoint, where a head is named."""
AUTOMATIC = ("triforce", "retrieval", "trees", "naive", "lookup", "plain")
"""Configs that `auto` chooses from: the one that is predicted to be fastest, the first among equals."""

Count = Annotated[int, 0]  # the metadata of an annotation: the least value, and perhaps the largest
Positive = Annotated[int, 1]
MOST_ENTRIES = 2**24  # more than any context has tokens
Entries = Annotated[int, 1, MOST_ENTRIES]


@dataclass(frozen=True)
class RefreshPolicy:
    """Schedule by which the retrieved cache chooses its entries anew.

    Attributes:
        kind: `every` verification; every `stride` generated tokens; or when the rolling `acceptance`
            rate falls below `value`.
        value: tokens for `stride`, a rate in (0, 1] for `acceptance`, 0 for `every`.
    """

    kind: Literal["every", "stride", "acceptance"] = "every"
    value: float = 0

    @classmethod
    def parse(cls, text: object) -> RefreshPolicy:
        """Parses `every`, `stride:N` or `acceptance:X`.

        Raises:
            UsageError: for anything else, under the key `retrieval.refresh`.
        """
        kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
        if text == "every":
            return EVERY
        if kind == "stride" and number.isdecimal() and len(number) < LONGEST_NUMBER and int(number) >= 1:
            return cls("stride", int(number))
        with suppress(ValueError):
            if kind == "acceptance" and 0 < float(number) <= 1:
                return cls("acceptance", float(number))
        rule = "must be every, stride:N (N tokens, at least 1) or acceptance:X (a rate in (0, 1])"
        raise InvalidValue("retrieval.refresh", text, rule)

    def __str__(self) -> str:
        return self.kind if self.kind == "every" else f"{self.kind}:{self.value}"


EVERY = RefreshPolicy()
LONGEST_NUMBER = 19
"""Digits of a number of 64 bits, which every count of tokens or bytes fits."""


@dataclass(frozen=True)
class RetrievalConfig:
    """The retrieved cache of a layer and KV head, in tokens."""

    # Entries held: the first chunk, the best chunks and the recent window together; 0: as planned, by what
    # they cost and by how many more of their drafts are accepted.
    budget: Annotated[int, 0, MOST_ENTRIES] = 0
    # Of an entry of a chosen chunk: 16 (as in the full cache), 8 or 4; `auto`: as planned, 8 on a GPU, and 16
    # where nothing is planned.
    bits: Literal["auto", 16, 8, 4] = "auto"
    chunk: Positive = 8  # scored and chosen together
    recent: Positive = 256  # at least so many of the latest are always held
    refresh: RefreshPolicy = EVERY  # when the entries are chosen anew
    # Chunks are chosen by the attention mass of verifications, the newest ones counting most (`attention`) or
    # all alike (`heavy_hitters`, as H2O), or by the newest queries' attention to the mean keys of chunks
    # (`mean_keys`, as TriForce, which has no `rest`).
    select: Literal["attention", "heavy_hitters", "mean_keys"] = "attention"
    rest: bool = True  # approximate unretrieved tokens by per-page mean keys and values

    def __post_init__(self) -> None:
        least = self.always_held
        rule = (
            f"must be 0 (the planner decides) or at least {least}: the first chunk (retrieval.chunk ="
            f" {self.chunk}) and the recent window (retrieval.recent = {self.recent}) are always held"
        )
        require(self.budget == 0 or self.budget >= least, "retrieval.budget", self.budget, rule)

    @property
    def entry_bits(self) -> int:
        """Bits of an entry of a chosen chunk, also where nothing is decided."""
        return 16 if self.bits == "auto" else self.bits

    @property
    def always_held(self) -> int:
        """Entries of the first chunk and of the recent window: the smallest budget."""
        return self.chunk + self.recent


@dataclass(frozen=True)
class LevelConfig:
    """One level, which drafts for the next one; written as a table, or short as its name, `model:cache`.

    The classes in `levels` say which levels there are and what each allows.
    """

    # `draft` (the small model), `target`, `head` (one on the target's hidden states), `lookup`, `suffix` or
    # `datastore`.
    model: str
    cache: str = ""  # `streaming`, `retrieved` or `shared` (the full one); none for a head or a look-up
    layers: str = "all"  # that it runs, and in which order: `all`, `groups:N[@F]`, `skip:5,7a` (`LayerOrder`)
    calibrate: bool = True  # the newest verified tokens still go through all layers
    # Shape of its drafts: `chain`, `sequences:K`, `tree:W,W,...`, `sequoia:N`, `grown:N` or `auto`
    # (`DraftShape`).
    draft: str = "chain"
    merge: str = ""  # `lookup`, `suffix` or `datastore`: its finds join the draft
    # The same names, of a level that drafts for another one: what is found is proposed in place of a draft,
    # which is drawn where nothing is found.
    prefer: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}:{self.cache}" if self.cache else self.model

    @property
    def shape(self) -> DraftShape:
        """Shape of its drafts, of depth 0 so far."""
        return DraftShape.parse(self.draft)

    @classmethod
    def parse(cls, key: str, value: object) -> LevelConfig:
        """Returns a level from its name or its table.

        Raises:
            InvalidValue: it is neither, or a key or value is not valid.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            model, _, cache = value.partition(":")
            value = {"model": model, "cache": cache}
        types = get_type_hints(cls)
        if not isinstance(value, Mapping):
            raise InvalidValue(key, value, "must be the name of a level or a table")
        for name, item in value.items():
            require(name in types, f"{key}.{name}", item, f"is no key of a level{nearest(name, types)}")
            require_type(types[name], f"{key}.{name}", item)
        require("model" in value, key, dict(value), "names no model")
        level = cls(**value)
        try:
            level.shape  # noqa: B018
        except UsageError as error:
            raise InvalidValue(f"{key}.draft", level.draft, str(error).partition(": ")[2]) from None
        return level


@dataclass(frozen=True)
class SpeculationConfig:
    """The levels that draft, and the depth of their drafts."""

    # From the cheapest to the most expensive; each drafts for the next one, the last for the target over its
    # full cache. Empty: plain decoding.
    levels: tuple[LevelConfig, ...]
    gamma1: Annotated[int, 1, MOST_NODES] = 2  # depth of drafts that levels below the last one propose
    # Depth of drafts for the target over its full cache; 0: chosen while decoding, by what passes and drafts
    # take and by how many tokens are accepted.
    gamma2: Annotated[int, 0, MOST_NODES] = 0
    step_down: bool = True  # fall back to plain decoding while speculation is slower

    def __post_init__(self) -> None:
        for level, shape in zip(self.levels, self.shapes, strict=True):
            least = shape.deep(max(1, shape.depth))
            rule = f"has {least.size} nodes at depth {least.depth}: must have at most {MOST_NODES}"
            require(least.size <= MOST_NODES, "speculation.levels.draft", level.draft, rule)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the levels."""
        return tuple(level.name for level in self.levels)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Shapes of the levels' drafts; the last one's depth is 0 where it is chosen while decoding."""
        depths = [*(len(self.levels) - 1) * [self.gamma1], self.gamma2]
        return tuple(level.shape.deep(depth) for level, depth in zip(self.levels, depths, strict=False))


@dataclass(frozen=True)
class StreamingConfig:
    """Entries kept by streaming caches."""

    sinks: Annotated[int, 0, MOST_ENTRIES] = 16  # the first tokens
    window: Entries = 240  # the latest tokens


@dataclass(frozen=True)
class HeadConfig:
    """A draft head (`model/draft_head.py`) and its cache, in tokens."""

    # Its folder or hub ID, or `mtp`: the one in the target's checkpoint; `auto`: that, or one on this machine
    # that fits the target.
    path: str = AUTO
    sinks: Annotated[int, 1, MOST_ENTRIES] = 4  # the first tokens
    # The latest tokens; 0: as many as the head was trained on by its config, and at most 4,096.
    window: Annotated[int, 0, MOST_ENTRIES] = 0


@dataclass(frozen=True)
class WeightsConfig:
    """Form of the target's weights in memory."""

    # Two planes without loss, of which drafts read one (`kernels/planes.py`); `auto`: where a config drafts
    # with the target, and a trial shows that drafts read them faster.
    planes: Literal["auto", "on", "off"] = "auto"


@dataclass(frozen=True)
class LookupConfig:
    """Lengths in tokens of the ends of a sequence that a look-up searches for, the longest first."""

    max_ngram: Annotated[int, 0, LONGEST_MATCH] = 4  # `suffix` has no longest one
    min_ngram: Positive = 1
    # The shortest whose find replaces a draft (`prefer`): after a shorter one, models know better.
    prefer_ngram: Positive = 6

    def __post_init__(self) -> None:
        rule = f"must be at least lookup.min_ngram = {self.min_ngram}"
        require(self.max_ngram >= self.min_ngram, "lookup.max_ngram", self.max_ngram, rule)


@dataclass(frozen=True)
class DatastoreConfig:
    """A datastore of other texts (`offload-rt datastore build`)."""

    path: str = ""  # of its file
    longest: Annotated[int, 1, LONGEST_MATCH] = 16  # tokens of the sequence's end that are compared
    occurrences: Positive = 64  # most occurrences that are looked at


@dataclass(frozen=True)
class PrefillConfig:
    """Settings of the prefill."""

    chunk: Positive = 2048  # tokens taken through a layer at a time; it bounds the memory for activations
    # Tokens of a prompt taken through all layers before the next ones, which are kept where reading is ended
    # early; 0: as few as cost little time.
    piece: Count = 0


PageCode = Literal["auto", "raw", "packed"]


@dataclass(frozen=True)
class StoreConfig:
    """The full KV cache in CPU memory, in tokens of one layer."""

    page: Positive = 256
    # Form of full pages: `packed` keeps bfloat16 in 12 bits without loss, `raw` as it is; `auto` packs what
    # crosses a link.
    code: PageCode = "auto"
    slab_tokens: Positive = 4096  # of a slab, the unit of allocation
    ring_buffers: Annotated[int, 2] = 3  # staging buffers on the device: one is filled while another is read
    # Of one layer's KV, copied and attended at a time: whole pages, and at most half of a layer.
    segment_bytes: Positive = 64 * 2**20

    def __post_init__(self) -> None:
        rule = f"must be a multiple of store.page = {self.page}"
        require(self.slab_tokens % self.page == 0, "store.slab_tokens", self.slab_tokens, rule)


RefreshFrom = Literal["auto", "stream", "store"]


@dataclass(frozen=True)
class OffloadConfig:
    """Use of the full KV cache over a link; ignored where KV is attended in place."""

    resident_tokens: Annotated[int, -1] = -1  # the first of each layer, on the GPU; -1: as planned
    cpu_tokens: Annotated[int, -1] = -1  # those that follow, attended by the CPU in place; -1: as planned
    ahead: Count = 4  # most outcomes of a verification that are drafted for while it runs
    # Where a refresh of the retrieved cache takes its entries: from the `stream` of the next pass, into a
    # second buffer on the GPU, or from the `store`, gathered between two passes; `auto`: as planned, and from
    # the stream where nothing is planned.
    refresh_from: RefreshFrom = "auto"
    # GPUs that run the attention blocks of layers in groups side by side (EasySpec), each with the KV of its
    # own; 0: as planned, and one where nothing is planned.
    group_devices: Annotated[int, 0, 2] = 0

    @property
    def refreshes_from_stream(self) -> bool:
        """A refresh takes its entries from the stream, also where nothing is decided."""
        return self.refresh_from != "store"


@dataclass(frozen=True)
class Config:
    """A whole composition. `name` is the name it was found by, or the stem of its file."""

    name: str
    retrieval: RetrievalConfig
    speculation: SpeculationConfig
    streaming: StreamingConfig
    head: HeadConfig
    weights: WeightsConfig
    lookup: LookupConfig
    datastore: DatastoreConfig
    prefill: PrefillConfig
    store: StoreConfig
    offload: OffloadConfig

    def __post_init__(self) -> None:
        chunk, page = self.retrieval.chunk, self.store.page
        rule = f"must be -1 (the planner decides) or a multiple of store.page = {page}"
        for name in ("resident_tokens", "cpu_tokens"):
            tokens = getattr(self.offload, name)
            require(tokens == -1 or tokens % page == 0, f"offload.{name}", tokens, rule)
        rule = f"must divide store.page = {page}, so that no chunk crosses a page"
        require(page % chunk == 0, "retrieval.chunk", chunk, rule)

    def value(self, key: str) -> Any:
        """Returns the value of one key, `section.key`."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def having(self, key: str, value: object) -> Config:
        """Returns the config with another value of one key, `section.key`."""
        section, name = key.split(".")
        return replace(self, **{section: replace(getattr(self, section), **{name: value})})
