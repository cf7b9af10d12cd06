"""Our function in transformers' attention registry, and the refusal of models that it cannot serve.

A model uses it from the first runner that opens the model until the last one that restores it. The pass
arrives as a keyword argument, so there is no global state; without it, as in the model's own `forward` and
`generate`, the function is transformers' `sdpa` attention.
"""

from __future__ import annotations

import threading
from functools import reduce
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_rt.errors import UsageError

ATTENTION_NAME = "offload_rt"


class AttentionPass(Protocol):
    """Computes attention for the layers of one forward pass: a cache, or a prefill."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor: ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_pass: AttentionPass | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface, `[1, heads, tokens, head_dim]`, by an `AttentionPass`."""
    if attention_pass is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **extra)
    # Arguments that would change the result must not be ignored silently.
    extra["sliding_window"] = _window(module.config, extra.get("sliding_window"))
    unknown = [word for name, word in _CHANGES_ATTENTION.items() if extra.get(name) is not None]
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        raise ValueError(f"its attention has {', '.join(unknown)}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = attention_pass.attend(int(module.layer_idx), query[0], key[0], value[0], scale)  # type: ignore[arg-type]
    return out.transpose(0, 1)[None].contiguous(), None


_CHANGES_ATTENTION = {
    "softcap": "capped scores (softcap)",
    "s_aux": "learned sinks (s_aux)",
    "position_bias": "position biases",
    "sliding_window": "a sliding window",
}


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)  # of the model's own passes


def _window(config: Any, window: int | None) -> int | None:
    """Returns a sliding window in tokens; None if it covers all positions of the model."""
    return window if window is not None and window < config.max_position_embeddings else None


_FOUND: WeakKeyDictionary[PreTrainedModel, list[tuple[str | None, bool]]] = WeakKeyDictionary()
"""Attention and training mode found at each opening of a model; the first entry is its owner's."""
_LOCK = threading.Lock()


def open_model(model: PreTrainedModel) -> None:
    """Puts the model in evaluation mode with our attention, until `restore_model` was called as often."""
    with _LOCK:
        _FOUND.setdefault(model, []).append((model.config._attn_implementation, model.training))
        model.config._attn_implementation = ATTENTION_NAME
        model.eval()


def restore_model(model: PreTrainedModel) -> None:
    """Undoes one `open_model`; the last call leaves the model as its owner gave it.

    Counted, as several runners may share a model and any of them may be closed first.
    """
    with _LOCK:
        model.config._attn_implementation, training = _FOUND[model].pop()
        model.train(training)


def kind_of(model: PreTrainedModel) -> str:
    """Returns the name of the model's architecture, that of its class."""
    return type(model).__name__


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Refuses models without plain full attention and rotary positions.

    Raises:
        UsageError: names the architecture and what is not supported.
    """
    kind = kind_of(model)
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or [])
    if layer_types - {"full_attention"}:
        others = ", ".join(sorted(layer_types - {"full_attention"}))
        raise UsageError(
            f"{name}: {kind} has layers of type {others}; only full attention is supported. "
            "Their KV is not the whole context"
        )
    window = _window(config, getattr(config, "sliding_window", None))
    if window is not None and getattr(config, "use_sliding_window", True) and not layer_types:
        raise UsageError(
            f"{name}: {kind} attends through a sliding window of {window} tokens, which is not supported; "
            "use a checkpoint whose config has sliding_window null"
        )
    if config.is_heterogeneous:
        raise UsageError(f"{name}: {kind} is not supported: its layers differ in their sizes")
    missing = [path for path in _MODULES if _module(model, path) is None]
    if missing:
        raise UsageError(f"{name}: {kind} is not supported: it has no {', '.join(missing)}")
    rope = getattr(_module(model, "model.rotary_emb"), "rope_type", "default")
    # Models with several types of layers have a dict; none of them has LongRoPE yet.
    changing = {"dynamic"} & {rope} if isinstance(rope, str) else {"dynamic", "longrope"} & {*rope.values()}
    if changing:
        raise UsageError(
            f"{name}: {kind} changes its rotary frequencies with the length of the sequence "
            f"({', '.join(changing)}), which is not supported: KV in the store never changes"
        )
    if not isinstance(rope, str) and "full_attention" not in rope:
        raise UsageError(f"{name}: {kind} is not supported: its full attention has no rotary frequencies")


_MODULES = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


def _module(model: Any, path: str) -> Any:
    return reduce(lambda owner, part: getattr(owner, part, None), path.split("."), model)
