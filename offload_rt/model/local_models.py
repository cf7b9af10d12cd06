"""Finds the models on this machine: the embedded pair, in the hub's cache, and in folders.

Asks no network and reads no weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from huggingface_hub import CacheNotFound, constants, scan_cache_dir
from transformers import PreTrainedTokenizerBase

from offload_rt.config.settings import load_settings
from offload_rt.errors import UsageError, first_line
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.config_shapes import from_config
from offload_rt.model.embedded import DEMO_PARTS, demo_model
from offload_rt.model.head_config import is_head
from offload_rt.model.loading import check_same_tokens, checked_config, load_tokenizer, weight_files
from offload_rt.model.shape import ModelShape

FEWER_PARAMETERS = 4
"""A draft has at most the target's parameters divided by this: a larger one is hardly faster."""
Skipped = Callable[[str], None]
"""Called with a line on what cannot be listed."""


class LocalModel:
    """A model on this machine, whether it runs or not.

    Args:
        name: what a user calls it: demo, a hub ID, or its folder.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder

    @cached_property
    def weight_bytes(self) -> int:
        """Size of its weight files."""
        with suppress(OSError, ValueError):  # an index may name what no file is called
            return sum(file.stat().st_size for file in weight_files(self.folder))
        return 0

    @cached_property
    def architecture(self) -> str:
        """Name of its architecture; empty where its config cannot be read."""
        try:
            config = model_config(self.folder)
        except UsageError:
            return ""
        return ", ".join(config.architectures or [config.model_type])

    @cached_property
    def _checked(self) -> ModelShape | str:
        try:
            shape = from_config(checked_config(self.folder), None, self.name)
            load_tokenizer(self.folder)
            return shape
        except UsageError as error:
            ours = rf"(model )?({re.escape(str(self.folder))}|{re.escape(self.name)})( \([^)]*\))?(: | )"
            return re.sub(f"^{ours}", "", str(error))

    @property
    def shape(self) -> ModelShape | None:
        """Its shape, in the dtype of its weights; None where it does not run."""
        return self._checked if isinstance(self._checked, ModelShape) else None

    @property
    def refusal(self) -> str | None:
        """Why it does not run; None where it does."""
        return self._checked if isinstance(self._checked, str) else None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return load_tokenizer(self.folder)


def local_models(folders: Iterable[Path], skipped: Skipped = lambda line: None) -> list[LocalModel]:
    """Returns the embedded pair, the models of the hub's cache, and those of folders, each once; no heads.

    Args:
        folders: each a model's folder, or one of models, or one of folders of models.
    """
    models: dict[str, LocalModel] = {}
    for model in (*_embedded(), *_cached(skipped), *_in_folders(folders, skipped)):
        if not is_head(model.folder):
            models.setdefault(os.path.realpath(model.folder), model)
    return list(models.values())


def local_drafts(
    target: ModelShape, source: str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> list[LocalModel]:
    """Returns the models that can draft for the target in `source`.

    They are looked for in the hub's cache, in the folders of the settings, and beside the target's folder.
    """
    beside = [Path(source).absolute().parent] if Path(source).is_dir() else []
    return drafts_for(target, tokenizer, local_models([*(load_settings().folders or ()), *beside]))


def drafts_for(
    target: ModelShape, tokenizer: PreTrainedTokenizerBase | None, models: Iterable[LocalModel]
) -> list[LocalModel]:
    """Returns the models that can draft for a target: with its vocabulary, and far fewer parameters."""
    return [model for model in models if tokenizer is not None and _drafts_for(target, tokenizer, model)]


def _drafts_for(target: ModelShape, tokenizer: PreTrainedTokenizerBase, draft: LocalModel) -> bool:
    limit = target.parameters // FEWER_PARAMETERS
    if draft.weight_bytes > limit * 4 or draft.shape is None or draft.shape.parameters > limit:
        return False  # compared with float32 first: the shape of a large model takes a while
    if draft.tokenizer is None:
        return False
    try:
        check_same_tokens(tokenizer, target.name, draft.tokenizer, draft.name)
    except UsageError:
        return False
    return True


def _embedded() -> Iterator[LocalModel]:
    for name, part in DEMO_PARTS.items():
        with suppress(UsageError):  # not installed
            yield LocalModel(name, demo_model(part))


def _cached(skipped: Skipped) -> Iterator[LocalModel]:
    """Yields the models of the hub's cache, each in its newest revision, `main` first."""
    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return
    except (OSError, ValueError) as error:
        skipped(f"the hub's cache cannot be read: {first_line(error)}")
        return
    for broken in cache.warnings:
        skipped(f"the hub's cache has a broken entry: {first_line(broken)}")
    for repository in sorted(cache.repos, key=lambda item: item.repo_id):
        if repository.repo_type == "model" and repository.revisions:
            newest = max(repository.revisions, key=lambda item: ("main" in item.refs, item.last_modified))
            yield LocalModel(repository.repo_id, newest.snapshot_path)


def _in_folders(folders: Iterable[Path], skipped: Skipped) -> Iterator[LocalModel]:
    for folder in folders:
        if not folder.is_dir():
            skipped(f"{folder}: there is no such folder")
            continue
        for path in [folder] if _is_model(folder) else _folders(folder, skipped):
            if _is_model(path):
                yield LocalModel(str(path), path)
            else:
                yield from (LocalModel(str(m), m) for m in _folders(path, skipped) if _is_model(m))


def _folders(folder: Path, skipped: Skipped) -> Iterator[Path]:
    """Yields the folders in a folder, but for hidden ones, sorted."""
    try:
        inside = sorted(folder.iterdir())
    except OSError as error:
        skipped(f"{folder}: cannot be read ({error.strerror})")
        return
    yield from (path for path in inside if path.is_dir() and not path.name.startswith("."))


def _is_model(folder: Path) -> bool:
    """Returns whether a folder is meant to be a model, whole or not."""
    return (folder / "config.json").is_file() or bool(weight_files(folder))
