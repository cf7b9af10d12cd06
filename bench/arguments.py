"""Command-line arguments that several commands share, and the models and texts that they name."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload_rt.commands.options import add_overrides
from offload_rt.commands.prompts import BUILT_IN, built_in
from offload_rt.config.schema import NO_DRAFT
from offload_rt.machine.devices import DEVICES, DTYPES
from offload_rt.model.embedded import demo_model, model_name
from offload_rt.text.documents import read_document

Source = str | Path
"""A folder or a hub id, or, as a `Path`, a model of the demo pair."""


def add_models(parser: argparse.ArgumentParser, *, draft: bool = True, shapes: str = "") -> None:
    """Adds `--model`, `--draft`, `--text`, `--device`, `--dtype` and `--set`.

    Args:
        draft: whether the command uses a small model.
        shapes: names for `random:SHAPE`, where the command accepts random weights.
    """
    add, source = parser.add_argument, "FOLDER|random:SHAPE" if shapes else "PATH|ID"
    about = "target model (default: the demo pair)"
    about += f"; random:SHAPE has random weights, for timing only: {shapes}" if shapes else ""
    add("--model", metavar=source, help=about)
    if draft:
        add("--draft", metavar=f"{source}|none", help="small model that drafts")
    add("--text", type=Path, action="append", metavar="FILE", help="UTF-8 text; may be repeated")
    add("--device", choices=DEVICES, default="auto", help="default: a GPU if there is one")
    default = "float32; bfloat16 for random weights on a GPU" if shapes else "float32"
    add("--dtype", choices=("auto", *DTYPES), help=f"default: {default}")
    add_overrides(parser, "sets a configuration key of every configuration of offload-rt")


def add_output(parser: argparse.ArgumentParser, quick: Mapping[str, Any]) -> None:
    """Adds `--quick`, which stands for the sizes `quick`, and `--out`."""
    values = {name: shown(value) if isinstance(value, tuple) else value for name, value in quick.items()}
    sizes = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
    parser.add_argument("--quick", action="store_true", help=f"smaller sizes: {sizes}")
    about = "JSON lines; parts that it holds are not measured again (default: in bench/results)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=about)


def fitted(arguments: argparse.Namespace, declared: Any, quick: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass: as given, else as `quick` has them with `--quick`, else as `declared`."""
    values = vars(declared) | dict(quick if arguments.quick else {})
    return {
        name: default if (value := getattr(arguments, name, None)) is None else value
        for name, default in values.items()
    }


def add_numbers(
    parser: argparse.ArgumentParser, declared: Any, *numbers: tuple[str, type, float, str]
) -> None:
    """Adds arguments for number fields of the dataclass `declared`: name, type, least value, description."""
    for name, kind, least, about in numbers:
        about += f" (default: {getattr(declared, name):g})"
        parser.add_argument(f"--{name}", type=number(kind, least), metavar="N", help=about)


def number(kind: type, least: float, largest: float = sys.float_info.max) -> Callable[[str], Any]:
    """Returns an argument type for an `int` or `float` from `least` to `largest`."""
    limits = f"of at least {least:g}" + ("" if largest == sys.float_info.max else f" and at most {largest:g}")

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= largest:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name} {limits}")
        return value

    return parse


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """Returns an argument type for one of several names."""

    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def listed(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Returns an argument type for values with commas between them, each once."""
    return lambda text: tuple(dict.fromkeys(map(parse, text.split(","))))


def shown(values: Sequence[object]) -> str:
    """Values as an argument gives them."""
    return ",".join(map(str, values))


def read_texts(paths: Sequence[Path] | None) -> dict[str, str]:
    """Texts of files by their names, or the built-in book.

    Raises:
        UsageError: a file is missing, empty or not UTF-8.
    """
    return {path.name: read_document(path, say, source=f"text {path}") for path in paths or ()} or {
        BUILT_IN: built_in()
    }


def sources(arguments: argparse.Namespace) -> tuple[Source, Source | None]:
    """The target and the draft model that the arguments name."""
    target: Source = demo_model("target") if arguments.model is None else arguments.model
    named: str | None = getattr(arguments, "draft", NO_DRAFT)
    if named is None and arguments.model is None:
        return target, demo_model("draft")
    return target, None if named == NO_DRAFT else named


def recorded_name(source: Source) -> str:
    """A hub id or an embedded model's name, or the last part of a folder's path: results go elsewhere."""
    name = model_name(source)
    return Path(name).resolve().name if Path(name).exists() else name


def say(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)
