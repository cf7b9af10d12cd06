"""Layer-major prefill: the whole prompt goes through one layer before the next.

In chunks of queries, so that memory for activations is bounded. Each byte of KV is written to CPU memory
once; what stays on the device beside one layer's KV are the hidden states of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.full import FullCache
from offload_rt.caches.prompt_writer import PromptWriter
from offload_rt.caches.selection import LAST_QUERIES
from offload_rt.caches.target_states import TargetStates
from offload_rt.model.runner import CausalModel

Progress = Callable[[int, int], None]
Outputs = Callable[[int, Tensor], None]
"""Called with the position of a chunk's first token, and the chunk's hidden states after the last layer,
`[1, tokens, hidden_size]`, which are valid during the call: chunks in order of position, each once."""
LAST_PORTION = 256
"""Tokens at the end of a prompt that are a portion of their own where a model has local layers."""


@torch.inference_mode()
def prefill(
    model: CausalModel,
    cache: FullCache,
    tokens: Sequence[int],
    chunk: int,
    progress: Progress | None = None,
    *,
    behind: int = 0,
    outputs: Outputs | None = None,
) -> None:
    """Computes the KV of tokens behind those of a cache; derived caches are filled by `build_derived`.

    Behind others, `chunk` tokens at a time go through all layers: the earlier KV crosses the link once for
    all of them. Where nothing crosses a link, they begin at multiples of `chunk`, and are computed alike
    whatever was read together.

    Args:
        tokens: without the sequence's last token, whose pass is the first verification.
        chunk: queries at a time.
        progress: called with (token-layers done, token-layers in all).
        behind: number of tokens of the prompt that further calls will read.
        outputs: takes the output of the last layer for these tokens; None: it is not computed. Decoding
            needs only the KV, which takes no attention in that layer.
    """
    if not tokens:
        raise ValueError("a prefill needs at least one token")
    end = len(tokens)
    # A sequence with local layers returns only to lengths at which a portion ended: with another end, such a
    # prompt is not prefilled again from its beginning.
    apart = model.kinds.local and not behind
    alone = LAST_PORTION if apart and end > 2 * LAST_PORTION else 0
    first, layers = cache.verified_length, model.layers
    starts = [0, *range(end - alone, end, chunk)] if alone else [0]
    if first:  # an empty cache takes all tokens layer by layer, so that no KV comes back over the link
        in_place = cache.transfer.link.in_place
        begun, least = (first % chunk, LAST_QUERIES) if in_place else (0, 1)
        # The last portion has the queries that choose what is retrieved.
        starts = sorted({*starts, *range(chunk - begun, end - alone - least + 1, chunk)})
    for start, stop in pairwise([*starts, end]):

        def report(token_layers: int, before: int = start * layers) -> None:
            if progress is not None:
                progress(before + token_layers, layers * end)

        rest = end - stop + behind
        _prefill_portion(model, cache, tokens[start:stop], rest, chunk, report, outputs)


def _prefill_portion(
    model: CausalModel,
    cache: FullCache,
    tokens: Sequence[int],
    behind: int,
    chunk: int,
    report: Callable[[int], None],
    outputs: Outputs | None,
) -> None:
    """Prefills tokens behind those of a cache, layer by layer; see `prefill`.

    Args:
        behind: tokens that other portions will follow with.
    """
    count, first = len(tokens), cache.verified_length
    hidden = model.embed(torch.tensor(tokens, device=model.device))
    positions = torch.arange(first, first + count, device=model.device)
    writer, last_queries = PromptWriter(cache, count), []
    taken = StatesOfPrompt(model, cache.states, first, count, first + count + behind)
    try:
        writer.start()
        attention = PromptAttention(cache, writer)
        for layer in range(model.layers):
            taken.take(layer, hidden)
            attention.begin()
            for start in range(0, count, chunk):
                part = slice(start, start + chunk)
                last = layer == model.layers - 1
                needed = outputs is not None or taken.needs_output(start, start + chunk)
                attention.kv_alone = last and not needed
                hidden[:, part] = model.run_layer(layer, hidden[:, part], positions[part], attention)
                if last and outputs is not None:
                    outputs(first + start, hidden[:, part])
                report(layer * count + min(start + chunk, count))
            if model.kinds.kinds[layer].full:
                last_queries.append(attention.last_queries)
        taken.take(model.layers, hidden)
        writer.finish(last_queries)
        taken.finish()
    except BaseException:
        writer.give_up()
        raise


class StatesOfPrompt:
    """Takes the states of a portion of a prompt from which a draft head continues.

    Args:
        states: takes them; None: none are wanted.
        first: position of the portion's first token.
        end: tokens of the prompt.
    """

    def __init__(
        self, model: CausalModel, states: TargetStates | None, first: int, count: int, end: int
    ) -> None:
        self._model, self._states, self._first = model, states, first
        self._inputs = model.tapped() if states is not None else {}
        self._wanted = [] if states is None else states.wanted(first, count, end)

    def take(self, layer: int, hidden: Tensor) -> None:
        """Takes what is wanted of the input of a layer, `[1, tokens, hidden_size]`."""
        if layer in self._inputs and self._wanted:
            self._inputs[layer] = torch.cat([hidden[0, part] for part in self._wanted])

    def needs_output(self, start: int, stop: int) -> bool:
        """Returns whether the output of the last layer is wanted of any of these tokens."""
        wanted = any(part.start < stop and start < part.stop for part in self._wanted)
        return wanted and self._model.layers in self._inputs

    def finish(self) -> None:
        """Adds the states to those of the sequence."""
        if self._states is None or not self._wanted:
            return
        output = next(iter(self._inputs.values()))  # of a head that does not take the last one: not used
        states = self._model.states(self._inputs, self._inputs.get(self._model.layers, output))
        for part, rows in zip(
            self._wanted, states.split([part.stop - part.start for part in self._wanted]), strict=True
        ):
            self._states.append(self._first + part.start, rows)


class PromptAttention:
    """Attention of a prompt's tokens over those before them: queries come layer by layer, in chunks.

    Attributes:
        last_queries: those of the layer's newest tokens, `[heads, n, head_dim]`.
        kv_alone: the layer's output is not needed, so nothing is attended.
    """

    def __init__(self, cache: FullCache, writer: PromptWriter) -> None:
        self.local = cache.local
        self.last_queries = torch.empty(0)
        self._cache = cache
        self._writer = writer
        self.kv_alone = False

    def begin(self) -> None:
        """Turns to the next layer."""
        self.last_queries = torch.empty(0)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        cache, newest = self._cache, queries[:, -LAST_QUERIES:]
        cache.scale = softmax.scale
        if self.last_queries.numel():
            newest = torch.cat([self.last_queries, newest], dim=1)
        # Copied: a view would keep the whole chunk's projections alive.
        self.last_queries = newest[:, -LAST_QUERIES:].clone()
        earlier, tail, view = self._writer.put(layer, keys, values)
        if self.kv_alone:
            return torch.zeros_like(queries)
        total = AttentionSum(cache.backend, queries, len(keys), softmax.scale)
        total.attend_prompt(tail, view, earlier)
        return total.result(softmax.sinks)
