"""Computes hidden states with the modules of a transformers model, over our caches.

Hidden states go through the model's own embedding, rotary embedding, decoder layers, norm and head, its
layers by a layer order. Their attention is that of an `AttentionPass`.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import KVLayout
from offload_rt.caches.local_history import LocalLayers
from offload_rt.errors import UsageError
from offload_rt.kernels.planes import WeightPlanes
from offload_rt.model.architecture import (
    CACHE_ARGUMENT,
    Rotary,
    embedding,
    final_norm,
    further_arguments,
    rotary_embedding,
    scale_embeddings,
    scale_logits,
)
from offload_rt.model.attention_hook import (
    ATTENTION_NAME,
    AttentionPass,
    LayerPass,
    open_model,
    restore_model,
)
from offload_rt.model.host_embedding import host_bytes
from offload_rt.model.layer_kinds import layer_kinds
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.quantized_weights import named_weights, stored_bytes
from offload_rt.model.remote_blocks import RemoteBlocks, RemotePass
from offload_rt.model.remote_mlp import RemoteMlp, remote_mlps
from offload_rt.model.supported import refuse_unsupported


class NotANumber(UsageError):
    """Raised for NaN logits; the message names the weight or the first layer that they come from."""


class Decoder:
    """The modules of a causal language model, whose attention runs over our caches until `restore`.

    Args:
        model: a loaded transformers model.
        name: its name in messages.

    Attributes:
        kinds: what each decoder layer keeps of a sequence.
        local_layers: the layers among them that keep something else than the KV of the whole sequence.
        remote_blocks: attention blocks that a second device runs, in passes by an order on two devices.

    Raises:
        UsageError: the architecture is not supported; names what is not.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.name = name
        self.module = model
        refuse_unsupported(model, name)
        self._config = config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kinds = layer_kinds(model)
        paged = self.kinds.kinds[[*self.kinds.full, *self.kinds.windowed][0]]
        self.kv_heads: int = paged.kv_heads
        self.head_dim: int = paged.head_dim
        self.hidden_size: int = config.hidden_size
        self._entries: int = config.vocab_size  # of the embedding
        self.vocabulary = self._entries  # of the logits: a draft model gets its target's, padding included
        self.max_positions: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.local_layers = LocalLayers(self.kinds, config, self.dtype, self.device)
        self._body: Any = model.model
        self._embedding: Any = embedding(self._body)
        self._norm: Any = final_norm(self._body)
        self._blocks: list[Any] = list(self._body.layers)
        self._steps: list[Any] = list(self._blocks)  # what computes each layer
        self._further = further_arguments(self._blocks[0])
        self._head: Any = self._own_head
        self.remote_blocks = RemoteBlocks(self._blocks)
        self._in_turn = LayerOrder.whole(self.layers)
        self._rotary = Rotary(rotary_embedding(self._body))
        self._long_context: Self | None = None
        open_model(model)
        self._open = True

    def restore(self) -> None:
        """Leaves the transformers model as it was given, once all its runners are restored. Idempotent."""
        if self._open:
            self._open = False
            restore_model(self.module)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights in the memory of its device."""
        return stored_bytes(self.module) - host_bytes(self.module)

    @property
    def remote_mlps(self) -> list[RemoteMlp]:
        """MLP blocks whose weights are on another GPU."""
        return remote_mlps(self.module)

    def left_out_bytes(self, order: LayerOrder) -> int:
        """Returns the bytes of weights in the blocks that `order` leaves out."""
        left_out = [self._blocks[layer].self_attn for layer in order.no_attention]
        left_out += [self._blocks[layer].mlp for layer in order.no_mlp]
        return sum(map(stored_bytes, left_out))

    def kv_layout(self, page_size: int = 1) -> KVLayout:
        """Returns the layout of the KV of its full-attention layers, in pages of `page_size` tokens."""
        if not self.kinds.full:  # one value per token, by which the store counts them
            return KVLayout(1, 1, 1, self.dtype, page_size)
        return KVLayout(len(self.kinds.full), self.kv_heads, self.head_dim, self.dtype, page_size)

    @property
    def rotary_frequencies(self) -> Tensor:
        """Frequencies in radians per position, `[rotated / 2]`; `rotated` is at most `head_dim`."""
        return self._rotary.frequencies.to(self.device) if self.kinds.full else torch.empty(0)

    @property
    def rotary_factor(self) -> float:
        """Factor on the cosines and sines of positions."""
        return self._rotary.factor

    def for_length(self, prompt_tokens: int, new_tokens: int) -> Self:
        """Returns the runner for a sequence: this one, or another beyond the original context of LongRoPE.

        Raises:
            UsageError: the sequence would grow across that length.
        """
        limit = self._rotary.original_context
        if limit is None or prompt_tokens + new_tokens <= limit:
            return self
        if prompt_tokens <= limit:
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {new_tokens} new ones cross {limit} tokens, from where "
                f"on {self.name} has other rotary frequencies (longrope), and KV in the store never changes: "
                f"stay within {limit} tokens, or give a prompt of more"
            )
        if self._long_context is None:
            self._long_context = copy.copy(self)
            self._long_context._rotary = self._rotary.long_context()
        return self._long_context

    def max_length(self, prompt_tokens: int) -> int:
        """Returns the number of tokens that a sequence with such a prompt may grow to."""
        limit = self._rotary.original_context
        return self.max_positions if limit is None or prompt_tokens > limit else limit

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds token ids `[tokens]` as hidden states `[1, tokens, hidden_size]`."""
        if self._entries < self.vocabulary:
            tokens = tokens.clamp(max=self._entries - 1)
        return scale_embeddings(self._embedding(tokens[None]), self._config)

    def run_layer(
        self,
        layer: int,
        hidden: Tensor,
        positions: Tensor,
        attention_pass: AttentionPass,
        remote: frozenset[int] = frozenset(),
    ) -> Tensor:
        """Runs hidden states `[1, tokens, hidden_size]` through one decoder layer."""
        order = LayerOrder(((layer,),), remote=remote & {layer})
        return self.run(order, hidden, positions, attention_pass)

    def run(
        self,
        order: LayerOrder | None,
        hidden: Tensor,
        positions: Tensor,
        attention_pass: AttentionPass,
        *,
        by_blocks: bool = False,
        inputs: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """Runs hidden states `[1, tokens, hidden_size]` through decoder layers.

        Args:
            order: the order of layers; None: all in turn.
            positions: of the tokens in their sequences, `[tokens]`.
            by_blocks: run each layer as its attention and MLP blocks, and not as a whole.
            inputs: takes the input of each layer that it has a key of, `[1, tokens, hidden_size]`.
        """
        order = order or self._in_turn
        position_ids = positions[None]
        layer_pass = LayerPass(self.kinds, attention_pass, positions)
        arguments: dict[str, Any] = {
            "attention_mask": None,
            "position_ids": position_ids,
            "attention_pass": layer_pass,
            CACHE_ARGUMENT: layer_pass,
            **self._further,
        }
        # Layers of one type share their rotary frequencies.
        rotations: dict[str, tuple[Tensor, Tensor] | None] = {}
        if (found := self.module.config._attn_implementation) != ATTENTION_NAME:
            raise UsageError(f"{self.name}: its attention was changed to {found!r} while it is in use")
        remote = self.remote_blocks.begin(arguments) if order.remote else None
        for group in order.groups:
            if inputs is not None:
                inputs.update((layer, hidden) for layer in group if layer in inputs)
            rope = self.kinds.kinds[group[0]].rope
            if rope not in rotations:
                rotations[rope] = self._rotary(hidden, position_ids, rope)
            arguments["position_embeddings"] = rotations[rope]
            alone = len(group) == 1 and order.exact(group[0]) and group[0] not in order.remote
            if alone and not by_blocks:
                hidden = self._steps[group[0]](hidden, **arguments)
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            else:
                hidden = self._run_group(group, hidden, arguments, order, remote)
        return hidden

    def _run_group(
        self,
        group: tuple[int, ...],
        hidden: Tensor,
        arguments: dict[str, Any],
        order: LayerOrder,
        remote: RemotePass | None,
    ) -> Tensor:
        """Runs the attention blocks of a group over its input, then its MLP blocks in order."""
        attended: dict[int, Tensor] = {}
        there = [layer for layer in group if layer in order.remote]
        finish = None if remote is None or not there else remote.start(there, hidden)
        for layer in group:
            if layer not in order.no_attention | order.remote:
                block = self._blocks[layer]
                attended[layer] = block.self_attn(block.input_layernorm(hidden), **arguments)[0]
        for layer in group:
            block = self._blocks[layer]
            if finish is not None and layer == there[0]:  # not before it is needed
                attended |= zip(there, finish(), strict=True)
            if layer in attended:
                hidden = hidden + attended[layer]
            if layer not in order.no_mlp:
                hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return hidden

    def normed(self, hidden: Tensor) -> Tensor:
        """Returns final hidden states `[…, hidden_size]` behind the final norm."""
        normed: Tensor = self._norm(hidden)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits `[tokens, vocabulary]` of final hidden states `[1, tokens, hidden_size]`."""
        logits = scale_logits(self._head(hidden)[0], self._config)
        if self._entries != self.vocabulary:
            logits = torch.nn.functional.pad(logits, (0, self.vocabulary - self._entries), value=-torch.inf)
        return logits

    def check_weights(self) -> None:
        """Raises NotANumber if a weight is NaN or infinite."""
        for name, weight in named_weights(self.module):
            # Numbers of 8 bits are quantised, and torch cannot look at some of them.
            if isinstance(weight, WeightPlanes):
                finite = bool(weight.finite)
            else:
                finite = weight.itemsize == 1 or bool(weight.isfinite().all())
            if not finite:
                raise NotANumber(
                    f"{self.name}: the weight {name} has NaN or infinite entries; check its file"
                )

    def _own_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.lm_head(self._norm(hidden))
        return logits
