"""What composes a decoder and how large its parts are: frozen dataclasses, read from TOML.

A config file states only what differs from the defaults below. The same keys, written `section.key`, are
accepted as overrides from Python and from the command line. Every mistake is a `UsageError` that names
where the value came from, the key, the value and what is allowed. Every key is listed here, and nowhere else.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from offload_rt.drafting.shapes import MOST_NODES, DraftShape
from offload_rt.errors import UsageError

LOOKUP = "lookup"
SUFFIX = "suffix"
DATASTORE = "datastore"
HEAD = "head"
DRAFT_STREAMING = "draft:streaming"
TARGET_STREAMING = "target:streaming"
TARGET_RETRIEVED = "target:retrieved"
TARGET_SHARED = "target:shared"

LONGEST_MATCH = 64
"""Tokens of a text's end: more are never compared, and a datastore's suffixes are sorted by so many."""

SOURCES = (LOOKUP, SUFFIX, DATASTORE)
"""Levels without a model: what followed the text's end elsewhere."""

LEVELS = (*SOURCES, HEAD, DRAFT_STREAMING, TARGET_STREAMING, TARGET_RETRIEVED, TARGET_SHARED)
"""What may stand below the target over its full cache, from the cheapest to the dearest."""

AUTO = "auto"
AUTOMATIC = ("triforce", "retrieval", "trees", "naive", "lookup", "plain")
"""What `auto` stands for: the one that the planner predicts to be fastest, the first among equals."""

Count = Annotated[int, 0]  # and the least that is allowed, perhaps the most
Positive = Annotated[int, 1]
MOST_ENTRIES = 2**24  # more than any context has tokens
Entries = Annotated[int, 1, MOST_ENTRIES]


class InvalidValue(UsageError):
    """A configuration value outside what its key, `section.key`, allows."""

    def __init__(self, key: str, value: object, rule: str) -> None:
        self.key = key
        super().__init__(f"{key} = {_shown(value)}: {rule}")


def _require(allowed: bool, key: str, value: object, rule: str) -> None:
    if not allowed:
        raise InvalidValue(key, value, rule)


@dataclass(frozen=True)
class RefreshPolicy:
    """When the retrieved cache chooses its entries anew.

    Attributes:
        kind: `every` verification; every `stride` generated tokens; or when the rolling `acceptance`
            rate falls below `value`.
        value: tokens for `stride`, a rate in (0, 1] for `acceptance`, 0 for `every`.
    """

    kind: Literal["every", "stride", "acceptance"] = "every"
    value: float = 0

    @classmethod
    def parse(cls, text: object) -> RefreshPolicy:
        """`every`, `stride:N` or `acceptance:X` as a policy.

        Raises:
            UsageError: for anything else, under the key `retrieval.refresh`.
        """
        kind, _, number = str(text).partition(":")
        if text == "every":
            return EVERY
        if kind == "stride" and number.isdecimal() and int(number) >= 1:
            return cls("stride", int(number))
        with suppress(ValueError):
            if kind == "acceptance" and 0 < float(number) <= 1:
                return cls("acceptance", float(number))
        rule = "must be every, stride:N (N tokens, at least 1) or acceptance:X (a rate in (0, 1])"
        raise InvalidValue("retrieval.refresh", text, rule)

    def __str__(self) -> str:
        return self.kind if self.kind == "every" else f"{self.kind}:{self.value}"


EVERY = RefreshPolicy()


@dataclass(frozen=True)
class RetrievalConfig:
    """The retrieved cache of a layer and KV head, in tokens."""

    budget: Entries = 4096  # entries held: the first chunk, the best chunks and the recent window together
    chunk: Positive = 8  # scored and chosen together
    recent: Positive = 256  # at least so many of the latest are always held
    refresh: RefreshPolicy = EVERY  # when the entries are chosen anew
    # What chunks are chosen by: what verifications have attended to, the newest ones counting most
    # (`attention`) or all alike (`heavy_hitters`, as H2O); or the newest queries' attention to chunks'
    # `mean_keys` (TriForce, which has no `rest`).
    select: Literal["attention", "heavy_hitters", "mean_keys"] = "attention"
    rest: bool = True  # pages stand for what is not held, as their mean keys and values

    def __post_init__(self) -> None:
        always_held = self.chunk + self.recent
        rule = (
            f"must be at least {always_held}: the first chunk (retrieval.chunk = {self.chunk}) and the recent"
            f" window (retrieval.recent = {self.recent}) are always held"
        )
        _require(self.budget >= always_held, "retrieval.budget", self.budget, rule)


