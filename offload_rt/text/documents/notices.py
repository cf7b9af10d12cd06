"""Names in notices."""

from __future__ import annotations

from collections.abc import Sequence

MOST_LISTED = 50
"""Names that a notice lists."""


def listed(names: Sequence[str]) -> str:
    """Returns names for a notice, with the number of those beyond `MOST_LISTED`."""
    shown = ", ".join(names[:MOST_LISTED])
    hidden = len(names) - MOST_LISTED
    return f"{shown} and {hidden:,} more" if hidden > 0 else shown
