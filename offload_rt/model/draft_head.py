"""Draft heads: a few layers that continue from a target's hidden states, and their published formats.

A head computes, from the embedding of a token and the state before it, the state after it, from which the
next token is predicted. The first state is taken from the target; those behind it are the head's own. Each
layer attends to the tokens before, so a head has KV: `caches.head.HeadCache`.

`Eagle3Head` is that of EAGLE-3 (arXiv 2503.01840), in the formats of SafeAILab/EAGLE, SpecForge and vLLM's
speculators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from cpu_kv import KVLayout
from offload_rt.attention.sums import Softmax
from offload_rt.caches.sizes import LONGEST_HEAD_WINDOW
from offload_rt.kernels.dense import LayerWeights, NativeLayer, NativeProduct, RmsNorm, supports
from offload_rt.system.digests import digest

IMPOSSIBLE = -1e4
"""Logit of a token that a head cannot predict. Not -inf, as a grammar may allow only such tokens."""
Attend = Callable[[int, Tensor, Tensor, Tensor, Softmax], Tensor]
"""Attention of a layer, as `Cache.attend`."""


@dataclass(frozen=True)
class StateTap:
    """The states that a head continues from, as they are taken in a pass of its target.

    Attributes:
        name: tells them from the states of other heads.
        layers: numbers of the target's layers whose inputs are taken, rising; the number of layers stands for
            the output of the last one.
        join: makes the state of them, `[…, hidden_size]` each.
    """

    name: str
    layers: tuple[int, ...]
    join: Callable[[Sequence[Tensor]], Tensor]


class DraftHead(nn.Module, ABC):
    """The layers of a head, with what it predicts tokens by.

    Attributes:
        layer_count: number of its layers.
        heads, kv_heads, head_dim: of their attention.
        state_size: entries of a state.
        tap: the states of its target that it continues from.
        window: tokens that its attention is used to, at most `LONGEST_HEAD_WINDOW`.
    """

    window = LONGEST_HEAD_WINDOW
    layer_count: int
    heads: int
    kv_heads: int
    head_dim: int
    state_size: int
    tap: StateTap

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings `[tokens, width]` of token IDs `[tokens]`."""

    @abstractmethod
    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the states `[tokens, state_size]` after tokens.

        Args:
            embedded: of the tokens, `[tokens, width]`.
            states: before them, `[tokens, state_size]`.
            positions: of the tokens, `[tokens]`.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Returns logits over the target's vocabulary, `[tokens, vocabulary]`, of states after tokens.

        A token that the head cannot predict has `IMPOSSIBLE`.
        """

    @property
    @abstractmethod
    def rotary_frequencies(self) -> Tensor:
        """Frequencies in radians per position, `[rotated / 2]`."""

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of its own weights: what it shares with its target is not counted."""
        return sum(weight.nbytes for weight in self.state_dict().values())

    def kv_layout(self) -> KVLayout:
        """Returns the layout of its KV."""
        return KVLayout(self.layer_count, self.kv_heads, self.head_dim, self.dtype, 1)


def default_taps(layers: int) -> tuple[int, int, int]:
    """Returns the layers whose inputs an EAGLE-3 head takes that names none: a low, a middle, a high one."""
    return 2, layers // 2, layers - 3


