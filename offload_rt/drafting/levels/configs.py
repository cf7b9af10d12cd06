"""Loads configurations, and checks that their levels can draft for each other."""

from __future__ import annotations

from collections.abc import Mapping

from offload_rt.config.files import read_config
from offload_rt.config.schema import (
    AUTO,
    AUTOMATIC,
    Config,
)
from offload_rt.drafting.levels.check import check_levels


def load_configs(name_or_path: str, overrides: Mapping[str, object] = {}) -> tuple[Config, ...]:
    """Returns the config of that name, or for `auto` those among which it chooses; see `load_config`."""
    names = AUTOMATIC if name_or_path == AUTO else (name_or_path,)
    if "speculation.levels" in overrides:  # which leaves no choice
        names = names[:1]
    return tuple(load_config(name, overrides) for name in names)


def with_head(
    configs: tuple[Config, ...], overrides: Mapping[str, object], head: str | None
) -> tuple[Config, ...]:
    """Returns the configs that `auto` chooses from, and one that drafts with a head, where there is one."""
    return (
        configs
        if head is None or "speculation.levels" in overrides
        else (*configs, load_config("heads", {**overrides, "head.path": head}))
    )


def load_config(name_or_path: str, overrides: Mapping[str, object] = {}) -> Config:
    """Reads a config whose levels exist and can draft for each other; see `config.files.read_config`."""
    return read_config(name_or_path, overrides, check_levels)
