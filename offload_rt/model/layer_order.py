"""Layer plans: all layers in turn, groups of layers that share an input, or layers with blocks left out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from offload_rt.errors import UsageError

EXACT = "all"


@dataclass(frozen=True)
class LayerOrder:
    """The order in which hidden states go through a model's layers.

    In a group every attention block takes the input of the group's first layer, so that the attention blocks
    can run in parallel; the MLP blocks follow in order, each after its layer's attention has been added
    (EasySpec, arXiv 2502.02493). A group of one is an ordinary layer.

    Attributes:
        groups: layers in order.
        no_attention, no_mlp: layers whose attention or MLP block is left out (Draft & Verify,
            arXiv 2309.08168).
        remote: layers whose attention block runs on the second device, where their KV is. Everything else
            runs on the first.
        draft_plane: weights in two planes are read from the draft plane alone (`kernels/planes.py`).
    """

    groups: tuple[tuple[int, ...], ...]
    no_attention: frozenset[int] = frozenset()
    no_mlp: frozenset[int] = frozenset()
    remote: frozenset[int] = frozenset()
    draft_plane: bool = False

    def exact(self, layer: int) -> bool:
        """Returns whether no block of the layer is left out."""
        return layer not in self.no_attention and layer not in self.no_mlp

    @property
    def exchanges(self) -> int:
        """Number of times that a pass sends hidden states to the second device and waits for its results."""
        return sum(not self.remote.isdisjoint(group) for group in self.groups)

    def on_two_devices(self) -> LayerOrder:
        """Returns the order with the attention blocks of each group shared out over two devices, by layer.

        The second device has the last layers of a group, and of an odd number the larger half: the first one
        runs the MLP blocks too, in order, and those of its own layers before any result is needed. A group is
        one exchange. Were the MLP blocks replicated, the second device would have the next group's input
        without being sent it, but it would have to be sent the first one's attention outputs instead: as
        many exchanges, for all weights and for the KV of the layers that are alone, twice.
        """
        remote = (layer for group in self.groups for layer in group[len(group) // 2 :] if len(group) > 1)
        return replace(self, remote=frozenset(remote))

    def in_turn(self) -> LayerOrder:
        """Returns the order of all layers in turn, each attended where this order keeps its KV."""
        layers = sum(map(len, self.groups))
        return replace(LayerOrder.whole(layers), remote=self.remote, draft_plane=self.draft_plane)

    @classmethod
    def whole(cls, layers: int) -> LayerOrder:
        """Returns the order of all layers in turn."""
        return cls(tuple((layer,) for layer in range(layers)))

    @classmethod
    def parse(cls, text: str, layers: int) -> LayerOrder | None:
        """Parses a layer order for a model of `layers` layers; returns None for `all`.

        `groups:N`: the first and the last layer alone, groups of `N` between them, aligned so that full ones
        come first from layer `N` on, as in EasySpec (32 layers and N = 4: 1-3, 4-7, ..., 28-30).
        `groups:N@F`: aligned so that full ones begin at layer `F` (32 layers and `4@1`: 1-4, ..., 29-30).
        `skip:5,7a,9m`: without layer 5, the attention of layer 7 and the MLP of layer 9.

        Raises:
            UsageError: the text is anything else, or names a layer that does not exist.
        """
        kind, _, details = text.partition(":")
        if text == EXACT:
            return None
        size, at, first = details.partition("@")
        if kind == "groups" and size.isdecimal() and int(size) >= 1 and first.isdecimal() == bool(at):
            return cls(_groups(layers, int(size), int(first or size)))
        if kind == "skip" and details:
            return cls._skipping(text, details.split(","), layers)
        raise UsageError(f"layers {text!r}: write all, groups:N or groups:N@F (N at least 1) or skip:5,7a,9m")

    @classmethod
    def _skipping(cls, text: str, blocks: list[str], layers: int) -> LayerOrder:
        attention: set[int] = set()
        mlp: set[int] = set()
        for block in blocks:
            number = block.strip().rstrip("am")
            half = block.strip().removeprefix(number)
            if not number.isdecimal() or half not in ("", "a", "m"):
                raise UsageError(f"layers {text!r}: {block.strip()!r} is not a layer like 5, 5a or 5m")
            if int(number) >= layers:
                raise UsageError(
                    f"layers {text!r}: layer {number} does not exist in a model of {layers} layers, 0 to"
                    f" {layers - 1}; python -m bench search-skips finds which of its own to skip"
                )
            if half != "m":
                attention.add(int(number))
            if half != "a":
                mlp.add(int(number))
        if len(attention) == layers:
            raise UsageError(f"layers {text!r}: no attention is left; skip fewer layers")
        return replace(cls.whole(layers), no_attention=frozenset(attention), no_mlp=frozenset(mlp))


def blocks_of(layers: int) -> list[str]:
    """Returns all blocks that `skip:` can name: 0a and 0m are the attention and the MLP of layer 0."""
    return [f"{layer}{kind}" for layer in range(layers) for kind in "am"]


def skipping(blocks: Collection[str]) -> str:
    """Returns the text of an order without these of `blocks_of`, for `LayerOrder.parse`."""
    layers = sorted({int(block[:-1]) for block in blocks})
    kinds = {layer: "".join(kind for kind in "am" if f"{layer}{kind}" in blocks) for layer in layers}
    named = [f"{layer}{kind if kind != 'am' else ''}" for layer, kind in kinds.items()]
    return f"skip:{','.join(named)}" if named else EXACT


def _groups(layers: int, size: int, first: int) -> tuple[tuple[int, ...], ...]:
    inner = range(1, layers - 1)
    numbers = sorted({(layer - first) // size for layer in inner})
    grouped = [tuple(layer for layer in inner if (layer - first) // size == number) for number in numbers]
    last = [(layers - 1,)] if layers > 1 else []
    return ((0,), *grouped, *last)