class Eagle3Head(DraftHead):
    """A head of EAGLE-3.

    Three hidden states of the target are joined by `fc` to the state before a token. Its first layer attends
    with the token's embedding beside the state, its output head knows a part of the vocabulary.

    Args:
        config: `LlamaConfig` of its layers, with the settings of the published formats beside it
            (`head_files.Eagle3Config`).
        taps: see `StateTap.layers`.
        vocabulary: tokens of its target.
        embedding: the target's; None: the head has its own.
    """

    def __init__(
        self,
        config: LlamaConfig,
        taps: tuple[int, ...],
        vocabulary: int,
        embedding: Callable[[Tensor], Tensor] | None,
    ) -> None:
        super().__init__()
        given: Any = config  # settings that transformers does not know
        self.config = config
        hidden = config.hidden_size
        self.layer_count = config.num_hidden_layers
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads or self.heads
        self.head_dim = config.head_dim or hidden // self.heads
        self.state_size = hidden
        self.window = min(LONGEST_HEAD_WINDOW, config.max_position_embeddings)
        self.vocabulary = vocabulary
        self.fc = nn.Linear(
            len(taps) * (getattr(given, "target_hidden_size", None) or hidden), hidden, bias=False
        )
        before = bool(getattr(given, "norm_before_residual", False))
        self.layers = nn.ModuleList(
            _Layer(config, self.head_dim, self.kv_heads, joins=not at, norm_before_residual=before)
            for at in range(self.layer_count)
        )
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        drafted = getattr(given, "draft_vocab_size", None) or vocabulary
        self.lm_head = nn.Linear(hidden, drafted, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64))
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if embedding is None else None
        self._embedding = embedding
        self._frequencies = torch.empty(0)  # of rotary positions, in float32
        self._rotary_factor = 1.0  # on their cosines and sines
        self.tap = StateTap("", taps, self._join)
        self._drafted: Tensor | None = None  # the tokens that it can predict; None: all
        self._native: list[_NativeLayer] = []  # in place of the layers, on a CPU
        self._native_head: NativeProduct | None = None

    def _join(self, states: Sequence[Tensor]) -> Tensor:
        joined: Tensor = self.fc(torch.cat(list(states), -1))
        return joined

    def ready(self) -> None:
        """Prepares for passes, once its weights are loaded and on their device."""
        drafted = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        self._drafted = None if len(drafted) == self.vocabulary else drafted
        rotary: Any = LlamaRotaryEmbedding(self.config)
        self._frequencies = rotary.inv_freq.clone().to(self.d2t.device)
        self._rotary_factor = rotary.attention_scaling
        if self._runs_natively():
            self._native = [_NativeLayer(layer) for layer in self.layers]
            self._native_head = NativeProduct(self.lm_head, _rms_norm(self.norm))
        joined_by = digest(self.fc.weight[:16].detach().float().cpu().numpy().tobytes(), digits=16)
        self.tap = replace(self.tap, name=f"eagle3 {joined_by}")

    def _runs_natively(self) -> bool:
        """Returns whether the native library computes all of it: on a CPU, with SiLU, without training."""
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        return self.config.hidden_act == "silu" and all(
            supports(linear, self.dtype) and not linear.weight.requires_grad for linear in linears
        )

    @property
    def rotary_frequencies(self) -> Tensor:
        return self._frequencies

    def embed(self, tokens: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            embedded: Tensor = self.embed_tokens(tokens)
            return embedded
        assert self._embedding is not None
        return self._embedding(tokens)[0]

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        angles = positions[:, None] * self._frequencies
        angles = torch.cat([angles, angles], -1)[None]
        factor, dtype = self._rotary_factor, embedded.dtype
        rotation = (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)
        layers: Sequence[Any] = self._native or list(self.layers)
        for at, layer in enumerate(layers):
            states = layer(at, embedded, states, rotation, attend)
        return states

    def logits(self, states: Tensor) -> Tensor:
        native = self._native_head
        logits: Tensor = self.lm_head(self.norm(states)) if native is None else native(states.contiguous())
        if self._drafted is None:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.vocabulary), IMPOSSIBLE)
        return everything.index_copy_(-1, self._drafted, logits)


class _Layer(nn.Module):
    """A layer of an EAGLE-3 head; the first one `joins` the embedding and the state."""

    def __init__(
        self, config: LlamaConfig, head_dim: int, kv_heads: int, *, joins: bool, norm_before_residual: bool
    ) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.self_attn = _Attention(config, head_dim, kv_heads, 2 * hidden if joins else hidden)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, epsilon)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, epsilon)
        self.hidden_norm = LlamaRMSNorm(hidden, epsilon) if joins else None
        self._norm_before_residual = norm_before_residual

    def forward(
        self, layer: int, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        given, states = self.inputs(embedded, states)
        states = states + self.self_attn(layer, given, rotation, attend)
        result: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result

    def inputs(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what attention takes, and the states that its output is added to."""
        if self.hidden_norm is None:
            return self.input_layernorm(states), states
        normed = self.hidden_norm(states)
        given = torch.cat([self.input_layernorm(embedded), normed], -1)
        return given, normed if self._norm_before_residual else states


class _NativeLayer:
    """A layer in the native library (`layer.h`): all of it but the norms in front of attention."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._softmax = Softmax(attention.head_dim**-0.5)
        self._native = NativeLayer(
            LayerWeights(
                None,
                _rms_norm(layer.post_attention_layernorm),
                None,
                None,
                *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
                *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
                attention.head_dim,
            )
        )

    def __call__(
        self, layer: int, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
        given, states = self._layer.inputs(embedded, states)
        cosines, sines = (part.contiguous() for part in rotation)
        queries, keys, values = self._native.attention_inputs(given[None].contiguous(), cosines, sines)
        attended = attend(layer, queries, keys, values, self._softmax)
        return self._native.after_attention(states[None].contiguous(), attended)[0]


def _rms_norm(norm: LlamaRMSNorm) -> RmsNorm:
    return RmsNorm(norm.weight, norm.variance_epsilon)


class _Attention(nn.Module):
    """The projections of a layer's attention, which goes over the head's cache."""

    def __init__(self, config: LlamaConfig, head_dim: int, kv_heads: int, width: int) -> None:
        super().__init__()
        bias, heads = config.attention_bias, config.num_attention_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * head_dim, config.hidden_size, bias=bias)
        self.head_dim = head_dim

    def forward(self, layer: int, given: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        parts = (projection(given) for projection in (self.q_proj, self.k_proj, self.v_proj))
        queries, keys, values = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)[None] for part in parts
        )
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotation)
        attended = attend(layer, queries[0], keys[0], values[0], Softmax(self.head_dim**-0.5))
        out: Tensor = self.o_proj(attended.transpose(0, 1).flatten(1))
        return out
