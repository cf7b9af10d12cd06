"""A folder of saved contexts: sessions that a user named, and a cache of prefixes that were read.

Several processes may use a folder. Files are renamed into it when they are whole, and one that disappears
between listing and opening is skipped.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from offload_rt.context import ROOM, Context, Host
from offload_rt.engine.prefix import KVPrefix
from offload_rt.errors import UsageError
from offload_rt.files import remove_partials
from offload_rt.machine.memory import cache_folder
from offload_rt.model.fingerprint import Fingerprint
from offload_rt.model.runner import CausalModel
from offload_rt.saved_context import CorruptContext, Messages, SavedContext, save_prefix

SUFFIX = ".safetensors"
PREFIX = ".prefix-"
"""How the names of cached prefixes begin; no session's name begins with a dot."""
LEAST_TOKENS = 1024
"""Tokens that are worth a file in the cache, or loading one: fewer are read about as fast."""
SHARE = 0.1
"""Of the disk's free space, the cache included: some books' KV on a desktop's disk, and never in the way."""
LONGEST_NAME = 100
GONE = (UsageError, OSError)
"""Errors of a file that another process has removed, or that is of no use."""


@dataclass(frozen=True)
class Entry:
    """A file of a session folder.

    Attributes:
        name: of the session, or of the cached prefix.
        tokens: how many it has; None: the file is corrupt.
        model: name of the model that read them.
        nbytes: size of the file.
        used: when it was used last, in seconds since 1970.
    """

    name: str
    path: Path
    tokens: int | None
    model: str
    nbytes: int
    used: float

    @property
    def cached(self) -> bool:
        """It is a cached prefix, no named session."""
        return self.name.startswith(PREFIX)


