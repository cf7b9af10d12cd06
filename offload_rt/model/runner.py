"""Runs passes of a transformers model over our caches, for one sequence or several.

Tokens of several sequences are concatenated without padding: they share the reading of the weights, and each
sequence has attention of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import FullCache
from offload_rt.caches.split import SplitCache
from offload_rt.caches.window_attention import PAGED_WINDOW
from offload_rt.errors import UsageError
from offload_rt.kernels.planes import draft_plane_alone
from offload_rt.model.attention_hook import AttentionPass
from offload_rt.model.cuda_graphs import Capture, CudaCapture, PassGraphs
from offload_rt.model.decoder import Decoder, NotANumber
from offload_rt.model.dense_layers import (
    DenseHead,
    DenseLayer,
    computes_the_same,
    dense_head,
    dense_layer,
    hooks_of,
    is_dense,
    is_dense_head,
)
from offload_rt.model.draft_head import StateTap
from offload_rt.model.fixed_rows import compute_in_fixed_rows, rows_are_alike
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import BatchedAttention, PassInput, PassOutput
from offload_rt.model.plane_weights import SplitWeights, give_back, in_planes, take_planes
from offload_rt.model.recurrence import missing_kernels
from offload_rt.model.remote_mlp import remote_mlps
from offload_rt.model.self_check import TOKENS, Probe, check_against_own_forward, spread_positions
from offload_rt.model.supported import kind_of
from offload_rt.system.device_copies import joined, selection, to_device
from offload_rt.system.installation import pip_install


class CausalModel(Decoder):
    """A causal language model that runs passes of new tokens; it computes what the code of its model does.

    Args:
        model: a loaded transformers model.
        name: its name in messages.
        graphs: record and replay recurring passes; None: every pass is computed, on a CPU by native layers.
        planes: linear layers are in two planes until `restore`, of which drafts read one.
        owned: nobody else uses the model, so that `restore` need not join its planes.

    Attributes:
        missing_kernels: packages without which recurrent layers are slow on a GPU.

    Raises:
        UsageError: the architecture is not supported; names what is not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        graphs: PassGraphs | None = None,
        *,
        planes: bool = False,
        owned: bool = False,
    ) -> None:
        super().__init__(model, name)
        self._planes: SplitWeights | None = None
        self._owned = owned
        self.graphs = graphs
        self._tap: StateTap | None = None
        try:
            self._planes = take_planes(model, name, split=planes)
            with torch.inference_mode(), missing_kernels() as self.missing_kernels:
                check_against_own_forward(self)
            self._long_context = None  # that of the check was copied from a runner which is not complete
            self._rows_differ_by: str | None = "products of another number of rows"
            self._hooks = hooks_of(model)
            if self.device.type == "cpu" and graphs is None:  # which record torch's operators alone
                self._use_native_layers()
            elif self.device.type == "cuda":
                self._rows_differ_by = self._found_to_differ()
        except BaseException:
            self.restore()
            raise

    def restore(self) -> None:
        planes, self._planes = self._planes, None
        try:
            if planes is not None:
                # What computes by the planes goes first: otherwise both forms would be in memory.
                self._steps, self._head, self._long_context = list(self._blocks), self._own_head, None
                give_back(self.module, planes, join=not self._owned)
        finally:
            super().restore()

    @property
    def differs_by(self) -> str | None:
        """What rounds a token otherwise in a pass of more or fewer tokens; None: nothing does."""
        if self.device.type == "cuda":
            return "a hook of a module" if any(self._hooks) else self._rows_differ_by
        for block, step in zip(self._blocks, self._steps, strict=True):
            if not (isinstance(step, DenseLayer) and step.native):
                return f"{type(block).__name__}, which runs in torch"
        if not (isinstance(self._head, DenseHead) and self._head.native):
            return "the output head, which runs in torch"
        windows = [kind.window for kind in self.kinds.kinds if kind.window is not None]
        shortest = min(windows, default=PAGED_WINDOW)
        return f"sliding windows of {shortest} tokens" if shortest < PAGED_WINDOW else None

    def layer_order(self, text: str) -> LayerOrder | None:
        """Parses a layer order for this model; None: all layers in turn.

        Args:
            text: as in the config, see `LayerOrder.parse`.

        Raises:
            UsageError: it does not fit the model, or the model's layers are more than attention and MLP
                blocks, so that they cannot be grouped or left out.
        """
        order = LayerOrder.parse(text, self.layers)
        if order is None:
            return None
        if self.kinds.local:
            raise UsageError(
                f"layers {text!r}: {self.name} has layers with sliding windows or recurrent states, which"
                " cannot be grouped or left out; use layers all"
            )
        self._check_blocks(text)
        return order

    def drafting(self, order: LayerOrder | None) -> LayerOrder | None:
        """Returns an order of layers as passes go through it whose results are drafts.

        Of weights in two planes they read one.
        """
        if not in_planes(self.module):
            return order
        return replace(order or LayerOrder.whole(self.layers), draft_plane=True)

    @torch.inference_mode()
    def _check_blocks(self, text: str) -> None:
        """Checks that a layer run block by block adds to its input what the whole layer does."""
        first, probe = LayerOrder(((0,),)), Probe(self)
        positions = spread_positions(self)
        whole = probe.run(positions, order=first)
        try:
            blocks = Probe(self).run(positions, order=first, by_blocks=True)
        except (AttributeError, TypeError) as error:
            raise UsageError(f"layers {text!r}: {self.name} cannot be run block by block: {error}") from error
        if not computes_the_same(self.embed(probe.tokens), whole, blocks):
            raise UsageError(
                f"layers {text!r}: {self.name} ({kind_of(self.module)}) does more in a layer than attention "
                "and an MLP, each added to its input; use layers all"
            )

    @torch.inference_mode()
    def forward(self, inputs: Sequence[PassInput], order: LayerOrder | None = None) -> list[PassOutput]:
        """Runs one pass of new tokens of several sequences; their KV is pending in the caches afterwards.

        The host does not wait for the device. A caller that finds NaN in the logits calls `raise_nan`.

        Args:
            order: the order of layers; None: all in turn.
        """
        batch, alone = BatchedAttention(inputs), inputs[0].cache if len(inputs) == 1 else None
        if alone is not None:
            alone.begin(inputs[0].new)
            if self.graphs is not None and (output := self.graphs.replay(self.compute, inputs[0], order)):
                return [output]
        else:
            batch.begin()
        ids = joined([one.ids(self.device) for one in inputs])
        positions = to_device([at for one in inputs for at in one.positions], self.device)
        rows: list[int] = []
        start = 0
        for one in inputs:
            start += one.new.count
            rows += range(start - one.rows, start)
        attention_pass = batch if alone is None else alone
        verifies = any(isinstance(one.cache, FullCache) for one in inputs)
        if verifies and self._rows_differ_by is None and not any(self._hooks):  # which would see padding
            taken = self.tapped()
            logits, hidden = compute_in_fixed_rows(self, attention_pass, ids, positions, rows, taken)
            states = self.states(taken, hidden)
        else:
            logits, states = self.compute(attention_pass, ids, positions, order, rows)
        counts = [one.rows for one in inputs]
        split = logits.split(counts), states.split(counts), batch.errors
        return [
            PassOutput(logits, rows if one.states else None, error)
            for one, logits, rows, error in zip(inputs, *split, strict=True)
        ]

    def tap(self, tap: StateTap) -> None:
        """Makes passes return the states of a head; see `PassOutput.states`.

        Raises:
            UsageError: they return those of another head.
        """
        if self._tap is not None and self._tap is not tap:
            raise UsageError(f"{self.name}: has another draft head already; open it once more for this one")
        if self._tap is None and self.graphs is not None:
            self.graphs.forget()  # which return others
        self._tap = tap
        if self._long_context is not None:
            self._long_context._tap = tap

    def tapped(self) -> dict[int, Tensor]:
        """Returns a place for the input of each layer that states are made of; see `Decoder.run`."""
        return {} if self._tap is None else dict.fromkeys(self._tap.layers, torch.empty(0))

    def states(self, inputs: dict[int, Tensor], hidden: Tensor) -> Tensor:
        """Returns the states `[tokens, state_size]` of a pass; without a head, its hidden states.

        Args:
            inputs: of layers by their numbers, `[…, tokens, hidden_size]`.
            hidden: after the last layer, `[tokens, hidden_size]`.
        """
        if self._tap is None:
            return hidden
        rows = [hidden if at == self.layers else inputs[at].view_as(hidden) for at in self._tap.layers]
        return self._tap.join(rows)

    @torch.inference_mode()
    def prepare(self, cache: BoundedCache, counts: Iterable[int], order: LayerOrder | None) -> None:
        """Prepares for recurring passes over `cache`, which is still empty.

        Args:
            counts: numbers of new tokens of these passes.
        """
        if self.graphs is not None:
            self.graphs.prepare(self.compute, cache, counts, order)

    def compute(
        self,
        attention_pass: AttentionPass,
        ids: Tensor,
        positions: Tensor,
        order: LayerOrder | None,
        rows: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Computes logits `[rows, vocabulary]` and states `[rows, state_size]`, after `begin`.

        Args:
            ids, positions: of all new tokens, `[tokens]`.
            rows: numbers of the tokens after which they are wanted.
        """
        inputs = self.tapped()
        with draft_plane_alone(order is not None and order.draft_plane):
            hidden = self.run(order, self.embed(ids), positions, attention_pass, inputs=inputs)
            if len(rows) < hidden.shape[1]:
                at = selection(rows, self.device)
                hidden = hidden[:, at]
                inputs = {layer: given[:, at] for layer, given in inputs.items() if layer < self.layers}
            return self.logits(hidden), self.states(inputs, hidden[0])

    @torch.inference_mode()
    def raise_nan(self, given: PassInput) -> NoReturn:
        """Finds where the NaN logits of a pass come from, by running it again layer by layer.

        Raises:
            NotANumber: names the weight or the layer.
        """
        self.check_weights()
        hidden, positions = self.embed(given.ids(self.device)), to_device(given.positions, self.device)
        given.cache.begin(given.new)
        remote = given.cache.remote if isinstance(given.cache, SplitCache) else frozenset[int]()
        for layer in range(self.layers):
            hidden = self.run_layer(layer, hidden, positions, given.cache, remote)
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
        """Returns hidden states `[5, hidden_size]` after five fixed tokens, which identify the model."""
        return Probe(self).run(torch.arange(TOKENS, device=self.device))[0]

    def _found_to_differ(self) -> str | None:
        """Returns what rounds a token otherwise even in passes of fixed rows; None: nothing does."""
        for block in self._blocks:
            if not is_dense(block, self.dtype, self.kinds):
                return f"products of {type(block).__name__}"
        if not is_dense_head(self._norm, self.module.lm_head, self.dtype):
            return "products of the output head"
        if self.kinds.windowed:
            return "sliding windows"
        return None if rows_are_alike(self) else "products on this GPU"

    @torch.inference_mode()
    def _use_native_layers(self) -> None:
        """Lets the native library compute the layers, and the head, that it computes as their modules do."""
        natives = [dense_layer(block, self.dtype, self.kinds) for block in self._blocks]
        probe = Probe(self)
        hidden, positions = self.embed(probe.tokens), spread_positions(self)
        head = dense_head(self._norm, self.module.lm_head, self.dtype)
        if head is not None and computes_the_same(torch.zeros(()), self._own_head(hidden), head(hidden)):
            self._head = head
        if not any(natives):
            return
        for layer, (block, native) in enumerate(zip(self._blocks, natives, strict=True)):
            given = hidden
            hidden = self.run_layer(layer, given, positions, probe)
            if native is None:
                continue
            self._steps[layer] = native
            if not computes_the_same(given, hidden, self.run_layer(layer, given, positions, Probe(self))):
                self._steps[layer] = block


def open_runner(
    model: PreTrainedModel,
    name: str,
    on_notice: Callable[[str], None],
    capture: Capture | None = None,
    *,
    planes: bool = False,
    owned: bool = False,
) -> CausalModel:
    """Returns the runner of a model; on a GPU it records recurring passes.

    Args:
        planes, owned: see `CausalModel`.
        on_notice: called with what makes it slow: kernels that are missing, or why recording failed.
        capture: how to record; None: CUDA graphs on a GPU, nothing on a CPU.
    """
    if capture is None and model.device.type == "cuda" and not remote_mlps(model):
        capture = CudaCapture(model.device)  # of one device
    graphs = None if capture is None else PassGraphs(name, model.device, capture, on_notice)
    runner = CausalModel(model, name, graphs, planes=planes, owned=owned)
    if model.device.type == "cuda" and (missing := " ".join(sorted(runner.missing_kernels))):
        remedy = f"{pip_install()} {missing}"
        on_notice(f"{name}: its recurrent layers are slow without their kernels: {remedy}")
    return runner
