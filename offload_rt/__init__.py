"""Lossless generation from very long prompts, with the full KV cache paged in CPU memory."""

from typing import TYPE_CHECKING

from offload_rt.errors import UsageError
from offload_rt.openmp import wait_passively

if TYPE_CHECKING:
    from offload_rt.api import LLM
    from offload_rt.results import GenerationResult, SamplingParams, TokenEvent

wait_passively()

__all__ = ["LLM", "GenerationResult", "SamplingParams", "TokenEvent", "UsageError"]


def __getattr__(name: str) -> object:
    """The API, imported when it is first asked for: torch takes seconds, and a usage error needs none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from offload_rt import api

    return getattr(api, name)
