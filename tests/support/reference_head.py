"""What a published head of EAGLE-3 computes, in a few lines of torch over its own tensors, in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offload_rt.model.draft_head import IMPOSSIBLE

HEADS, KV_HEADS, DIM = 4, 2, 8
EPSILON, THETA = 1e-5, 10_000.0


class ReferenceHead:
    """A head that sees all tokens of a sequence.

    Args:
        tensors: by their published names.
        embedding: of the target, `[vocabulary, hidden]`.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], embedding: Tensor, *, norm_before_residual: bool = False
    ) -> None:
        named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        self._weights = {
            name: tensor.double() for name, tensor in named.items() if tensor.is_floating_point()
        }
        self._embedding = self._weights.get("embed_tokens.weight", embedding.double())
        self._d2t = named.get("d2t")
        self._vocabulary = len(embedding)
        self._norm_before = norm_before_residual
        self._layers = 1 + max(int(name.split(".")[1]) for name in named if name.startswith("layers."))

    def first_states(self, taken: Sequence[Tensor]) -> Tensor:
        """States of the target's hidden states at three layers, `[tokens, hidden]` each."""
        return torch.cat([part.double() for part in taken], -1) @ self._weights["fc.weight"].T

    def run(self, tokens: Sequence[int], before: Tensor) -> Tensor:
        """States after tokens 1 and later of a sequence.

        Args:
            before: the state before each of them, `[tokens - 1, hidden]`: of the target, or after the token
                before by this head.
        """
        embedded, states = self._embedding[torch.tensor(tokens[1:])], before
        for layer in range(self._layers):
            states = self._layer(f"layers.{layer}.", embedded, states, joins=not layer)
        return states

    def logits(self, states: Tensor) -> Tensor:
        own = self._normed("norm", states) @ self._weights["lm_head.weight"].T
        if self._d2t is None:
            return own
        everything = torch.full((len(own), self._vocabulary), IMPOSSIBLE, dtype=own.dtype)
        for at, offset in enumerate(self._d2t.tolist()):
            everything[:, at + offset] = own[:, at]
        return everything

    def _normed(self, name: str, rows: Tensor) -> Tensor:
        return rows / (rows.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * self._weights[f"{name}.weight"]

    def _layer(self, prefix: str, embedded: Tensor, states: Tensor, *, joins: bool) -> Tensor:
        weights = self._weights
        given, residual = self._normed(f"{prefix}input_layernorm", states), states
        if joins:
            normed = self._normed(f"{prefix}hidden_norm", states)
            given = torch.cat([self._normed(f"{prefix}input_layernorm", embedded), normed], -1)
            residual = normed if self._norm_before else states
        parts = [given @ weights[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv"]
        queries, keys, values = (part.unflatten(-1, (-1, DIM)).transpose(0, 1) for part in parts)
        queries, keys = _rotated(queries), _rotated(keys)
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (keys, values))
        scores = queries @ keys.mT * DIM**-0.5
        scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
        attended = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
        residual = residual + attended @ weights[f"{prefix}self_attn.o_proj.weight"].T
        normed = self._normed(f"{prefix}post_attention_layernorm", residual)
        gate = torch.nn.functional.silu(normed @ weights[f"{prefix}mlp.gate_proj.weight"].T)
        up = normed @ weights[f"{prefix}mlp.up_proj.weight"].T
        result: Tensor = residual + (gate * up) @ weights[f"{prefix}mlp.down_proj.weight"].T
        return result


def _rotated(rows: Tensor) -> Tensor:
    frequencies = THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.arange(rows.shape[1], dtype=torch.float64)[:, None] * frequencies
    cosines, sines = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
    half = DIM // 2
    return rows * cosines + torch.cat([-rows[..., half:], rows[..., :half]], -1) * sines