@dataclass(frozen=True)
class LevelConfig:
    """Who drafts for the next level; written as a table, or short as its name, `model:cache`."""

    # `draft` (the small model), `target`, `head` (one on the target's hidden states), or one of `SOURCES`.
    model: str
    cache: str = ""  # `streaming`, `retrieved` or `shared` (the full one); none for a head or a source
    layers: str = "all"  # in what order it drafts: `all`, `groups:N` or `skip:5,7a,9m` (`layers.LayerPlan`)
    calibrate: bool = True  # the newest verified tokens still go through all layers
    # Shape of what it proposes: `chain`, `sequences:K`, `tree:W,W,...`, `sequoia:N`, `grown:N` or `auto`
    # (`drafting.shapes.DraftShape`).
    draft: str = "chain"
    merge: str = ""  # one of `SOURCES`, whose finds join the draft

    @property
    def name(self) -> str:
        return f"{self.model}:{self.cache}" if self.cache else self.model

    @property
    def shape(self) -> DraftShape:
        """Of what it proposes, of no depth yet."""
        return DraftShape.parse(self.draft)

    @classmethod
    def parse(cls, key: str, value: object) -> LevelConfig:
        """A level from its name or its table."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            model, _, cache = value.partition(":")
            value = {"model": model, "cache": cache}
        types = get_type_hints(cls)
        if not isinstance(value, Mapping):
            raise InvalidValue(key, value, f"must be a name ({', '.join(LEVELS)}) or a table")
        for name, item in value.items():
            _require(name in types, f"{key}.{name}", item, f"is no key of a level{_nearest(name, types)}")
            _require_type(types[name], f"{key}.{name}", item)
        _require("model" in value, key, dict(value), "names no model")
        level = cls(**value)
        _require(level.name in LEVELS, key, level.name, f"is not a level{_nearest(level.name, LEVELS)}")
        try:
            shape = level.shape
        except UsageError as error:
            raise InvalidValue(f"{key}.draft", level.draft, str(error).partition(": ")[2]) from None
        rule = f"must be one of {', '.join(SOURCES)}, or empty"
        _require(level.merge in ("", *SOURCES), f"{key}.merge", level.merge, rule)
        if level.model in SOURCES:
            kinds = ("chain", "grown") if level.model == DATASTORE else ("chain",)
            rule = f"must be {' or '.join(kinds)} for {level.model}"
            _require(shape.kind in kinds, f"{key}.draft", level.draft, rule)
            _require(not level.merge, f"{key}.merge", level.merge, f"must be empty for {level.model}")
        if level.model in (*SOURCES, HEAD):
            _require(level.layers == "all", f"{key}.layers", level.layers, f"must be all for {level.model}")
        return level


@dataclass(frozen=True)
class SpeculationConfig:
    """Who drafts, and how far ahead."""

    # From the cheapest to the dearest; each drafts for the next one, the last for the target over its full
    # cache. None: plain decoding.
    levels: tuple[LevelConfig, ...]
    gamma1: Annotated[int, 1, MOST_NODES] = (
        2  # depth of the drafts that the levels below the last one propose
    )
    # Depth of those for the target over its full cache; 0: chosen as it runs, by what passes and drafts take
    # and by how many tokens are accepted.
    gamma2: Annotated[int, 0, MOST_NODES] = 0
    step_down: bool = True  # give up speculation where it does not pay

    def __post_init__(self) -> None:
        key = "speculation.levels"
        ranks = [LEVELS.index(name) for name in self.names]
        rule = f"each level must be cheaper than the next, in the order {', '.join(LEVELS)}"
        _require(ranks == sorted(set(ranks)), key, self.names, rule)
        for level, shape in zip(self.levels, self.shapes, strict=True):
            least = shape.deep(max(1, shape.depth))
            rule = f"has {least.size} nodes at depth {least.depth}: must have at most {MOST_NODES}"
            _require(least.size <= MOST_NODES, f"{key}.draft", level.draft, rule)
        for below, above in pairwise(self.levels):
            rule = f"{above.name} proposes what rounds with the level below yield: chain or sequences:K"
            _require(above.shape.kind in ("chain", "sequences"), f"{key}.draft", above.draft, rule)
            rule = "joins drafts for the target over its full cache only: leave it empty below another level"
            _require(not below.merge, f"{key}.merge", below.merge, rule)
            rule = "is planned by what the full cache accepts: choose another shape below a level"
            _require(below.shape.kind != "sequoia", f"{key}.draft", below.draft, rule)
            rule = "has no model that could verify what the level below drafts: put it first"
            _require(above.model not in (*SOURCES, HEAD), key, above.name, rule)
            rule = "a head below it goes on from hidden states of the target: put a level of the target there"
            _require(below.model != HEAD or above.model == "target", key, above.name, rule)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the levels."""
        return tuple(level.name for level in self.levels)

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """Of what the levels propose; the last one of no depth where that is chosen as it runs."""
        depths = [*(len(self.levels) - 1) * [self.gamma1], self.gamma2]
        return tuple(level.shape.deep(depth) for level, depth in zip(self.levels, depths, strict=False))


