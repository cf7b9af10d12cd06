"""Saving contexts to a folder of sessions and cached prefixes, and loading them; see `session_files`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from offload_rt.api.context import ROOM, Context
from offload_rt.api.frontend import Frontend
from offload_rt.api.session_files import GONE, PREFIX, SUFFIX, SessionFiles, discard, touch
from offload_rt.engine.context_files import CorruptContext, Messages
from offload_rt.engine.prefix import KVPrefix
from offload_rt.engine.saved_context import SavedContext, save_prefix
from offload_rt.errors import UsageError
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.model.runner import CausalModel
from offload_rt.system.digests import digest
from offload_rt.system.files import remove_partials
from offload_rt.text.tokenize import common_beginning

LEAST_TOKENS = 1024
"""Tokens that are worth a file in the cache, or loading one: fewer are read about as fast."""


class SessionFolder(SessionFiles):
    """Named sessions and cached prefixes, to save contexts to and load them from."""

    def save(self, context: Context, name: str) -> None:
        """Saves a context as a session, in the place of one of that name; for errors see `Context.save`."""
        with context.snapshot() as prefix:
            self._write(context.llm, prefix, self.path(name), context.messages, context.date)

    def _write(
        self,
        llm: Frontend,
        prefix: KVPrefix,
        path: Path,
        messages: Messages = None,
        date: datetime | None = None,
    ) -> None:
        self.create()
        remove_partials(self.folder)
        ours, progress = llm.fingerprint(prefix.target), llm.engine.on_progress
        save_prefix(path, prefix, ours, messages, progress, date=date)

    def load(self, llm: Frontend, name: str, room: int = ROOM) -> Context:
        """Loads a session as it was saved; for errors see `LLM.load`."""
        path = self.path(name)
        with llm.engine.lock, SavedContext(path) as saved:
            context, _ = Context.load(llm, saved, room)
        touch(path)
        return context

    def longest(self, llm: Frontend, tokens: Sequence[int]) -> tuple[Path, int] | None:
        """Finds the file with the longest common beginning with `tokens`, of those that the model can use.

        Returns:
            The file, and the number of tokens; None: no file begins with the first of them.
        """
        beginnings = self._beginnings(_fingerprint(llm, tokens), tokens)
        return beginnings[0] if beginnings else None

    def _beginnings(self, ours: Fingerprint, tokens: Sequence[int]) -> list[tuple[Path, int]]:
        """Returns files with the length of their common beginning with `tokens`, the longest first."""
        tokens, beginnings = list(tokens), list[tuple[Path, int]]()
        for path in self._files():
            with suppress(*GONE), SavedContext(path) as saved:
                if ours.difference(saved.fingerprint) is None:
                    beginnings.append((path, saved.begins(tokens)))
        return sorted(
            (beginning for beginning in beginnings if beginning[1]), key=lambda beginning: -beginning[1]
        )

    def read(self, llm: Frontend, path: Path, target: CausalModel, tokens: int) -> KVPrefix | None:
        """Loads the first tokens of a file that `longest` found.

        Returns:
            None: the file is gone or corrupt, or another one, by another model, has taken its place.

        Args:
            target: the runner for the sequence that will begin with them.
        """
        with suppress(*GONE), llm.engine.lock, SavedContext(path) as saved:
            saved.check(llm.fingerprint(target))
            prefix = saved.load(llm.engine, target, tokens, llm.engine.on_progress)
            touch(path)
            return prefix
        return None

    def open(
        self, llm: Frontend, tokens: Sequence[int], room: int, name: str | None = None, *, cache: bool = True
    ) -> tuple[Context, int]:
        """Opens a context of these tokens; reads those that no file has.

        Args:
            name: a session, which may not exist yet; a model that cannot go on from it is refused.
            cache: look for the longest beginning in all other files too.

        Returns:
            The context, and the number of tokens that were there.
        """
        tokens, files = llm.prompt_ids(tokens), list[tuple[Path, int]]()
        ours, own = _fingerprint(llm, tokens), None if name is None else self.path(name)
        if own is not None and own.exists():
            with SavedContext(own) as saved:
                saved.check(ours)
                files = [(own, saved.begins(tokens))]
        if cache:
            least = max(LEAST_TOKENS, *(common + 1 for _, common in files), 0)
            files = [
                beginning for beginning in self._beginnings(ours, tokens) if beginning[1] >= least
            ] + files
        for path, _ in files:
            try:
                with llm.engine.lock, SavedContext(path) as saved:
                    opened = Context.load(llm, saved, room, tokens)
            except UsageError as error:
                if isinstance(error, CorruptContext) and path.name.startswith(PREFIX):
                    discard(path)
                elif path == own and path.exists():
                    raise
            else:
                touch(path)
                return opened
        with llm.engine.lock:
            return Context.open(llm, tokens, room), 0

    def keep_unfinished(
        self,
        llm: Frontend,
        name: str | None = None,
        messages: Messages = None,
        date: datetime | None = None,
        *,
        cache: bool = True,
    ) -> int:
        """Stores what `open` had read when it failed: as a session, or in the cache.

        Args:
            name: a session, where it does not lose a token by that; None: in the cache.
            messages, date: of the session, see `Context`.
            cache: as it was given to `open`; False: what is no session is not stored.

        Returns:
            Number of tokens that are stored.
        """
        prefix = llm.engine.take_unfinished()
        if prefix is None:
            return 0
        with prefix:
            path = None if name is None else self.path(name)
            if path is not None and path.exists():
                with SavedContext(path) as saved:
                    if common_beginning(saved.tokens, prefix.tokens) < len(saved.tokens):
                        path = None
            if path is not None:
                self._write(llm, prefix, path, messages, date)
            elif not cache or self.keep_prefix(llm, prefix) is None:
                return 0
            return len(prefix.tokens)

    def keep(self, context: Context) -> Path | None:
        """Stores a context in the cache, if that is worth it; see `keep_prefix`."""
        with context.snapshot() as prefix:
            return self.keep_prefix(context.llm, prefix)

    def keep_prefix(self, llm: Frontend, prefix: KVPrefix) -> Path | None:
        """Stores a prefix in the cache, if that is worth it; cached prefixes that it extends are removed.

        Returns:
            The file; None: it is too short, too large for the cache, or nearly all of it is there already.
        """
        tokens, ours = list(prefix.tokens), llm.fingerprint(prefix.target)
        beginnings = self._beginnings(ours, tokens)
        if len(tokens) - (beginnings[0][1] if beginnings else 0) < LEAST_TOKENS:
            return None
        size = len(tokens) * llm.engine.store.layout.stored_token_bytes
        if not self._make_room(size):
            return None
        path = self.folder / f"{PREFIX}{digest(repr((tokens, ours)), digits=16)}{SUFFIX}"
        self._write(llm, prefix, path)
        for entry in self.entries():
            if entry.cached and (entry.path, entry.tokens) in beginnings:
                discard(entry.path)
        return path


def _fingerprint(llm: Frontend, tokens: Sequence[int]) -> Fingerprint:
    """Returns the fingerprint of the model as it reads a sequence of these tokens."""
    return llm.fingerprint(llm.engine.target.for_length(len(tokens), 0))
