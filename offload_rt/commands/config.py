"""`offload-rt config`: shows the user's settings, which are defaults of the command line's flags."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import fields

from offload_rt.config.settings import Settings, load_settings, settings_file

CACHE_FOLDER = "OFFLOAD_RT_CACHE"
DEFAULTS = {
    "model": "demo",
    "draft": "none",
    "device": "auto",
    "dtype": "auto",
    "quantize": "none",
    "folders": "none",
    "cache": "off",
    "cache_limit_gib": "a tenth of the free disk",
}
"""What holds where neither a flag nor the file says anything."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    config = commands.add_parser(
        "config",
        help="your settings: defaults of flags",
        description="Shows your settings. Each is the default of the flag of its name.",
        epilog='A settings file: model = "/models/Qwen3-8B", draft = "auto", folders = ["/models"], each on a'
        " line of its own.",
        allow_abbrev=False,
    )
    actions = config.add_subparsers(dest="action", metavar="show|path", required=True)
    show = actions.add_parser("show", help="the settings, and where each comes from", allow_abbrev=False)
    show.set_defaults(run=lambda arguments: _show())
    path = actions.add_parser("path", help="where the settings file is", allow_abbrev=False)
    path.set_defaults(run=lambda arguments: _path())


def _path() -> int:
    print(settings_file()[0])
    return 0


def _show() -> int:
    path, origin = settings_file()
    note = "" if os.path.exists(path) else "; there is no such file"
    rows = [("file", str(path), origin + note), *_rows(load_settings())]
    wide, wider = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, source in rows:
        print(f"{name:{wide}}  {value:{wider}}  {source}")
    return 0


def _rows(settings: Settings) -> Iterator[tuple[str, str, str]]:
    """Yields each setting with its value and where that comes from."""
    for name in (field.name for field in fields(settings)):
        value = getattr(settings, name)
        if value is not None:
            listed = value if isinstance(value, tuple) else (value,)
            yield name, ", ".join(map(str, listed)), "file"
        else:
            yield name, DEFAULTS[name], "default"
