"""A folder of saved contexts as files: sessions that a user named, and a cache of prefixes that were read.

Several processes may use a folder. Files are renamed into it when they are whole, and one that disappears
between listing and opening is skipped. Nothing here needs torch, which takes seconds to import.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload_rt.engine.context_files import ContextFile, CorruptContext
from offload_rt.errors import UsageError
from offload_rt.system.files import remove_partials
from offload_rt.system.memory import cache_folder

SUFFIX = ".safetensors"
PREFIX = ".prefix-"
"""How the names of cached prefixes begin; no session's name begins with a dot."""
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
        last_used: when it was used last, in seconds since 1970.
    """

    name: str
    path: Path
    tokens: int | None
    model: str
    nbytes: int
    last_used: float

    @property
    def cached(self) -> bool:
        """It is a cached prefix, no named session."""
        return self.name.startswith(PREFIX)


class SessionFiles:
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

    def create(self) -> None:
        """Creates the folder, where there is none. Raises UsageError where that fails."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"session folder {self.folder}: cannot be created ({error.strerror}); name another one"
            ) from None

    def _make_room(self, size: int) -> bool:
        """Removes the least recently used prefixes until there is room for another one.

        Args:
            size: its bytes.

        Returns:
            False: the limit is below its size, and nothing was removed.
        """
        cached = sorted(
            (entry for entry in self.entries() if entry.cached), key=lambda entry: entry.last_used
        )
        used, limit = sum(entry.nbytes for entry in cached), self._limit
        if limit is None:
            existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
            limit = int(SHARE * (shutil.disk_usage(existing).free + used))
        if size > limit:
            return False
        for entry in cached:
            if used + size <= limit:
                break
            discard(entry.path)
            used -= entry.nbytes
        return True

    def entries(self) -> list[Entry]:
        """Returns what is in the folder, the most recently used first."""
        entries = []
        for path in self._files():
            with suppress(*GONE):
                facts, name = path.stat(), path.name.removesuffix(SUFFIX)
                try:
                    with ContextFile(path) as saved:
                        about: tuple[int | None, str] = len(saved.tokens), saved.model
                except CorruptContext:
                    about = None, "corrupt"
                entries.append(Entry(name, path, *about, facts.st_size, facts.st_mtime))
        return sorted(entries, key=lambda entry: -entry.last_used)

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
                f"session {name}: cannot be removed ({error.strerror}); {self.listing()}"
            ) from None

    def listing(self) -> str:
        """Returns the end of a sentence that names the sessions of the folder."""
        return f"there are: {', '.join(entry.name for entry in self.entries() if not entry.cached) or 'none'}"

    def clear(self) -> int:
        """Removes all cached prefixes; returns the number of those that were there and could be removed."""
        remove_partials(self.folder)
        return sum(discard(path) for path in self._files() if path.name.startswith(PREFIX))


def discard(path: Path) -> bool:
    """Removes a file; returns False where it is gone, or may not be removed."""
    with suppress(OSError):
        path.unlink()
        return True
    return False


def touch(path: Path) -> None:
    """Notes that a file was used."""
    with suppress(*GONE):
        os.utime(path)
