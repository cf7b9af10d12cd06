"""From a folder, a hub id or the embedded pair to a model and its tokenizer; refusals name the cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from offload_rt.errors import UsageError, first_line
from offload_rt.machine.cuda import no_cuda_device
from offload_rt.machine.hardware import GIB
from offload_rt.model.remote_mlp import place_mlps

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "pair"
DEMO = "demo"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEVICES = ("auto", "cpu", "cuda")
_CARD = re.compile(r"cuda:(\d+)")
_BODY = re.compile(r"model\.(embed_tokens|layers|norm)\.|lm_head\.")
"""Weights that a text goes through. Files may hold others: a vision tower, a reward head."""


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N` as a device; a GPU by its number, which some functions of torch need.

    Raises:
        UsageError: for another name, or a GPU that is not there.
    """
    card = _CARD.fullmatch(name)
    if name not in DEVICES and card is None:
        raise UsageError(f"device {name!r} is not known: use one of {', '.join(DEVICES)}, cuda:N")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if missing := no_cuda_device():
        raise UsageError(f"device {name}: {missing}; or use --device cpu")
    number, count = int(card[1]) if card else torch.cuda.current_device(), torch.cuda.device_count()
    if number >= count:
        raise UsageError(f"device {name}: this torch sees {count} CUDA devices, counted from 0")
    return torch.device("cuda", number)


def choose_devices(names: str) -> tuple[torch.device, ...]:
    """The device that computes, and further GPUs that keep and attend KV: `cuda:0,cuda:1`.

    Raises:
        UsageError: see `choose_device`; or devices that do not go together.
    """
    first, *others = devices = tuple(map(choose_device, names.split(",")))
    if others and any(device.type == "cpu" for device in devices):
        raise UsageError(f"device {names}: only GPUs work together; write cuda:0,cuda:1")
    if len(set(devices)) < len(devices):
        raise UsageError(f"device {names}: names a GPU twice; leave one out")
    if first.type == "cuda" and first.index != torch.cuda.current_device():
        raise UsageError(
            f"device {names}: models run on cuda:{torch.cuda.current_device()}; name that one first, and let "
            "CUDA_VISIBLE_DEVICES say which card it is"
        )
    return devices


def choose_dtype(name: str, device: torch.device) -> torch.dtype | None:
    """`auto` or a dtype's name; None means the checkpoint's own (`auto` on a GPU).

    `auto` on a CPU is float32: few CPUs multiply 16-bit numbers faster.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is not known: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def demo_model(part: str) -> Path:
    """Folder of the embedded `target` or `draft`."""
    folder = DEMO_FOLDER / part
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"the embedded demo {part} is not installed at {folder}; reinstall the package or name a --model"
        )
    return folder


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model; None where there is none (the model then works with token ids).

    Raises:
        UsageError: it cannot be read, or there is no such model.
    """
    model_config(source)  # what is wrong with the whole folder or id is not the tokenizer's fault
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*token*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for one thing
        wrong = f"its tokenizer cannot be read ({first_line(error)}); download it again"
        raise UsageError(f"model {source}: {wrong}") from error
    return tokenizer


def check_same_tokens(
    target: PreTrainedTokenizerBase | None,
    target_name: str,
    draft: PreTrainedTokenizerBase | None,
    draft_name: str,
) -> None:
    """Refuses a draft in whose tokenizer a token of the target has another number.

    The output would follow the target's law all the same, but no draft would ever be accepted.

    Raises:
        UsageError: naming the token.
    """
    if target is None or draft is None:
        return
    theirs = draft.get_vocab()
    for token, number in target.get_vocab().items():
        if theirs.get(token, number) != number:
            raise UsageError(
                f"draft {draft_name} has another vocabulary than the target {target_name}: {token!r} is "
                f"token {theirs[token]} there and {number} here; a draft must share the target's tokenizer"
            )


