"""What each decoder layer of a model keeps of a sequence, as values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class LayerKind:
    """What one decoder layer keeps of a sequence.

    Attributes:
        kv_heads, head_dim: of its attention; 0 where it has none.
        window: tokens that each token attends to, itself included; None: all before it.
        mixer: name of the submodule with a recurrent state; empty where it has none.
        rope: type of layer by which its rotary frequencies are found, where a model has several sets.
    """

    kv_heads: int = 0
    head_dim: int = 0
    window: int | None = None
    mixer: str = ""
    rope: str = "full_attention"

    @property
    def full(self) -> bool:
        """Its KV is that of the whole sequence."""
        return self.kv_heads > 0 and self.window is None

    @property
    def windowed(self) -> bool:
        """Its KV is that of the newest tokens."""
        return self.window is not None

    @property
    def recurrent(self) -> bool:
        """It carries a state of fixed size from token to token."""
        return bool(self.mixer)


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of a model's decoder layers, in order."""

    kinds: tuple[LayerKind, ...]

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_dim: int) -> LayerKinds:
        """Returns the kinds of a model that has full attention in all layers."""
        return cls((LayerKind(kv_heads, head_dim),) * layers)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Of each layer, its number among the full ones; -1 for any other layer."""
        places, count = [], 0
        for kind in self.kinds:
            places.append(count if kind.full else -1)
            count += kind.full
        return tuple(places)

    @cached_property
    def full(self) -> tuple[int, ...]:
        """Full-attention layers, whose KV is paged."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.full)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """Layers with a sliding window."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.windowed)

    @cached_property
    def recurrent(self) -> tuple[int, ...]:
        """Layers with a recurrent state."""
        return tuple(layer for layer, kind in enumerate(self.kinds) if kind.recurrent)

    @property
    def local(self) -> bool:
        """Some layers keep something else than the KV of the whole sequence."""
        return bool(self.windowed or self.recurrent)
