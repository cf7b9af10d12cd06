"""Results as JSON files: `--json FILE`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from offload_rt.errors import UsageError


def check_writable(path: Path) -> None:
    """Raises UsageError where `path` cannot become a file."""
    if path.is_dir():
        raise UsageError(f"--json {path}: is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--json {path}: its folder does not exist; create it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"--json {path}: may not be written; name a file elsewhere")


def write_json(path: Path, report: dict[str, object]) -> None:
    """Writes the file as a whole or not at all."""
    text = json.dumps(report, indent=2) + "\n"
    # A device or a pipe cannot be replaced, and a link stays a link.
    target = path.resolve()
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(target)
        except OSError:
            target.write_text(text, encoding="utf-8")  # a file in a folder that is not ours to write
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"--json {path}: cannot be written ({error.strerror})") from None
