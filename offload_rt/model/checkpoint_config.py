"""Finds a checkpoint, reads its config.json and refuses what no model can be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import transformers
from huggingface_hub import constants, get_session, snapshot_download
from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.model.gguf_files import refuse_gguf
from offload_rt.model.rope import Yarn

HUB_TIMEOUT_S = 5.0
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
    name = str(source)
    if not isinstance(source, str | Path):
        wrong = "is no folder and no hub ID; LLM.from_models takes loaded models"
        raise UsageError(f"model {name[:60]!r} {wrong}")
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if files := sorted(folder.glob("*.gguf")):
                refuse_gguf(name, *files)
            raise UsageError(f"model {name}: there is no config.json in it")
    elif folder.suffix == ".gguf" and folder.is_file():
        refuse_gguf(name, folder)
    elif folder.exists():
        raise UsageError(f"model {name}: is a file; name the folder that holds config.json and the weights")
    elif folder.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise UsageError(f"model {name}: there is no such folder")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(located(source), trust_remote_code=False)
    except UsageError:
        raise
    except Exception as error:  # transformers raises many types for one thing
        raise UsageError(f"model {name}: {_why_unreadable(folder, error)}") from error
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


def located(source: str | Path) -> str | Path:
    """Returns what transformers should load: without network, the folder in the hub's cache.

    The hub is asked once, as transformers and its client retry for half a minute.

    Raises:
        UsageError: the hub cannot be reached, and the model is not in its cache.
    """
    if Path(source).exists() or constants.HF_HUB_OFFLINE or (failure := _hub_failure()) is None:
        return source
    with suppress(Exception):
        return snapshot_download(str(source), local_files_only=True)
    raise UsageError(
        f"model {source}: there is no such folder here, and no model of that ID can be had: the hub cannot be"
        f" reached ({failure}), and its cache does not hold the model; give the folder that does"
    )


@cache
def _hub_failure() -> str | None:
    """Returns why the hub cannot be reached; None where it answers, whatever it says."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        return first_line(error)
    return None


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
    for key, most in LARGEST.items():
        value, least = sizes.get(key), int(key in NEVER_ZERO)
        if key != "sliding_window" and not isinstance(value, int):
            continue  # transformers has checked what it asks for
        if value is not None and not (isinstance(value, int) and least <= value <= most):
            return f"config.json has {key} = {briefly(value)}; a model has {least} to {most}"
    return None
