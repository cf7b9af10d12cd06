"""The shape of a model: all that a plan needs to know of it, without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cpu_kv import KVLayout
from offload_rt.errors import UsageError
from offload_rt.model.attention_hook import refuse_unsupported
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.loading import DEMO, demo_model, model_config

DEMO_DRAFT = "demo-draft"
DEMO_PARTS = {DEMO: "target", DEMO_DRAFT: "draft"}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with full attention and gated MLPs, as in Llama."""

    name: str
    layers: int
    hidden: int  # width of the hidden states
    intermediate: int  # and inside the MLP
    heads: int  # query heads of a layer
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int  # all weights
    tied: bool = False  # the output head shares the embedding's weights
    mlp_parameters: int = 0  # of the MLP of each layer; 0: three matrices, as in Llama
    max_positions: int = 131_072  # longest text its positions are valid for, in tokens
    dtype: torch.dtype = torch.bfloat16  # of weights and KV

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding; the output head has as many."""
        return self.vocabulary * self.hidden

    @property
    def step_parameters(self) -> int:
        """Weights that a step over a few tokens reads: of the embedding, only the output head."""
        return self.parameters - (0 if self.tied else self.embedding_parameters)

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    @property
    def step_bytes(self) -> int:
        return self.step_parameters * self.dtype.itemsize

    def __post_init__(self) -> None:
        if not self.mlp_parameters:
            object.__setattr__(self, "mlp_parameters", 3 * self.hidden * self.intermediate)

    @property
    def mlp_bytes(self) -> int:
        """Of the MLP of a layer."""
        return self.mlp_parameters * self.dtype.itemsize

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of one query token over one entry, in one layer."""
        return 4 * self.heads * self.head_dim

    def layout(self, page: int) -> KVLayout:
        """The layout of its KV in the store, in pages of `page` tokens."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, page)

    def running(self, plan: LayerPlan) -> ModelShape:
        """The shape of the blocks that `plan` does not leave out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        left_out = len(plan.no_attention) * attention + len(plan.no_mlp) * self.mlp_parameters
        layers = self.layers - len(plan.no_attention)
        return replace(self, layers=layers, parameters=self.parameters - left_out)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        return self.layout(1).token_bytes

    @cached_property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's KV in one layer."""
        return self.layout(1).layer_token_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        # layers, hidden, intermediate, heads, key heads, head dim, vocabulary, parameters
        ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),  # 128K: with YaRN
        ModelShape("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 13_015_864_320),
        ModelShape("lwm-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),
        ModelShape("llama3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8_030_261_248),
        ModelShape("llama3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 70_553_706_496),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 7_615_616_512),
        ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, 14_770_033_664),
        # Drafts: they see only a window of the text, so their positions are no limit.
        ModelShape("jf68m", 2, 768, 3072, 12, 12, 64, 32000, 68_030_208, max_positions=2048),
        ModelShape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 64, 32000, 1_100_048_384, max_positions=2048),
        ModelShape("llama3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 1_235_814_400, tied=True),
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 494_032_768, tied=True),
    )
}
"""Models by name, as their published configs have them, in bfloat16."""


def head_shape(target: ModelShape) -> ModelShape:
    """A draft head for `target` as `train_head` makes it, with the target's own output head."""
    block = 14 * target.hidden**2  # its input is two vectors, and its MLP four times as wide
    parameters = target.embedding_parameters + block
    return replace(target, name="head", layers=1, parameters=parameters, tied=True)


def find_shape(source: str | Path, dtype: torch.dtype | None) -> ModelShape:
    """The shape behind a name from `SHAPES` or `DEMO_PARTS`, a folder or a hub id; reads no weights.

    Args:
        dtype: of weights and KV; None: the checkpoint's own.

    Raises:
        UsageError: no such name or folder, or a model that the runtime does not support.
    """
    name = str(source)
    if name in SHAPES:
        return replace(SHAPES[name], dtype=dtype or SHAPES[name].dtype)
    if name in DEMO_PARTS:
        return from_config(model_config(demo_model(DEMO_PARTS[name])), dtype, name)
    if "/" not in name and not Path(name).exists():
        raise UsageError(
            f"model {name}: there is no such folder, and no shape of that name; there are "
            f"{', '.join((*SHAPES, *DEMO_PARTS))}; or give a hub id such as owner/{name}"
        )
    return from_config(model_config(source), dtype, name)


def from_config(config: PretrainedConfig, dtype: torch.dtype | None, name: str) -> ModelShape:
    """The shape that a transformers config describes.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.

    Raises:
        UsageError: for an architecture that the runtime does not support.
    """
    try:
        with torch.device("meta"):  # modules and their sizes, without memory
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds for one thing
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(f"model {name} ({kind}): is no causal language model: {error}") from error
    refuse_unsupported(model, name)
    return shape_of(model, dtype, name)


def shape_of(model: PreTrainedModel, dtype: torch.dtype | None, name: str) -> ModelShape:
    """The shape of a transformers model.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.
    """
    text = model.config.get_text_config()
    heads: int = text.num_attention_heads
    mlps = [getattr(layer, "mlp", None) for layer in model.model.layers]
    return ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        parameters=model.num_parameters(),
        tied=bool(text.tie_word_embeddings),
        mlp_parameters=max(sum(p.numel() for p in mlp.parameters()) if mlp else 0 for mlp in mlps),
        max_positions=text.max_position_embeddings,
        dtype=dtype or (text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32),
    )
