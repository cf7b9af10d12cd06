"""Compares a runner with its transformers model, on a few tokens at every position where that may change.

A config need not declare everything that a model does between and within its modules (factors, capped logits,
norms, scales that grow with the position), so running both is the only reliable check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from cpu_kv import PlainPages
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.local import LocalState
from offload_rt.errors import UsageError
from offload_rt.model.architecture import CACHE_ARGUMENT
from offload_rt.model.decoder import Decoder
from offload_rt.model.layer_order import LayerOrder

TOKENS = 5
"""Tokens of a probe."""
_FIRST = 3
"""Tokens of the first pass, where a probe is two passes."""
BORDERS = ("original_max_position_embeddings", "floor_scale")
"""Settings of a config that name a position from which on a layer computes otherwise."""


class Probe:
    """A few fixed tokens, which attend to themselves causally in any number of passes."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.tokens = torch.arange(TOKENS, device=model.device) * 7 % model.vocabulary
        self.calls = 0
        self._backend = choose_backend(model.device)
        self._local = LocalState(model.local_layers, self._backend)
        self._local.start_prefill()
        self._kv: dict[int, Tensor] = {}

    @property
    def local(self) -> LocalState:
        return self._local

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        self.calls += 1
        total = AttentionSum(self._backend, queries, len(keys), softmax.scale)
        total.add(*self._backend.causal(queries, keys, values, softmax.scale))
        kv = torch.stack([keys, values])
        if layer in self._kv:
            total.attend(PlainPages.one(*self._kv[layer]))
            kv = torch.cat([self._kv[layer], kv], dim=2)
        self._kv[layer] = kv
        return total.result(softmax.sinks)

    def run(
        self,
        positions: Tensor,
        part: slice = slice(None),
        order: LayerOrder | None = None,
        *,
        by_blocks: bool = False,
    ) -> Tensor:
        """Returns hidden states after a part of the tokens, `[1, tokens, hidden_size]`; see `Decoder.run`.

        Args:
            positions: of all tokens.
        """
        hidden = self._model.embed(self.tokens[part])
        return self._model.run(order, hidden, positions[part], self, by_blocks=by_blocks)


class _PastTokens(DynamicCache):
    """A cache of transformers for tokens from position `start` on, without the KV of those before.

    Recurrent layers begin with an empty state, and attention sees the new tokens only. Of what a model
    computes, positions alone depend on `start`.
    """

    def __init__(self, config: PretrainedConfig, start: int) -> None:
        super().__init__(config=config)
        self._start = start

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self._start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def probe_starts(config: PretrainedConfig) -> list[int]:
    """Returns the first positions of probes: the last tokens of the context, across each border, and 0."""
    last = config.max_position_embeddings - TOKENS
    borders = {border - 2 for border in _borders(config.to_dict()) if 2 < border < last}
    return sorted({last, 0} | borders, reverse=True)


def _borders(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _borders(value)
        elif name in BORDERS and isinstance(value, int | float):
            yield int(value)


def spread_positions(model: Decoder) -> Tensor:
    """Returns early, middle and late positions of the probe's tokens, `[5]`."""
    last = model.max_positions - 1
    return torch.tensor([0, 1, last // 2, last - 1, last], device=model.device)


def check_against_own_forward(model: Decoder) -> None:
    """Compares a runner with the own forward pass of its model.

    Raises:
        UsageError: it computes other logits, at some position or in passes of another size.
    """
    # Position 0 comes last: a rotary embedding may remember the length of its newest sequence.
    for start in probe_starts(model.module.config.get_text_config()):
        _check_at(model, start)


def _check_at(model: Decoder, start: int) -> None:
    kind = type(model.module).__name__
    refusal = f"{model.name}: {kind} is not supported: "
    runner = model.for_length(start + TOKENS, 0)
    probe, continued = Probe(runner), Probe(runner)
    positions = torch.arange(start, start + TOKENS, device=model.device)
    try:
        past = _PastTokens(model.module.config.get_text_config(), start)
        expected = model.module(input_ids=probe.tokens[None], **{CACHE_ARGUMENT: past}).logits[0]
        whole = runner.logits(probe.run(positions))
        parts = [continued.run(positions, part) for part in (slice(_FIRST), slice(_FIRST, None))]
        in_parts = runner.logits(torch.cat(parts, dim=1))
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UsageError(f"{refusal}{error}") from error
    if model.kinds.full and not probe.calls:
        raise UsageError(f"{refusal}its layers do not pass keyword arguments on to their attention")
    if not bool(expected.isfinite().all()):
        model.check_weights()
        return  # `raise_nan` reports the layer at the first real pass
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    tolerance *= max(float(expected.abs().max()), 1.0)

    def alike(logits: Tensor) -> bool:
        return logits.shape == expected.shape and float((logits - expected).abs().max()) <= tolerance

    if probe.calls != len(model.kinds.full) or not alike(whole):
        raise UsageError(
            f"{refusal}it does more than run its decoder layers in turn between its embedding, norm and head"
        )
    if not alike(in_parts):
        fault = "recurrent layers ignore their state" if model.kinds.recurrent else "layers compute otherwise"
        raise UsageError(
            f"{refusal}in this version of transformers its {fault} when several tokens are behind it in one"
            " pass"
        )