@dataclass(frozen=True)
class DraftConfig:
    """Entries kept by streaming caches."""

    sinks: Annotated[int, 0, MOST_ENTRIES] = 16  # the first tokens
    window: Entries = 240  # the latest tokens


@dataclass(frozen=True)
class HeadConfig:
    """A draft head (`heads.py`)."""

    path: str = ""  # of its file; empty: that of the embedded demo target


@dataclass(frozen=True)
class LookupConfig:
    """Lengths in tokens of the endings that look-up in the text searches for, the longest first."""

    max_ngram: Annotated[int, 0, LONGEST_MATCH] = 4  # `suffix` has no longest one
    min_ngram: Positive = 1

    def __post_init__(self) -> None:
        rule = f"must be at least lookup.min_ngram = {self.min_ngram}"
        _require(self.max_ngram >= self.min_ngram, "lookup.max_ngram", self.max_ngram, rule)


@dataclass(frozen=True)
class DatastoreConfig:
    """A datastore of other texts (`offload-rt datastore build`)."""

    path: str = ""  # of its file
    longest: Annotated[int, 1, LONGEST_MATCH] = 16  # tokens of the text's end that are compared
    occurrences: Positive = 64  # how many are looked at


@dataclass(frozen=True)
class PrefillConfig:
    """How a prompt is read."""

    chunk: Positive = 2048  # tokens taken through a layer at a time; it bounds the memory for activations


@dataclass(frozen=True)
class StoreConfig:
    """The full KV cache in CPU memory, in tokens of one layer."""

    page: Positive = 256
    slab_tokens: Positive = 4096  # of a slab, the unit of allocation
    ring_buffers: Annotated[int, 2] = 3  # staging buffers on the device: one is filled while another is read
    segment_tokens: Positive = 4096  # copied and attended at a time

    def __post_init__(self) -> None:
        rule = f"must be a multiple of store.page = {self.page}"
        for name in ("slab_tokens", "segment_tokens"):
            tokens = getattr(self, name)
            _require(tokens % self.page == 0, f"store.{name}", tokens, rule)


RefreshFrom = Literal["auto", "stream", "store"]