def model_config(source: str | Path) -> PretrainedConfig:
    """A model's config from a local folder or a hub id; no weights.

    Raises:
        UsageError: no such folder, no config in it, or one that transformers cannot read.
    """
    where = str(source)
    if not isinstance(source, str | Path):
        wrong = "is no folder and no hub id; LLM.from_models takes loaded models"
        raise UsageError(f"model {where[:60]!r} {wrong}")
    folder = Path(source)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UsageError(f"model {where}: there is no config.json in it")
    elif folder.exists():
        raise UsageError(f"model {where}: is a file; name the folder that holds config.json and the weights")
    elif folder.is_absolute() or where.startswith(("./", "../", "~")) or where.count("/") > 1:
        raise UsageError(f"model {where}: there is no such folder")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for one thing: this config is of no use
        fetched = "there is no such folder here, and no model of that id can be had"
        broken = folder.exists()
        wrong = "its config.json cannot be read" if broken else fetched
        remedy = "; download it again" if broken else ""
        raise UsageError(f"model {where}: {wrong}: {first_line(error)}{remedy}") from error
    return config


def load_model(
    source: str | Path,
    device: torch.device,
    dtype: torch.dtype | None,
    on_progress: Callable[[str, int, int], None] | None = None,
    phase: str = "load",
    elsewhere: tuple[torch.device, int] | None = None,
) -> PreTrainedModel:
    """Weights from a local folder or a hub id, on `device`.

    Args:
        on_progress: told the phase, how many of the weights are read, and how many there are.
        elsewhere: another card, and how many MLP blocks are there.

    Raises:
        UsageError: no config, no weights, a corrupt or truncated file, an unknown architecture.
    """
    where = str(source)
    config = model_config(source)
    if Path(source).exists():
        _check_weights(Path(source))
    wanted: Any = dtype if dtype is not None else "auto"
    loader: Any = AutoModelForCausalLM.from_pretrained  # what it returns hangs on its arguments
    try:
        with _told_by_transformers(partial(on_progress, phase) if on_progress else None):
            model, report = loader(
                source,
                config=config,
                dtype=wanted,
                attn_implementation="sdpa",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # its own error refers to a report that is not shown
                trust_remote_code=False,
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise UsageError(f"model {where}: its weights do not fit into memory: {first_line(error)}") from error
    except Exception as error:
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(f"model {where} ({kind}): cannot be loaded: {first_line(error)}") from error
    _check_report(where, report)
    gib = sum(p.nbytes for p in model.parameters()) / GIB
    try:
        placed: PreTrainedModel = place_mlps(model, device, *elsewhere or (device, 0))
    except torch.OutOfMemoryError as error:
        there = "the GPUs" if elsewhere else "the GPU"
        raise UsageError(f"model {where}: {gib:.1f} GiB of weights do not fit on {there}") from error
    placed.eval()
    return placed


@contextmanager
def _told_by_transformers(on_progress: Callable[[int, int], None] | None) -> Iterator[None]:
    """transformers logs errors alone and draws no bars within; that of its weights goes to `on_progress`."""

    def bar(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if on_progress is None or options.get("desc") != "Loading weights":
            return factory(*arguments, **options)
        return _counted(list(arguments[0]), on_progress)

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hook = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _counted(items: Sequence[Any], on_progress: Callable[[int, int], None]) -> Iterator[Any]:
    for done, item in enumerate(items, 1):
        yield item
        on_progress(done, len(items))


def _check_report(where: str, report: Mapping[str, Any]) -> None:
    """Refuses a model whose files hold other weights than its config describes."""
    differ = f"model {where}: its config.json does not describe its weights"
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        weight, held, described = mismatched[0]
        raise UsageError(
            f"{differ}: {weight} is {list(held)} in the files and {list(described)} by the config; "
            "download both again"
        )
    unknown = sorted(key for key in report["unexpected_keys"] if _BODY.match(key))
    if unknown:
        raise UsageError(
            f"{differ}: {len(unknown)} of those in the files have no place by the config, the first is "
            f"{unknown[0]}; download both again"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model {where}: {len(missing)} weights are missing from its files, the first is {missing[0]}; "
            "download it again"
        )


def _check_weights(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    if not shards and not list(folder.glob("pytorch_model*.bin")):
        raise UsageError(f"model {folder}: there are no weights in it (*.safetensors)")
    for shard in shards:
        try:
            with safetensors.safe_open(shard, framework="pt") as opened:
                opened.keys()
        except Exception as error:  # safetensors raises its own error types, OSError and ValueError
            wrong = f"{shard.name} is truncated or corrupt ({first_line(error)}); download it again"
            raise UsageError(f"model {folder}: {wrong}") from error
