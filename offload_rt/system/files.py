"""Output files: checked before the work, written as a whole after it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from offload_rt.errors import UsageError

_WRITTEN_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, errno.ENAMETOOLONG)
"""Errors of replacing a file. The file itself may be writable: in another user's folder, or as a mount."""


def check_writable(option: str, path: Path) -> None:
    """Raises UsageError, which names the command line's `option`, where `path` cannot be written."""
    if path.is_dir():
        raise UsageError(f"{option} {path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: its folder does not exist; create it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: may not be written; name a file elsewhere")


def check_new(option: str, path: Path) -> None:
    """Raises UsageError, which names the `option`, where `path` exists or cannot be written."""
    check_writable(option, path)
    if path.exists():
        raise UsageError(f"{option} {path}: exists; name another file, or remove it")


def write_json(option: str, path: Path, report: Mapping[str, object], indent: int = 2) -> None:
    """Writes a report as a whole or not at all.

    Raises:
        UsageError: it cannot be written; names the command line's `option`.
    """
    try:
        write_whole(path, json.dumps(report, indent=indent) + "\n")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written ({error.strerror})") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; the new file replaces `path` unless an exception is raised."""
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


PARTIAL = ".partial"
"""How the names of files end that `synced` writes to."""


@contextmanager
def synced(path: Path) -> Iterator[BinaryIO]:
    """Yields a new file; once it is on the disk it replaces `path`, unless an exception is raised.

    It lies beside `path` and is locked as long as its writer lives; `remove_partials` removes those of killed
    writers.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        with locked(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems cannot
            os.fsync(folder)
    finally:
        os.close(folder)


def locked(path: Path, mode: Literal["xb", "ab"]) -> BinaryIO:
    """Opens a file and locks it where the file system can; waits as long as another process has locked it.

    Args:
        mode: `xb`: it must be new; `ab`: it need not be.
    """
    while True:
        file = path.open(mode)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have removed it before it was locked, or while it had locked it.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def remove_partials(folder: Path) -> None:
    """Removes what killed writers have left in a folder; files that are still written stay."""
    for partial in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError), partial.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            partial.unlink()


def write_whole(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all; links, devices and pipes are kept.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))  # resolve raises RuntimeError for a link to itself
    try:
        with replacing(target) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        if error.errno not in _WRITTEN_IN_PLACE:
            raise
        target.write_text(text, encoding="utf-8")