@dataclass(frozen=True)
class OffloadConfig:
    """How the full KV cache is used over a link; where KV is attended in place, nothing of it applies."""

    resident_tokens: Annotated[int, -1] = -1  # the first of each layer, on the GPU; -1: as planned
    cpu_tokens: Annotated[int, -1] = -1  # those that follow, attended by the CPU in place; -1: as planned
    ahead: Count = 4  # outcomes of a verification that are drafted for while it runs
    # Where a refresh of the retrieved cache takes its entries: from the `stream` of the next pass, into a
    # second buffer on the GPU, or from the `store`, gathered between two passes; `auto`: as planned, and from
    # the stream where nothing is planned.
    refresh_from: RefreshFrom = "auto"

    @property
    def refreshes_from_stream(self) -> bool:
        """Whether a refresh takes its entries from the stream: also where nothing is decided."""
        return self.refresh_from != "store"


@dataclass(frozen=True)
class Config:
    """A whole composition. `name` is the name it was found by, or the stem of its file."""

    name: str
    retrieval: RetrievalConfig
    speculation: SpeculationConfig
    draft: DraftConfig
    head: HeadConfig
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
            _require(tokens == -1 or tokens % page == 0, f"offload.{name}", tokens, rule)
        rule = f"must divide store.page = {page}, so that no chunk crosses a page"
        _require(page % chunk == 0, "retrieval.chunk", chunk, rule)
        path, rule = self.datastore.path, "names no file: build one with offload-rt datastore build FOLDER"
        _require(bool(path) or DATASTORE not in self.sources, "datastore.path", path, rule)

    @property
    def sources(self) -> set[str]:
        """Those of `SOURCES` that it uses."""
        levels = self.speculation.levels
        return {name for level in levels for name in (level.model, level.merge)} & set(SOURCES)

    @property
    def kept_means(self) -> tuple[int | None, bool]:
        """What retrieval reads beside the KV: mean keys of chunks of so many tokens, and means of pages."""
        if TARGET_RETRIEVED not in self.speculation.names:
            return None, False
        return self.retrieval.chunk if self.retrieval.select == "mean_keys" else None, self.retrieval.rest

    def having(self, key: str, value: object) -> Config:
        """The same with another value of one key, `section.key`."""
        section, name = key.split(".")
        return replace(self, **{section: replace(getattr(self, section), **{name: value})})


_CONFIGS = Path(__file__).with_name("configs")

_SECTIONS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Config).items() if name != "name"}
_KEYS = {
    f"{section}.{key}": expected
    for section, kind in _SECTIONS.items()
    for key, expected in get_type_hints(kind, include_extras=True).items()
}
_TYPES = {int: "a whole number", bool: "true or false", str: "a string"}


def config_names() -> list[str]:
    """Names of the configs that ship with the package, sorted."""
    return sorted(path.stem for path in _CONFIGS.glob("*.toml"))


def load_configs(name_or_path: str, overrides: Mapping[str, object] = {}) -> tuple[Config, ...]:
    """What a name stands for: one config, or those among which `auto` chooses; see `load_config`."""
    names = AUTOMATIC if name_or_path == AUTO else (name_or_path,)
    if "speculation.levels" in overrides:  # which leaves no choice
        names = names[:1]
    return tuple(load_config(name, overrides) for name in names)


def uses_small_model(configs: Iterable[Config]) -> bool:
    """Whether one of them has a level for a small model."""
    return any(DRAFT_STREAMING in config.speculation.names for config in configs)


def possible(configs: Sequence[Config], small_model: bool) -> list[Config]:
    """Those of several that need no small model, where there is none; a single one is kept as it is."""
    kept = small_model or len(configs) == 1
    return [config for config in configs if kept or not uses_small_model([config])]


