"""Lossless generation from very long prompts, with the full KV cache paged in CPU memory."""

import importlib
from typing import TYPE_CHECKING

from offload_rt.errors import UsageError
from offload_rt.openmp import wait_passively

if TYPE_CHECKING:
    from offload_rt.api import LLM
    from offload_rt.context import Context, TokenStream
    from offload_rt.results import GenerationResult, SamplingParams, TokenEvent

wait_passively()

__all__ = ["LLM", "Context", "GenerationResult", "SamplingParams", "TokenEvent", "TokenStream", "UsageError"]


def __getattr__(name: str) -> object:
    """Imports the API when it is first used: importing torch takes seconds, which a usage error need not."""
    if name == "__version__":
        from importlib import metadata

        found = metadata.distributions(name="offload-rt")
        return next((one.version for one in found), "not installed")  # used from a checkout
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = {"LLM": "api", "Context": "context", "TokenStream": "context"}
    return getattr(importlib.import_module(f"offload_rt.{homes.get(name, 'results')}"), name)
