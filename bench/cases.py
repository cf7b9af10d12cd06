"""The declared cases: what is measured, and how much of it, where the command line does not say otherwise."""

from __future__ import annotations

from dataclasses import dataclass

COMPOSITIONS = ("plain", "retrieval", "triforce", "lookup", "streaming", "naive")
"""Our systems, by the names of their configs."""

PEERS = ("plain", "lookup", "assisted")
"""transformers' `generate`: plain, with prompt look-up, assisted by the same draft."""


@dataclass(frozen=True)
class SpeedupCase:
    """How much `speedup` measures.

    Attributes:
        contexts: prompt lengths in tokens.
        new_tokens: what our systems decode a run.
        peer_tokens: what the peers decode a run. They are slow, and a time a token is a time a token.
        repeats: interleaved runs of every system, after one that is not timed.
    """

    contexts: tuple[int, ...]
    new_tokens: int
    peer_tokens: int
    repeats: int


FULL = SpeedupCase((4096, 8192, 16384, 32768, 65536, 131072), new_tokens=64, peer_tokens=32, repeats=3)
QUICK = SpeedupCase((4096, 8192), new_tokens=32, peer_tokens=16, repeats=2)

WARM_UP_TOKENS = 8
LOOKUP_TOKENS = 10  # what transformers' own prompt look-up proposes a round by default


@dataclass(frozen=True)
class ModelCardCase:
    """How much `model-card` measures.

    Attributes:
        context: longest prompt.
        step: the loss is told by steps of so many tokens.
        windows: prompts cut to their last tokens, whose tails' losses are compared.
        tail: how many of the last tokens those losses are of.
        needle_contexts: lengths of the prompts that needles are planted in.
        depths: how many depths, from the beginning to the end.
        needles: passages a depth, in one prompt.
        acceptance_contexts: contexts below `context` at which acceptance is measured too.
        shares: sizes of the bounded caches, one over the context.
        positions: how many positions the acceptance is a mean of.
    """

    context: int = 131072
    step: int = 8192
    windows: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536)
    tail: int = 2048
    needle_contexts: tuple[int, ...] = (8192, 32768, 65536, 131072)
    depths: int = 9
    needles: int = 4
    acceptance_contexts: tuple[int, ...] = (32768,)
    shares: tuple[int, ...] = (32, 8)
    positions: int = 256


MODEL_CARD = ModelCardCase()
