"""A transformers model, run over one of our caches.

The runner takes hidden states through the model's own modules (embedding, rotary embedding, decoder
layers, norm, head) in an order of layers. Tokens of several texts go through together, one after the other
and without padding: they share the reading of the weights, and attention is each text's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import KVLayout
from offload_rt.caches.bounded import BoundedCache
from offload_rt.errors import UsageError
from offload_rt.host import to_device
from offload_rt.model.architecture import Rotary, scale_embeddings, scale_logits
from offload_rt.model.attention_hook import (
    ATTENTION_NAME,
    AttentionPass,
    kind_of,
    open_model,
    refuse_unsupported,
    restore_model,
)
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.parts import AttendTogether, Output, Part
from offload_rt.model.remote_mlp import RemoteMlp


class NotANumber(UsageError):
    """Logits contain NaN; the message names the weight, or the first layer, that they come from."""


class CausalModel:
    """A causal language model whose attention goes through our caches, until `restore`.

    Args:
        model: a loaded transformers model of plain full attention.
        name: what to call it in messages.

    Raises:
        UsageError: for an architecture that does not fit, naming what does not.
    """

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        self.name = name
        self.module = model
        refuse_unsupported(model, name)
        self._config = config = model.config.get_text_config()
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.hidden_size: int = config.hidden_size
        self._entries: int = config.vocab_size  # of its embedding
        self.vocabulary = self._entries  # of logits: a draft's becomes its target's, padding included
        self.max_positions: int = config.max_position_embeddings
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self._body: Any = model.model
        self._blocks: list[Any] = list(self._body.layers)
        self._in_turn = LayerPlan.whole(self.layers)
        self._rotary = Rotary(self._body.rotary_emb)
        self._of_long_texts: Self | None = None
        open_model(model)
        self._open = True
        try:
            self._check_against_its_own_forward()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        """Leaves the transformers model as it was given, once all its runners are closed. Idempotent."""
        if self._open:
            self._open = False
            restore_model(self.module)

    @property
    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.module.parameters())

    @property
    def remote_mlps(self) -> list[RemoteMlp]:
        """Its MLP blocks whose weights are on another GPU."""
        return [module for module in self.module.modules() if isinstance(module, RemoteMlp)]

    def left_out_bytes(self, plan: LayerPlan) -> int:
        """Of the weights of the blocks that `plan` leaves out."""
        left_out = [self._blocks[layer].self_attn for layer in plan.no_attention]
        left_out += [self._blocks[layer].mlp for layer in plan.no_mlp]
        return sum(p.nbytes for block in left_out for p in block.parameters())

    def kv_layout(self, page_size: int = 1) -> KVLayout:
        """How its KV lies in memory, in pages of so many tokens."""
        return KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype, page_size)

    @property
    def rotary_frequencies(self) -> Tensor:
        """`[rotated / 2]`, radians a position; `rotated` is at most `head_dim`."""
        return self._rotary.frequencies

    def for_text(self, prompt_tokens: int, new_tokens: int) -> Self:
        """The runner of such a text: this one, or, beyond the original context of LongRoPE, another.

        Raises:
            UsageError: the text would grow beyond that context.
        """
        border = self._rotary.border
        if border is None or prompt_tokens + new_tokens <= border:
            return self
        if prompt_tokens <= border:
            raise UsageError(
                f"{prompt_tokens} prompt tokens and {new_tokens} new ones cross {border} tokens, from where "
                f"on {self.name} has other rotary frequencies (longrope), and KV in the store never changes: "
                f"stay within {border} tokens, or give a prompt of more"
            )
        if self._of_long_texts is None:
            self._of_long_texts = copy.copy(self)
            self._of_long_texts._rotary = self._rotary.beyond_the_border()
        return self._of_long_texts

    def longest(self, prompt_tokens: int) -> int:
        """Number of tokens that a text may grow to that begins with so many."""
        border = self._rotary.border
        return self.max_positions if border is None or prompt_tokens > border else border

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids `[tokens]` to hidden states `[1, tokens, hidden_size]`."""
        if self._entries < self.vocabulary:
            tokens = tokens.clamp(max=self._entries - 1)
        return scale_embeddings(self._body.embed_tokens(tokens[None]), self._config)

    def run_layer(
        self, layer: int, hidden: Tensor, positions: Tensor, attention_pass: AttentionPass
    ) -> Tensor:
        """Hidden states `[1, tokens, hidden_size]` through one decoder layer."""
        return self._run(LayerPlan(((layer,),)), hidden, positions, attention_pass)

    def _run(
        self,
        plan: LayerPlan,
        hidden: Tensor,
        positions: Tensor,
        attention_pass: AttentionPass,
        *,
        by_blocks: bool = False,
    ) -> Tensor:
        position_ids = positions[None]
        given = {
            "attention_mask": None,
            "position_ids": position_ids,
            "position_embeddings": self._rotary(hidden, position_ids),
            "attention_pass": attention_pass,
        }
        if (found := self.module.config._attn_implementation) != ATTENTION_NAME:
            raise UsageError(f"{self.name}: its attention was changed to {found!r} while it is in use")
        for group in plan.groups:
            if len(group) == 1 and plan.exact(group[0]) and not by_blocks:
                hidden = self._blocks[group[0]](hidden, **given)
            else:
                hidden = self._run_group(group, hidden, given, plan)
        return hidden

    def _run_group(
        self, group: tuple[int, ...], hidden: Tensor, given: dict[str, Any], plan: LayerPlan
    ) -> Tensor:
        """The attention blocks of a group over its input, then its MLP blocks in order; see `LayerPlan`."""
        attended: dict[int, Tensor] = {}
        for layer in group:
            if layer not in plan.no_attention:
                block = self._blocks[layer]
                attended[layer] = block.self_attn(block.input_layernorm(hidden), **given)[0]
        for layer in group:
            block = self._blocks[layer]
            if layer in attended:
                hidden = hidden + attended[layer]
            if layer not in plan.no_mlp:
                hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return hidden

    def layer_plan(self, text: str) -> LayerPlan | None:
        """The order of layers that `text` describes, checked against this model; None: all in turn.

        Raises:
            UsageError: it is not one of this model, or the model's layers are not built of blocks in the
                usual way, so that they cannot be grouped or left out.
        """
        plan = LayerPlan.parse(text, self.layers)
        if plan is not None:
            self._check_blocks(text)
        return plan

    @torch.inference_mode()
    def _check_blocks(self, text: str) -> None:
        """Compares a layer that is run block by block with the whole one."""
        first = LayerPlan(((0,),))
        whole = self._probed(_Probe(self), first)
        try:
            blocks = self._probed(_Probe(self), first, by_blocks=True)
        except (AttributeError, TypeError) as error:
            raise UsageError(f"layers {text!r}: {self.name} cannot be run block by block: {error}") from error
        if not torch.allclose(whole, blocks, rtol=1e-2, atol=1e-3):
            raise UsageError(
                f"layers {text!r}: {self.name} ({kind_of(self.module)}) does more in a layer than attention "
                "and an MLP, each added to its input; use layers all"
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states `[1, tokens, hidden_size]` to logits `[tokens, vocabulary]`."""
        logits = scale_logits(self.module.lm_head(self._body.norm(hidden))[0], self._config)
        if self._entries != self.vocabulary:
            logits = torch.nn.functional.pad(logits, (0, self.vocabulary - self._entries), value=-torch.inf)
        return logits

    @torch.inference_mode()
    def forward(self, parts: Sequence[Part], plan: LayerPlan | None = None) -> list[Output]:
        """One pass of new tokens of several texts; their KV is pending in the caches afterwards.

        Nothing here waits for the device. Who reads what is drawn from the logits looks for NaN then, and
        asks `raise_nan` where it comes from.

        Args:
            plan: the order of layers; None: all of them, as the model does it.
        """
        together, alone = AttendTogether(parts), parts[0].cache if len(parts) == 1 else None
        if alone is not None:
            alone.begin(parts[0].new)
        else:
            together.begin()
        ids = torch.cat([part.ids(self.device) for part in parts])
        positions = to_device([at for part in parts for at in part.positions], self.device)
        rows: list[int] = []
        start = 0
        for part in parts:
            start += part.new.count
            rows += range(start - part.rows, start)
        hidden = self.compute(together if alone is None else alone, ids, positions, plan, rows)
        counts = [part.rows for part in parts]
        split = self.logits(hidden).split(counts), hidden[0].split(counts), together.errors
        return [
            Output(logits, states if part.hidden else None, error)
            for part, logits, states, error in zip(parts, *split, strict=True)
        ]

    def prepare(self, cache: BoundedCache, counts: Iterable[int], plan: LayerPlan | None) -> None:
        """Passes of so many new tokens over `cache`, which is empty yet, will recur in a text to come."""

    def compute(
        self,
        attention_pass: AttentionPass,
        ids: Tensor,
        positions: Tensor,
        plan: LayerPlan | None,
        rows: Sequence[int],
    ) -> Tensor:
        """The part of a pass that is the device's alone, after `begin`: hidden states of the `rows`."""
        hidden = self._run(plan or self._in_turn, self.embed(ids), positions, attention_pass)
        if len(rows) == hidden.shape[1]:
            return hidden
        if rows[-1] - rows[0] == len(rows) - 1:
            return hidden[:, rows[0] : rows[-1] + 1]
        return hidden[:, to_device(rows, self.device)]

    @torch.inference_mode()
    def raise_nan(self, part: Part) -> NoReturn:
        """Says why this part's logits are NaN, by running it again over its cache as it was before.

        Raises:
            NotANumber: naming the weight or the layer.
        """
        self._check_weights()
        hidden, positions = self.embed(part.ids(self.device)), to_device(part.positions, self.device)
        part.cache.begin(part.new)
        for layer in range(self.layers):
            hidden = self.run_layer(layer, hidden, positions, part.cache)
            if not bool(hidden.isfinite().all()):
                wider = {torch.float16: "bfloat16 or float32", torch.bfloat16: "float32"}.get(self.dtype)
                remedy = (
                    f"try --dtype {wider}" if wider else "it overflows even in float32, so check its files"
                )
                raise NotANumber(
                    f"{self.name}: logits are NaN; the first NaN or inf is in the output of layer {layer};"
                    f" {remedy}"
                )
        raise NotANumber(
            f"{self.name}: logits are NaN, but no layer's output is; look at the final norm and head"
        )

    @torch.inference_mode()
    def probe(self) -> Tensor:
        """Hidden states `[5, hidden_size]` after five fixed tokens: they tell one model from another."""
        return self._probed(_Probe(self), self._in_turn)[0]

    def _probed(self, probe: _Probe, plan: LayerPlan, *, by_blocks: bool = False) -> Tensor:
        """Hidden states after the probe's tokens, `[1, tokens, hidden_size]`."""
        positions = torch.arange(len(probe.tokens), device=self.device)
        return self._run(plan, self.embed(probe.tokens), positions, probe, by_blocks=by_blocks)

    def _check_weights(self) -> None:
        for name, parameter in self.module.named_parameters():
            if not bool(parameter.isfinite().all()):
                raise NotANumber(
                    f"{self.name}: the weight {name} has NaN or infinite entries; check its file"
                )

    def _check_against_its_own_forward(self) -> None:
        """Compares the runner with the model's own forward pass on a few tokens.

        What a model does between its modules (other factors, capped logits, norms …) is declared nowhere
        for certain; running both is the only honest test that the runner fits.
        """
        probe = _Probe(self)
        try:
            with torch.inference_mode():
                found = self.logits(self._probed(probe, self._in_turn))
                expected = self.module(input_ids=probe.tokens[None], use_cache=False).logits[0]
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise UsageError(f"{self.name}: {kind_of(self.module)} is not supported: {error}") from error
        if not probe.calls:
            raise UsageError(
                f"{self.name}: {kind_of(self.module)} is not supported: its layers do not pass keyword"
                " arguments on to their attention"
            )
        if not bool(expected.isfinite().all()):
            self._check_weights()
            return  # reported where it matters, by layer, at the first real pass
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        scale = float(expected.abs().max())
        if probe.calls != self.layers or float((found - expected).abs().max()) > tolerance * max(scale, 1.0):
            raise UsageError(
                f"{self.name}: {kind_of(self.module)} is not supported: it does more than plain full "
                "attention between its embedding, decoder layers, norm and head"
            )


class _Probe:
    """Attention of a few tokens over themselves."""

    def __init__(self, model: CausalModel) -> None:
        self.kv_heads = model.kv_heads
        self.head_dim = model.head_dim
        self.tokens = torch.arange(5, device=model.device) * 7 % model.vocabulary
        self.calls = 0

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.calls += 1
        expected = (self.kv_heads, keys.shape[1], self.head_dim)
        if keys.shape != expected or values.shape != expected:
            raise ValueError(
                f"its attention has {keys.shape[0]} heads of keys {keys.shape[2]} wide and values "
                f"{values.shape[2]} wide, and its config says {self.kv_heads} heads of {self.head_dim}"
            )
        return torch.nn.functional.scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
