"""Flags that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.commands import prompts
from offload_rt.config.files import config_names, parse_override
from offload_rt.config.schema import AUTO, NO_DRAFT, RetrievalConfig, SpeculationConfig
from offload_rt.config.settings import DEVICES, DTYPES, NO_QUANTIZATION, QUANTIZATIONS, SettingDefault
from offload_rt.drafting.levels.configs import load_configs
from offload_rt.model.rope import Yarn
from offload_rt.system.files import check_writable
from offload_rt.text.documents import decode, read_bytes

if TYPE_CHECKING:
    from offload_rt.sampling.params import SamplingParams

Add = Callable[..., object]
"""The `add_argument` of a parser or a group."""


SETTING = "the setting"
"""Says that the default is what the settings file has under the flag's name."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the models and the devices."""
    add = parser.add_argument_group("model").add_argument
    add_target(add)
    draft = "small draft model with the target's tokenizer; auto: of the local models and none, the fastest"
    draft += f" by the plan (default: {SETTING}, or none, but the demo's own for the demo)"
    add("--draft", default=SettingDefault("draft"), metavar="FOLDER|ID|auto|none", help=draft)
    add_computing(add)


def add_computing(add: Add) -> None:
    """Adds the flags that say where and in which numbers the target computes."""
    device = "where models run; cuda:0,cuda:1: KV is stored on both"
    device += f" (default: {SETTING}, or auto: the GPU if there is one)"
    names = "auto|cpu|cuda|cuda:N,…"
    add("--device", type=_devices, default=SettingDefault("device", AUTO), metavar=names, help=device)
    add_dtype(add)
    add_quantize(add)
    add_rope(add)


def add_target(add: Add) -> None:
    """Adds `--model`."""
    meaning = f"target model: a folder, a hub ID or demo (default: {SETTING}, or the embedded demo pair)"
    add("--model", default=SettingDefault("model"), metavar="FOLDER|ID", help=meaning)


def _devices(text: str) -> str:
    """An argument type: names of devices, whether they exist or not."""
    if not DEVICES.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not a device: use auto, cpu, cuda or cuda:0,cuda:1"
        )
    return text


def add_dtype(add: Add) -> None:
    """Adds `--dtype`."""
    meaning = (
        f"dtype of weights and KV (default: {SETTING}, or auto: the model's own on a GPU; on a CPU bfloat16"
        " for a bfloat16 model where the processor has its dot products (AVX512-BF16), else float32, which"
        " rounds no weight)"
    )
    add("--dtype", choices=DTYPES, default=SettingDefault("dtype", AUTO), help=meaning)


def add_quantize(add: Add) -> None:
    """Adds `--quantize`."""
    meaning = "quantize the target's weights as they load; KV and computing stay in the dtype; needs"
    meaning += f" the extra quantized (default: {SETTING}, or {NO_QUANTIZATION})"
    default = SettingDefault("quantize", NO_QUANTIZATION)
    add("--quantize", choices=QUANTIZATIONS, default=default, help=meaning)


def add_rope(add: Add) -> None:
    """Adds `--rope`."""
    meaning = "stretch the target's positions by YaRN, e.g. yarn:4 (default: as its config.json says)"
    add("--rope", type=Yarn.parse, metavar="yarn:FACTOR", help=meaning)


def add_json(add: Add, content: str) -> None:
    """Adds `--json FILE`; refuses a file that cannot be written before any work."""

    def writable(name: str) -> Path:
        check_writable("--json", Path(name))
        return Path(name)

    add("--json", type=writable, metavar="FILE", help=f"write {content} to FILE (default: nowhere)")


def add_sampling(
    parser: argparse.ArgumentParser, max_tokens: int, title: str = "sampling", exception: str = ""
) -> None:
    """Adds the flags of a generation: its length, its end and its distribution.

    Args:
        max_tokens: tokens to generate by default.
        exception: added to the help on that default.
    """
    sampling = parser.add_argument_group(title)
    add = sampling.add_argument
    meaning = f"generate at most N tokens (default: {max_tokens}{exception})"
    add("-n", "--max-new-tokens", type=prompts.token_count, default=max_tokens, metavar="N", help=meaning)
    add_distribution(sampling)
    add("--seed", type=int, metavar="S", help="seed of sampling (default: random, shown in the summary)")
    stop = "end the text where STRING begins; may be repeated (default: none)"
    add("--stop", action="append", default=[], metavar="STRING", help=stop)
    schema = (
        "write JSON that fits this JSON schema, without thoughts; needs the extra json (default: any text)"
    )
    add("--json-schema", type=_schema, metavar="FILE|JSON", help=schema)
    add("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")


