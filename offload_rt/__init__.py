"""Lossless generation from very long prompts, with the full KV cache paged in CPU memory."""

from offload_rt.api import LLM, GenerationResult, SamplingParams, TokenEvent
from offload_rt.errors import UsageError

__all__ = ["LLM", "GenerationResult", "SamplingParams", "TokenEvent", "UsageError"]
