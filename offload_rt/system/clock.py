"""The clocks that the runtime reads, so that a test may replace it in one place."""

from __future__ import annotations

import time
from datetime import datetime

now = time.perf_counter
"""Returns seconds since an arbitrary moment; never goes back."""


def date() -> datetime:
    """Returns the local date and time, in whole seconds."""
    return datetime.now().replace(microsecond=0)