def _schema(value: str) -> str:
    """An argument type: a JSON schema, or a file that has one; returns its text, unchecked."""
    if value.lstrip().startswith("{"):
        return value
    source = f"--json-schema {value}"
    return decode(source, read_bytes(source, value, "give a JSON schema, or a file of one"))


def add_distribution(sampling: argparse._ArgumentGroup) -> None:
    """Adds the flags of the distribution that tokens are drawn from."""
    add = sampling.add_argument
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token (default: 0)")
    top_p = "draw from the fewest likeliest tokens whose probabilities sum to P (default: 1, all)"
    add("--top-p", type=float, metavar="P", help=top_p)
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: 0, all)")
    min_p = "draw from tokens at least P times as likely as the likeliest one (default: 0, all)"
    add("--min-p", type=float, metavar="P", help=min_p)
    repetition = "divide logits of tokens that the prompt or the text has already (default: 1, off)"
    add("--repetition-penalty", type=float, metavar="X", help=repetition)
    presence = "lower the logits of tokens that were generated before by X, -2 to 2 (default: 0, off)"
    add("--presence-penalty", type=float, metavar="X", help=presence)
    frequency = "lower them by X each time that they were (default: 0, off)"
    add("--frequency-penalty", type=float, metavar="X", help=frequency)


DISTRIBUTION = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of `SamplingParams` that `add_distribution` sets, by flags of their names."""


ANY_KEY = "sets any configuration key (default: the config's values); the last value given wins"


def add_overrides(
    parser: argparse._ActionsContainer,
    meaning: str = ANY_KEY,
    flag: str = "--set",
    metavar: str = "section.key=value",
    key: str = "",
) -> None:
    """Adds a flag for any key of a configuration, or for one `key`."""
    parser.add_argument(
        flag,
        type=lambda value: parse_override(f"{key}={value}" if key else value),
        action="append",
        default=[],
        dest="overrides",
        metavar=metavar,
        help=meaning,
    )


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the composition and its settings."""
    group = parser.add_argument_group("configuration")
    meaning = f"{', '.join(config_names())}, a TOML file, or auto: the fastest by the plan (default: auto)"
    group.add_argument("--config", default=AUTO, metavar="NAME|FILE", help=meaning)

    def add(flag: str, key: str, meaning: str, metavar: str = "N") -> None:
        add_overrides(group, f"{meaning}; sets {key}", flag, metavar, key)

    head = (
        "head that drafts from the target's states; auto: of its checkpoint, or a local one (default: auto)"
    )
    add("--head", "head.path", head, "FOLDER|ID|mtp|auto|none")
    add("--retrieval-budget", "retrieval.budget", "tokens retrieved (default: as it pays)")
    add("--chunk-size", "retrieval.chunk", f"tokens chosen together (default: {RetrievalConfig.chunk})")
    add("--gamma1", "speculation.gamma1", f"depth of first drafts (default: {SpeculationConfig.gamma1})")
    add("--gamma2", "speculation.gamma2", "depth of drafts for the full cache (default: as it pays)")
    policies = "every, stride:N or acceptance:X (default: the config's)"
    add("--refresh", "retrieval.refresh", f"when to retrieve anew: {policies}", "POLICY")
    add_overrides(group)


def check_early(arguments: argparse.Namespace) -> None:
    """Refuses models and a configuration that do not exist, before the runtime is imported.

    Raises:
        UsageError: one of them does not exist.
    """
    from offload_rt.model.hub import check_exists

    check_exists(arguments.model)
    if arguments.draft not in (AUTO, NO_DRAFT):
        check_exists(arguments.draft)
    # Last, as levels check a config whose values are right, and import torch.
    load_configs(arguments.config, dict(arguments.overrides))


def distribution(arguments: argparse.Namespace, **further: Any) -> SamplingParams:
    """Returns sampling parameters from the flags of `add_distribution`, and `further`."""
    from offload_rt.sampling.params import SamplingParams

    return SamplingParams(**given_distribution(arguments), max_tokens=arguments.max_new_tokens, **further)


def given_distribution(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values that the user gave to flags of `add_distribution`."""
    named = {name: getattr(arguments, name) for name in DISTRIBUTION}
    return {name: value for name, value in named.items() if value is not None}
