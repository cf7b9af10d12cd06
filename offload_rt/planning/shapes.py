"""The shape of a model: all that a plan needs to know of it, without its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cpu_kv import KVLayout
from offload_rt.errors import UsageError
from offload_rt.loading import DEMO, demo_model, model_config
from offload_rt.model import refuse_unsupported

DEMO_DRAFT = "demo-draft"


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of plain full attention with gated MLPs, as Llama has them.

    Attributes:
        name: what to call it in messages.
        hidden, intermediate: width of the hidden states, and inside the MLP.
        heads, kv_heads: query heads and key heads of a layer.
        vocabulary: tokens.
        tied: the output head shares the embedding's weights.
        query_bias: the projections to queries, keys and values have biases.
        max_positions: tokens for which its positions are valid.
        dtype: of weights and KV.
        other_parameters: weights beyond those of a Llama of these sizes (norms of queries, more biases …).
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    query_bias: bool = False
    max_positions: int = 131_072
    dtype: torch.dtype = torch.bfloat16
    other_parameters: int = 0

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding; of the output head as many again, unless the two are tied."""
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Weights of one decoder layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys)
        biases = queries + 2 * keys if self.query_bias else 0
        return attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def body_parameters(self) -> int:
        """Weights of all decoder layers: what each token of a prompt is multiplied with."""
        return self.layers * self.layer_parameters + self.hidden + self.other_parameters

    @property
    def parameters(self) -> int:
        """All weights."""
        return self.body_parameters + self.embedding_parameters * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * self.dtype.itemsize

    @property
    def step_bytes(self) -> int:
        """Bytes of the weights that one step over a few tokens reads: of the embedding, only the head."""
        return (self.body_parameters + self.embedding_parameters) * self.dtype.itemsize

    @property
    def step_flops(self) -> int:
        """Floating-point operations of one token's matrix products, attention apart."""
        return 2 * (self.body_parameters + self.embedding_parameters)

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.heads // self.kv_heads

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of one query token over one entry, in one layer."""
        return 4 * self.heads * self.head_dim

    def layout(self, page: int) -> KVLayout:
        """How its KV lies in the store, in pages of `page` tokens."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, page)

    @property
    def token_bytes(self) -> int:
        """Bytes of the KV of one token in all layers."""
        return self.layout(1).token_bytes

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of the KV of one token in one layer."""
        return self.layout(1).layer_token_bytes


def _llama(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    *,
    tied: bool = False,
    query_bias: bool = False,
    max_positions: int = 131_072,
) -> ModelShape:
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocabulary=vocabulary,
        tied=tied,
        query_bias=query_bias,
        max_positions=max_positions,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        # layers, hidden, intermediate, heads, key heads, vocabulary
        _llama("llama2-7b", 32, 4096, 11008, 32, 32, 32000),  # 128K positions, as YaRN stretches them
        _llama("llama2-13b", 40, 5120, 13824, 40, 40, 32000),
        _llama("lwm-7b", 32, 4096, 11008, 32, 32, 32000),
        _llama("llama3.1-8b", 32, 4096, 14336, 32, 8, 128256),
        _llama("llama3.1-70b", 80, 8192, 28672, 64, 8, 128256),
        _llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, 152064, query_bias=True),
        # Models that draft: they see a window of the text only, so their positions are no limit.
        _llama("jf68m", 2, 768, 3072, 12, 12, 32000, max_positions=2048),
        _llama("tinyllama-1.1b", 22, 2048, 5632, 32, 4, 32000, max_positions=2048),
        _llama("llama3.2-1b", 16, 2048, 8192, 32, 8, 128256, tied=True),
        _llama("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 151936, tied=True, query_bias=True),
    )
}
"""Models by name, as their published configs have them, in bfloat16."""


def shape_names() -> list[str]:
    """Names that `find_shape` knows without a download."""
    return [*SHAPES, DEMO, DEMO_DRAFT]


def find_shape(source: str | Path, dtype: torch.dtype | None) -> ModelShape:
    """The shape behind a name from `shape_names()`, a folder or a hub id; no weights are read.

    Args:
        dtype: of weights and KV; None: the checkpoint's own.

    Raises:
        UsageError: no such name or folder, or a model that the runtime does not support.
    """
    name = str(source)
    if name in SHAPES:
        return SHAPES[name] if dtype is None else replace(SHAPES[name], dtype=dtype)
    packaged = {DEMO: "target", DEMO_DRAFT: "draft"}
    where = demo_model(packaged[name]) if name in packaged else source
    if "/" not in name and name not in packaged and not Path(name).exists():
        raise UsageError(
            f"model {name}: there is no such folder, and no shape of that name; there are "
            f"{', '.join(shape_names())}; or give a hub id such as owner/{name}"
        )
    return from_config(model_config(where), dtype, name)


def from_config(config: PretrainedConfig, dtype: torch.dtype | None, name: str) -> ModelShape:
    """The shape that a transformers config describes.

    Args:
        dtype: of weights and KV; None: the config's own, float32 where it names none.

    Raises:
        UsageError: for an architecture that the runtime does not support.
    """
    model = _without_weights(config, name)
    refuse_unsupported(model, name)
    text = model.config.get_text_config()
    heads: int = text.num_attention_heads
    own = text.dtype if isinstance(text.dtype, torch.dtype) else torch.float32
    shape = ModelShape(
        name=name,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocabulary=text.vocab_size,
        tied=bool(text.tie_word_embeddings),
        query_bias=any(key.endswith("q_proj.bias") for key, _ in model.named_parameters()),
        max_positions=text.max_position_embeddings,
        dtype=own if dtype is None else dtype,
    )
    counted = sum(parameter.numel() for parameter in model.parameters())
    return replace(shape, other_parameters=counted - shape.parameters)


def _without_weights(config: PretrainedConfig, name: str) -> PreTrainedModel:
    """The model on the meta device: its modules with all their sizes, and no memory behind them."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises many kinds for one thing
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(f"model {name} ({kind}): is no causal language model: {error}") from error
    return model
