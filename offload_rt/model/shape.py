"""The shape of a model: what a plan needs to know about it, without its weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cpu_kv import KVLayout
from offload_rt.errors import UsageError, first_line
from offload_rt.model.attention_hook import refuse_unsupported
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.loading import DEMO_PARTS, model_source
from offload_rt.model.rope import Yarn

if TYPE_CHECKING:
    from offload_rt.model.runner import CausalModel

MOST_STRETCHED = 8
"""Largest factor of YaRN that a message suggests."""


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
    max_positions: int = 131_072  # tokens of the longest sequence that its positions are valid for
    dtype: torch.dtype = torch.bfloat16  # of weights and KV
    family: str = field(default="", compare=False)  # type of the architecture, as transformers calls it
    rope_scaled: bool = field(default=True, compare=False)  # its positions are stretched already
    ignored: str = field(default="", compare=False)  # what a plan leaves out of account

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding; the output head has the same number."""
        return self.vocabulary * self.hidden

    @property
    def step_parameters(self) -> int:
        """Weights that a step over a few tokens reads: all but the embedding, where that is not the head."""
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
        """Bytes of the MLP of one layer."""
        return self.mlp_parameters * self.dtype.itemsize

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of one query token attending to one entry, in one layer."""
        return 4 * self.heads * self.head_dim

    def layout(self, page: int) -> KVLayout:
        """Returns the layout of its KV in the store, in pages of `page` tokens."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, page)

    def running(self, plan: LayerPlan) -> ModelShape:
        """Returns the shape of the blocks that `plan` does not leave out."""
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


DUAL_CHUNK = (
    "dual-chunk attention is ignored: the model was published with it, and without it may read texts of more"
    " than 262,144 tokens less well"
)


def _qwen3(
    name: str, layers: int, hidden: int, mlp: int, heads: int, parameters: int, tied: bool = False
) -> ModelShape:
    shape = ModelShape(name, layers, hidden, mlp, heads, 8, 128, 151_936, parameters, tied)
    return replace(shape, max_positions=40_960, family="qwen3", rope_scaled=False)


def _ministral3(
    name: str, layers: int, hidden: int, mlp: int, parameters: int, tied: bool = False
) -> ModelShape:
    shape = ModelShape(name, layers, hidden, mlp, 32, 8, 128, 131_072, parameters, tied)
    return replace(shape, max_positions=262_144, family="ministral3")


