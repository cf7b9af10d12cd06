"""Draft heads: small blocks that continue from a target's hidden states, and their files.

A head is one block, applied repeatedly, as in EAGLE (arXiv 2401.15077), Hydra (2402.05109) and ReDrafter
(2403.09919): the hidden state before a token and the token's embedding give the state after it. Embedding,
norm and output head are the target's own, and the head has no KV.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO_FOLDER
from offload_rt.model.runner import CausalModel
from offload_rt.system.tensor_files import read_tensors, write_tensors

KIND = "offload-rt head 1"
DEMO_HEAD = DEMO_FOLDER / "head" / "head.safetensors"
TRAIN = "train one: python -m tools.demo_training.train_head, in a checkout"
PROBE = "target"
"""Key in the file: hidden states of the target that it was trained for, see `CausalModel.probe`."""
MIN_SIMILARITY = 0.98
"""Least cosine similarity between probes of one model in different dtypes."""


class Head(nn.Module):
    """The block of a draft head.

    Args:
        hidden: width of the target's hidden states.
        inner: width inside the MLP.
    """

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.token_norm, self.state_norm, self.mlp_norm = (nn.RMSNorm(hidden, 1e-6) for _ in range(3))
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Computes the states after tokens from embeddings and the states before them, `[…, hidden]`."""
        joined: Tensor = self.join(torch.cat([self.token_norm(embedded), self.state_norm(states)], -1))
        normed = self.mlp_norm(joined)
        added: Tensor = self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))
        return joined + added

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters())


def save_head(head: Head, target: CausalModel, path: Path) -> None:
    """Writes a head in bfloat16; the file appears complete or not at all.

    Raises:
        OSError, SafetensorError: the file cannot be written.
    """
    weights = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in head.state_dict().items()}
    write_tensors(path, weights | {PROBE: target.probe().float().cpu()}, {"kind": KIND, "model": target.name})


def load_head(path: Path, target: CausalModel) -> Head:
    """Loads a head in the target's dtype, on its device.

    Raises:
        UsageError: the file is missing, corrupt, not a head, or a head for another model or other sizes.
    """
    weights, about = read_tensors(path, "head", KIND, TRAIN)
    probe = weights.pop(PROBE, torch.empty(0))
    trained, own = f"was trained for {about.get('model', 'another model')}", target.probe().float().cpu()
    if probe.shape != own.shape:
        raise UsageError(
            f"head {path}: {trained}, whose hidden states here are {list(probe.shape)}, and those of "
            f"{target.name} are {list(own.shape)}: name one for it with head.path, or {TRAIN}"
        )
    similarity = float(torch.cosine_similarity(probe, own).min())
    if not similarity >= MIN_SIMILARITY:
        raise UsageError(
            f"head {path}: {trained}, and {target.name} is another model (cosine similarity of hidden "
            f"states {similarity:.2f}): name one for it with head.path, or {TRAIN}"
        )
    head = Head(target.hidden_size, weights.get("gate.weight", own).shape[:1].numel())
    if differing := head.state_dict().keys() ^ weights.keys():
        wrong = "has no place in a head" if min(differing) in weights else "is missing"
        raise UsageError(f"head {path}: {min(differing)} {wrong}; {TRAIN}")
    for name, weight in head.state_dict().items():
        stored_weight = weights[name]
        if stored_weight.shape != weight.shape:
            sizes = f"{name} is {list(stored_weight.shape)} and should be {list(weight.shape)}"
            raise UsageError(f"head {path}: {sizes}; {TRAIN}")
        if not bool(stored_weight.isfinite().all()):
            raise UsageError(f"head {path}: {name} has NaN or infinite entries; {TRAIN}")
        weight.copy_(stored_weight)
    return head.to(target.device, target.dtype).eval()