def load_config(name_or_path: str, overrides: Mapping[str, object] = {}) -> Config:
    """Reads a config by its name or from a TOML file, with `overrides` on top.

    Args:
        name_or_path: a name from `config_names()`, or the path of a TOML file.
        overrides: values by full key, e.g. `{"retrieval.budget": 4096}`.

    Raises:
        UsageError: an unknown config or key, a file that cannot be read, a value of the wrong type or
            range.
    """
    if not isinstance(overrides, Mapping):
        raise UsageError(
            f"overrides {overrides!r}: give values by full key, e.g. {{'retrieval.budget': 4096}}"
        )
    path = _config_path(str(name_or_path))
    stated = _read_toml(path)
    sources = {**dict.fromkeys(stated, str(path)), **dict.fromkeys(overrides, "override")}
    try:
        sections: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
        for key, value in {**stated, **overrides}.items():
            if key not in _KEYS:
                raise UsageError(f"{sources[key]}: unknown key {key}{_nearest(key, _KEYS)}")
            section, _, name = key.partition(".")
            sections[section][name] = _typed(key, value)
        if "speculation.levels" not in sources:
            raise UsageError(f"{path}: speculation.levels is missing: a list from {', '.join(LEVELS)}, or []")
        return Config(path.stem, **{name: _SECTIONS[name](**given) for name, given in sections.items()})
    except InvalidValue as error:
        section_key = ".".join(error.key.split(".")[:2])  # a level's keys stand below that
        raise UsageError(f"{sources.get(section_key, 'default')}: {error}") from None


def parse_override(text: str) -> tuple[str, object]:
    """`section.key=value` as a key and a value; the value is TOML, a bare word is a string.

    Raises:
        UsageError: there is no `=`, no key or no value.
    """
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not (equals and key and written):
        raise UsageError(f"override {text!r}: write section.key=value, e.g. retrieval.budget=4096")
    try:
        parsed = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        return key, written
    # A line break in the text would have started a second key.
    return key, parsed["value"] if len(parsed) == 1 else written


def _config_path(name_or_path: str) -> Path:
    if name_or_path in config_names():
        return _CONFIGS / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if os.path.isfile(name_or_path):  # unlike Path.is_file, false for a name too long to be one
        return path
    names = [AUTO, *config_names()]
    if name_or_path == AUTO:
        raise UsageError(
            f"config {AUTO}: stands for several; give a TOML file or one of {', '.join(names[1:])}"
        )
    is_folder = os.path.isdir(name_or_path)
    if is_folder or path.suffix == ".toml" or path.parent != Path("."):
        wrong = "is a folder" if is_folder else "no such file"
        raise UsageError(f"config {name_or_path}: {wrong}; give a TOML file or one of {', '.join(names)}")
    raise UsageError(f"unknown config {name_or_path!r}{_nearest(name_or_path, names)}, or the path of a file")


def _read_toml(path: Path) -> dict[str, object]:
    """The file's values by full key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    values: dict[str, object] = {}
    for section, table in tables.items():
        if section not in _SECTIONS:
            raise UsageError(f"{path}: unknown section {section}{_nearest(section, _SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {section} = {_shown(table)}: must be a table, [{section}]")
        values.update({f"{section}.{key}": value for key, value in table.items()})
    return values


def _typed(key: str, value: object) -> object:
    """`value` as the type that `key` holds."""
    expected = _KEYS[key]
    if expected is RefreshPolicy:
        return RefreshPolicy.parse(value)
    if expected != tuple[LevelConfig, ...]:
        _require_type(expected, key, value)
        return value
    if not isinstance(value, list | tuple):
        raise InvalidValue(key, value, f"must be a list of names ({', '.join(LEVELS)}) or tables")
    return tuple(LevelConfig.parse(key, level) for level in value)


def _require_type(expected: Any, key: str, value: Any) -> None:
    if get_origin(expected) is Literal:
        allowed = get_args(expected)
        _require(value in allowed, key, value, f"must be one of {', '.join(allowed)}")
        return
    kind, *bounds = get_args(expected) or (expected,)
    # bool is a subclass of int, and `true` is no number of tokens.
    _require(type(value) is kind, key, value, f"must be {_TYPES[kind]}")
    for least in bounds[:1]:
        _require(value >= least, key, value, f"must be at least {least}")
    for most in bounds[1:]:
        _require(value <= most, key, value, f"must be at most {most}")


def _shown(value: object) -> str:
    """`value` as it would be written in TOML, where that is simple."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value) if isinstance(value, tuple) else value)


def _nearest(given: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown word: the nearest known one and the whole list."""
    known = list(known)
    close = difflib.get_close_matches(given, known, n=1)
    guess = f"; did you mean {close[0]}?" if close else ";"
    return f"{guess} there are {', '.join(known)}"
