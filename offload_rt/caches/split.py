"""A bounded cache whose layers are on two devices, each with the KV of the layers that it attends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cpu_kv import KVLayout, LayerGatherer
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import AttentionSum, Softmax
from offload_rt.caches.base import CachedModel, DerivedCache, VerifiedTokens
from offload_rt.caches.bounded import BoundedCache
from offload_rt.caches.full import FullCache
from offload_rt.caches.local import NO_LOCAL_STATE
from offload_rt.caches.local_history import LocalLayers
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.system.device_copies import to_device
from offload_rt.system.second_device import SecondDevice


class SplitCache(DerivedCache):
    """Two caches of one policy that see the same passes, each with the KV of some layers.

    All that is done with the second one is enqueued on the stream of its device, as its share of a pass is.

    Args:
        home: the cache of the layers that the first device attends.
        away: of the layers in `remote`, on the second device.
        close: called when both are released.

    Attributes:
        remote: layers that the second device attends.
    """

    recordable = False  # a CUDA graph is of one device

    def __init__(
        self,
        home: BoundedCache,
        away: BoundedCache,
        second: SecondDevice,
        remote: frozenset[int],
        layers: int,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.home, self.away, self.remote = home, away, remote
        # Equal in both, as the same tokens are kept and forgotten.
        self.speculative, self.local, self.mass_chunk = home.speculative, home.local, home.mass_chunk
        self._second = second
        self._layers = [layer for layer in range(layers) if layer not in remote], sorted(remote)
        self._places = {layer: place for part in self._layers for place, layer in enumerate(part)}
        self._numbers = [to_device(part, second.home) for part in self._layers]
        self._close = close

    def _both(self, work: Callable[[BoundedCache], object]) -> None:
        work(self.home)
        with self._second.on_stream():
            work(self.away)

    # As the cache of a pass.

    @property
    def verified_length(self) -> int:
        return self.home.verified_length

    def begin(self, new: NewTokens) -> None:
        self._both(lambda cache: cache.begin(new))

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Computes attention on the device that the layer is on, where the tensors are."""
        cache = self.away if layer in self.remote else self.home
        return cache.attend(self._places[layer], queries, keys, values, softmax)

    def commit(self, indices: Sequence[int]) -> None:
        self._both(lambda cache: cache.commit(indices))

    def keep(self, entries: Sequence[int]) -> None:
        self._both(lambda cache: cache.keep(entries))

    def settle(self) -> None:
        self._both(lambda cache: cache.settle())

    def release(self) -> None:
        """Returns the memory of both to their pool. The cache must not be used afterwards."""
        self._both(lambda cache: cache.release())
        self._close()

    # Of the target, whose full cache it follows.

    def build(self, queries: Tensor) -> None:
        parts = iter([queries.index_select(0, numbers) for numbers in self._numbers])
        self._both(lambda cache: cache.build(next(parts)))

    def catch_up(self) -> None:
        self._both(lambda cache: cache.catch_up())

    def take_mass(self, layer: int, total: AttentionSum) -> None:
        # Both keep scores on the first device, as a pass must not wait for what the second one drafts.
        cache = self.away if layer in self.remote else self.home
        cache.take_mass(self._places[layer], total)

    def adopt(self, verified: VerifiedTokens) -> None:
        home, away = (
            replace(verified, kv=verified.kv.index_select(0, n), queries=verified.queries.index_select(0, n))
            for n in self._numbers
        )
        self.home.adopt(home)
        (kv,) = self._second.send(away.kv)
        with self._second.on_stream():
            self.away.adopt(replace(away, kv=kv))


class SplitStreamingCache(SplitCache):
    """Two streaming caches, which the passes of a small model may fill; see `StreamingCache`."""

    home: StreamingCache
    away: StreamingCache

    @property
    def sinks(self) -> int:
        return self.home.sinks

    @property
    def window(self) -> int:
        return self.home.window

    def skip(self, tokens: int) -> None:
        self.home.skip(tokens)
        with self._second.on_stream():
            self.away.skip(tokens)

    def reset(self) -> None:
        self.home.reset()
        with self._second.on_stream():
            self.away.reset()


@dataclass(frozen=True)
class ModelLayers:
    """Some layers of a model, as their cache on another device sees them."""

    layout: KVLayout
    rotary_frequencies: Tensor
    local_layers: LocalLayers

    @classmethod
    def of(cls, model: CachedModel, layers: Sequence[int], second: SecondDevice | None) -> ModelLayers:
        """Returns some layers of a model; None: on its own device."""
        frequencies, layout = model.rotary_frequencies, replace(model.kv_layout(), layers=len(layers))
        frequencies = frequencies if second is None else frequencies.to(second.device)
        return cls(layout, frequencies, LocalLayers.none())

    def kv_layout(self) -> KVLayout:
        """Returns the layout of the KV of these layers."""
        return self.layout


class SourceLayers:
    """Some layers of a full cache, as a `CacheSource` of caches on the first device or on the second one."""

    def __init__(self, full: FullCache, layers: Sequence[int], second: SecondDevice | None) -> None:
        self._full = full
        self.layers = layers
        self.layout = replace(full.layout, layers=len(layers))
        self.sequence = full.sequence
        self.device = full.device if second is None else second.device
        self.backend = full.backend if second is None else choose_backend(second.device)
        self.local = NO_LOCAL_STATE
        self.transfer = LayerGatherer(
            full.transfer, full.transfer.link if second is None else second.link, layers
        )

    @property
    def verified_length(self) -> int:
        return self._full.verified_length

    @property
    def scale(self) -> float:
        scale: float = self._full.scale
        return scale
