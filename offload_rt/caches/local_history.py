"""What verified tokens leave in layers that do not attend to the whole sequence, as a value.

A `LocalHistory` is never changed in place: a sequence can return to an earlier one, and sequences can share
one. `local.py` says how it grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from offload_rt.caches.layer_kinds import LayerKinds


@dataclass(frozen=True)
class RecurrentState:
    """The state of a recurrent layer after some tokens.

    Attributes:
        state: a layer of transformers' cache, never changed; None: that of no token.
        rows: inputs of the layer for the tokens behind it, `[tokens, hidden_size]`; None: there are none.
    """

    state: Any
    rows: Tensor | None = None

    def followed_by(self, rows: Tensor | None) -> RecurrentState:
        """Returns the state after further tokens with these inputs."""
        if rows is None or self.rows is None:
            return RecurrentState(self.state, self.rows if rows is None else rows)
        return RecurrentState(self.state, torch.cat([self.rows, rows]))

    def on(self, device: torch.device) -> RecurrentState:
        """Returns a copy in the memory of `device`."""
        rows = None if self.rows is None else self.rows.to(device, copy=True)
        return RecurrentState(copied(self.state, device), rows)


@dataclass
class _WindowMemory:
    """Memory that several `Window`s may share.

    Attributes:
        kv: `[2, kv_heads, capacity, head_dim]`.
        filled: number of slots that one of them uses.
    """

    kv: Tensor
    filled: int


@dataclass(frozen=True)
class Window:
    """Keys and values of the newest tokens of a layer.

    Attributes:
        limit: number of tokens that are kept at most.
    """

    memory: _WindowMemory
    start: int
    end: int
    limit: int

    @classmethod
    def empty(
        cls, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
    ) -> Window:
        """Returns the history of a layer whose tokens attend to `window` tokens, themselves included."""
        kv = torch.empty(2, kv_heads, 0, head_dim, dtype=dtype, device=device)
        return cls(_WindowMemory(kv, 0), 0, 0, window - 1)

    def holding(self, kv: Tensor) -> Window:
        """Returns a window of the same layer that holds these tokens, `[2, kv_heads, tokens, head_dim]`."""
        return Window(_WindowMemory(kv, kv.shape[2]), 0, kv.shape[2], self.limit)

    @property
    def kv(self) -> Tensor:
        """Keys and values, `[2, kv_heads, tokens, head_dim]`."""
        return self.memory.kv[:, :, self.start : self.end]

    def append(self, kv: Tensor) -> Window:
        """Returns the window after further tokens, `[2, kv_heads, n, head_dim]`; this one stays valid."""
        kv = kv[:, :, max(0, kv.shape[2] - self.limit) :]
        end, memory = self.end + kv.shape[2], self.memory
        start = max(self.start, end - self.limit)
        # Slots behind this window may be another one's, which was appended to it before.
        if memory.filled != self.end or end > memory.kv.shape[2]:
            old = memory.kv[:, :, start : self.end]
            shape = (*kv.shape[:2], 2 * self.limit + kv.shape[2], kv.shape[3])
            memory = _WindowMemory(torch.empty(shape, dtype=kv.dtype, device=kv.device), old.shape[2])
            memory.kv[:, :, : old.shape[2]] = old
            start, end = 0, old.shape[2] + kv.shape[2]
        memory.kv[:, :, memory.filled : end] = kv
        memory.filled = end
        return Window(memory, start, end, self.limit)


@dataclass(frozen=True)
class LocalHistory:
    """What the local layers keep of the verified tokens, by layer.

    Attributes:
        length: number of verified tokens.
        states: recurrent states; a layer that has read no token is missing.
    """

    length: int = 0
    windows: Mapping[int, Window] = field(default_factory=dict)
    states: Mapping[int, RecurrentState] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all windows and states."""
        states = (t for local in self.states.values() for t in state_tensors(local.state).values())
        return sum(t.nbytes for t in (*(local.kv for local in self.windows.values()), *states))

    def on(self, device: torch.device) -> LocalHistory:
        """Returns a copy in the memory of `device`."""
        windows = {
            layer: window.holding(window.kv.to(device, copy=True)) for layer, window in self.windows.items()
        }
        states = {layer: state.on(device) for layer, state in self.states.items()}
        return LocalHistory(self.length, windows, states)


def copied(state: Any, device: torch.device | None = None) -> Any:
    """Returns a copy of a recurrent state, on `device` if one is given."""
    copy = object.__new__(type(state))
    for name, value in vars(state).items():
        if isinstance(value, dict):
            value = {key: _copied(part, device) for key, part in value.items()}
        setattr(copy, name, _copied(value, device))
    if device is not None and isinstance(getattr(copy, "device", None), torch.device):
        copy.device = device
    return copy


def _copied(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if device is None else value.to(device, copy=True)


def described_state(state: Any) -> dict[str, Any]:
    """Returns what a recurrent state is beside its tensors, as JSON can hold it; see `restored_state`."""
    described: dict[str, Any] = {}
    for name, value in vars(state).items():
        if isinstance(value, dict):
            described[name] = {key: part for key, part in value.items() if not isinstance(part, Tensor)}
        elif isinstance(value, bool | int | None):
            described[name] = value
    return described


def restored_state(state: Any, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """Returns `state`, a new one, with the contents of another; see `described_state`, `state_tensors`."""
    for name, value in described.items():
        if isinstance(value, dict):
            getattr(state, name).update({int(key): part for key, part in value.items()})
        else:
            setattr(state, name, value)
    for path, tensor in tensors.items():
        name, _, key = path.partition(".")
        if key:
            getattr(state, name)[int(key)] = tensor
        else:
            setattr(state, name, tensor)
        state.device, state.dtype = tensor.device, tensor.dtype
    return state


def state_tensors(state: Any) -> dict[str, Tensor]:
    """Returns the tensors of a recurrent state by name; see `restored_state`."""
    tensors: dict[str, Tensor] = {}
    for name, value in vars(state).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        tensors |= {f"{name}.{key}".rstrip("."): part for key, part in parts if isinstance(part, Tensor)}
    return tensors


@dataclass(frozen=True)
class LocalLayers:
    """The layers of a model that keep something else than the KV of the whole sequence.

    Attributes:
        config: of the text model, by which transformers makes recurrent states.
    """

    kinds: LayerKinds
    config: PretrainedConfig
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def none(cls) -> LocalLayers:
        """Returns those of a model that has full attention in all layers."""
        return cls(LayerKinds(()), PretrainedConfig(), torch.float32, torch.device("cpu"))

    def start(self) -> LocalHistory:
        """Returns the history of no token."""
        windows = {}
        for layer in self.kinds.windowed:
            kind = self.kinds.kinds[layer]
            assert kind.window is not None
            windows[layer] = Window.empty(kind.kv_heads, kind.head_dim, kind.window, self.dtype, self.device)
        return LocalHistory(windows=windows)

    def carrier(self) -> DynamicCache:
        """Returns a cache of transformers, through which a recurrent layer reads and writes its state."""
        return DynamicCache(config=self.config)
