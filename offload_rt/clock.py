"""The one clock that the runtime reads, so that a test may replace it in one place."""

from __future__ import annotations

import time

now = time.perf_counter
"""Returns seconds since an arbitrary moment; never goes back."""
