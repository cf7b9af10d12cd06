"""Finds the draft head for a target on this machine: in its checkpoint, in the hub's cache, and in folders.

Asks no network and reads no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants
from transformers import PretrainedConfig

from offload_rt.config.schema import MTP
from offload_rt.config.settings import load_settings
from offload_rt.errors import UsageError
from offload_rt.model.embedded import DEMO, DEMO_FOLDER
from offload_rt.model.head_config import Eagle3Config, head_config, is_head
from offload_rt.model.mtp_head import has_mtp_tensors, mtp_layers

DEMO_HEAD = DEMO_FOLDER / "head"
COMMON_WORDS = 0.7
"""Least share of the words of a target's name that the name of a head has which does not state its target."""
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)?")


def find_head(target: str, config: PretrainedConfig) -> str | None:
    """Returns what names the head for a target; None: there is none.

    The head in its own checkpoint comes first, then heads of its sizes that state the target as theirs, then
    those whose name has most words of the target's.

    Args:
        target: the embedded target's name, a folder or a hub ID.
        config: of the target.
    """
    if target == DEMO:
        return str(DEMO_HEAD) if DEMO_HEAD.is_dir() else None
    if mtp_layers(config) or has_mtp_tensors(target):
        return MTP
    text = config.get_text_config()
    fitting = [
        (share, head.name)
        for head in local_heads()
        if head.misfit(text.hidden_size, text.vocab_size) is None
        and (share := _share(head, target)) >= COMMON_WORDS
    ]
    return max(fitting)[1] if fitting else None


def local_heads() -> list[Eagle3Config]:
    """Returns the heads of the hub's cache and of the settings' folders that can be run."""
    found = list[Eagle3Config]()
    for name, folder in [*_cached(), *_in_folders()]:
        with suppress(UsageError):
            if is_head(folder):
                found.append(head_config(name))
    return found


def _share(head: Eagle3Config, target: str) -> float:
    """Returns how well the name of a head goes with that of a target, from 0 to 1, or 2 where it names it."""
    name = Path(target).name
    if head.verifier is not None:
        return 2.0 if Path(head.verifier).name.lower() == name.lower() else 0.0
    words, own = set(_WORD.findall(name.lower())), set(_WORD.findall(Path(head.name).name.lower()))
    return len(words & own) / max(1, len(words))


def _cached() -> Iterator[tuple[str, Path]]:
    """Yields the models of the hub's cache, as they are named there and where their newest revision is."""
    with suppress(OSError):
        for repository in sorted(Path(constants.HF_HUB_CACHE).glob("models--*")):
            snapshots = [
                path for path in (repository / "snapshots").iterdir() if (path / "config.json").exists()
            ]
            if snapshots:
                name = repository.name.removeprefix("models--").replace("--", "/")
                yield name, max(snapshots, key=lambda path: path.stat().st_mtime)


def _in_folders() -> Iterator[tuple[str, Path]]:
    """Yields the folders in the settings' folders that have a config."""
    for folder in load_settings().folders or ():
        with suppress(OSError):
            for pattern in ("config.json", "*/config.json", "*/*/config.json"):
                for file in sorted(folder.glob(pattern)):
                    yield str(file.parent), file.parent
