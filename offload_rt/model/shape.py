"""The shape of a model: what a plan needs to know about it, without its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from cpu_kv import ElementType, KVSizes
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.model.layer_kinds import Recurrence
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.quantization import WITH_EXPERTS, Quantization
from offload_rt.model.rope import Yarn

if TYPE_CHECKING:
    from offload_rt.model.runner import CausalModel

PLANE_BITS = 12
"""Bits of a weight in two planes, but for 0.01 of what is listed and said of a row."""
MOST_STRETCHED = 8
"""Largest factor of YaRN that a message suggests."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with gated MLPs, as in Llama.

    Only layers with full attention have paged KV. `layers` counts all decoder layers, `paged_layers` those.
    """

    name: str
    layers: int  # decoder layers of any kind
    hidden: int  # width of the hidden states
    intermediate: int  # and inside the MLP
    heads: int  # query heads of a layer
    kv_heads: int  # of a layer with full attention, as `head_dim`
    head_dim: int
    vocabulary: int
    parameters: int  # all weights
    tied: bool = False  # the output head shares the embedding's weights
    embedding_on_gpu: bool = False  # with a GPU; otherwise it stays in host memory unless it is tied
    mlp_parameters: int = 0  # of the MLP of each layer; 0: three matrices, as in Llama
    max_positions: int = 131_072  # tokens of the longest sequence that its positions are valid for
    dtype: ElementType = ElementType.BFLOAT16  # of weights and KV
    family: str = field(default="", compare=False)  # type of the architecture, as transformers calls it
    rope_scaled: bool = field(default=True, compare=False)  # its positions are stretched already
    ignored: str = field(default="", compare=False)  # what a plan leaves out of account
    kinds: LayerKinds = field(default_factory=lambda: LayerKinds(()))  # left out where all are full
    recurrence: Recurrence | None = None  # sizes of a layer with a recurrent state, where there is one
    expert_parameters: int = field(default=0, compare=False)  # of those of each MLP, those of its experts
    experts: int = 0  # of each MLP, or 0
    chosen_experts: int = 0  # those that a token goes through
    expert_layers: int = 0  # layers with experts; 0: all, where there are experts
    quantization: Quantization | None = None
    quantized: int = 0  # weights that are quantised in memory
    quantized_mlp: int = 0  # and of the MLP of each layer
    planes: bool = False  # its linear layers are in two planes (`kernels/planes.py`)
    draft_plane: bool = False  # of which a pass reads the draft plane alone

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding; the output head has the same number."""
        return self.vocabulary * self.hidden

    @property
    def step_parameters(self) -> int:
        """Weights that a step over a few tokens reads: all but the embedding, where that is not the head."""
        return self.parameters - (0 if self.tied else self.embedding_parameters)

    @property
    def splits(self) -> bool:
        """Whether its linear layers can be in two planes."""
        return self.dtype == ElementType.BFLOAT16 and self.quantization is None

    def in_planes(self, planes: bool) -> ModelShape:
        """Returns the shape of the model with linear layers in two planes, where they can be, or without."""
        return replace(self, planes=planes and self.splits)

    @property
    def split_parameters(self) -> int:
        """Weights in two planes. Norms and biases are counted among them: 0.01% of the weights."""
        return self.parameters - self.embedding_parameters - self.all_experts if self.planes else 0

    @property
    def weight_bytes(self) -> int:
        return self._stored_bytes(self.parameters, self.quantized, self.split_parameters)

    @property
    def host_embedding_bytes(self) -> int:
        """Bytes of the embedding of a model on a GPU that stay in host memory."""
        if self.tied or self.embedding_on_gpu:
            return 0
        return self.embedding_parameters * self.dtype.itemsize

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the weights of a model on a GPU."""
        return self.weight_bytes - self.host_embedding_bytes

    @property
    def step_bytes(self) -> int:
        return self._stored_bytes(self.step_parameters, self.quantized, self.split_parameters)

    @property
    def all_experts(self) -> int:
        """Weights of the experts of all layers."""
        return self.expert_layers * self.expert_parameters

    @property
    def experts_quantized(self) -> bool:
        """Whether the experts are quantised in memory."""
        return bool(self.all_experts and self.quantized and self.quantization and self.quantization.experts)

    @property
    def gathers_experts(self) -> bool:
        """Whether products with quantised experts are those of `quantized_experts`."""
        return (
            self.experts_quantized
            and self.quantization is not None
            and self.quantization.method == WITH_EXPERTS
        )

    @property
    def quantized_linear(self) -> int:
        """Weights of linear layers that are quantised in memory."""
        return self.quantized - self.all_experts if self.experts_quantized else self.quantized

    @property
    def expert_bytes(self) -> float:
        """Bytes of one expert; 0 where there are none."""
        if not self.experts:
            return 0.0
        quantized = self.expert_parameters if self.experts_quantized else 0
        return self._stored_bytes(self.expert_parameters, quantized) / self.experts

    @property
    def active_parameters(self) -> float:
        """Weights that a token is multiplied with: all of a step's but those of experts not chosen."""
        chosen = self.chosen_experts / self.experts if self.experts else 1.0
        return self.step_parameters - (1 - chosen) * self.all_experts

    def distinct_experts(self, rows: int) -> float:
        """Returns the expected number of experts of a layer that a pass of some rows goes through.

        Each row is assumed to choose by itself, every expert with the same chance. Rows of one text share
        more experts than that, so that fewer are read.
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.chosen_experts / self.experts) ** rows)

    def _stored_bytes(self, parameters: int, quantized: int, split: int = 0) -> int:
        """Returns the bytes of weights of which some are quantised, or in two planes."""
        packed = self.quantization.nbytes(quantized) if self.quantization is not None and quantized else 0
        return (parameters - quantized - split) * self.dtype.itemsize + packed + split * PLANE_BITS // 8

    def with_weights(self, quantization: Quantization) -> ModelShape:
        """Returns the shape of the model with so quantised weights: embedding and head are left alone.

        Norms and biases, which are left alone too, are counted as quantised: 0.01% of the weights.
        """
        if quantization.bits is None:
            return replace(self, quantization=quantization)
        embeddings = (1 if self.tied else 2) * self.embedding_parameters
        linear = self.parameters - embeddings - self.all_experts
        in_mlp = self.mlp_parameters - self.expert_parameters
        return replace(
            self,
            quantization=quantization,
            quantized=quantization.linear * linear + quantization.experts * self.all_experts,
            quantized_mlp=quantization.linear * in_mlp + quantization.experts * self.expert_parameters,
        )

    def __post_init__(self) -> None:
        if not self.mlp_parameters:
            object.__setattr__(self, "mlp_parameters", 3 * self.hidden * self.intermediate)
        if self.expert_parameters and not self.expert_layers:
            object.__setattr__(self, "expert_layers", self.layers)
        if not self.kinds.local:
            uniform = LayerKinds.uniform(self.layers, self.kv_heads, self.head_dim)
            object.__setattr__(self, "kinds", uniform)
        if len(self.kinds.kinds) != self.layers:
            raise ValueError(f"{self.layers} layers, but kinds of {len(self.kinds.kinds)}")

    @property
    def dense(self) -> bool:
        """Layers are attention over the whole sequence and an MLP without experts, and are not quantised."""
        return not (self.quantized or self.expert_parameters or self.kinds.local)

    @property
    def mlp_bytes(self) -> int:
        """Bytes of the MLP of one layer."""
        split = self.mlp_parameters - self.expert_parameters if self.planes else 0
        return self._stored_bytes(self.mlp_parameters, self.quantized_mlp, split)

    @property
    def attention_bytes(self) -> int:
        """Bytes of the attention block of one layer, in a model whose layers are alike."""
        parameters = self._block_parameters(self.kinds.kinds[0])
        quantized = max(0, self.quantized // self.layers - self.quantized_mlp)
        return self._stored_bytes(parameters, quantized, parameters if self.planes else 0)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of one query token attending to one entry, in one full layer."""
        return 4 * self.heads * self.head_dim

    @property
    def paged_layers(self) -> int:
        """Layers with full attention, whose KV is paged."""
        return len(self.kinds.full)

    @property
    def drafts_trees(self) -> bool:
        """Drafts for it, and by it, may branch: it has no recurrent state, which follows one path alone."""
        return not self.kinds.recurrent

    def layout(self, page: int) -> KVSizes:
        """Returns the sizes of its KV in the store, in pages of `page` tokens."""
        return KVSizes(self.paged_layers, self.kv_heads, self.head_dim, self.dtype, page)

    def running(self, order: LayerOrder) -> ModelShape:
        """Returns the shape of the blocks that `plan` does not leave out."""
        left_out = len(order.no_mlp) * self.mlp_parameters
        left_out += sum(self._block_parameters(self.kinds.kinds[layer]) for layer in order.no_attention)
        kinds_left = (kind for layer, kind in enumerate(self.kinds.kinds) if layer not in order.no_attention)
        kinds = LayerKinds(tuple(kinds_left))
        quantized = self.quantized and self.quantized - min(self.quantized, left_out)
        return replace(
            self,
            layers=len(kinds.kinds),
            kinds=kinds,
            expert_layers=max(0, self.expert_layers - len(order.no_mlp)),
            parameters=self.parameters - left_out,
            quantized=quantized,
        )

    def _block_parameters(self, kind: LayerKind) -> int:
        """Weights of a layer beside its MLP: of its attention, of its mixer with a state, or of both."""
        attention = 2 * self.hidden * kind.head_dim * (self.heads + kind.kv_heads) if kind.kv_heads else 0
        return attention + (self.recurrence.parameters if kind.recurrent and self.recurrence else 0)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all full layers; 0 where there are none."""
        return self.layout(1).token_bytes

    @cached_property
    def layer_token_bytes(self) -> int:
        """Bytes of one token's KV in one full layer."""
        return self.layout(1).layer_token_bytes

    def window_bytes(self, tokens: int | None = None) -> int:
        """Returns the bytes of KV in the sliding windows of all layers, of a sequence of `tokens`.

        Args:
            tokens: of the sequence; None: more than any window.
        """
        return sum(
            2 * kind.kv_heads * entries * self.dtype.itemsize for kind, entries in self._windows(tokens)
        )

    def window_flops(self, tokens: int) -> int:
        """Returns the operations of one query token attending to the windows of all layers."""
        return sum(4 * self.heads * entries for _, entries in self._windows(tokens))

    def prompt_flops(self, tokens: int) -> float:
        """Returns the operations of the attention of a prompt to itself.

        Causal: half of all pairs, and of those that a window spans. Of the last layer only the KV is needed.
        """
        flops = 0.0
        for kind in self.kinds.kinds[:-1]:
            beyond = max(0, tokens - kind.window) if kind.window is not None else 0
            flops += 4 * self.heads * kind.head_dim * (tokens**2 - beyond**2) / 2
        return flops

    def _windows(self, tokens: int | None) -> Iterator[tuple[LayerKind, int]]:
        """Yields each layer with a window, and the elements of a head's keys in it."""
        for layer in self.kinds.windowed:
            kind = self.kinds.kinds[layer]
            assert kind.window is not None
            yield kind, kind.head_dim * min(kind.window, kind.window if tokens is None else tokens)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of all layers, one copy."""
        return len(self.kinds.recurrent) * self.recurrence.state_bytes(self.dtype) if self.recurrence else 0


DUAL_CHUNK = (
    "dual-chunk attention is ignored: the model was published with it, and without it may read texts of more"
    " than 262,144 tokens less well"
)


HEAD_VOCABULARY = 32_000
"""Tokens that a published EAGLE-3 head can predict."""


def head_shape(target: ModelShape, *, mtp: bool = False) -> ModelShape:
    """Returns the shape of a draft head for `target`, all of which a step reads.

    Args:
        mtp: it is the one in the target's checkpoint, a layer of the target's kind with the target's output
            head; else an EAGLE-3 head with one layer of the target's sizes, and an output head of its own.
    """
    hidden, attention = target.hidden, target.head_dim * (target.heads + 2 * target.kv_heads)
    block = 2 * hidden * attention + target.heads * target.head_dim * hidden
    vocabulary = target.vocabulary if mtp else min(HEAD_VOCABULARY, target.vocabulary)
    if mtp:
        block = (
            hidden * attention
            + target.heads * target.head_dim * hidden
            + 2 * hidden**2
            + target.mlp_parameters
        )
    else:
        block += 3 * hidden**2 + 3 * hidden * target.intermediate
    return replace(
        target,
        name="head",
        layers=1,
        kinds=LayerKinds.uniform(1, target.kv_heads, target.head_dim),
        recurrence=None,
        quantization=None,
        quantized=0,
        quantized_mlp=0,
        planes=False,
        expert_parameters=target.expert_parameters if mtp else 0,
        expert_layers=1 if mtp and target.expert_parameters else 0,
        vocabulary=vocabulary,
        parameters=block + vocabulary * hidden,
        tied=True,
    )


def yarn_factor(model: ModelShape, tokens: int) -> int | None:
    """Returns the YaRN factor that gives a model positions for `tokens`; None where none is to be had."""
    if model.rope_scaled:
        return None
    trained = Yarn(1).trained(model.family, model.max_positions)
    factor: int = 2 ** math.ceil(math.log2(tokens / trained))
    return factor if factor <= MOST_STRETCHED else None


def yarn_hint(model: ModelShape | CausalModel, tokens: int) -> str:
    """Returns the end of a message: the YaRN factor that gives a model positions for `tokens`, or nothing."""
    factor = yarn_factor(model, tokens) if isinstance(model, ModelShape) else None
    if factor is None:
        return ""
    key = '"rope_parameters" with "rope_type": "yarn" in its config.json'
    return f"; or stretch its positions with YaRN: --rope yarn:{factor}, or {key}"
