"""How attention reaches our caches: a function in transformers' registry, and what it cannot serve.

The pass is handed down as a keyword, so there is no global state. A model's own attention is switched for the
length of a pass alone: between passes the model is its owner's, and other engines may share it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_rt.errors import UsageError

ATTENTION_NAME = "offload_rt"


class AttentionPass(Protocol):
    """What attends for the layers of one forward pass: a cache, or one layer of a prefill."""

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
    """transformers' attention interface over an `AttentionPass`; `[1, heads, tokens, head_dim]` in."""
    if attention_pass is None:
        raise ValueError("its layers do not pass keyword arguments on to their attention")
    # What would change the result and is not asked for by name must not be dropped in silence.
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


def _window(config: Any, window: int | None) -> int | None:
    """A sliding window, in tokens; None where the model has no positions for a longer text."""
    return window if window is not None and window < config.max_position_embeddings else None


@contextmanager
def attention_through(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model's attention goes through the registered function `name`, afterwards as before.

    Passes of one model may overlap in two threads: the first one switches, the last one switches back.
    """
    switch = switch_of(model)
    with switch.lock:
        if switch.passes == 0:
            switch.given = model.config._attn_implementation
            model.config._attn_implementation = name
        switch.passes += 1
    try:
        yield
    finally:
        with switch.lock:
            switch.passes -= 1
            if switch.passes == 0:
                model.config._attn_implementation = switch.given


@dataclass
class Switch:
    """Of one model's attention: how many passes need it, what it was before, and whether ours fits."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    passes: int = 0
    given: str | None = None
    checked: bool = False


_SWITCHES: WeakKeyDictionary[PreTrainedModel, Switch] = WeakKeyDictionary()
_SWITCHES_LOCK = threading.Lock()


def switch_of(model: PreTrainedModel) -> Switch:
    """The one switch of a model."""
    with _SWITCHES_LOCK:
        return _SWITCHES.setdefault(model, Switch())


def kind_of(model: PreTrainedModel) -> str:
    """Its architecture, by the name of its class."""
    return type(model).__name__


def refuse_unsupported(model: PreTrainedModel, name: str) -> None:
    """Refuses, by name, what is not plain full attention with rotary positions.

    Raises:
        UsageError: naming the architecture and what about it does not fit.
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
    # Of models with several types of layers, which have a dict, none has LongRoPE yet.
    changing = {"dynamic"} & {rope} if isinstance(rope, str) else {"dynamic", "longrope"} & {*rope.values()}
    if changing:
        raise UsageError(
            f"{name}: {kind} changes its rotary frequencies with the length of the text "
            f"({', '.join(changing)}), which is not supported: KV in the store never changes"
        )
    if not isinstance(rope, str) and "full_attention" not in rope:
        raise UsageError(f"{name}: {kind} is not supported: its full attention has no rotary frequencies")


_MODULES = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


def _module(model: Any, path: str) -> Any:
    return reduce(lambda owner, part: getattr(owner, part, None), path.split("."), model)
