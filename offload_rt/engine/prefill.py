"""Layer-major prefill: the whole prompt goes through one layer before the next.

In chunks of queries, so that memory for activations is bounded. Each byte of KV is written to CPU memory
once; what stays on the device beside one layer's KV are the hidden states of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from cpu_kv import PlainPages
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.full import FullCache
from offload_rt.caches.selection import LAST_QUERIES
from offload_rt.model.runner import CausalModel

Progress = Callable[[int, int], None]
LAST_READ = 256
"""Tokens at the end of a prompt that are read on their own where a model has local layers."""


@torch.inference_mode()
def prefill(
    model: CausalModel,
    cache: FullCache,
    tokens: Sequence[int],
    chunk: int,
    progress: Progress | None = None,
    *,
    outputs: bool = False,
) -> Tensor | None:
    """Reads tokens behind those that a cache holds; the derived caches are not told (see `build_derived`).

    Behind others, `chunk` tokens at a time go through all layers: what is there crosses the link once for all
    of them, and a GPU attends to it about as long as that takes.

    Args:
        tokens: without the sequence's last token, whose pass is the first verification.
        chunk: queries at a time.
        progress: called with (token-layers done, token-layers in all).
        outputs: of an empty cache, also compute what the last layer puts out. Decoding needs its KV alone,
            which takes no attention in that layer.

    Returns:
        With `outputs`, hidden states after the last layer, `[1, tokens, hidden_size]`; else None.
    """
    if not tokens:
        raise ValueError("a prefill needs at least one token")
    if cache.verified_length and outputs:
        raise ValueError("outputs are available only for an empty cache")
    end = len(tokens)
    # A sequence with local layers returns to lengths at which something was read: with another end, such a
    # prompt is not read again from its beginning.
    alone = LAST_READ if model.kinds.local and not outputs and end > 2 * LAST_READ else 0
    layers, hidden, done = model.layers, None, 0
    if not cache.verified_length:
        done = end - alone

        def report(token_layers: int) -> None:
            if progress is not None:
                progress(token_layers, layers * end)

        hidden = _read_prompt(model, cache, tokens[:done], chunk, report, outputs)
    starts = [*range(done, end - alone, chunk), *range(end - alone if alone else end, end, chunk)]
    for start, stop in pairwise([*starts, end]):
        _read_behind(model, cache, tokens[start:stop])
        if progress is not None:
            progress(stop * layers, end * layers)
    return hidden


def _read_prompt(
    model: CausalModel,
    cache: FullCache,
    tokens: Sequence[int],
    chunk: int,
    report: Callable[[int], None],
    outputs: bool,
) -> Tensor | None:
    """Reads tokens into an empty cache, layer by layer; arguments and result are those of `prefill`."""
    count = len(tokens)
    hidden = model.embed(torch.tensor(tokens, device=model.device))
    positions = torch.arange(count, device=model.device)
    last_queries = []
    try:
        prompt = PromptAttention(cache, count)
        for layer in range(model.layers):
            prompt.begin(kv_alone=layer == model.layers - 1 and not outputs)
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                hidden[:, part] = model.run_layer(layer, hidden[:, part], positions[part], prompt)
                report(layer * count + min(start + chunk, count))
            if model.kinds.kinds[layer].full:
                last_queries.append(prompt.last_queries)
        cache.finish_read(count, last_queries)
    except BaseException:
        cache.give_up_read()
        raise
    return hidden if outputs else None


def _read_behind(model: CausalModel, cache: FullCache, tokens: Sequence[int]) -> None:
    """Takes tokens through all layers, behind those that the cache holds."""
    start = cache.verified_length
    hidden = model.embed(torch.tensor(tokens, device=model.device))
    positions = torch.arange(start, start + len(tokens), device=model.device)
    try:
        attention = AppendedAttention(cache)
        for layer in range(model.layers):
            attention.kv_alone = layer == model.layers - 1
            hidden = model.run_layer(layer, hidden, positions, attention)
        cache.finish_read(len(tokens), attention.last_queries)
    except BaseException:
        cache.give_up_read()
        raise


class AppendedAttention:
    """Attention of tokens that are read behind others; each layer's history passes by once.

    Attributes:
        last_queries: of each full-attention layer, those of the newest tokens, `[heads, n, head_dim]`.
        kv_alone: the output of the next layer is not needed, so nothing is attended.
    """

    def __init__(self, cache: FullCache) -> None:
        self.last_queries: list[Tensor] = []
        self.kv_alone = False
        self._cache = cache
        self.local = cache.local
        cache.start_read()

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        cache = self._cache
        cache.scale = softmax.scale
        self.last_queries.append(queries[:, -LAST_QUERIES:].clone())
        if self.kv_alone:
            cache.put_read(layer, keys, values)
            return torch.zeros_like(queries)
        total = AttentionSum(cache.backend, queries, len(keys), softmax.scale)
        total.add(*cache.backend.causal(queries, keys, values, softmax.scale))
        for segment in cache.history(layer):
            total.attend(segment)
        cache.put_read(layer, keys, values)
        return total.result(softmax.sinks)


class PromptAttention:
    """Attention of a prompt, one layer after the other: queries come chunk by chunk, keys stay at hand.

    On a CPU they stay in the store itself. On a GPU one layer's KV is on the device while the layer is
    computed, and its pages are written to the store as they fill; it crosses the link once.

    Args:
        tokens: length of the whole prompt.
    """

    def __init__(self, cache: FullCache, tokens: int) -> None:
        self._cache = cache
        self.local = cache.local
        cache.local.start_read()
        self._tokens = tokens
        self._done = 0  # of the layer
        self._written = 0
        self._kv_alone = False
        self._whole: tuple[Tensor, Tensor] | None = None
        if not cache.engine.link.in_place:
            shape = (cache.layout.kv_heads, tokens, cache.layout.head_dim)
            keys = torch.empty(shape, dtype=cache.layout.dtype, device=cache.device)
            self._whole = (keys, torch.empty_like(keys))
        self.last_queries = torch.empty(0)

    def begin(self, *, kv_alone: bool) -> None:
        """Turns to the next layer.

        Args:
            kv_alone: the layer's output is not needed, so nothing is attended.
        """
        self._done = self._written = 0
        self._kv_alone = kv_alone

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        cache, start = self._cache, self._done
        self._done += keys.shape[1]
        cache.scale = softmax.scale
        newest = queries if start == 0 else torch.cat([self.last_queries, queries[:, -LAST_QUERIES:]], dim=1)
        # Copied: a view would keep the whole chunk's projections alive.
        self.last_queries = newest[:, -LAST_QUERIES:].clone()
        if self._whole is not None:
            self._whole[0][:, start : self._done] = keys
            self._whole[1][:, start : self._done] = values
            history = PlainPages.one(*self._whole).span(0, start)
            self._write(layer, *self._whole)
        else:
            history = cache.sequence.views(layer, 0, start)
            cache.sequence.append(layer, keys, values)
        if self._kv_alone:
            return torch.zeros_like(queries)
        total = AttentionSum(cache.backend, queries, len(keys), softmax.scale)
        total.add(*cache.backend.causal(queries, keys, values, softmax.scale))
        for segment in history:
            total.attend(segment)
        return total.result(softmax.sinks)

    def _write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Writes the pages that are full, and with the layer's last token the one that is not."""
        cache, page = self._cache, self._cache.layout.page_size
        last = self._done == self._tokens
        end = self._done if last else self._done // page * page
        if end > self._written:
            cache.engine.write_prompt(layer, keys[:, self._written : end], values[:, self._written : end])
            self._written = end
