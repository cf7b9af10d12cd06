"""Reads a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from offload_rt.errors import UsageError, first_line


def read_tables(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises UsageError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except RecursionError:
        raise UsageError(f"{path}: its values are nested too deeply; write fewer brackets") from None
    except ValueError as error:  # a TOMLDecodeError, or an integer of too many digits
        raise UsageError(f"{path}: not valid TOML: {first_line(error)}") from None
