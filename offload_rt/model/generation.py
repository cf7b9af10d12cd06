"""What a checkpoint says about generation: how to sample, and which tokens end a text."""

from __future__ import annotations

from transformers import PreTrainedModel

from offload_rt.errors import UsageError
from offload_rt.results import SamplingParams


def suggested_sampling(model: PreTrainedModel) -> SamplingParams | None:
    """Returns the sampling of generation_config.json; None: there is no such file, or it is not valid.

    Temperature, top-p, top-k, min-p and repetition penalty; without sampling the penalty alone.
    """
    if (config := model.generation_config) is None:
        return None
    drawn = ("temperature", "top_p", "top_k", "min_p") if config.do_sample else ()
    names = (*drawn, "repetition_penalty")
    found = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    try:
        return SamplingParams(**({"temperature": 1.0} if drawn else {}) | found)
    except UsageError:
        return None  # a bad suggestion is no reason to refuse a run


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Returns the end-of-text tokens of a model."""
    for source in (model.generation_config, model.config):
        ends = getattr(source, "eos_token_id", None)
        if ends is not None:
            return frozenset([ends] if isinstance(ends, int) else ends)
    return frozenset()
