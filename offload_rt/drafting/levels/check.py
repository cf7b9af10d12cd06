"""Checks that the levels of a composition exist, are in order, and can draft for each other."""

from __future__ import annotations

from itertools import pairwise

from offload_rt.config.schema import Config
from offload_rt.config.validation import nearest, require
from offload_rt.drafting.levels.base import LEVELS, Level, levels_of
from offload_rt.drafting.levels.sources import SourceLevel

KEY = "speculation.levels"


def check_levels(config: Config) -> None:
    """Refuses a composition that could not draft.

    Raises:
        InvalidValue: names the level's key, its value and what is allowed.
    """
    for level in config.speculation.levels:
        require(level.name in LEVELS, KEY, level.name, f"is not a level{nearest(level.name, LEVELS)}")
    levels, order = levels_of(config), list(LEVELS)
    for checked in levels:
        _check_level(checked)
    ranks = [order.index(checked.name) for checked in levels]
    rule = f"each level must be cheaper than the next, in the order {', '.join(order)}"
    require(ranks == sorted(set(ranks)), KEY, config.speculation.names, rule)
    for below, above in pairwise(levels):
        _check_pair(below, above)
    if levels:
        last = levels[-1].settings
        rule = "replaces drafts for another level: leave it empty for the last one"
        require(not last.prefer, f"{KEY}.prefer", last.prefer, rule)


def _check_level(level: Level) -> None:
    settings = level.settings
    if level.shapes:
        rule = f"must be {' or '.join(level.shapes)} for {settings.model}"
        require(settings.shape.kind in level.shapes, f"{KEY}.draft", settings.draft, rule)
    sources = [name for name, kind in LEVELS.items() if issubclass(kind, SourceLevel)]
    rule = f"must be one of {', '.join(sources)}, or empty"
    for name in ("merge", "prefer"):
        value = getattr(settings, name)
        require(value in ("", *sources), f"{KEY}.{name}", value, rule)
    level.check(KEY)
    for beside in (level.merged, level.preferred):
        if beside is not None:
            beside.check(KEY)


def _check_pair(below: Level, above: Level) -> None:
    rule = f"{above.name} proposes what rounds with the level below yield: chain or sequences:K"
    require(above.settings.shape.kind in ("chain", "sequences"), f"{KEY}.draft", above.settings.draft, rule)
    rule = "joins drafts for the target over its full cache only: leave it empty below another level"
    require(not below.settings.merge, f"{KEY}.merge", below.settings.merge, rule)
    rule = "is planned by what the full cache accepts: choose another shape below a level"
    require(below.settings.shape.kind != "sequoia", f"{KEY}.draft", below.settings.draft, rule)
    rule = "has no model that could verify what the level below drafts: put it first"
    require(above.verifies, KEY, above.name, rule)
    rule = "a head below it goes on from hidden states of the target: put a level of the target there"
    require(not below.needs_target_states or above.of_target, KEY, above.name, rule)