SHAPES = {
    shape.name: shape
    for shape in (
        # layers, hidden, intermediate, heads, key heads, head dim, vocabulary, parameters
        ModelShape("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),  # 128K: with YaRN
        ModelShape("llama2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 13_015_864_320),
        ModelShape("lwm-7b", 32, 4096, 11008, 32, 32, 128, 32000, 6_738_415_616),
        ModelShape("llama3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 8_030_261_248),
        ModelShape("llama3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 70_553_706_496),
        ModelShape("llama3.3-70b", 80, 8192, 28672, 64, 8, 128, 128256, 70_553_706_496),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 7_615_616_512),
        ModelShape(
            "qwen2.5-7b-1m",
            28,
            3584,
            18944,
            28,
            4,
            128,
            152064,
            7_615_616_512,
            max_positions=1_010_000,
            ignored=DUAL_CHUNK,
        ),
        ModelShape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, 14_770_033_664),
        _qwen3("qwen3-0.6b", 28, 1024, 3072, 16, 596_049_920, tied=True),
        _qwen3("qwen3-1.7b", 28, 2048, 6144, 16, 1_720_574_976, tied=True),
        _qwen3("qwen3-4b", 36, 2560, 9728, 32, 4_022_468_096, tied=True),
        _qwen3("qwen3-8b", 36, 4096, 12288, 32, 8_190_735_360),
        _qwen3("qwen3-14b", 40, 5120, 17408, 40, 14_768_307_200),
        _qwen3("qwen3-32b", 64, 5120, 25600, 64, 32_762_123_264),
        _ministral3("ministral3-3b", 26, 3072, 9216, 3_429_006_336, tied=True),
        _ministral3("ministral3-8b", 34, 4096, 14336, 8_489_553_920),
        _ministral3("ministral3-14b", 40, 5120, 16384, 13_506_073_600),
        # Drafts: they see only a window of the text, so their positions are no limit.
        ModelShape("jf68m", 2, 768, 3072, 12, 12, 64, 32000, 68_030_208, max_positions=2048),
        ModelShape("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 64, 32000, 1_100_048_384, max_positions=2048),
        ModelShape("llama3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, 1_235_814_400, tied=True),
        ModelShape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, 494_032_768, tied=True),
    )
}
"""Models by name, with the sizes of their published configs, in bfloat16."""

_VARIANT = re.compile(r"meta|instruct|chat|base|hf|it|2512")
"""Parts of a checkpoint's name that say nothing of its shape."""


def known_name(name: str) -> str | None:
    """Returns the name in `SHAPES` of a checkpoint such as Llama-3.1-8B-Instruct, or None."""

    def plain(name: str) -> str:
        parts = re.split(r"[-_ ]", name.lower())
        return "".join(part for part in parts if not _VARIANT.fullmatch(part))

    return next((known for known in SHAPES if plain(known) == plain(name)), None)


def head_shape(target: ModelShape) -> ModelShape:
    """Returns the shape of a draft head for `target` as `train_head` makes it."""
    block = 14 * target.hidden**2  # its input is two vectors, and its MLP four times as wide
    parameters = target.embedding_parameters + block
    return replace(target, name="head", layers=1, parameters=parameters, tied=True)


def find_shape(source: str | Path, dtype: torch.dtype | None, rope: Yarn | None = None) -> ModelShape:
    """Returns the shape of a model by a name from `SHAPES` or `DEMO_PARTS`, or from a folder or a hub ID.

    Reads no weights. A checkpoint's name without its owner, such as Llama-3.1-8B-Instruct, is a name too.

    Args:
        dtype: of weights and KV; None: the checkpoint's own.
        rope: scaling of its rotary frequencies beyond what its config says.

    Raises:
        UsageError: no such name or folder, or a model that the runtime does not support.
    """
    name = str(source)
    if name in DEMO_PARTS:
        return from_config(model_config(model_source(name), rope), dtype, name)
    if name not in SHAPES and ("/" in name or Path(name).exists()):
        return from_config(model_config(source, rope), dtype, name)
    known = known_name(name)
    if known is None:
        raise UsageError(
            f"model {name}: there is no such folder, and no shape of that name; there are "
            f"{', '.join((*SHAPES, *DEMO_PARTS))}; or give a hub ID such as owner/{name}"
        )
    shape = SHAPES[known]
    if rope is not None:
        if shape.rope_scaled:
            wrong = f"its positions are scaled already, to {shape.max_positions}; leave --rope out"
            raise UsageError(f"model {name}: {wrong}")
        positions = rope.stretched(shape.family, shape.max_positions)
        shape = replace(shape, max_positions=positions, rope_scaled=True)
    return replace(shape, dtype=dtype or shape.dtype)


def yarn_hint(model: ModelShape | CausalModel, tokens: int) -> str:
    """Returns the end of a message: the YaRN factor that gives a model positions for `tokens`, or nothing."""
    if not isinstance(model, ModelShape) or model.rope_scaled:
        return ""
    trained = Yarn(1).trained(model.family, model.max_positions)
    factor = 2 ** math.ceil(math.log2(tokens / trained))
    if factor > MOST_STRETCHED:
        return ""
    key = '"rope_parameters" with "rope_type": "yarn" in its config.json'
    return f"; or stretch its positions with YaRN: --rope yarn:{factor}, or {key}"


def from_config(config: PretrainedConfig, dtype: torch.dtype | None, name: str) -> ModelShape:
    """Returns the shape that a transformers config describes.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.

    Raises:
        UsageError: for an architecture that the runtime does not support.
    """
    try:
        with torch.device("meta"):  # modules and their sizes, without memory
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many types for one thing
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(
            f"model {name} ({kind}): is no causal language model: {first_line(error)}"
        ) from error
    refuse_unsupported(model, name)
    return shape_of(model, dtype, name)


def ignored_parts(config: PretrainedConfig) -> str:
    """Returns a note on what a config asks for and the runtime leaves out; empty for nothing."""
    return DUAL_CHUNK if getattr(config.get_text_config(), "dual_chunk_attention_config", None) else ""


def shape_of(model: PreTrainedModel, dtype: torch.dtype | None, name: str) -> ModelShape:
    """Returns the shape of a transformers model.

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
        family=text.model_type,
        rope_scaled=(getattr(text, "rope_parameters", None) or {}).get("rope_type", "default") != "default",
        ignored=ignored_parts(model.config),
        dtype=dtype or (text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32),
    )
