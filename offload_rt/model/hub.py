"""Where a model is loaded from, a folder or the hub: checked without torch, which takes seconds to import."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

from huggingface_hub import constants, get_session, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from offload_rt.errors import UsageError, first_line
from offload_rt.model.embedded import DEMO_PARTS
from offload_rt.model.gguf_files import refuse_gguf

HUB_TIMEOUT_S = 5.0


def check_source(source: str | Path) -> None:
    """Raises UsageError for what can be neither a folder of a model nor a hub ID; asks no network."""
    name = str(source)
    if not isinstance(source, str | Path):
        wrong = "is no folder and no hub ID; LLM.from_models takes loaded models"
        raise UsageError(f"model {name[:60]!r} {wrong}")
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if files := sorted(folder.glob("*.gguf")):
                refuse_gguf(name, *files)
            raise UsageError(f"model {name}: there is no config.json in it")
    elif folder.suffix == ".gguf" and folder.is_file():
        refuse_gguf(name, folder)
    elif folder.exists():
        raise UsageError(f"model {name}: is a file; name the folder that holds config.json and the weights")
    elif folder.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise UsageError(f"model {name}: there is no such folder")


def check_exists(model: str | Path | None) -> None:
    """Raises UsageError for a model that is neither embedded, nor a folder, nor to be had from the hub.

    None is the embedded target.
    """
    if model is not None and str(model) not in DEMO_PARTS:
        check_source(model)
        located(model)


def located(source: str | Path) -> str | Path:
    """Returns what transformers should load: without network, the folder in the hub's cache.

    The hub is asked once, as transformers and its client retry for half a minute.

    Raises:
        UsageError: the hub cannot be reached, and the model is not in its cache.
    """
    if Path(source).exists():
        return source
    if constants.HF_HUB_OFFLINE:
        if cached_config(str(source)) is not None:
            return source
        failure: str | None = "HF_HUB_OFFLINE is set"
    elif (failure := _hub_failure()) is None:
        return source
    else:
        with suppress(Exception):
            return snapshot_download(str(source), local_files_only=True)
    raise UsageError(
        f"model {source}: there is no such folder here, and no model of that ID can be had: the hub cannot be"
        f" reached ({failure}), and its cache does not hold the model; give the folder that does"
    )


def cached_config(name: str) -> Path | None:
    """Returns the config.json of a hub ID in the hub's cache; None: it is not there."""
    with suppress(HFValidationError):
        if isinstance(path := try_to_load_from_cache(name, "config.json"), str):
            return Path(path)
    return None


@cache
def _hub_failure() -> str | None:
    """Returns why the hub cannot be reached; None where it answers, whatever it says."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as error:
        return first_line(error)
    return None
