"""Builds a composition: the target over its full cache, and the levels of a config below it."""

from __future__ import annotations

from offload_rt.config.draft_shape import CHAIN
from offload_rt.drafting.base import Drafter
from offload_rt.drafting.levels.base import Resources, levels_of
from offload_rt.drafting.levels.sources import SourceLevel
from offload_rt.drafting.merged import MergedDrafter, PreferredDrafter
from offload_rt.drafting.verifier import Verifier

TARGET_FULL = "target:full"
FOUND_DEPTH = 8
"""Most tokens of a find that is proposed in place of a draft: a longer one makes the pass slower."""


def compose(resources: Resources) -> Verifier:
    """Returns the target over its full cache, which verifies what the config's levels draft."""
    drafter, below = Drafter(), CHAIN
    for level, shape in zip(levels_of(resources.config), resources.config.speculation.shapes, strict=True):
        drafter = level.drafter(drafter, below, shape, resources)
        if (merged := level.merged) is not None:
            assert isinstance(merged, SourceLevel)  # checked with the config
            drafter = MergedDrafter(drafter, merged.source())
        below = shape
        if (preferred := level.preferred) is not None:
            assert isinstance(preferred, SourceLevel)
            drafter = PreferredDrafter(drafter, preferred.source(), shape.depth)
            below = shape.deep(max(shape.depth, FOUND_DEPTH))
    return Verifier(TARGET_FULL, resources.target, resources.full, drafter, resources.sampling)
