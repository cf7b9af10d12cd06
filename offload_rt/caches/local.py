"""What layers keep that do not attend to the whole sequence: KV of sliding windows, and recurrent states.

All of it is small and stays on the device. `LocalHistory` is what verified tokens leave, a value that is
never changed in place: a sequence can return to an earlier one, and sequences can share one. `LocalState`
belongs to a cache and adds the tokens of its passes: pending until a commit, then speculative, as in the
cache itself.

A recurrent state cannot be cut. So the inputs of the recurrent layers are kept of all tokens behind a state,
and where a pass is accepted in part, those of the accepted tokens go through these layers once more, in front
of the tokens of the next pass: that takes no product of other layers, and no attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cpu_kv import PlainPages
from offload_rt.attention.backends import AttentionBackend, TorchCpuBackend, folded_mask
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.local_history import LocalHistory, LocalLayers, RecurrentState, Window, copied
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.window_attention import PAGE, PAGED_WINDOW, attend_window, from_column
from offload_rt.kernels.tail import TailView
from offload_rt.system.device_copies import to_device

MOST_BLOCK = 512
"""Most queries of a prefill that attend to a window together."""

Mixer = Callable[[Tensor, Any], Tensor]
"""Runs a recurrent layer over hidden states `[1, tokens, hidden_size]` with a cache of transformers."""

MOST_ROWS = 32
"""Most verified tokens that a recurrent layer takes once more in front of those of a pass. With a draft they
are as many as a chunked kernel takes at once."""


@dataclass(frozen=True)
class _Run:
    """Tokens of a pass that follow each other, with no branch between them.

    Attributes:
        parent: number of the token before them, as in `NewTokens`; -1: the verified sequence.
        tokens: their indices in the pass.
    """

    parent: int
    tokens: list[int]


class LocalState:
    """The local layers of one sequence in one cache.

    A pass is `begin`, `attend` and `mix` for its layers, then `commit`; tokens are counted as in the cache:
    its speculative entries, then the tokens of the pass. Between `start_prefill` and `finish_prefill`
    the same calls take verified tokens, layer by layer, in chunks of any size.

    Args:
        source: the local layers of the full cache of the same model, whose verified tokens are also this
            one's; None: it has its own.

    Attributes:
        before_layer: called before each layer of a pass; what it raises ends the pass.
    """

    def __init__(
        self, layers: LocalLayers, backend: AttentionBackend, source: LocalState | None = None
    ) -> None:
        self.layers = layers
        self._backend = backend
        self._source = source
        self._own = layers.start()
        self._prefilled: tuple[dict[int, Window], dict[int, RecurrentState]] | None = None
        kinds = layers.kinds
        self._carrier = layers.carrier() if kinds.recurrent else None
        # Of speculative tokens and those of the pass: KV of windows, inputs of recurrent layers, by layer.
        self._rows: dict[int, Tensor] = {}
        self._pending: dict[int, Tensor] = {}
        self._mixers: dict[int, Mixer] = {}
        self._parents: list[int] = []
        self._depths: list[int] = []
        # States after speculative entries without a child, by entry, and the history that they follow.
        self._states: dict[int, dict[int, RecurrentState]] = {}
        self._followed = self._own
        self._new_tokens: NewTokens | None = None
        self._runs: list[_Run] = []
        self._ends: list[dict[int, RecurrentState]] = []
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._view: TailView | None = None
        self._read: dict[int, int] = {}  # tokens that a prefill has read, by layer
        self.before_layer: Callable[[], None] = _nothing

    def derived(self) -> LocalState:
        """Returns local layers for another cache of the same sequence and model."""
        return LocalState(self.layers, self._backend, self)

    @property
    def history(self) -> LocalHistory:
        """What the verified tokens left."""
        return self._own if self._source is None else self._source.history

    def restart(self, history: LocalHistory | None = None) -> None:
        """Returns to a history of the sequence, of no token by default, and forgets everything behind it."""
        self._own = self.layers.start() if history is None else history
        self._prefilled = None
        self._forget()

    def start_prefill(self) -> None:
        """Starts a prefill of verified tokens; `finish_prefill` keeps them, `give_up_prefill` does not."""
        if self.layers.kinds.local:
            self._prefilled, self._read = (dict(self._own.windows), {}), {}

    def finish_prefill(self, tokens: int) -> None:
        """Keeps the tokens of the prefill, `tokens` in number."""
        if self._prefilled is not None:
            windows, states = self._prefilled
            length = self._own.length + tokens
            self.restart(LocalHistory(length, windows, {**self._own.states, **states}))

    def give_up_prefill(self) -> None:
        """Forgets the tokens of the prefill."""
        self._prefilled = None

    def begin(self, new: NewTokens, behind: int) -> None:
        """Starts a pass over new tokens behind `behind` speculative entries."""
        if not self.layers.kinds.local:
            return
        self._prefilled = None
        if behind < len(self._parents):  # the cache has forgotten its speculation
            self.keep(range(behind))
        if self._followed is not self.history:
            self._states.clear()  # they follow what was drafted; now the true states are known
            self._followed = self.history
        self._new_tokens, self._view = new, None
        self._masks.clear()
        if self.layers.kinds.recurrent:
            self._runs = _runs(new.parents, behind)
            self._ends = [{} for _ in self._runs]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention over a sliding window; shapes as in `Cache.attend`, `layer` of the model."""
        if self._prefilled is not None:
            return self._read_window(layer, queries, keys, values, softmax)
        self.before_layer()
        new, window = self._new_tokens, self.layers.kinds.kinds[layer].window
        assert new is not None and window is not None
        kv = torch.stack([keys, values])
        if self._parents:
            kv = torch.cat([self._rows[layer], kv], dim=2)
        self._pending[layer] = kv
        past, depths, end = self.history.windows[layer].kv, new.depths, self.history.length
        oldest = [end + depth - window for depth in depths]
        if (backend := self._by_query(layer)) is not None and max(oldest) <= end - PAGE:
            if self._view is None:
                self._view = new.view(PAGE, end % PAGE, self.layers.device)
            return attend_window(backend, queries, past, kv, end, oldest, self._view, softmax)
        total = AttentionSum(self._backend, queries, len(keys), softmax.scale)
        unseen = past.shape[2] + min(depths) - window  # the oldest tokens that no query sees any more
        past = past[:, :, max(0, unseen) :]
        if past.shape[2]:
            total.attend(PlainPages.one(*past), self._mask(queries, len(keys), window, past.shape[2]))
        total.attend(PlainPages.one(*kv), self._mask(queries, len(keys), window, 0))
        return total.result(softmax.sinks)

    def _mask(self, queries: Tensor, kv_heads: int, window: int, past: int) -> Tensor | None:
        """Returns the mask of the pass over the newest `past` verified tokens; 0: over its own tokens."""
        if (window, past) not in self._masks:
            mask = self._past_mask(window, past, queries) if past else self._own_mask(window, queries)
            if mask is not None:
                mask = folded_mask(self._backend, mask, queries, kv_heads)
            self._masks[window, past] = mask
        return self._masks[window, past]

    def _past_mask(self, window: int, past: int, like: Tensor) -> Tensor | None:
        assert self._new_tokens is not None
        depths = self._new_tokens.depths
        if past + max(depths) <= window:
            return None
        return from_column([past + depth - window for depth in depths], past, like)

    def _own_mask(self, window: int, like: Tensor) -> Tensor | None:
        new, behind = self._new_tokens, len(self._parents)
        assert new is not None
        depths = [*self._depths, *new.depths]
        if max(depths) <= window and new.sees_all(behind):
            return None
        mask = new.mask(behind, like)
        if max(depths) > window:
            every = to_device(depths, self.layers.device)
            mask = mask.masked_fill(every <= every[behind:, None] - window, -torch.inf)
        return mask

    def _read_window(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax,
    ) -> Tensor:
        """Attends a chunk of verified tokens to their windows, in blocks of queries."""
        assert self._prefilled is not None
        windows, _ = self._prefilled
        before, window = windows[layer].kv, self.layers.kinds.kinds[layer].window
        assert window is not None
        past, count = before.shape[2], queries.shape[1]
        every = torch.cat([before, torch.stack([keys, values])], dim=2)
        windows[layer] = windows[layer].append(every[:, :, past:])
        end = self._own.length + self._read.get(layer, 0)
        self._read[layer] = self._read.get(layer, 0) + count
        if (backend := self._by_query(layer)) is not None:
            return _read_pages(backend, queries, every, end, window, softmax)
        outs, block = [], min(window, MOST_BLOCK)
        for start in range(0, count, block):
            part = queries[:, start : start + block]
            at, rows = past + start, part.shape[1]
            first = max(0, at - window + 1)  # the oldest token that a query sees
            whole = max(first, at + rows - window)  # from here on all queries see every token
            own = every[:, :, at : at + rows]
            total = AttentionSum(self._backend, part, len(keys), softmax.scale)
            total.add(*self._backend.causal(part, own[0], own[1], softmax.scale))
            if whole < at:
                total.attend(PlainPages.one(*every[:, :, whole:at]))
            if first < whole:
                unseen = at - window + 1 - first
                mask = from_column(range(unseen, unseen + rows), whole - first, queries)
                window_pages = PlainPages.one(*every[:, :, first:whole])
                total.attend(window_pages, folded_mask(self._backend, mask, part, len(keys)))
            outs.append(total.result(softmax.sinks))
        return torch.cat(outs, dim=1)

    def _by_query(self, layer: int) -> AttentionBackend | None:
        """Returns the backend that attends to the window of a layer page by page; None: there is none."""
        kind = self.layers.kinds.kinds[layer]
        paged = self.layers.device.type == "cpu" and kind.window is not None and kind.window >= PAGED_WINDOW
        return self._backend.by_query(self.layers.dtype, kind.head_dim) if paged else None

    def mix(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Runs a recurrent layer over the new tokens, `[1, tokens, hidden_size]`."""
        self._mixers[layer] = mixer
        if self._prefilled is not None:
            _, states = self._prefilled
            start = states[layer] if layer in states else self._after(layer, -1)
            out, states[layer] = self._run(layer, start, hidden)
            return out
        self.before_layer()
        behind = len(self._parents)
        self._pending[layer] = torch.cat([self._rows[layer], hidden[0]]) if behind else hidden[0]
        if len(self._runs) == 1:
            out, self._ends[0][layer] = self._run(layer, self._after(layer, self._runs[0].parent), hidden)
            return out
        outs = torch.empty_like(hidden)
        for run, ends in zip(self._runs, self._ends, strict=True):
            at = to_device(run.tokens, hidden.device)
            outs[:, at], ends[layer] = self._run(layer, self._after(layer, run.parent), hidden[:, at])
        return outs

    def _run(self, layer: int, start: RecurrentState, hidden: Tensor) -> tuple[Tensor, RecurrentState]:
        """Runs a recurrent layer from a state; returns its output for `hidden`, and the state behind."""
        assert self._carrier is not None
        before, inputs = 0, hidden
        if start.rows is not None:
            before, inputs = len(start.rows), torch.cat([start.rows[None], hidden], dim=1)
        state = self.layers.carrier().layers[layer] if start.state is None else copied(start.state)
        self._carrier.layers[layer] = state
        return self._mixers[layer](inputs, self._carrier)[:, before:], RecurrentState(state)

    def _after(self, layer: int, token: int) -> RecurrentState:
        """Returns the state of a layer after a speculative entry or a token of the pass."""
        behind = len(self._parents)
        if token >= behind:
            ended = next(at for at, run in enumerate(self._runs) if run.tokens[-1] == token - behind)
            return self._ends[ended][layer]
        if (state := self._states.get(token, {}).get(layer)) is not None:
            return state
        path = []
        while token >= 0:
            path.append(token)
            token = self._parents[token]
        verified = self.history.states.get(layer, RecurrentState(None))
        return verified.followed_by(
            self._rows[layer][to_device(path[::-1], self.layers.device)] if path else None
        )

    def commit(self, indices: Sequence[int]) -> None:
        """Makes these tokens of the pass speculative, in this order, and forgets the others."""
        new, self._new_tokens = self._new_tokens, None
        if new is None:
            return
        behind = len(self._parents)
        slots = [*range(behind), *(behind + index for index in indices)]
        self._rows, self._pending = self._rows_of(self._pending, slots), {}
        place = {behind + index: behind + at for at, index in enumerate(indices)}
        for index in indices:
            parent = new.parents[index]
            self._add(place.get(parent, parent))
        for run, states in zip(self._runs, self._ends, strict=True):
            if (entry := place.get(behind + run.tokens[-1])) is not None:
                self._states[entry] = states
        self._runs, self._ends = [], []
        # Of a chain one state is kept, and of a tree one a branch: others can be computed again.
        inner = set(self._parents)
        self._states = {
            entry: entry_states for entry, entry_states in self._states.items() if entry not in inner
        }

    def _add(self, parent: int) -> None:
        self._parents.append(parent)
        self._depths.append(1 + (self._depths[parent] if parent >= 0 else 0))

    def _rows_of(self, rows: Mapping[int, Tensor], slots: Sequence[int]) -> dict[int, Tensor]:
        """Returns these slots of the rows of every layer."""
        windowed = self.layers.kinds.windowed
        if slots == list(range(len(slots))):
            return {
                layer: tensor[:, :, : len(slots)] if layer in windowed else tensor[: len(slots)]
                for layer, tensor in rows.items()
            }
        at = to_device(slots, self.layers.device)
        return {
            layer: tensor.index_select(2 if layer in windowed else 0, at) for layer, tensor in rows.items()
        }

    def keep(self, entries: Sequence[int]) -> None:
        """Keeps these speculative entries, in this order, and forgets the others."""
        entries = list(entries)
        if not self.layers.kinds.local or entries == list(range(len(self._parents))):
            return
        self._rows = self._rows_of(self._rows, entries)
        place = {-1: -1} | {entry: at for at, entry in enumerate(entries)}
        parents = [place.get(self._parents[entry], -1) for entry in entries]
        self._states = {place[entry]: states for entry, states in self._states.items() if entry in place}
        self._parents, self._depths = [], []
        for parent in parents:
            self._add(parent)

    def settle(self) -> None:
        """Makes all speculative entries verified; they must be a chain."""
        if not self._parents:
            return
        count = len(self._parents)
        kinds, history = self.layers.kinds, self._own
        windows = {
            layer: window.append(self._rows[layer][:, :, :count]) for layer, window in history.windows.items()
        }
        if self._followed is not self._own:
            self._states.clear()
        states = {layer: self._after(layer, count - 1) for layer in kinds.recurrent}
        self._own = LocalHistory(history.length + count, windows, states)
        self._forget()
        self.compute_states(MOST_ROWS)

    @torch.inference_mode()
    def compute_states(self, tokens: int = 0) -> None:
        """Computes the verified states that lie more than `tokens` tokens back."""
        states = dict(self._own.states)
        late = [
            layer for layer, state in states.items() if state.rows is not None and len(state.rows) > tokens
        ]
        for layer in late:
            start = states[layer]
            assert start.rows is not None
            states[layer] = self._run(layer, RecurrentState(start.state), start.rows[None])[1]
        if late:
            self._own = replace(self._own, states=states)
            self._followed = self._own

    def _forget(self) -> None:
        """Forgets all speculation."""
        self._rows, self._pending, self._states = {}, {}, {}
        self._parents, self._depths = [], []
        self._new_tokens, self._runs, self._ends = None, [], []
        self._followed = self.history


def _nothing() -> None:
    """Does nothing."""


def _read_pages(
    backend: AttentionBackend, queries: Tensor, kv: Tensor, end: int, window: int, softmax: Softmax
) -> Tensor:
    """Attends verified tokens from position `end` on to their windows, page by page, in blocks of queries.

    Args:
        kv: keys and values up to those of the last query, `[2, kv_heads, tokens, head_dim]`.
    """
    outs, count = [], queries.shape[1]
    past, block = kv.shape[2] - count, min(window - PAGE, MOST_BLOCK)
    for start in range(0, count, block):
        part, at = queries[:, start : start + block], past + start
        rows, first = part.shape[1], end + start
        before, own = kv[:, :, max(0, at - window + 1) : at], kv[:, :, at : at + rows]
        oldest = range(first + 1 - window, first + 1 - window + rows)
        view = TailView(PAGE, rows, first % PAGE)
        outs.append(attend_window(backend, part, before, own, first, oldest, view, softmax))
    return torch.cat(outs, dim=1)


def _runs(parents: Sequence[int], behind: int) -> list[_Run]:
    """Splits the tokens of a pass into runs, each after the one that it follows."""
    children: dict[int, int] = {}
    for parent in parents:
        children[parent] = children.get(parent, 0) + 1
    runs: list[_Run] = []
    open_runs: dict[int, _Run] = {}  # by the number of their last token
    for index, parent in enumerate(parents):
        run = open_runs.pop(parent, None) if children[parent] == 1 else None
        if run is None:
            run = _Run(parent, [])
            runs.append(run)
        run.tokens.append(index)
        open_runs[behind + index] = run
    return runs


NO_LOCAL_STATE = LocalState(LocalLayers.none(), TorchCpuBackend())
"""That of a cache of a model with full attention in all layers."""
