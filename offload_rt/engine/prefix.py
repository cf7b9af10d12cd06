"""A prefix: tokens that were read, with their KV in the store and no memory on any device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cpu_kv import SequenceKV
from offload_rt.model.runner import CausalModel
from offload_rt.text import common_beginning


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """Tokens with their KV, which any number of sequences may begin with; they share its pages.

    Attributes:
        tokens: token IDs.
        kv: KV of the first ones, of all but the last one as a rule.
        reads: length and queries of the last tokens, `[layers, heads, tokens, head_dim]` on the host, after
            each prefill; they choose the retrieved cache.
        target: the runner that computed the KV.
        lock: the engine's, which is held while the KV is given back.
    """

    tokens: list[int]
    kv: SequenceKV
    reads: list[tuple[int, Tensor]]
    target: CausalModel
    lock: threading.RLock

    def begins(self, tokens: Sequence[int], target: CausalModel) -> int:
        """Returns with how many tokens of the prefix a sequence of `target` may begin."""
        return common_beginning(self.tokens, tokens) if target is self.target else 0

    def verified_length(self, tokens: int) -> int:
        """Returns how many of the first `tokens` tokens have KV in a sequence of them: all but the last."""
        return min(self.kv.length, max(0, tokens - 1))

    def shared_tokens(self, tokens: int) -> int:
        """Returns how many tokens such a sequence shares the KV of: whole pages."""
        return self.verified_length(tokens) // self.kv.layout.page_size * self.kv.layout.page_size

    def close(self) -> None:
        """Gives the KV back, but for what sequences share. Idempotent."""
        with self.lock:
            self.kv.close()

    def __enter__(self) -> KVPrefix:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
