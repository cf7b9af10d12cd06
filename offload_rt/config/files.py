"""Configurations as TOML: finds them by name or path, reads, overrides and writes them.

A file states only what differs from the defaults. The same keys, written `section.key`, are accepted as
overrides from Python and from the command line. Every mistake is a `UsageError` that names the origin of the
value, the key, the value and what is allowed.
"""

from __future__ import annotations

import json
import os
import reprlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from offload_rt.config.schema import AUTO, Config, LevelConfig, RefreshPolicy
from offload_rt.config.toml import read_tables
from offload_rt.config.validation import InvalidValue, nearest, require_type, shown
from offload_rt.errors import UsageError

_CONFIGS = Path(__file__).parent.with_name("configs")

_SECTIONS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Config).items() if name != "name"}
_KEYS = {
    f"{section}.{key}": expected
    for section, kind in _SECTIONS.items()
    for key, expected in get_type_hints(kind, include_extras=True).items()
}

_FORMER_SECTIONS = {"draft": "streaming"}
"""Sections by the names that they had before, which files and programs may still use."""


def config_names() -> list[str]:
    """Returns the names of the configs that ship with the package, sorted."""
    return sorted(path.stem for path in _CONFIGS.glob("*.toml"))


def read_config(
    name_or_path: str, overrides: Mapping[str, object], check: Callable[[Config], object]
) -> Config:
    """Reads a config by its name or from a TOML file, and applies `overrides`.

    Args:
        name_or_path: a name from `config_names()`, or the path of a TOML file.
        overrides: values by full key, e.g. `{"retrieval.budget": 4096}`.
        check: refuses a config by an `InvalidValue`.

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
    overrides = {_present_key(key): value for key, value in overrides.items()}
    sources = {**dict.fromkeys(stated, str(path)), **dict.fromkeys(overrides, "override")}
    try:
        sections: dict[str, dict[str, object]] = {name: {} for name in _SECTIONS}
        for key, value in {**stated, **overrides}.items():
            if key not in _KEYS:
                raise UsageError(f"{sources[key]}: unknown key {key}{nearest(key, _KEYS)}")
            section, _, name = key.partition(".")
            sections[section][name] = _typed(key, value)
        if "speculation.levels" not in sources:
            raise UsageError(f"{path}: speculation.levels is missing: a list of levels, or []")
        config = Config(path.stem, **{name: _SECTIONS[name](**values) for name, values in sections.items()})
        check(config)
        return config
    except InvalidValue as error:
        raise UsageError(_blamed(error, sources)) from None


def _present_key(key: object) -> str:
    """Returns a key by the name that its section has now."""
    section, dot, name = str(key).partition(".")
    return f"{_FORMER_SECTIONS.get(section, section)}{dot}{name}"


def _blamed(error: InvalidValue, sources: Mapping[str, str]) -> str:
    """Returns the message of `error` with the origin of the value that the user gave.

    A rule between two keys blames one of them, which may be a default; the rule then names the other one.
    """
    section_key = ".".join(error.key.split(".")[:2])  # the keys of a level stand below `speculation.levels`
    if section_key in sources:
        return f"{sources[section_key]}: {error}"
    key = next((key for key in sources if f"{key} = " in str(error)), None)
    if key is None:
        return f"default: {error}"
    return f"{sources[key]}: {key} does not go with the default of another key: {error}"


def parse_override(text: str) -> tuple[str, object]:
    """Splits `section.key=value`; the value is TOML, and a bare word is a string.

    Raises:
        UsageError: there is no `=`, no key or no value, or the value is nested too deeply.
    """
    key, equals, written = text.partition("=")
    key, written = key.strip(), written.strip()
    if not (equals and key and written):
        shown = reprlib.repr(text)
        raise UsageError(f"override {shown}: write section.key=value, e.g. retrieval.budget=4096")
    try:
        parsed = tomllib.loads(f"value = {written}")
    except RecursionError:
        raise UsageError(f"override {key}: its value is nested too deeply; write fewer brackets") from None
    except ValueError:  # no TOML, or an integer of too many digits
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
            f"config {AUTO}: selects among several configurations; give a TOML file or one of"
            f" {', '.join(names[1:])}"
        )
    is_folder, exists = os.path.isdir(name_or_path), os.path.exists(name_or_path)
    if exists or path.suffix == ".toml" or path.parent != Path("."):
        wrong = "is a folder" if is_folder else "is a pipe or a device" if exists else "no such file"
        raise UsageError(f"config {name_or_path}: {wrong}; give a TOML file or one of {', '.join(names)}")
    raise UsageError(f"unknown config {name_or_path!r}{nearest(name_or_path, names)}, or the path of a file")


def _read_toml(path: Path) -> dict[str, object]:
    """Reads a config; returns its values by full key."""
    values: dict[str, object] = {}
    for written, table in read_tables(path).items():
        section = _FORMER_SECTIONS.get(written, written)
        if section not in _SECTIONS:
            raise UsageError(f"{path}: unknown section {section}{nearest(section, _SECTIONS)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {written} = {shown(table)}: must be a table, [{section}]")
        values.update({f"{section}.{key}": value for key, value in table.items()})
    return values


def _typed(key: str, value: object) -> object:
    """Returns `value` as the type of `key`."""
    expected = _KEYS[key]
    if expected is RefreshPolicy:
        return RefreshPolicy.parse(value)
    if expected != tuple[LevelConfig, ...]:
        require_type(expected, key, value)
        return value
    if not isinstance(value, list | tuple):
        raise InvalidValue(key, value, "must be a list of names or tables")
    return tuple(LevelConfig.parse(key, level) for level in value)


def to_toml(config: Config) -> str:
    """Returns the values of `config` that differ from the defaults, as TOML."""
    sections = {name: _changed(section) for name, section in vars(config).items() if name != "name"}
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {_written(value)}\n" for key, value in changed.items())
        for name, changed in sections.items()
        if changed
    )


def _written(value: object) -> str:
    """Returns a value as TOML writes it."""
    if isinstance(value, str):
        # A TOML string escapes what a JSON string does, and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_written(item)}' for key, item in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _changed(part: Any) -> dict[str, object]:
    """Returns the values of a section, or of a level, that differ from their defaults."""
    values = {key.name: (getattr(part, key.name), key.default) for key in fields(part)}
    return {name: _plain(value) for name, (value, default) in values.items() if value != default}


def _plain(value: object) -> object:
    if isinstance(value, RefreshPolicy):
        return str(value)
    return [_changed(level) for level in value] if isinstance(value, tuple) else value
