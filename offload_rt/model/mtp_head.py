"""The head for multi-token prediction (MTP) in a target's own checkpoint, by the modules of transformers.

It is a decoder layer of the target's kind over the normed embedding of a token and the target's final hidden
state before it (arXiv 2412.19437, section 2.2). Embedding and output head are the target's. A checkpoint may
have several, for one token each; the first one drafts all tokens here, as it continues from its own states.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from offload_rt.attention.sums import Softmax
from offload_rt.caches.layer_kinds import LayerKinds
from offload_rt.caches.local import NO_LOCAL_STATE
from offload_rt.config.schema import MTP
from offload_rt.errors import UsageError, first_line
from offload_rt.model.architecture import Rotary, cache_argument
from offload_rt.model.attention_hook import ATTENTION_NAME, LayerPass
from offload_rt.model.draft_head import Attend, DraftHead, StateTap
from offload_rt.model.hub import cached_config
from offload_rt.model.loading import quiet_transformers, weight_files
from offload_rt.model.runner import CausalModel

_COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Settings that state the number of MTP layers in configs of the hub; the first one is transformers' own."""
_LEAST_VERSION = "transformers 5.23"


class MtpHead(DraftHead):
    """The first MTP layer of a target's checkpoint.

    Args:
        model: `MtpModel` of transformers, with its weights.
    """

    layer_count = 1

    def __init__(self, model: Any, target: CausalModel) -> None:
        super().__init__()
        self.layer: Any = model.layers[0]
        config = model.config
        config._attn_implementation = ATTENTION_NAME
        self.heads = config.num_attention_heads
        self.kv_heads = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.state_size = config.hidden_size
        self.tap = StateTap(MTP, (target.layers,), lambda states: target.normed(states[0]))
        self._model = [model]  # in a list: its other modules are the target's
        self._target = target
        self._kinds = LayerKinds.uniform(1, self.kv_heads, self.head_dim)
        self._rotary = Rotary(model.rotary_emb)
        self._cache_argument = cache_argument(type(self.layer).forward)

    @property
    def rotary_frequencies(self) -> Tensor:
        return self._rotary.frequencies.to(self._target.device)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._target.embed(tokens)[0]

    def forward(self, embedded: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        layer_pass = LayerPass(self._kinds, _Attention(attend), positions)
        rotation = self._rotary(embedded[None], positions[None], self._kinds.kinds[0].rope)
        after: Tensor = self.layer(
            embedded[None],
            states[None],
            position_embeddings=rotation,
            attention_mask=None,
            position_ids=positions[None],
            attention_pass=layer_pass,
            **{self._cache_argument: layer_pass},
        )
        model = self._model[0]
        return (model.shared_post_norm(after) if model.use_shared_post_norm else after)[0]

    def logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self._model[0]._project_to_logits(states)
        return logits


class _Attention:
    """Attention of the head's layer, as `AttentionPass`."""

    local = NO_LOCAL_STATE

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        return self._attend(layer, queries, keys, values, softmax)


def mtp_layers(config: PretrainedConfig) -> int:
    """Returns how many MTP layers a checkpoint has by its config."""
    text = config.get_text_config()
    return next(
        (count for name in _COUNTS if isinstance(count := getattr(text, name, None), int) and count), 0
    )


def has_mtp_tensors(source: str | Path) -> bool:
    """Returns whether the files of a model on this machine name tensors of an MTP head; reads no weights."""
    folder = Path(source)
    if not folder.is_dir():
        config = cached_config(str(source))
        if config is None:
            return False
        folder = config.parent
    with suppress(OSError, ValueError, KeyError, SafetensorError):  # what is broken is told as it is loaded
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = json.loads(index.read_bytes())["weight_map"]
        else:
            (file,) = filter(Path.is_file, weight_files(folder))  # opening a pipe would wait
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
        return any(".eh_proj." in name or name.startswith("mtp.") for name in names)
    return False


def load_mtp_head(target: CausalModel) -> MtpHead:
    """Loads the MTP head in the checkpoint of a target.

    Raises:
        UsageError: there is none, or it does not run; names the reason.
    """
    config = target.module.config.get_text_config()
    name = f"head {MTP} of {target.name}"
    if not (mtp_layers(config) or has_mtp_tensors(target.module.config.name_or_path or "")):
        raise UsageError(f"{name}: its checkpoint has no MTP layers; name another head, or none")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise UsageError(
            f"{name}: needs {_LEAST_VERSION} or later; install it, or name another head"
        ) from None
    try:
        with described_mtp(config), quiet_transformers():
            model: Any = MtpModel.from_pretrained(target.module)
    except Exception as error:  # transformers raises many types for one thing
        raise UsageError(
            f"{name}: cannot be loaded: {first_line(error)}; name another head, or none"
        ) from error
    layer = model.layers[0]
    if getattr(layer.mtp_block, "self_attn", None) is None:
        raise UsageError(f"{name}: its layer has no attention of a known kind; name another head, or none")
    if getattr(layer.mtp_block.self_attn, "sliding_window", None) is not None:
        raise UsageError(f"{name}: its layer has a sliding window, which is not supported")
    head = MtpHead(model.to(target.device, target.dtype), target)
    return head.eval().requires_grad_(False)


@contextmanager
def described_mtp(config: Any) -> Iterator[None]:
    """States the MTP layers of a config in transformers' words meanwhile, where it has others or none."""
    count, given = mtp_layers(config) or 1, vars(config).copy()
    wanted: dict[str, Any] = {"num_mtp_layers": count}
    if getattr(config, "layer_types", None) is not None and not getattr(config, "mtp_layer_types", None):
        wanted["mtp_layer_types"] = ["full_attention"] * count
    if getattr(config, "mlp_layer_types", None) and not getattr(config, "mtp_mlp_layer_types", None):
        wanted["mtp_mlp_layer_types"] = [config.mlp_layer_types[-1]] * count
    try:
        for key, value in wanted.items():
            setattr(config, key, value)
        yield
    finally:
        for key in wanted:
            if key in given:
                setattr(config, key, given[key])
            else:
                vars(config).pop(key, None)
