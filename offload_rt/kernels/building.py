"""Builds the native library in the cache folder, by a process of its own: `building.py COMPILER PATH FLAG…`.

That process outlives the one that waits for it. It uses the standard library alone, so that it starts at
once.

A library ends with a digest of what comes before: loading one that was cut short, by a power cut or a full
disk, would kill the process by SIGBUS.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

PATIENCE_S = 120.0
"""Seconds that a start waits for a build, which goes on afterwards."""

LOCK, BUILT = ".lock", ".built"
"""How the names of files of a build end: the one that it locks, and the compiler's output."""

_DIGEST = 32  # bytes of SHA-256


class StillBuilding(RuntimeError):
    """The library is not there yet, and a process goes on building it."""


def intact(path: Path) -> bool:
    """Returns whether a library is there, as a whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def build(compiler: str, path: Path, arguments: list[str], patience_s: float = PATIENCE_S) -> None:
    """Builds a library at `path` in another process, or waits for one that does so already.

    Args:
        arguments: of the compiler, but for the output.

    Raises:
        StillBuilding: it takes longer than `patience_s`; it will be there at a later start.
        RuntimeError: the compiler failed.
    """
    command = [sys.executable, str(Path(__file__)), compiler, str(path), *arguments]
    # An interrupt of this process, or its end, leaves the build alone.
    nowhere = subprocess.DEVNULL
    builder = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    try:
        status = builder.wait(patience_s)
    except subprocess.TimeoutExpired:
        raise StillBuilding(f"the native kernel takes longer than {patience_s:g} s to build") from None
    if status:
        raise RuntimeError(f"{compiler} failed with status {status}")


def build_here(compiler: str, path: Path, arguments: list[str]) -> int:
    """Builds a library at `path`, unless another process does so meanwhile; returns the compiler's status."""
    remove_abandoned(path.parent)
    lock, built = beside(path, LOCK), beside(path, BUILT)
    with _locked(lock) as locked:
        try:
            if intact(path):
                return 0
            command = [compiler, *arguments, "-o", str(built)]
            # The compiler inherits the lock: it may outlive this process, and still write then.
            status = subprocess.run(command, check=False, pass_fds=(locked.fileno(),)).returncode
            if status == 0:
                with built.open("ab") as library:
                    library.write(hashlib.sha256(built.read_bytes()).digest())
                    library.flush()
                    os.fsync(library.fileno())
                built.replace(path)
            return status
        finally:
            built.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


def _locked(lock: Path) -> BinaryIO:
    """Opens a file, new or not, and locks it where the file system can."""
    while True:
        file = lock.open("ab")
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        # Another process may have removed it while it had locked it.
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            return file
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Removes what killed builds have left in a folder; those that go on are locked, and stay."""
    for lock in folder.glob(f".*{LOCK}"):
        with suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.with_name(lock.name.removesuffix(LOCK) + BUILT).unlink(missing_ok=True)
            lock.unlink()


def beside(path: Path, ending: str) -> Path:
    """Returns the path of a file of the build of `path`."""
    return path.with_name(f".{path.name}{ending}")


if __name__ == "__main__":
    sys.exit(build_here(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
