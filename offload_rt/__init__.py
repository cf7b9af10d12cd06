"""Lossless generation from very long prompts, with the full KV cache paged in CPU memory."""

from offload_rt.errors import UsageError
from offload_rt.system.openmp import wait_passively

TYPE_CHECKING = False  # true to type checkers; importing typing would delay the program's start
if TYPE_CHECKING:
    from offload_rt.api.context import Context, TokenStream
    from offload_rt.api.llm import LLM
    from offload_rt.engine.results import GenerationResult, PromptScore, TokenEvent
    from offload_rt.sampling.params import SamplingParams

wait_passively()

__all__ = [
    "LLM",
    "Context",
    "GenerationResult",
    "PromptScore",
    "SamplingParams",
    "TokenEvent",
    "TokenStream",
    "UsageError",
]


def __getattr__(name: str) -> object:
    """Imports the API when it is first used: importing torch takes seconds, which a usage error need not."""
    if name == "__version__":
        from importlib import metadata

        installed = metadata.distributions(name="offload-rt")
        return next(
            (distribution.version for distribution in installed), "not installed"
        )  # used from a checkout
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    homes = {
        "LLM": "api.llm",
        "Context": "api.context",
        "TokenStream": "api.context",
        "SamplingParams": "sampling.params",
    }
    return getattr(importlib.import_module(f"offload_rt.{homes.get(name, 'engine.results')}"), name)
