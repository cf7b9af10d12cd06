"""What the machine has."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMITS = (
    # limit, what is used of it: version 2, version 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_memory() -> int:
    """Bytes of host memory that may still be taken: what is free, or what a container leaves of it."""
    available = int(psutil.virtual_memory().available)
    for limit, used in _CGROUP_LIMITS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        available = min(available, max(0, left))
    return available