class SessionFolder:
    """Named sessions, `NAME.safetensors`, and cached prefixes.

    Args:
        folder: is created when something is saved; None: `sessions` in the folder for files that can be made
            again.
        limit_bytes: most bytes of cached prefixes; the least recently used ones go first. None: a tenth of
            the disk's free space. Named sessions do not count and stay.
    """

    def __init__(self, folder: Path | None = None, limit_bytes: int | None = None) -> None:
        self.folder = cache_folder() / "sessions" if folder is None else folder
        self._limit = limit_bytes

    def path(self, name: str) -> Path:
        """Returns the file of a session. Raises UsageError for a name that is not allowed."""
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or len(name) > LONGEST_NAME:
            raise UsageError(
                f"session {name[:LONGEST_NAME]!r}: a name has up to {LONGEST_NAME} letters, digits, '.', '_'"
                " and '-', and begins with no dot"
            )
        return self.folder / f"{name}{SUFFIX}"

    def save(self, context: Context, name: str) -> None:
        """Saves a context as a session, in the place of one of that name; for errors see `Context.save`."""
        with context.snapshot() as prefix:
            self._write(context.host, prefix, self.path(name), context.messages, context.date)

    def create(self) -> None:
        """Creates the folder, where there is none. Raises UsageError where that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"session folder {self.folder}: cannot be created ({error.strerror}); name another one"
            ) from None

    def _write(
        self,
        llm: Host,
        prefix: KVPrefix,
        path: Path,
        messages: Messages = None,
        date: datetime | None = None,
    ) -> None:
        self.create()
        remove_partials(self.folder)
        ours, progress = llm.fingerprint(prefix.target), llm.engine.on_progress
        save_prefix(path, prefix, ours, messages, progress, date=date)

    def load(self, llm: Host, name: str, room: int = ROOM) -> Context:
        """Loads a session as it was saved; for errors see `LLM.load`."""
        path = self.path(name)
        with llm.engine.lock, SavedContext(path) as saved:
            context, _ = Context.load(llm, saved, room)
        _touch(path)
        return context

    def longest(self, llm: Host, tokens: Sequence[int]) -> tuple[Path, int] | None:
        """Finds the file with the longest common beginning with `tokens`, of those that the model can use.

        Returns:
            The file, and the number of tokens; None: no file begins with the first of them.
        """
        found = self._beginnings(_fingerprint(llm, tokens), tokens)
        return found[0] if found else None

    def _beginnings(self, ours: Fingerprint, tokens: Sequence[int]) -> list[tuple[Path, int]]:
        """Returns files with the length of their common beginning with `tokens`, the longest first."""
        tokens, found = list(tokens), list[tuple[Path, int]]()
        for path in self._files():
            with suppress(*GONE), SavedContext(path) as saved:
                if ours.difference(saved.fingerprint) is None:
                    found.append((path, saved.begins(tokens)))
        return sorted((one for one in found if one[1]), key=lambda one: -one[1])

    def read(self, llm: Host, path: Path, target: CausalModel, tokens: int) -> KVPrefix | None:
        """Loads the first tokens of a file that `longest` found.

        Returns:
            None: the file is gone or corrupt, or another one, by another model, has taken its place.

        Args:
            target: the runner for the sequence that will begin with them.
        """
        with suppress(*GONE), llm.engine.lock, SavedContext(path) as saved:
            saved.check(llm.fingerprint(target))
            prefix = saved.load(llm.engine, target, tokens, llm.engine.on_progress)
            _touch(path)
            return prefix
        return None

    def open(
        self, llm: Host, tokens: Sequence[int], room: int, name: str | None = None, *, cache: bool = True
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
            least = max(LEAST_TOKENS, *(there + 1 for _, there in files), 0)
            files = [one for one in self._beginnings(ours, tokens) if one[1] >= least] + files
        for path, _ in files:
            try:
                with llm.engine.lock, SavedContext(path) as saved:
                    opened = Context.load(llm, saved, room, tokens)
            except UsageError as error:
                if isinstance(error, CorruptContext) and path.name.startswith(PREFIX):
                    _discard(path)
                elif path == own and path.exists():
                    raise
            else:
                _touch(path)
                return opened
        with llm.engine.lock:
            return Context.open(llm, tokens, room), 0

    def keep(self, context: Context) -> Path | None:
        """Stores a context in the cache, if that is worth it; see `keep_prefix`."""
        with context.snapshot() as prefix:
            return self.keep_prefix(context.host, prefix)

    def keep_prefix(self, llm: Host, prefix: KVPrefix) -> Path | None:
        """Stores a prefix in the cache, if that is worth it; cached prefixes that it extends are removed.

        Returns:
            The file; None: it is too short, too large for the cache, or nearly all of it is there already.
        """
        tokens, ours = prefix.tokens, llm.fingerprint(prefix.target)
        beginnings = self._beginnings(ours, tokens)
        if len(tokens) - (beginnings[0][1] if beginnings else 0) < LEAST_TOKENS:
            return None
        size = len(tokens) * llm.engine.store.layout.stored_token_bytes
        if not self._make_room(size):
            return None
        digest = hashlib.sha256(repr((tokens, ours)).encode()).hexdigest()[:16]
        path = self.folder / f"{PREFIX}{digest}{SUFFIX}"
        self._write(llm, prefix, path)
        for entry in self.entries():
            if entry.cached and (entry.path, entry.tokens) in beginnings:
                _discard(entry.path)
        return path

    def _make_room(self, size: int) -> bool:
        """Removes the least recently used prefixes until there is room for another one.

        Args:
            size: its bytes.

        Returns:
            False: the limit is below its size, and nothing was removed.
        """
        cached = sorted((one for one in self.entries() if one.cached), key=lambda one: one.used)
        used, limit = sum(entry.nbytes for entry in cached), self._limit
        if limit is None:
            there = next(one for one in (self.folder, *self.folder.parents) if one.exists())
            limit = int(SHARE * (shutil.disk_usage(there).free + used))
        if size > limit:
            return False
        for entry in cached:
            if used + size <= limit:
                break
            _discard(entry.path)
            used -= entry.nbytes
        return True

    def entries(self) -> list[Entry]:
        """Returns what is in the folder, the most recently used first."""
        found = []
        for path in self._files():
            with suppress(*GONE):
                facts, name = path.stat(), path.name.removesuffix(SUFFIX)
                try:
                    with SavedContext(path) as saved:
                        about: tuple[int | None, str] = len(saved.tokens), saved.model
                except CorruptContext:
                    about = None, "corrupt"
                found.append(Entry(name, path, *about, facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob(f"*{SUFFIX}"))

    def remove(self, name: str) -> None:
        """Removes a session or a cached prefix. Raises UsageError where there is none of that name."""
        path = (
            self.folder / f"{name}{SUFFIX}"
            if name.startswith(PREFIX) and "/" not in name
            else self.path(name)
        )
        try:
            path.unlink()
        except OSError as error:
            raise UsageError(
                f"session {name}: cannot be removed ({error.strerror}); {self.known()}"
            ) from None

    def known(self) -> str:
        """Returns the end of a sentence that names the sessions of the folder."""
        return f"there are: {', '.join(one.name for one in self.entries() if not one.cached) or 'none'}"

    def clear(self) -> int:
        """Removes all cached prefixes; returns the number of those that were there and could be removed."""
        remove_partials(self.folder)
        return sum(_discard(path) for path in self._files() if path.name.startswith(PREFIX))


def _fingerprint(llm: Host, tokens: Sequence[int]) -> Fingerprint:
    """Returns the fingerprint of the model as it reads a sequence of these tokens."""
    return llm.fingerprint(llm.engine.target.for_length(len(tokens), 0))


def _discard(path: Path) -> bool:
    """Removes a file; returns False where it is gone, or may not be removed."""
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _touch(path: Path) -> None:
    """Notes that a file was used."""
    with suppress(*GONE):
        os.utime(path)
