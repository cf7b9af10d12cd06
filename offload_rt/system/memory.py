"""Available host memory, and the folder for files that can be made again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import psutil

CACHE_FOLDER = "OFFLOAD_RT_CACHE"

_CGROUP_FILES = (  # limit and usage, version 2 and version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Returns how many bytes of host memory are available, to a container within its limit."""
    available = int(psutil.virtual_memory().available)
    return min([available, *(max(0, limit - used) for limit, used in _container_limits())])


def total_memory() -> int:
    """Returns the bytes of host memory, of a container its limit."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _container_limits())])


def _container_limits() -> Iterator[tuple[int, int]]:
    """Yields limits and their usage, in bytes."""
    for limit, used in _CGROUP_FILES:
        try:
            yield int(Path(limit).read_text()), int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue


def cache_folder() -> Path:
    """Returns the folder for files that can be made again, and creates it.

    It is `$OFFLOAD_RT_CACHE`, by default `offload_rt` in the user's cache folder. Raises OSError where it
    cannot be created.
    """
    value = os.environ.get(CACHE_FOLDER)
    folder = Path(value) if value else platformdirs.user_cache_path("offload_rt", appauthor=False)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
