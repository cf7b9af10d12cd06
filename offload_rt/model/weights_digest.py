"""Fingerprints of models: one model can go on from the KV of another whose fingerprint is the same."""

from __future__ import annotations

import functools
import json
import math
from itertools import chain

import torch
from torch import Tensor

from cpu_kv.sizes import dtype_name
from offload_rt.kernels.planes import WeightPlanes
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.model.quantized_weights import bitsandbytes_scales, named_weights
from offload_rt.model.runner import CausalModel
from offload_rt.system.digests import digest

_CHUNK = 2**20
"""Words of 32 bits that a sum is taken of."""
_CHANGE_NOTHING = {
    *("_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("initializer_range", "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "num_labels", "finetuning_task", "task_specific_params"),
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "classifier_dropout"),
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise", "pretraining_tp", "auto_map"),
    *("tie_word_embeddings", "chunk_size_feed_forward", "_attn_implementation"),
    *("base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan"),
}
"""Settings of a config that change nothing that is computed; tied weights show in the weights.

Any other setting may, those included that a later transformers adds.
"""


def fingerprint_of(model: CausalModel, tokenizer: str | None) -> Fingerprint:
    """Returns the fingerprint of a runner, whose frequencies may be those of long sequences.

    Args:
        tokenizer: digest of the vocabulary; None: unknown.
    """
    layout = model.kv_layout()
    return Fingerprint(
        (layout.layers, layout.kv_heads, layout.head_dim),
        dtype_name(model.dtype),
        (*model.rotary_frequencies.double().tolist(), model.rotary_factor),
        tokenizer,
        weights_digest(model),
    )


def weights_digest(model: CausalModel) -> str:
    """Returns a digest of the config of the language model, and of all bytes of its weights."""
    config = model.module.config.get_text_config().to_dict()
    settings = {name: value for name, value in config.items() if name not in _CHANGE_NOTHING}
    parts: list[str | bytes] = [json.dumps(settings, sort_keys=True, default=str)]
    weights = chain(
        named_weights(model.module), (("scales", scales) for scales in bitsandbytes_scales(model.module))
    )
    sums: dict[torch.device, list[Tensor]] = {}
    devices: list[torch.device] = []
    for name, weight in weights:
        plain = name.replace(".mlp.block.", ".mlp.")  # on whichever GPU it is
        parts.append(f"{plain} {list(weight.shape)} {weight.dtype}")
        sums.setdefault(weight.device, []).append(_checksum_of(weight))
        devices.append(weight.device)
    # One read for each device; in an order that does not depend on where parameters are.
    arrived = {device: iter(torch.cat(device_sums).cpu().split([len(part) for part in device_sums]))
               for device, device_sums in sums.items()}  # fmt: skip
    parts += [next(arrived[device]).numpy().tobytes() for device in devices]
    return digest(*parts, digits=32)


def _checksum_of(weight: Tensor | WeightPlanes) -> Tensor:
    """Returns the checksum of a weight, which is joined some rows at a time where it is in two planes."""
    if isinstance(weight, Tensor):
        return checksum(weight)
    outs, ins = weight.shape
    words = _CHUNK * 4 // torch.bfloat16.itemsize
    rows = words // math.gcd(words, ins)  # whole chunks
    sums = [
        checksum(weight.expanded(draft=False, start=start, stop=min(start + rows, outs)))
        for start in range(0, outs, rows)
    ]
    return torch.cat([*(one[:-1] for one in sums[:-1]), sums[-1]])


@torch.inference_mode()
def checksum(tensor: Tensor) -> Tensor:
    """Returns sums of 64 bits that depend on every byte of a tensor, on its device, the same on all devices.

    A multilinear hash: words of 32 bits times random odd numbers of 64 bits, modulo 2**64. One changed word
    always shows, and several go unseen with a probability of 2**-32 (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014).
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    rest = torch.nn.functional.pad(data[whole:], (0, whole + 4 - data.numel()))
    words = data[:whole]
    if words.storage_offset() % 4:
        words = words.clone()
    factors = _factors(tensor.device)
    parts = (*words.view(torch.int32).split(_CHUNK), rest.view(torch.int32))
    return torch.stack([(part * factors[: part.numel()]).sum() for part in parts])


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Returns random odd numbers of 64 bits, `[_CHUNK]`."""
    generator = torch.Generator().manual_seed(0x5EED)
    return torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator).mul_(2).add_(1).to(device)
