"""Small random checkpoints of supported architectures, and text for them.

Their weights are drawn wide enough that a greedy continuation varies instead of repeating one token, and a
draft is a noisy copy of its target, so that some drafts are accepted and some are not.
"""

from __future__ import annotations

import copy
from functools import cache
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 256
MAX_POSITIONS = 8192
HEAD_DIM = 16
ROTARY_BASE = 10_000.0
LONGROPE_BORDER = 2048
"""The original context of `phi3`: longer sequences have other rotary frequencies."""

ALL_FULL = {"layer_types": ["full_attention"]}  # of each layer, how many there may be

GROUPED = {"num_key_value_heads": 2}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama", GROUPED),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": ROTARY_BASE,
                "factor": 8.0,
                "original_max_position_embeddings": MAX_POSITIONS // 8,
            }
        },
    ),
    "llama3": (
        "llama",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": MAX_POSITIONS // 8,
            },
        },
    ),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "granite": (
        "granite",
        {
            **GROUPED,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
        },
    ),
    "cohere": ("cohere", {**GROUPED, "use_qk_norm": True}),
    "cohere2": ("cohere2", ALL_FULL),
    "gemma3": (
        "gemma3_text",
        {
            **ALL_FULL,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": ROTARY_BASE, "factor": 8.0}
            },
        },
    ),
    "phi3": (
        "phi3",
        {
            **GROUPED,
            "sliding_window": 4 * MAX_POSITIONS,  # as in the checkpoints for 128K: no sequence is as long
            "original_max_position_embeddings": LONGROPE_BORDER,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": ROTARY_BASE,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 5.5, 7.0],
                "original_max_position_embeddings": LONGROPE_BORDER,
            },
        },
    ),
}
"""By a name: the type that transformers knows a model by, and settings of its config."""


WINDOW = 8
"""Tokens that a layer with a sliding window attends to, itself included."""
_WINDOWED: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_LINEAR: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM),
}
_MAMBA = {
    **GROUPED,
    "mamba_n_heads": 8,
    "mamba_d_head": HEAD_DIM,
    "mamba_n_groups": 1,
    "mamba_d_state": HEAD_DIM,
    "mamba_chunk_size": 16,
}

LOCAL_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {**_WINDOWED, "tie_word_embeddings": False}),
    "gpt-oss": ("gpt_oss", {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": ("cohere2", _WINDOWED),
    "olmo3": ("olmo3", _WINDOWED),
    "qwen3.5": ("qwen3_5_text", _LINEAR),
    "qwen3-next": (
        "qwen3_next",
        {
            **_LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "bamba": ("bamba", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon-h1": (
        "falcon_h1",
        {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_conv": 4},
    ),
}
"""As `ARCHITECTURES`: layers with sliding windows or recurrent states, some of them with full attention."""

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": (
        "qwen3_moe",
        {
            **GROUPED,
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "moe_intermediate_size": 64,
        },
    ),
    "qwen3.5-moe": (
        "qwen3_5_moe_text",
        {
            **_LINEAR,
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 32),
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {**_WINDOWED, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""As `ARCHITECTURES`: mixtures of experts, of sizes that bitsandbytes packs on any processor."""


def random_model(model_type: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A float32 model of an architecture, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **settings)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    return model


def to(model: PreTrainedModel, *where: torch.device | torch.dtype) -> PreTrainedModel:
    """`model.to(*where)`, which has lost its signature in transformers."""
    move: Any = model.to
    moved: PreTrainedModel = move(*where)
    return moved


def tiny_target(
    arch: str = "llama",
    *,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    spread: float = 0.2,
    **config: Any,
) -> PreTrainedModel:
    """A float32 model of `ARCHITECTURES[arch]`; `spread` is the deviation of its weights.

    The nearest tokens say more than the far ones, as in real models. There is no end-of-text token unless
    `config` names one.
    """
    model_type, settings = ARCHITECTURES[arch]
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "initializer_range": spread,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **copy.deepcopy(settings),
        **config,
    }
    if "layer_types" in settings:
        settings["layer_types"] *= layers
    model = random_model(model_type, seed, **settings)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 0.15
    return model


def local_model(arch: str, *, seed: int = 0, vocabulary: int = VOCABULARY, **config: Any) -> PreTrainedModel:
    """A float32 model of `LOCAL_ARCHITECTURES[arch]`."""
    return _small_model(*LOCAL_ARCHITECTURES[arch], seed, vocabulary, config)


def mixture(
    arch: str = "qwen3-moe", *, seed: int = 0, vocabulary: int = VOCABULARY, **config: Any
) -> PreTrainedModel:
    """A float32 model of `MIXTURES[arch]`; biases of experts, where there are any, are random, too."""
    model = _small_model(*MIXTURES[arch], seed, vocabulary, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and name.endswith("_bias"):
                parameter.normal_(std=0.2, generator=generator)
    return model


def _small_model(
    model_type: str, settings: dict[str, Any], seed: int, vocabulary: int, config: dict[str, Any]
) -> PreTrainedModel:
    settings = {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **copy.deepcopy(settings),
        **config,
    }
    return random_model(model_type, seed, **settings)


def tiny_draft(vocabulary: int = VOCABULARY, *, seed: int = 1) -> PreTrainedModel:
    """A smaller model of its own, which agrees with no target."""
    return tiny_target("llama", vocabulary=vocabulary, seed=seed, hidden=32, layers=1)


def noisy_copy(model: PreTrainedModel, *, noise: float = 0.02, seed: int = 7) -> PreTrainedModel:
    """`model` with every weight off by a share `noise` of its parameter's deviation: it agrees mostly."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            deviation = parameter.std() if parameter.numel() > 1 else torch.tensor(0.0)
            parameter.add_(noise * deviation * torch.randn(parameter.shape, generator=generator))
    return draft


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What transformers itself writes after `prompt`."""
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    with torch.inference_mode():
        out = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@cache
def real_text() -> str:
    """English text of some 600,000 characters that every Python installation carries."""
    return "\n".join(topics[name] for name in sorted(topics))


def byte_ids(count: int, *, start: int = 0, vocabulary: int = VOCABULARY) -> list[int]:
    """`count` bytes of `real_text` as token ids."""
    return [byte % vocabulary for byte in real_text().encode()[start : start + count]]


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, numbered as `byte_ids` numbers them; no special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
