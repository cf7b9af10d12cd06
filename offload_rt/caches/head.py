"""The cache of a draft head: its KV in a streaming cache, and the states that its drafts continue from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cpu_kv import KVLayout
from offload_rt.attention.backends import AttentionBackend
from offload_rt.caches.base import VerifiedTokens
from offload_rt.caches.buffers import BufferPool
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.streaming import StreamingCache
from offload_rt.system.device_copies import to_device


class HeadCache(StreamingCache):
    """KV of a head over attention sinks and a recent window, and its states after speculative tokens.

    A token's entry is computed from its embedding and the state before the token, so the first token of a
    sequence has none. A pass may be computed in several parts, as a token needs the state of its parent.

    Attributes:
        states: `[1 + speculative, state_size]`, the head's own: after the last verified entry, then after
            each speculative one.
        given: for each speculative entry, whether the state before it was the target's.
        pending: states of the newest part of a pass, `[tokens, state_size]`, until it is committed.
    """

    def __init__(
        self,
        layout: KVLayout,
        inverse_frequencies: Tensor,
        state_size: int,
        *,
        sinks: int,
        window: int,
        backend: AttentionBackend,
        pool: BufferPool | None = None,
    ) -> None:
        super().__init__(layout, inverse_frequencies, sinks=sinks, window=window, backend=backend, pool=pool)
        device = inverse_frequencies.device
        self.states = torch.zeros(1, state_size, dtype=layout.dtype, device=device)
        self.given: list[bool] = []
        self.pending = self.states[:0]
        self._part_given: Sequence[bool] = ()
        self._committed = 0  # tokens of the pass in earlier parts

    def reset(self, first: int = 1) -> None:
        super().reset(first)
        self.states, self.given = self.states[:1], []

    def begin_part(self, new: NewTokens, given: Sequence[bool], first: int) -> None:
        """Starts a part of a pass; those before it are committed.

        Args:
            given: for each of its tokens, whether the state before it is the target's.
            first: number of tokens of the pass in earlier parts.
        """
        self.begin(new)
        self._part_given, self._committed = given, first

    def commit(self, indices: Sequence[int]) -> None:
        if list(indices[: self._committed]) != list(range(self._committed)):
            raise ValueError("the earlier parts of a pass are committed already")
        kept = [index - self._committed for index in indices[self._committed :]]
        super().commit(kept)
        rows = (
            self.pending
            if kept == list(range(len(self.pending)))
            else self.pending[to_device(kept, self.states.device)]
        )
        self.states = torch.cat([self.states, rows])
        self.given += [self._part_given[index] for index in kept]
        self._committed = 0

    def keep(self, entries: Sequence[int]) -> None:
        super().keep(entries)
        if list(entries) != list(range(len(self.given))):
            self.states = self.states[to_device([0, *(1 + entry for entry in entries)], self.states.device)]
            self.given = [self.given[entry] for entry in entries]

    def settle(self) -> None:
        super().settle()
        self.states, self.given = self.states[-1:], []

    def settle_path(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Makes entries final that hold `tokens`, a chain behind the verified sequence; keeps those below."""
        slots = to_device([self.entries + entry for entry in path], self.states.device)
        self._take(self.kv[:, :, :, slots], self.states[1 + path[-1]], tokens)

    def replace(self, tokens: Sequence[int]) -> None:
        """Makes the pass that was computed final: `tokens`, a chain behind the verified sequence.

        What is below other entries of the same tokens stays, below these.
        """
        kv = self.kv[:, :, :, self.end : self.end + len(tokens)]
        self._take(kv.clone(), self.pending[-1], tokens)

    def _take(self, kv: Tensor, state: Tensor, tokens: Sequence[int]) -> None:
        self.adopt(VerifiedTokens(list(tokens), kv, kv[:0], 0))
        self.states = torch.cat([state[None], self.states[1:]])
