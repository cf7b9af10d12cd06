"""Our function in transformers' attention registry, and the refusal of models that it cannot serve.

A model uses it from the first runner that opens the model until the last one that restores it. The pass
arrives as a keyword argument, so there is no global state; without it, as in the model's own `forward` and
`generate`, the function is transformers' `sdpa` attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from offload_rt.attention.sums import Softmax
from offload_rt.caches.layer_kinds import LayerKinds
from offload_rt.caches.local import Mixer
from offload_rt.model.architecture import (
    CACHE_ARGUMENTS,
)
from offload_rt.model.layer_kinds import layer_kinds, usable_window

ATTENTION_NAME = "offload_rt"


class LocalPass(Protocol):
    """Computes one forward pass of the layers with sliding windows or recurrent states; see `LocalState`."""

    def attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax
    ) -> Tensor: ...

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor: ...


class AttentionPass(Protocol):
    """Computes attention for the layers of one forward pass: a cache, or a prefill.

    Attributes:
        local: computes the layers that do not attend to the whole sequence.
    """

    @property
    def local(self) -> LocalPass: ...

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes full attention; `layer` counts full-attention layers alone."""


@dataclass(frozen=True)
class LayerPass:
    """A forward pass as the modules of decoder layers see it: sends each layer to what keeps its part.

    It is passed on by transformers as a keyword argument, and as the cache of the layers.

    Attributes:
        positions: of the new tokens, `[tokens]`.
    """

    kinds: LayerKinds
    attention: AttentionPass
    positions: Tensor

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention in a decoder layer; shapes as in `Cache.attend`."""
        kind = self.kinds.kinds[layer]
        if kind.windowed:
            return self.attention.local.attend(layer, queries, keys, values, softmax)
        return self.attention.attend(self.kinds.places[layer], queries, keys, values, softmax)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of the pass alone, as `attend` adds those before."""
        return keys, values

    def get_seq_length(self, _: int = 0) -> Tensor:
        """Returns the number of tokens before the pass, as a layer takes it that counts positions itself.

        Such a layer (Llama 4) adds the row of each token. Tokens of trees and of several sequences are not in
        rows from one position on, so there is a number for each, `[tokens]`: the sum is its position.
        """
        return self.positions - torch.arange(len(self.positions), device=self.positions.device)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_pass: LayerPass | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface, `[1, heads, tokens, head_dim]`, by an `AttentionPass`."""
    sinks = extra.pop("s_aux", None)
    if attention_pass is None:
        if sinks is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **extra)
        return _attention_with_sinks(query, key, value, attention_mask, scaling, sinks), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    kind = attention_pass.kinds.kinds[layer]
    # Arguments that would change the result must not be ignored silently.
    unknown = [word for name, word in _CHANGES_ATTENTION.items() if extra.get(name) is not None]
    window = usable_window(module.config, extra.get("sliding_window"))
    if window != kind.window:
        by_module, by_config = (
            "no sliding window" if size is None else f"a sliding window of {size} tokens"
            for size in (window, kind.window)
        )
        unknown.append(f"{by_module} in layer {layer}, and {by_config} by its config")
    if attention_mask is not None:
        unknown.append("a mask of its own")
    if unknown:
        raise ValueError(f"its attention has {', '.join(unknown)}")
    if key.shape != value.shape:
        raise ValueError(
            f"its attention has keys {key.shape[3]} wide and values {value.shape[3]} wide, and only values as"
            " wide as keys are supported"
        )
    if key.shape[1:2] + key.shape[3:] != (kind.kv_heads, kind.head_dim):
        raise ValueError(
            f"its attention has {key.shape[1]} heads of keys {key.shape[3]} wide, and its config says"
            f" {kind.kv_heads} heads of {kind.head_dim}"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = attention_pass.attend(layer, query[0], key[0], value[0], Softmax(scale, sinks))
    return out.transpose(0, 1)[None].contiguous(), None


def _attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, sinks: Tensor
) -> Tensor:
    """Computes a model's own attention with sinks, which torch's function does not know."""
    group = query.shape[1] // key.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (key, value))
    scores = query @ keys.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_(
            scores.shape[-1] - scores.shape[-2]
        )
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
    probs = torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]
    return (probs.to(values.dtype) @ values).transpose(1, 2).contiguous()


_CHANGES_ATTENTION = {"softcap": "capped scores (softcap)", "position_bias": "position biases"}


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, sdpa_mask)  # of the model's own passes


_FOUND: WeakKeyDictionary[PreTrainedModel, list[tuple[str | None, bool]]] = WeakKeyDictionary()
"""Attention and training mode found at each opening of a model; the first entry is its owner's."""
_OWN_FORWARDS: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""What the owner of a model has put in the place of a mixer's `forward`; None: nothing."""
_LOCK = threading.Lock()


def open_model(model: PreTrainedModel) -> None:
    """Puts the model in evaluation mode with our attention, until `restore_model` was called as often."""
    with _LOCK:
        _FOUND.setdefault(model, []).append((model.config._attn_implementation, model.training))
        model.config._attn_implementation = ATTENTION_NAME
        if len(_FOUND[model]) == 1:
            for mixer in _mixers(model):
                _OWN_FORWARDS[mixer] = vars(mixer).get("forward")
                mixer.forward = partial(_mix, mixer, mixer.forward)
        model.eval()


def open_count(model: PreTrainedModel) -> int:
    """Returns how many runners have the model open."""
    with _LOCK:
        return len(_FOUND.get(model, ()))


def restore_model(model: PreTrainedModel) -> None:
    """Undoes one `open_model`; the last call leaves the model as its owner gave it.

    Counted, as several runners may share a model and any of them may be closed first.
    """
    with _LOCK:
        model.config._attn_implementation, training = _FOUND[model].pop()
        if not _FOUND[model]:
            for mixer in _mixers(model):
                if (own := _OWN_FORWARDS.pop(mixer)) is None:
                    del mixer.forward
                else:
                    mixer.forward = own
        model.train(training)


def _mixers(model: PreTrainedModel) -> list[Any]:
    """Returns the parts of a model's layers that carry a recurrent state."""
    kinds = layer_kinds(model)
    return [getattr(model.model.layers[layer], kinds.kinds[layer].mixer) for layer in kinds.recurrent]


def _mix(mixer: torch.nn.Module, forward: Callable[..., Any], *positional: Any, **arguments: Any) -> Any:
    """Runs a recurrent layer by the `LocalPass` of a pass; outside of one as it is."""
    name = next((name for name in CACHE_ARGUMENTS if isinstance(arguments.get(name), LayerPass)), None)
    if name is None:
        return forward(*positional, **arguments)
    layer_pass = arguments[name]
    hidden = positional[0] if positional else arguments["hidden_states"]
    run = partial(_run_mixer, forward, name)
    return layer_pass.attention.local.mix(int(mixer.layer_idx), run, hidden)  # type: ignore[arg-type]


def _run_mixer(forward: Callable[..., Any], name: str, hidden: Tensor, cache: Any) -> Tensor:
    out: Tensor = forward(hidden, **{name: cache})
    return out
