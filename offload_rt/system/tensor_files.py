"""Safetensors files of our own, which state their kind in the metadata; written as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offload_rt.errors import UsageError
from offload_rt.system.files import replacing


def read_tensors(path: Path, noun: str, kind: str, remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Opens a file; returns its tensors by name, mapped into memory and not read yet, and its metadata.

    Args:
        noun: what messages call the file.
        kind: the kind that its metadata must state.
        remedy: how to make such a file.

    Raises:
        UsageError: the file does not exist, is corrupt, or is of another kind.
    """
    if path.exists() and not path.is_file():
        # Opening a pipe would wait for a writer, in native code that no signal ends.
        raise UsageError(f"{noun} {path}: is no file but a folder, a pipe or a device; {remedy}")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get("kind") != kind:
                raise UsageError(f"{noun} {path}: is no {noun} of this version; {remedy}")
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
    except OSError as error:
        reason = error.strerror or "no such file"
        raise UsageError(f"{noun} {path}: cannot be read ({reason}); {remedy}") from None
    except SafetensorError as error:
        raise UsageError(f"{noun} {path}: is corrupt or not a safetensors file ({error}); {remedy}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Writes a file as a whole or not at all.

    Raises:
        OSError, SafetensorError: it cannot be written.
    """
    with replacing(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # of this user's files; safetensors sets another one
        save_file(dict(tensors), partial, dict(about))
        partial.chmod(mode)
