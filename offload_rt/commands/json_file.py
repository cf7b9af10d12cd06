"""Results as JSON files: `--json FILE`."""

from __future__ import annotations

import json
from pathlib import Path

from offload_rt.errors import UsageError
from offload_rt.files import write_whole


def write_json(path: Path, report: dict[str, object]) -> None:
    """Writes the file as a whole or not at all."""
    try:
        write_whole(path, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"--json {path}: cannot be written ({error.strerror})") from None
