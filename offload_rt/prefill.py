"""Layer-major prefill: the whole prompt goes through one layer before the next.

In chunks of queries, so that memory for activations is bounded. Each byte of KV is written to CPU memory
once and never read back over the link; what stays on the device beside one layer's KV are the hidden
states of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload_rt.caches.full import FullCache, LayerPrefill
from offload_rt.model import CausalModel

Progress = Callable[[int, int], None]


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
    """Takes the start of a text into an empty cache; the derived caches are not told (see `build_derived`).

    Args:
        tokens: the prompt without its last token, whose pass is the first verification.
        chunk: queries at a time.
        progress: called with (token-layers done, token-layers in all).
        outputs: also compute what the last layer puts out. Decoding needs its KV alone, which takes no
            attention in that layer.

    Returns:
        With `outputs`, hidden states after the last layer, `[1, tokens, hidden_size]`; else None.
    """
    if not tokens or cache.length:
        raise ValueError("a prefill needs at least one token and an empty cache")
    count = len(tokens)
    hidden = model.embed(torch.tensor(tokens, device=model.device))
    positions = torch.arange(count, device=model.device)
    last_queries = []
    for layer in range(model.layers):
        kv_alone = layer == model.layers - 1 and not outputs
        layer_pass = LayerPrefill(cache, count, kv_alone=kv_alone)
        for start in range(0, count, chunk):
            part = slice(start, start + chunk)
            hidden[:, part] = model.run_layer(layer, hidden[:, part], positions[part], layer_pass)
            if progress is not None:
                progress(layer * count + min(start + chunk, count), model.layers * count)
        last_queries.append(layer_pass.last_queries)
    cache.engine.flush()
    cache.start_from(count)
    cache.last_queries = torch.stack(last_queries)
    return hidden if outputs else None
