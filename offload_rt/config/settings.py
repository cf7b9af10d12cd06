"""The user's settings: defaults of the command line's flags, in a TOML file in the user's config folder."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from offload_rt.config.schema import AUTO, NO_DRAFT
from offload_rt.config.toml import read_tables
from offload_rt.config.validation import InvalidValue, nearest, require
from offload_rt.errors import UsageError

VARIABLE = "OFFLOAD_RT_CONFIG"
"""Environment variable that names another file."""
CACHE_ON, CACHE_OFF = "on", "off"
DEVICES = re.compile(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*")
AUTO_DTYPE = "auto"
DTYPES = (AUTO_DTYPE, "float32", "bfloat16", "float16")
NO_QUANTIZATION = "none"
QUANTIZATIONS = (NO_QUANTIZATION, "nf4", "int8")


@dataclass(frozen=True)
class Settings:
    """Values of the settings file; None: the program's own default.

    Relative folders are relative to the folder of the file; `~` is the user's home.
    """

    model: str | None = None  # target: a folder or a hub ID
    draft: str | None = None  # of that target: a folder, a hub ID, auto or none
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    folders: tuple[Path, ...] | None = None  # that hold models
    cache: Path | str | None = None  # folder of saved contexts, or on or off
    cache_limit_gib: float | None = None  # size that the folder may have


class SettingDefault:
    """The default of a flag: a setting of the user's, or `otherwise` where the file does not have it."""

    def __init__(self, key: str, otherwise: object = None) -> None:
        self.key = key
        self.otherwise = otherwise


def settings_file() -> tuple[Path, str]:
    """Returns the path of the settings file, which may be missing, and where the path comes from."""
    if path := os.environ.get(VARIABLE):
        return Path(path), f"environment, {VARIABLE}"
    import platformdirs  # here, as a program's help need not wait for it

    folder = platformdirs.user_config_path("offload_rt", appauthor=False)
    return folder / "settings.toml", "default"


def load_settings() -> Settings:
    """Reads the settings file; a missing one has no settings.

    Raises:
        UsageError: it cannot be read, or has an unknown key or a value that is not allowed.
    """
    path, _ = settings_file()
    stated = read_tables(path) if os.path.exists(path) else {}
    names = [key.name for key in fields(Settings)]
    for key in stated:
        if key not in names:
            raise UsageError(f"{path}: unknown key {key}{nearest(key, names)}")
    try:
        return Settings(**{key: _READERS[key](key, value, path.parent) for key, value in stated.items()})
    except InvalidValue as error:
        raise UsageError(f"{path}: {error}") from None


def fill_in(arguments: argparse.Namespace) -> None:
    """Replaces each `SettingDefault` of parsed arguments by its value; reads the file only for those.

    Raises:
        UsageError: see `load_settings`.
    """
    unset = {
        name: argument for name, argument in vars(arguments).items() if isinstance(argument, SettingDefault)
    }
    if not unset:
        return
    settings = load_settings()
    # A draft that is named goes with the settings' target; without one, with any that the user names.
    named_model = "model" in arguments and not isinstance(arguments.model, SettingDefault)
    unfit = settings.draft not in (None, AUTO, NO_DRAFT) and named_model == (settings.model is not None)
    for name, default in unset.items():
        value = getattr(settings, default.key)
        if default.key == "draft" and unfit:
            value = None
        setattr(arguments, name, default.otherwise if value is None else value)


# Readers of values: a key, its value, and the folder of the file.


def _text(key: str, value: object, folder: Path) -> str:
    require(isinstance(value, str) and bool(value), key, value, "must be a string, not empty")
    return os.path.expanduser(str(value))


def _one_of(allowed: Callable[[str], object], names: str) -> Callable[[str, object, Path], str]:
    def reader(key: str, value: object, folder: Path) -> str:
        require(isinstance(value, str) and bool(allowed(value)), key, value, f"must be {names}")
        return str(value)

    return reader


def _folder(key: str, value: object, folder: Path) -> Path:
    return folder / _text(key, value, folder)


def _folders(key: str, value: object, folder: Path) -> tuple[Path, ...]:
    listed = (
        value if isinstance(value, list) and all(isinstance(item, str) and item for item in value) else None
    )
    require(listed is not None, key, value, "must be a list of folders")
    return tuple(_folder(key, item, folder) for item in listed or ())


def _cache(key: str, value: object, folder: Path) -> Path | str:
    return str(value) if value in (CACHE_ON, CACHE_OFF) else _folder(key, value, folder)


def _gib(key: str, value: Any, folder: Path) -> float:
    # bool is a subclass of int, and `true` is no size.
    allowed = type(value) in (int, float) and 0 < value < float("inf")
    require(allowed, key, value, "must be a number of GiB above 0")
    return float(value)


_READERS: dict[str, Callable[[str, Any, Path], Any]] = {
    "model": _text,
    "draft": _text,
    "device": _one_of(DEVICES.fullmatch, "auto, cpu, cuda or cuda:0,cuda:1"),
    "dtype": _one_of(DTYPES.__contains__, f"one of {', '.join(DTYPES)}"),
    "quantize": _one_of(QUANTIZATIONS.__contains__, f"one of {', '.join(QUANTIZATIONS)}"),
    "folders": _folders,
    "cache": _cache,
    "cache_limit_gib": _gib,
}
