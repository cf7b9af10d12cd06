"""Reads draft heads of EAGLE-3 in the formats in which they are published; refusals name the cause.

All have a config.json and weights in safetensors or in torch's format. SafeAILab/EAGLE and SpecForge write
the sizes of the layer to the config as those of a Llama; vLLM's speculators have them in
`transformer_layer_config`. The weights are the same but for the names of some.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from offload_rt.config.schema import MTP
from offload_rt.errors import UsageError, first_line
from offload_rt.model.draft_head import DraftHead, Eagle3Head, default_taps
from offload_rt.model.head_config import Eagle3Config, head_config
from offload_rt.model.loading import weight_files
from offload_rt.model.mtp_head import load_mtp_head
from offload_rt.model.runner import CausalModel

_RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^target_id_to_draft_id$", "t2d"),
)


def load_head(source: str | Path, target: CausalModel) -> DraftHead:
    """Loads a head in the target's dtype, on its device.

    Args:
        source: a folder, a hub ID, or `mtp` for the head in the target's own checkpoint.

    Raises:
        UsageError: it is missing, corrupt, not a head, or one for a target of other sizes.
    """
    if source == MTP:
        return load_mtp_head(target)
    config = head_config(source)
    if misfit := config.misfit(target.hidden_size, target.vocabulary):
        raise UsageError(f"head {source}: {misfit}; name a head that was trained for {target.name}")
    taps = config.taps or default_taps(target.layers)
    if any(not 0 <= tap <= target.layers for tap in taps):
        raise UsageError(
            f"head {source}: takes states of layers {[tap - 1 for tap in taps]}, and {target.name} has"
            f" {target.layers} layers; name a head that was trained for it"
        )
    tensors = _tensors(config)
    own_embedding = "embed_tokens.weight" in tensors
    with torch.device("meta"):
        head = Eagle3Head(config.layer, taps, target.vocabulary, None if own_embedding else target.embed)
    _check_tensors(config, head, tensors, target.vocabulary)
    weights = {
        name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
        if name != "t2d"
    }
    head.load_state_dict(weights, assign=True)
    head.eval().requires_grad_(False)
    head.ready()
    return head


def _tensors(config: Eagle3Config) -> dict[str, Tensor]:
    """Returns the tensors of a head by the names of `Eagle3Head`'s, mapped into memory and not read yet."""
    files = weight_files(config.folder)
    if not files:
        raise UsageError(
            f"head {config.name}: there are no weights in it (model.safetensors or pytorch_model.bin)"
        )
    tensors = dict[str, Tensor]()
    for file in files:
        if not file.is_file():
            wrong = "is missing" if not file.exists() else "is no file"
            raise UsageError(f"head {config.name}: {file.name} {wrong}; download it again")
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            else:
                tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # safetensors and torch raise error types of their own
            wrong = f"{file.name} is truncated or corrupt ({first_line(error)}); download it again"
            raise UsageError(f"head {config.name}: {wrong}") from None
    return {_renamed(name): tensor for name, tensor in tensors.items()}


def _renamed(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _check_tensors(
    config: Eagle3Config, head: Eagle3Head, tensors: dict[str, Tensor], vocabulary: int
) -> None:
    """Refuses tensors that are not those of a head; adds what may be left out."""
    wrong = f"head {config.name}: config.json does not describe its weights"
    expected = head.state_dict()
    drafted = len(expected["d2t"])
    if "d2t" not in tensors and drafted == vocabulary:
        tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    if differing := (expected.keys() ^ tensors.keys()) - {"t2d"}:
        name = min(differing)
        what = "is missing" if name in expected else "has no place in an EAGLE-3 head"
        raise UsageError(f"{wrong}: {name} {what}; download both again")
    for name, weight in expected.items():
        found = tensors[name]
        if found.shape != weight.shape:
            raise UsageError(
                f"{wrong}: {name} is {list(found.shape)} in the files and {list(weight.shape)} by the config;"
                " download both again"
            )
        if found.is_floating_point() and not bool(found.isfinite().all()):
            raise UsageError(f"head {config.name}: {name} has NaN or infinite entries; download it again")
    tokens = tensors["d2t"] = tensors["d2t"].long()
    tokens = tokens + torch.arange(drafted)
    if len(tokens.unique()) < drafted or int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise UsageError(
            f"head {config.name}: d2t names tokens twice or beyond the vocabulary; download it again"
        )
    reduced = tensors.get("t2d")
    if (
        reduced is not None
        and reduced.shape == (vocabulary,)
        and reduced.bool().nonzero()[:, 0].tolist() != tokens.sort().values.tolist()
    ):
        raise UsageError(f"head {config.name}: d2t and t2d name other tokens; download it again")
