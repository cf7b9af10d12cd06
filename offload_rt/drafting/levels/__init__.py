"""Levels of a composition: one class for each kind, registered by its name when this package is imported."""

from offload_rt.drafting.levels import head, models, sources

__all__ = ["head", "models", "sources"]
