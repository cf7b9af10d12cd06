"""A configuration as TOML, which `config.load_config` reads back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offload_rt.config import Config, RefreshPolicy


def to_toml(config: Config) -> str:
    """What of `config` differs from the defaults."""
    import tomli_w

    sections = {name: _changed(section) for name, section in vars(config).items() if name != "name"}
    return tomli_w.dumps({name: changed for name, changed in sections.items() if changed})


def _changed(part: Any) -> dict[str, object]:
    """Values of a section, or of a level, that differ from their defaults."""
    given = {key.name: (getattr(part, key.name), key.default) for key in fields(part)}
    return {name: _plain(value) for name, (value, default) in given.items() if value != default}


def _plain(value: object) -> object:
    if isinstance(value, RefreshPolicy):
        return str(value)
    return [_changed(level) for level in value] if isinstance(value, tuple) else value
