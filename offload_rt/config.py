"""What composes a decoder and how large its parts are: frozen dataclasses, read from TOML.

A config file states only what differs from the defaults below. The same keys, written `section.key`, are
accepted as overrides from Python and from the command line. Every mistake is a `UsageError` that names
where the value came from, the key, the value and what is allowed.

Longer than other files: it is the one place that lists every key.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from offload_rt.drafting.shapes import DraftShape
from offload_rt.errors import UsageError

LOOKUP = "lookup"
SUFFIX = "suffix"
DATASTORE = "datastore"
HEAD = "head"
DRAFT_STREAMING = "draft:streaming"
TARGET_STREAMING = "target:streaming"
TARGET_RETRIEVED = "target:retrieved"

LONGEST_MATCH = 64
"""Tokens by which a datastore's suffixes are sorted: more are never compared."""

SOURCES = (LOOKUP, SUFFIX, DATASTORE)
"""Levels without a model: what followed the text's end elsewhere."""

LEVELS = (*SOURCES, HEAD, DRAFT_STREAMING, TARGET_STREAMING, TARGET_RETRIEVED)
"""What may stand below the target over its full cache, from the cheapest to the dearest."""


AUTO = "auto"
AUTOMATIC = ("triforce", "retrieval", "trees", "naive", "lookup", "plain")
"""What `auto` stands for: the one that the planner predicts to be fastest, the first among equals."""


class InvalidValue(UsageError):
    """A configuration value outside what its key allows.

    Attributes:
        key: the full key, `section.key`.
    """

    def __init__(self, key: str, value: object, rule: str) -> None:
        self.key = key
        super().__init__(f"{key} = {_shown(value)}: {rule}")


def _require(allowed: bool, key: str, value: object, rule: str) -> None:
    if not allowed:
        raise InvalidValue(key, value, rule)


def _at_least(minimum: int, key: str, value: int) -> None:
    _require(value >= minimum, key, value, f"must be at least {minimum}")


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
    def parse(cls, text: str) -> RefreshPolicy:
        """`every`, `stride:N` or `acceptance:X` as a policy.

        Raises:
            UsageError: for anything else, under the key `retrieval.refresh`.
        """
        kind, _, number = text.partition(":")
        if text == "every":
            return cls()
        if kind == "stride" and number.isdecimal() and int(number) >= 1:
            return cls("stride", int(number))
        if kind == "acceptance":
            try:
                rate = float(number)
            except ValueError:
                rate = 0.0
            if 0 < rate <= 1:
                return cls("acceptance", rate)
        rule = "must be every, stride:N (N tokens, at least 1) or acceptance:X (a rate in (0, 1])"
        raise InvalidValue("retrieval.refresh", text, rule)

    def __str__(self) -> str:
        return self.kind if self.kind == "every" else f"{self.kind}:{self.value}"


Selecting = Literal["attention", "heavy_hitters", "mean_keys"]


@dataclass(frozen=True)
class RetrievalConfig:
    """The retrieved cache of a layer and KV head.

    Attributes:
        budget: entries held: the first chunk, the best chunks and the recent window together.
        chunk: tokens scored and chosen together.
        recent: latest tokens always held.
        refresh: when the entries are chosen anew.
        select: what chunks are chosen by: what verifications have attended to, the newest ones counting most
            (`attention`) or all alike (`heavy_hitters`, as H2O); or the newest queries' attention to chunks'
            `mean_keys` (TriForce, which has no `rest`).
        rest: whether pages stand for what is not held, as their mean keys and values.
    """

    budget: int = 4096
    chunk: int = 8
    recent: int = 256
    refresh: RefreshPolicy = field(default_factory=RefreshPolicy)
    select: Selecting = "attention"
    rest: bool = True

    def __post_init__(self) -> None:
        _at_least(1, "retrieval.chunk", self.chunk)
        _at_least(1, "retrieval.recent", self.recent)
        _require(
            self.budget >= self.chunk,
            "retrieval.budget",
            self.budget,
            f"must be at least retrieval.chunk = {self.chunk}",
        )
        always_held = self.chunk + self.recent
        _require(
            self.budget >= always_held,
            "retrieval.budget",
            self.budget,
            f"must be at least {always_held}: the first chunk (retrieval.chunk = {self.chunk}) and the recent"
            f" window (retrieval.recent = {self.recent}) are always held",
        )


