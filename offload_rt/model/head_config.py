"""The config.json of a published draft head, read without its weights; see `head_files`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.model.hub import located

ARCHITECTURE = "LlamaForCausalLMEagle3"
_ARCHITECTURES = (
    ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
_REFUSED = {
    "parallel_drafting": "drafts several tokens in a pass (parallel_drafting)",
    "norm_before_fc": "norms the target's states (norm_before_fc)",
    "fc_norm": "norms the target's states (fc_norm)",
}
"""What heads of other kinds have, where a setting of their config is neither missing nor false."""


@dataclass(frozen=True)
class Eagle3Config:
    """The config.json of a head, checked.

    Attributes:
        name: what a user calls the head.
        layer: sizes of its layers, and settings beside them.
        taps: layers of the target whose outputs or inputs it names, as inputs; None: the usual ones.
        verifier: name of the target that it was trained for; None: it does not say.
    """

    name: str
    folder: Path
    layer: LlamaConfig
    taps: tuple[int, ...] | None
    verifier: str | None

    @property
    def target_hidden_size(self) -> int:
        """Hidden size of its target."""
        return getattr(self.layer, "target_hidden_size", None) or self.layer.hidden_size

    def misfit(self, hidden_size: int, vocabulary: int) -> str | None:
        """Returns why it is not for a target of these sizes; None: it may be."""
        if self.target_hidden_size != hidden_size:
            return f"is for a hidden size of {self.target_hidden_size}, and the target's is {hidden_size}"
        if self.layer.vocab_size != vocabulary:
            return f"is for a vocabulary of {self.layer.vocab_size} tokens, and the target's has {vocabulary}"
        return None


def head_config(source: str | Path) -> Eagle3Config:
    """Reads the config of a head from a folder or a hub ID; reads no weights.

    Raises:
        UsageError: there is none, it cannot be read, or it is not of a head that can be run.
    """
    try:
        folder = Path(located(source))
    except UsageError as error:
        raise UsageError(re.sub("^model", "head", str(error))) from None
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(source)))
    try:
        stated = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise UsageError(f"head {source}: there is no config.json in it; name the folder of a head") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"head {source}: config.json cannot be read ({first_line(error)})") from None
    if not isinstance(stated, dict):
        raise UsageError(f"head {source}: config.json is no object; download it again")
    return _checked(str(source), folder, stated)


def is_head(folder: Path) -> bool:
    """Returns whether a folder holds a draft head, that runs or not, by its config.json."""
    with suppress(OSError, ValueError, RecursionError):
        stated = json.loads((folder / "config.json").read_bytes())
        return isinstance(stated, dict) and states_head(stated)
    return False


def states_head(stated: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is that of a draft head."""
    named = stated.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    return (
        "draft_vocab_size" in stated or "speculators_model_type" in stated or any("agle3" in n for n in names)
    )


def _checked(name: str, folder: Path, stated: dict[str, Any]) -> Eagle3Config:
    nested = "speculators_model_type" in stated
    if nested and stated["speculators_model_type"] != "eagle3":
        kind = briefly(stated["speculators_model_type"])
        raise UsageError(f"head {name}: is of kind {kind}, and only eagle3 is supported")
    named = list(stated.get("architectures") or [])
    if not states_head(stated) or any(one not in _ARCHITECTURES for one in named):
        raise UsageError(
            f"head {name}: is no EAGLE-3 head by its config.json (architectures = {briefly(named)}); name one"
            " in the format of SafeAILab/EAGLE, SpecForge or vLLM's speculators"
        )
    for setting, meaning in _REFUSED.items():
        if stated.get(setting):
            raise UsageError(f"head {name}: {meaning}, which is not supported")
    sizes = dict(stated.get("transformer_layer_config") or {}) if nested else dict(stated)
    beside = ("draft_vocab_size", "norm_before_residual", "target_hidden_size")
    sizes |= {key: stated[key] for key in beside if key in stated}
    for key in ("architectures", "model_type", "auto_map", "torch_dtype", "dtype", "transformers_version"):
        sizes.pop(key, None)
    try:
        layer = LlamaConfig(**sizes)
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "vocab_size",
            "num_hidden_layers",
        ):
            if not isinstance(size := getattr(layer, key), int) or size < 1:
                raise ValueError(f"{key} = {briefly(size)}")
    except Exception as error:  # transformers raises many types for one thing
        raise UsageError(f"head {name}: config.json cannot be a head's ({first_line(error)})") from None
    taken, own = stated.get("eagle_aux_hidden_state_layer_ids"), stated.get("eagle_config") or {}
    if not nested and not taken:
        taken = own.get("eagle_aux_hidden_state_layer_ids")
    # speculators count inputs of layers, the others outputs.
    taps = tuple(int(layer) + (not nested) for layer in taken) if taken else None
    with suppress(KeyError, TypeError):
        return Eagle3Config(
            name, folder, layer, taps, str(stated["speculators_config"]["verifier"]["name_or_path"])
        )
    return Eagle3Config(name, folder, layer, taps, None)
