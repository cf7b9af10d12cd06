"""A prefix: tokens that were prefilled, with their KV in the store and no memory on any device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cpu_kv import SequenceKV
from offload_rt.caches.rewind_points import RewindPoint
from offload_rt.caches.target_states import SavedStates
from offload_rt.engine.shared_tokens import SharedTokens
from offload_rt.model.runner import CausalModel
from offload_rt.text.tokenize import common_beginning


def usable_length(points: Sequence[int] | None, length: int) -> int:
    """Returns the length at most `length` from which a sequence can go on.

    Args:
        points: lengths that it can return to; None: it can to any.
    """
    return length if points is None else max((point for point in points if point <= length), default=0)


def usable_tokens(
    points: Sequence[int] | None, verified: int, tokens: Sequence[int], prompt: Sequence[int]
) -> int:
    """Returns with how many of `tokens` a sequence of `prompt` may begin: those with KV, and one more.

    Args:
        points: see `usable_length`.
        verified: number of tokens with KV.
    """
    if isinstance(tokens, SharedTokens) and isinstance(prompt, SharedTokens):
        common = tokens.common_beginning(prompt)
    else:
        common = common_beginning(tokens, prompt)
    usable = usable_length(points, min(verified, max(0, common - 1)))
    return min(common, usable + 1) if usable or points is None else 0


@dataclass(frozen=True, eq=False)
class KVPrefix:
    """Tokens with their KV, which any number of sequences may begin with; they share its pages.

    Attributes:
        tokens: token IDs.
        kv: KV of the first ones, of all but the last one as a rule.
        points: lengths that a sequence can return to, in host memory.
        target: the runner that computed the KV.
        lock: the engine's, which is held while the KV is given back.
        states: of the target's newest tokens, for a draft head; None: there are none.
    """

    tokens: Sequence[int]
    kv: SequenceKV
    points: list[RewindPoint]
    target: CausalModel
    lock: threading.RLock
    states: SavedStates | None = None

    def begins(self, tokens: Sequence[int], target: CausalModel) -> int:
        """Returns with how many tokens of the prefix a sequence of `target` may begin."""
        usable = usable_tokens(self._lengths, self.kv.length, self.tokens, tokens)
        return usable if target is self.target else 0

    def verified_length(self, tokens: int) -> int:
        """Returns how many of the first `tokens` tokens have KV in a sequence of them: all but the last.

        With local layers, as many as the newest of `points` among them has.
        """
        return usable_length(self._lengths, min(self.kv.length, max(0, tokens - 1)))

    @property
    def _lengths(self) -> list[int] | None:
        """Lengths that a sequence can return to; None: to any."""
        return [point.length for point in self.points] if self.target.kinds.local else None

    def without_unread(self) -> KVPrefix:
        """Returns it without the tokens that have no KV, but for one: what was read of a prompt by now."""
        return replace(self, tokens=self.tokens[: self.kv.length + 1])

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
