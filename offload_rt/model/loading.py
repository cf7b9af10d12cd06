"""Loads models and tokenizers from a folder, a hub ID or the embedded pair; refusals name the cause."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from offload_rt.config.settings import NO_QUANTIZATION
from offload_rt.errors import UsageError, briefly, first_line
from offload_rt.model.architecture import EMBEDDINGS, FINAL_NORMS
from offload_rt.model.checkpoint_config import model_config
from offload_rt.model.generation import load_generation_config
from offload_rt.model.host_embedding import move_to_host
from offload_rt.model.hub import located
from offload_rt.model.plane_weights import SplitWeights
from offload_rt.model.processor_template import processor_template
from offload_rt.model.quantization import Quantization
from offload_rt.model.quantized_checkpoints import (
    cast_others,
    installed_quantization,
    load_options,
    packed_experts,
    stated_quantization,
)
from offload_rt.model.quantized_weights import check_sizes, move_scales, stored_bytes
from offload_rt.model.remote_mlp import place_mlps
from offload_rt.model.rope import Yarn
from offload_rt.system.hardware import GIB

_BODY = re.compile(rf"model\.({'|'.join((*EMBEDDINGS, 'layers', *FINAL_NORMS))})\.|lm_head\.")
"""Weights that a text model uses. Files may hold others: a vision tower, a reward head."""
_LANGUAGE_MODEL = {
    r"^(model\.)?language_model\.(model\.)?(?!lm_head\.)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Where files of a multimodal model have the weights of its language model, and where that has them alone."""
_ACTIVATION_SCALES = re.compile(r"(input|output|k|v|q)_(scale|zero_point|global_scale)$")
"""Scales of activations and KV in files whose weights are expanded: nothing is multiplied by them."""
_INTEGERS = ("I", "U", "BOOL")
"""First letters of the integer dtypes of safetensors."""


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer; returns None where there is none (the model then takes token IDs).

    Raises:
        UsageError: it cannot be read, or there is no such model.
    """
    model_config(source)  # first, so that a missing model is not reported as a broken tokenizer
    folder = Path(source)
    if folder.is_dir() and not any(folder.glob("*token*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            located(source), trust_remote_code=False
        )
    except Exception as error:  # transformers raises many types for one thing
        wrong = f"its tokenizer cannot be read ({first_line(error)}); download it again"
        raise UsageError(f"model {source}: {wrong}") from error
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        wrong = f"tokenizer_config.json has model_max_length = {briefly(longest)}, which is no number"
        raise UsageError(f"model {source}: {wrong}; download it again")
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor_template(located(source))
    return tokenizer


def check_same_tokens(
    target: PreTrainedTokenizerBase | None,
    target_name: str,
    draft: PreTrainedTokenizerBase | None,
    draft_name: str,
) -> None:
    """Refuses a draft in whose tokenizer a token of the target has another ID.

    The output would still have the target's distribution, but hardly a draft would be accepted.

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


def load_model(
    source: str | Path,
    device: torch.device,
    dtype: torch.dtype | None,
    on_progress: Callable[[str, int, int], None] | None = None,
    phase: str = "load",
    remote_mlps: tuple[torch.device, int] | None = None,
    rope: Yarn | None = None,
    quantize: str = NO_QUANTIZATION,
    *,
    planes: bool = False,
) -> PreTrainedModel:
    """Loads a model from a local folder or a hub ID onto `device`.

    Args:
        on_progress: called with the phase, the number of weights read so far, and the number of all. An
            exception that it raises passes through.
        remote_mlps: another GPU, and the number of MLP blocks that it holds.
        rope: scaling of the rotary frequencies beyond what the config says.
        quantize: nf4 or int8 quantises the weights of a checkpoint in floating point as they are read.
        planes: its linear layers are brought to `device` in two planes, see `SplitWeights`.

    Raises:
        UsageError: no config, no weights, a corrupt or truncated file, an unknown architecture, or a
            quantisation that is not supported or needs a package that is missing.
    """
    name = str(source)
    config = checked_config(source, rope, quantize)
    quantization, options = stated_quantization(config, name, quantize), {}
    if quantization is not None:
        # What another GPU gets must not need memory of this one first.
        options = load_options(quantization, config, dtype, torch.device("cpu") if remote_mlps else device)
    model, report = _read_weights(
        source, config, dtype, options, partial(on_progress, phase) if on_progress else None
    )
    model.generation_config = load_generation_config(located(source), config)
    _check_report(name, report, quantization)
    check_sizes(model, name)
    if quantization is not None:
        cast_others(quantization, model, dtype)
    if planes:
        SplitWeights(model)
    gib = stored_bytes(model) / GIB
    move_to_host(model, device)
    try:
        loaded: PreTrainedModel = place_mlps(model, device, *remote_mlps or (device, 0))
        move_scales(loaded)
    except torch.OutOfMemoryError as error:
        place = "the GPUs" if remote_mlps else "the GPU"
        raise UsageError(f"model {name}: {gib:.1f} GiB of weights do not fit on {place}") from error
    loaded.eval()
    return loaded


