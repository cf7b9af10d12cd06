"""What the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CACHE_FOLDER = "OFFLOAD_RT_CACHE"

_CGROUP_LIMITS = (
    # limit, what is used of it: version 2, version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes of host memory that may still be taken: what is free, or what a container leaves of it."""
    available = int(psutil.virtual_memory().available)
    return min([available, *(max(0, limit - used) for limit, used in _container_limits())])


def memory_limit() -> int | None:
    """Bytes of host memory that a container may have at all; None where nothing less than all of it."""
    total = int(psutil.virtual_memory().total)
    return min((limit for limit, _ in _container_limits() if limit < total), default=None)


def _container_limits() -> Iterator[tuple[int, int]]:
    """Limits and what is used of them, in bytes."""
    for limit, used in _CGROUP_LIMITS:
        try:
            yield int(Path(limit).read_text()), int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue


def cache_folder() -> Path:
    """Where files are kept that this machine can make again; created on demand.

    `$OFFLOAD_RT_CACHE`, or `offload_rt` in `$XDG_CACHE_HOME` or in `~/.cache`. Raises OSError where there
    can be no such folder, RuntimeError where nobody says where home is.
    """
    given = os.environ.get(CACHE_FOLDER)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(given) if given else home / "offload_rt"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