@dataclass(frozen=True)
class LevelConfig:
    """Who drafts for the next level; written as a table, or short as its name, `model:cache`.

    Attributes:
        model: `draft` (the small model), `target`, `head` (one on the target's hidden states), or one of
            `SOURCES` (no model at all).
        cache: `streaming` or `retrieved`; nothing without a model, or for a head.
        layers: order of the model's layers while it drafts: `all`, `groups:N` or `skip:5,7a,9m`
            (see `layers.LayerPlan`).
        calibrate: with other `layers` than `all`, the newest verified tokens still go through all of them.
        draft: shape of what it proposes: `chain`, `sequences:K`, `tree:W,W,...`, `sequoia:N`, `grown:N` or
            `auto` (see `drafting.shapes.DraftShape`).
        merge: one of `SOURCES`, whose finds join the draft; empty: none.
    """

    model: str
    cache: str = ""
    layers: str = "all"
    calibrate: bool = True
    draft: str = "chain"
    merge: str = ""

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
            _require(type(item) is types[name], f"{key}.{name}", item, f"must be a {types[name].__name__}")
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
    """Who drafts, and how far ahead.

    Attributes:
        levels: from the cheapest to the dearest, by name or as tables (`LevelConfig`); each drafts for the
            next one, the last for the target over its full cache. Empty: plain decoding.
        gamma1: depth of the drafts that the levels below the last one propose.
        gamma2: depth of those for the target over its full cache; 0: chosen as it runs, by what passes and
            drafts take and by how many tokens are accepted.
        step_down: give up speculation where it does not pay.
    """

    levels: tuple[LevelConfig, ...]
    gamma1: int = 2
    gamma2: int = 0
    step_down: bool = True

    def __post_init__(self) -> None:
        key = "speculation.levels"
        ranks = [LEVELS.index(name) for name in self.names]
        _require(
            ranks == sorted(set(ranks)),
            key,
            self.names,
            f"each level must be cheaper than the next, in the order {', '.join(LEVELS)}",
        )
        for level in self.levels[1:]:
            _require(
                level.shape.kind in ("chain", "sequences"),
                f"{key}.draft",
                level.draft,
                f"{level.name} proposes what rounds with the level below yield: chain or sequences:K",
            )
        for level in self.levels[:-1]:
            rule = "joins drafts for the target over its full cache only: leave it empty below another level"
            _require(not level.merge, f"{key}.merge", level.merge, rule)
            rule = "is planned by what the full cache accepts: choose another shape below a level"
            _require(level.shape.kind != "sequoia", f"{key}.draft", level.draft, rule)
        for level in self.levels[1:]:
            rule = "has no model that could verify what the level below drafts: put it first"
            _require(level.model not in (*SOURCES, HEAD), key, level.name, rule)
        for level in self.levels[1:2]:
            rule = "a head below it goes on from hidden states of the target: put a level of the target there"
            _require(self.levels[0].model != HEAD or level.model == "target", key, level.name, rule)
        _at_least(1, "speculation.gamma1", self.gamma1)
        _at_least(0, "speculation.gamma2", self.gamma2)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the levels."""
        return tuple(level.name for level in self.levels)


@dataclass(frozen=True)
class DraftConfig:
    """Entries kept by streaming caches: the first `sinks` tokens and the latest `window` tokens."""

    sinks: int = 16
    window: int = 240

    def __post_init__(self) -> None:
        _at_least(0, "draft.sinks", self.sinks)
        _at_least(1, "draft.window", self.window)


@dataclass(frozen=True)
class HeadConfig:
    """A draft head (`heads.py`): `path` of its file; empty: that of the embedded demo target."""

    path: str = ""


@dataclass(frozen=True)
class LookupConfig:
    """Lengths in tokens of the endings that look-up in the text searches for, the longest first.

    `suffix` has no longest one.
    """

    max_ngram: int = 4
    min_ngram: int = 1

    def __post_init__(self) -> None:
        _at_least(1, "lookup.min_ngram", self.min_ngram)
        _require(
            self.max_ngram >= self.min_ngram,
            "lookup.max_ngram",
            self.max_ngram,
            f"must be at least lookup.min_ngram = {self.min_ngram}",
        )


@dataclass(frozen=True)
class DatastoreConfig:
    """A datastore of other texts (`offload-rt datastore build`).

    Attributes:
        path: its file.
        longest: tokens of the text's end that are compared.
        occurrences: how many are looked at.
    """

    path: str = ""
    longest: int = 16
    occurrences: int = 64

    def __post_init__(self) -> None:
        _at_least(1, "datastore.longest", self.longest)
        rule = f"must be at most {LONGEST_MATCH}"
        _require(self.longest <= LONGEST_MATCH, "datastore.longest", self.longest, rule)
        _at_least(1, "datastore.occurrences", self.occurrences)


@dataclass(frozen=True)
class PrefillConfig:
    """`chunk`: prompt tokens taken through a layer at a time; it bounds the memory for activations."""

    chunk: int = 2048

    def __post_init__(self) -> None:
        _at_least(1, "prefill.chunk", self.chunk)


@dataclass(frozen=True)
class StoreConfig:
    """The full KV cache in CPU memory, in tokens of one layer.

    Attributes:
        page: tokens of a page.
        slab_tokens: tokens of a slab, the unit of allocation.
        ring_buffers: device buffers of the staging ring.
        segment_tokens: tokens copied and attended at a time.
    """

    page: int = 256
    slab_tokens: int = 4096
    ring_buffers: int = 3
    segment_tokens: int = 4096

    def __post_init__(self) -> None:
        _at_least(1, "store.page", self.page)
        for key, tokens in (
            ("store.slab_tokens", self.slab_tokens),
            ("store.segment_tokens", self.segment_tokens),
        ):
            _at_least(1, key, tokens)
            _require(tokens % self.page == 0, key, tokens, f"must be a multiple of store.page = {self.page}")
        # One buffer is filled while another is read.
        _at_least(2, "store.ring_buffers", self.ring_buffers)


RefreshFrom = Literal["auto", "stream", "store"]


@dataclass(frozen=True)
class OffloadConfig:
    """How the full KV cache is used over a link; where KV is attended in place, nothing of it applies.

    Attributes:
        resident_tokens: first tokens of each layer that stay on the GPU; -1: what the planner says.
        cpu_tokens: tokens after those that the CPU attends where they lie; -1: what the planner says.
        ahead: outcomes of a verification that are drafted for while it runs; 0: none.
        refresh_from: where a refresh of the retrieved cache takes its entries: from the `stream` of the next
            pass, into a second buffer on the GPU, or from the `store`, gathered between two passes; `auto`:
            what the planner says, and from the stream where it is not asked.
    """

    resident_tokens: int = -1
    cpu_tokens: int = -1
    ahead: int = 4
    refresh_from: RefreshFrom = "auto"

    def __post_init__(self) -> None:
        _at_least(-1, "offload.resident_tokens", self.resident_tokens)
        _at_least(-1, "offload.cpu_tokens", self.cpu_tokens)
        _at_least(0, "offload.ahead", self.ahead)

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
        for key, tokens in (
            ("offload.resident_tokens", self.offload.resident_tokens),
            ("offload.cpu_tokens", self.offload.cpu_tokens),
        ):
            _require(
                tokens == -1 or tokens % page == 0,
                key,
                tokens,
                f"must be -1 (the planner decides) or a multiple of store.page = {page}",
            )
        _require(
            page % chunk == 0,
            "retrieval.chunk",
            chunk,
            f"must divide store.page = {page}, so that no chunk crosses a page",
        )
        _require(
            bool(self.datastore.path) or DATASTORE not in self.sources,
            "datastore.path",
            self.datastore.path,
            "names no file: build one with offload-rt datastore build FOLDER",
        )

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

    def refreshing_from(self, place: RefreshFrom) -> Config:
        """The same with another `offload.refresh_from`."""
        return replace(self, offload=replace(self.offload, refresh_from=place))


_CONFIGS = Path(__file__).with_name("configs")

_SECTIONS: dict[str, type[Any]] = {
    name: section for name, section in get_type_hints(Config).items() if name != "name"
}
_KEYS = {
    f"{section}.{key}": expected
    for section, config_class in _SECTIONS.items()
    for key, expected in get_type_hints(config_class).items()
}


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
    kept = len(configs) == 1 or small_model
    return [config for config in configs if kept or DRAFT_STREAMING not in config.speculation.names]


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
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for source, given in ((str(path), _read_toml(path)), ("override", overrides)):
        for key, value in given.items():
            if key not in _KEYS:
                raise UsageError(f"{source}: unknown key {key}{_nearest(key, _KEYS)}")
            try:
                values[key] = _typed(key, value)
            except InvalidValue as error:
                raise UsageError(f"{source}: {error}") from None
            sources[key] = source
    if "speculation.levels" not in values:
        raise UsageError(f"{path}: speculation.levels is missing: a list from {', '.join(LEVELS)}, or []")
    try:
        sections = {
            name: config_class(
                **{
                    item.name: values[key]
                    for item in fields(config_class)
                    if (key := f"{name}.{item.name}") in values
                }
            )
            for name, config_class in _SECTIONS.items()
        }
        return Config(name=path.stem, **sections)
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
    names = [AUTO, *config_names()]
    if name_or_path in names[1:]:
        return _CONFIGS / f"{name_or_path}.toml"
    path = Path(name_or_path)
    if os.path.isfile(name_or_path):  # unlike Path.is_file, false for a name too long to be one
        return path
    if os.path.isdir(name_or_path):
        raise UsageError(f"config {name_or_path}: is a folder; give a TOML file or one of {', '.join(names)}")
    if path.suffix == ".toml" or path.parent != Path("."):
        raise UsageError(
            f"config {name_or_path}: no such file; give a TOML file or one of {', '.join(names)}"
        )
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
    if expected is int:
        # bool is a subclass of int, and `true` is no number of tokens.
        _require(type(value) is int, key, value, "must be a whole number")
        return value
    if expected is bool:
        _require(type(value) is bool, key, value, "must be true or false")
        return value
    if expected is str:
        _require(type(value) is str, key, value, "must be a string")
        return value
    if get_origin(expected) is Literal:
        allowed = get_args(expected)
        _require(value in allowed, key, value, f"must be one of {', '.join(allowed)}")
        return value
    if expected is RefreshPolicy:
        if not isinstance(value, str):
            raise InvalidValue(key, value, "must be a string: every, stride:N or acceptance:X")
        return RefreshPolicy.parse(value)
    if not isinstance(value, list | tuple):
        raise InvalidValue(key, value, f"must be a list of names ({', '.join(LEVELS)}) or tables")
    return tuple(LevelConfig.parse(key, level) for level in value)


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