def _read_weights(
    source: str | Path,
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    on_progress: Callable[[int, int], None] | None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Returns a model as transformers loads it, and its report on weights that are missing or unknown.

    Args:
        options: further arguments of `from_pretrained`.

    Raises:
        UsageError: names the architecture and the cause.
    """
    torch_dtype: Any = dtype if dtype is not None else "auto"
    loader: Any = AutoModelForCausalLM.from_pretrained  # its return type depends on its arguments
    progress = _LoadingProgress(on_progress)
    try:
        with quiet_transformers(progress):
            model, report = loader(
                located(source),
                config=config,
                dtype=torch_dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # its own error refers to a report that is not shown
                trust_remote_code=False,
                key_mapping=_LANGUAGE_MODEL,
                generation_config=GenerationConfig(),  # its own is read unchecked
                **options,
            )
    except Exception as error:
        if progress.failure is not None:
            raise progress.failure from None
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            wrong = f"its weights do not fit into memory: {first_line(error)}"
            raise UsageError(f"model {source}: {wrong}") from error
        kind = ", ".join(config.architectures or [config.model_type])
        raise UsageError(f"model {source} ({kind}): cannot be loaded: {first_line(error)}") from error
    return model, report


def checked_config(
    source: str | Path, rope: Yarn | None = None, quantize: str = NO_QUANTIZATION
) -> PretrainedConfig:
    """Returns the config of a model whose weights can be loaded, as far as that shows without reading them.

    Raises:
        UsageError: see `load_model`; the files of a hub ID are not looked at.
    """
    config = model_config(source, rope)
    quantization = installed_quantization(config, str(source), quantize)
    if Path(source).exists():
        _check_weights(Path(source), quantized=quantization is not None and quantize == NO_QUANTIZATION)
    return config


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of a model's weights, sorted: those that transformers reads.

    Others may lie beside them: adapters, weights in another form, or what a copy has left.
    """
    for single in ("model.safetensors", "pytorch_model.bin"):
        if os.path.lexists(path := folder / single):
            return [path]
        if named := _indexed(folder, single):
            return [folder / name for name in named]
    return []


def _indexed(folder: Path, single: str) -> list[str]:
    """Returns the files that the index of weights names, sorted; none where it is missing or broken.

    Args:
        single: name of the file that all weights are in where there is no index.
    """
    try:
        index = json.loads((folder / f"{single}.index.json").read_bytes())
        return sorted({str(file) for file in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return []


class _LoadingProgress:
    """Reports how many weights are loaded; keeps the exception of a report, which passes through."""

    def __init__(self, report: Callable[[int, int], None] | None) -> None:
        self.failure: Exception | None = None
        self._report = report

    def bar(self, factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Takes the place of a progress bar of transformers."""
        if self._report is None or options.get("desc") != "Loading weights":
            return factory(*arguments, **options)
        return self._counted(list(arguments[0]), self._report)

    def _counted(self, items: Sequence[Any], report: Callable[[int, int], None]) -> Iterator[Any]:
        for done, item in enumerate(items, 1):
            yield item
            try:
                report(done, len(items))
            except Exception as error:
                self.failure = error
                raise


@contextmanager
def quiet_transformers(progress: _LoadingProgress | None = None) -> Iterator[None]:
    """Lets transformers log errors only and draw no progress bars; that of its weights goes to `progress`."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hook = transformers_logging.set_tqdm_hook((progress or _LoadingProgress(None)).bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(hook)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_report(name: str, report: Mapping[str, Any], quantization: Quantization | None) -> None:
    """Refuses a model whose files hold weights that its config does not describe.

    Args:
        quantization: of the checkpoint, or as it was read.
    """
    expanded = quantization is not None and quantization.bits is None
    differ = f"model {name}: its config.json does not describe its weights"
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        weight, shape, described = mismatched[0]
        if quantization is not None and quantization.method == "bitsandbytes" and ".experts." in weight:
            raise UsageError(f"model {name}: {packed_experts(quantization.name)}")
        raise UsageError(
            f"{differ}: {weight} is {list(shape)} in the files and {list(described)} by the config; "
            "download both again"
        )
    unknown = sorted(
        key
        for key in report["unexpected_keys"]
        if _BODY.match(key) and not (expanded and _ACTIVATION_SCALES.search(key))
    )
    if unknown:
        raise UsageError(
            f"{differ}: {len(unknown)} of those in the files have no place by the config, the first is "
            f"{unknown[0]}; download both again"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"model {name}: {len(missing)} weights are missing from its files, the first is {missing[0]}; "
            "download it again"
        )


def _check_weights(folder: Path, quantized: bool) -> None:
    """Refuses a folder without weights, with a corrupt file, or with integer weights.

    Args:
        quantized: the config says how the weights are quantised, so that they may be integers.
    """
    files = weight_files(folder)
    if not files:
        raise UsageError(
            f"model {folder}: there are no weights in it (model.safetensors, or shards that"
            " model.safetensors.index.json names)"
        )
    if missing := [file.name for file in files if not os.path.exists(file)]:  # its name may be no file's
        raise UsageError(
            f"model {folder}: {len(missing)} of {len(files)} files of weights are missing, the first is"
            f" {missing[0]}; download it again"
        )
    for file in files:
        if not file.is_file():  # opening a pipe would wait in native code
            raise UsageError(f"model {folder}: {file.name} is no file; download it again")
    for shard in (file for file in files if file.suffix == ".safetensors"):
        try:
            with safetensors.safe_open(shard, framework="pt") as opened:
                names = [name for name in opened.keys() if _BODY.match(name)]  # noqa: SIM118
                dtypes = {name: str(opened.get_slice(name).get_dtype()) for name in names}
        except Exception as error:  # safetensors raises its own error types, OSError and ValueError
            wrong = f"{shard.name} is truncated or corrupt ({first_line(error)}); download it again"
            raise UsageError(f"model {folder}: {wrong}") from error
        for name, dtype in dtypes.items():
            if not quantized and name.endswith(".weight") and dtype.startswith(_INTEGERS):
                raise UsageError(
                    f"model {folder}: {name} in {shard.name} is of the integer type {dtype}, and config.json"
                    " does not say how it is quantized; give a checkpoint in bfloat16 or float16"
                )
