"""Output files: checked before the work, written as a whole after it."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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
