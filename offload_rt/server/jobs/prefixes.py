"""Prefixes that a server keeps: in memory as far as its limit goes, and on disk behind that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload_rt.api.llm import LLM
from offload_rt.api.sessions import LEAST_TOKENS, SessionFolder
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.shared_tokens import SharedTokens, TokenPages
from offload_rt.errors import UsageError, first_line
from offload_rt.model.runner import CausalModel


class PrefixPool:
    """Prefilled tokens, with their KV, the least recently used first; only the worker's thread uses it.

    Prefixes that begin alike share the pages of their common beginning, of KV and of token IDs, so that each
    costs the memory of its own end.

    Args:
        limit_bytes: most bytes of KV in the store; the least recently used prefixes go first.
        disk: takes the prefixes that memory has no room for, and all others at the end; None: they are lost.
        on_notice: called with a line where the disk does not take one, which is then lost.
    """

    def __init__(
        self,
        llm: LLM,
        limit_bytes: int,
        disk: SessionFolder | None = None,
        on_notice: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._llm = llm
        self._limit = limit_bytes
        self._disk = disk
        self._on_notice = on_notice
        self._prefixes: list[KVPrefix] = []
        self._pages = TokenPages()

    def __len__(self) -> int:
        return len(self._prefixes)

    def prepare(self, tokens: Sequence[int], new_tokens: int) -> tuple[KVPrefix | None, int]:
        """Returns the prefix with the longest common beginning, and the length of that, once there is room.

        Other prefixes are given up until memory has room for the sequence.

        Args:
            new_tokens: that the sequence is to have behind `tokens`.

        Raises:
            UsageError: there is no room, even without all other prefixes.
        """
        target = self._llm.engine.target.for_length(len(tokens), new_tokens)
        shared = self._pages.share(tokens)
        best, length = self._longest(shared, target)
        if self._disk is not None:
            file = self._disk.longest(self._llm, tokens)
            if file is not None and file[1] >= length + LEAST_TOKENS:
                self._make_room(len(tokens), new_tokens, None, 0)
                loaded = self._disk.read(self._llm, file[0], target, file[1])
                if loaded is not None:
                    best = replace(loaded, tokens=self._pages.share(loaded.tokens))
                    length = best.begins(shared, target)
                    self._prefixes.append(best)
        if best is not None:
            self._prefixes.remove(best)
            self._prefixes.append(best)  # the one that was used last
        self._make_room(len(tokens), new_tokens, best, length)
        return best, length

    def begins(self, tokens: Sequence[int], new_tokens: int) -> int:
        """Returns with how many tokens of a prefix in memory such a sequence may begin."""
        target = self._llm.engine.target.for_length(len(tokens), new_tokens)
        return self._longest(self._pages.share(tokens), target)[1]

    def _longest(self, tokens: SharedTokens, target: CausalModel) -> tuple[KVPrefix | None, int]:
        """Returns the prefix in memory with the longest common beginning, and the length of that."""
        best, length = None, 0
        for prefix in self._prefixes:
            common = prefix.begins(tokens, target)
            if common > length:
                best, length = prefix, common
        return best, length

    def add(self, prefix: KVPrefix) -> None:
        """Keeps a prefix; one that it begins with is not needed any more."""
        prefix = replace(prefix, tokens=self._pages.share(prefix.tokens))
        for other in list(self._prefixes):
            if prefix.begins(other.tokens, other.target) == len(other.tokens):
                self._prefixes.remove(other)
                other.close()
        self._prefixes.append(prefix)
        while self._llm.engine.store.used_bytes > self._limit and self._evict(keep=prefix):
            pass

    def make_room(self, tokens: int, new_tokens: int) -> None:
        """Gives prefixes up until memory has room for a sequence that shares none of them."""
        self._make_room(tokens, new_tokens, None, 0)

    def _make_room(self, tokens: int, new_tokens: int, prefix: KVPrefix | None, length: int) -> None:
        """Gives other prefixes up until memory has room for a sequence that begins with `length` of one."""
        shared_tokens = 0 if prefix is None else prefix.shared_tokens(length)
        while True:
            try:
                return self._llm.engine.check_room([(tokens, new_tokens)], shared_tokens)
            except UsageError:
                if not self._evict(prefix):
                    raise

    def _evict(self, keep: KVPrefix | None = None) -> bool:
        """Gives up the prefix that was not used for longest; returns whether there was one."""
        victim = next((prefix for prefix in self._prefixes if prefix is not keep), None)
        if victim is None:
            return False
        self._prefixes.remove(victim)
        self._give_up(victim)
        return True

    def _give_up(self, prefix: KVPrefix) -> None:
        try:
            if self._disk is not None:
                self._disk.keep_prefix(self._llm, prefix)
        except (UsageError, OSError) as error:  # a full disk fails no request
            self._on_notice(f"a context is not kept on disk: {first_line(error)}")
        finally:
            prefix.close()

    def close(self) -> None:
        """Gives all prefixes up, the newest first, which the others may be beginnings of. Idempotent."""
        while self._prefixes:
            self._give_up(self._prefixes.pop())
