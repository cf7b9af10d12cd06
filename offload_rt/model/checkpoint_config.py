"""Reads the config.json of a checkpoint and refuses what no model can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.model.hub import check_source, located
from offload_rt.model.rope import Yarn

LARGEST = {
    "num_hidden_layers": 2**10,
    "hidden_size": 2**17,
    "intermediate_size": 2**21,
    "moe_intermediate_size": 2**21,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**13,
    "vocab_size": 2**23,
    "num_experts": 2**13,
    "num_local_experts": 2**13,
    "n_routed_experts": 2**13,
    "max_position_embeddings": 2**31,
    "sliding_window": 2**31,
}
"""Largest plausible sizes, several times those of any published model. Building a larger one takes hours."""
_OF_THE_CHECKPOINT = ("quantization_config", "dtype")
"""Settings that a multimodal model's config has beside that of its language model."""
UNCHECKED = ("sliding_window",)
"""Those of them whose type transformers does not check."""
NEVER_ZERO = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)


def model_config(source: str | Path, rope: Yarn | None = None) -> PretrainedConfig:
    """Reads a model's config from a local folder or a hub ID; reads no weights.

    Of a model that takes images or sound too, it is the config of its language model.

    Args:
        rope: scaling of its rotary frequencies beyond what the config says.

    Raises:
        UsageError: no such folder or model, no config in it, or one that cannot be a model's.
    """
    check_source(source)
    name, folder = str(source), Path(source)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(located(source), trust_remote_code=False)
    except UsageError:
        raise
    except Exception as error:  # transformers raises many types for one thing
        raise UsageError(f"model {name}: {_why_unreadable(folder, error)}") from error
    stated = getattr(config, "text_config", None)
    if stated is not None and not isinstance(stated, PretrainedConfig | dict):
        raise UsageError(f"model {name}: config.json has text_config = {briefly(stated)}, which is no object")
    config = _language_model(config)
    _check_plausible(config, name)
    if rope is not None:
        rope.apply(config, name)
    return config


def _language_model(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of a multimodal model's language model, where transformers has it on its own."""
    text = config.get_text_config()
    if text is config or text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return config
    for name in _OF_THE_CHECKPOINT:
        if getattr(text, name, None) is None and (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)
    return text


def _why_unreadable(folder: Path, error: Exception) -> str:
    """Returns why transformers could not read a config, and what to do."""
    if not folder.exists() and isinstance(error, OSError):
        fetched = "there is no such folder here, and no model of that ID can be had"
        return f"{fetched}: {first_line(error)}"
    try:
        stated = json.loads((folder / "config.json").read_bytes()) if folder.exists() else {}
    except (ValueError, RecursionError):
        return f"its config.json cannot be read: {first_line(error)}; download it again"
    kind = stated.get("model_type") if isinstance(stated, dict) else None
    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        version = transformers.__version__
        return f"transformers {version} does not know its architecture, {kind}; a newer version may"
    absurd = _absurd(stated) if isinstance(stated, dict) else None
    return absurd or f"its config.json describes no model: {first_line(error)}"


def _check_plausible(config: PretrainedConfig, name: str) -> None:
    """Raises UsageError where a number of a config is absurd, or its activation is unknown."""
    text = config.get_text_config()
    if wrong := _absurd({key: getattr(text, key, None) for key in LARGEST}):
        raise UsageError(f"model {name}: {wrong}")
    if (activation := getattr(text, "hidden_act", None)) is not None and activation not in ACT2FN:
        raise UsageError(f"model {name}: config.json has hidden_act = {activation!r}, which is unknown")


def _absurd(sizes: Mapping[str, object]) -> str | None:
    """Returns which number of a config no model has; None: all are plausible."""
    for key, largest in LARGEST.items():
        value, least = sizes.get(key), int(key in NEVER_ZERO)
        if key not in UNCHECKED and not isinstance(value, int):
            continue  # transformers has checked it, and some architectures have a list
        if value is not None and not (isinstance(value, int) and least <= value <= largest):
            return f"config.json has {key} = {briefly(value)}; a model has {least} to {largest}"
    return None
