"""transformers' own cache in host memory, as a peer: all KV goes to the device and back each pass."""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

STEPS = 3


@torch.inference_mode()
def offloaded_cache_ms(model: PreTrainedModel, context: int) -> tuple[float | None, str]:
    """ms a token of plain decoding over `DynamicCache(offloading=True)`, random KV of `context` tokens.

    That is what `generate` uses for `cache_implementation="offloaded"`.

    Returns:
        None where it cannot run, and a note that says why, or what was measured.
    """
    if model.device.type != "cuda":
        return None, "needs a GPU"
    config: Any = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, context, head_dim)
    implementation, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        cache = DynamicCache(config=config, offloading=True)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
            cache.update(keys, values, layer)
            del keys, values
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        spent = []
        for _ in range(STEPS + 1):
            started = perf_counter()
            model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize(model.device)
            spent.append(1e3 * (perf_counter() - started))
    except torch.OutOfMemoryError as error:
        return None, f"does not fit: {str(error).splitlines()[0]}"
    finally:
        config._attn_implementation = implementation
    return median(spent[1:]), f"median of {STEPS} passes after one"
