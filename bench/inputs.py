"""What the commands share: models, texts and where results go."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from offload_rt.api import NO_DRAFT
from offload_rt.commands.generate import add_overrides
from offload_rt.commands.prompts import BUILT_IN, built_in, file_text
from offload_rt.errors import UsageError
from offload_rt.files import check_writable
from offload_rt.model.loading import DEMO, DEVICES, DTYPES, demo_model

T = TypeVar("T")

RESULTS = Path(__file__).resolve().parent / "results"
PAGE, PICTURE = ".md", ".png"
"""Beside a result, by the ends of their names."""


def command(commands: Any, name: str, run: Callable[..., int | None], about: str) -> Any:
    """Declares a command, which says what it is `about`; returns its parser."""
    parser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def add_arguments(
    parser: argparse.ArgumentParser,
    *,
    draft: bool = True,
    model: str = "PATH|ID",
    about: str = "default: the demo pair",
    dtype: str = "float32",
) -> None:
    """The arguments of every command that has models and texts.

    Args:
        draft: whether a small model counts.
        model: what the target may be, and `about` it.
        dtype: the default, in words.
    """
    parser.add_argument("--model", metavar=model, help=f"target model ({about})")
    if draft:
        parser.add_argument("--draft", metavar=f"{model}|none", help="small model that drafts")
    parser.add_argument("--text", type=Path, action="append", metavar="FILE", help="UTF-8; may be repeated")
    parser.add_argument("--device", choices=DEVICES, default="auto", help="default: a GPU if there is one")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), help=f"default: {dtype}")
    add_overrides(parser, "sets a configuration key of every composition of ours")


def add_output(parser: argparse.ArgumentParser, kind: str) -> None:
    """The arguments that say how much is done, and where its result of a `kind` goes."""
    parser.add_argument("--quick", action="store_true", help="less of everything")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"{kind} (default: in bench/results)")
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="a PNG")


def size(default: Any, about: str, parse: Callable[[str], object], *flags: str, metavar: str = "N") -> Any:
    """A field that is an argument of a command too, by its own name or by `flags`."""
    given = {"type": parse, "metavar": metavar, "help": about}
    return dataclasses.field(default=default, metadata={"flags": flags, "given": given})


def add_sizes(parser: argparse.ArgumentParser, declared: Any, without: Collection[str] = ()) -> None:
    """An argument for each field of a dataclass that `size` declares, by default what it is."""
    for one in dataclasses.fields(declared):
        if one.metadata and one.name not in without:
            flags = one.metadata["flags"] or [f"--{one.name.replace('_', '-')}"]
            given = {"dest": one.name, **one.metadata["given"]}
            given["help"] += f" (default: {said(getattr(declared, one.name))})"
            parser.add_argument(*flags, **given)


def said(value: object) -> str:
    """In a sentence."""
    if isinstance(value, tuple | list):
        return ",".join(map(said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def value(kind: Callable[[str], T], allowed: Callable[[T], bool], wanted: str) -> Callable[[str], T]:
    """An argument type; `wanted` says what a text is not that is refused."""

    def parse(text: str) -> T:
        try:
            found = kind(text)
        except ValueError:
            found = None
        if found is None or not allowed(found):
            raise argparse.ArgumentTypeError(f"{text!r} is {wanted}")
        return found

    return parse


def count(least: int) -> Callable[[str], int]:
    """An argument type: a whole number."""
    return value(int, lambda number: number >= least, f"not a whole number of at least {least}")


def number(least: float = 0.0, most: float = sys.float_info.max) -> Callable[[str], float]:
    """An argument type: a finite number."""
    to = f" and at most {most:g}" if most < sys.float_info.max else ""
    return value(float, lambda number: least <= number <= most, f"not a number of at least {least:g}{to}")


def several(one: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """An argument type: with commas between them, each once."""
    return lambda text: tuple(dict.fromkeys(map(one, text.split(","))))


def counts(least: int) -> Callable[[str], tuple[int, ...]]:
    """An argument type: whole numbers with commas between them, each once, rising."""
    return lambda text: tuple(sorted(several(count(least))(text)))


def names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """An argument type: known names with commas between them, each once."""
    return several(value(str, lambda name: name in known, f"none of {', '.join(known)}"))


def read_texts(paths: Sequence[Path] | None) -> list[tuple[str, str]]:
    """Names and texts of files, or of the built-in prompt of the command line.

    Raises:
        UsageError: a file is missing, empty or not UTF-8.
    """
    texts = [(path.name, file_text(f"text {path}", path)) for path in paths or ()]
    return texts or [(BUILT_IN, built_in())]


Source = str | Path
"""A folder or a hub id, or, as a `Path`, a model of the demo pair."""


def sources(arguments: argparse.Namespace) -> tuple[Source, Source | None]:
    """Target and draft that the arguments name."""
    target: Source = demo_model("target") if arguments.model is None else arguments.model
    named: str | None = getattr(arguments, "draft", NO_DRAFT)
    if named is None and arguments.model is None:
        return target, demo_model("draft")
    return target, None if named == NO_DRAFT else named


def model_name(source: Source) -> str:
    """In reports: a hub id as it is; of a folder the end alone, for a report goes elsewhere."""
    if isinstance(source, Path):
        return DEMO
    path = Path(source)
    return path.resolve().name if path.exists() else source


def destination(given: Path | None, name: str) -> Path:
    """Where the result goes, with page and picture beside it; checked before anything is measured.

    Args:
        name: of a file among the results, where none is given.

    Raises:
        UsageError: it cannot be written there.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = given or RESULTS / name
    if path.suffix in (PAGE, PICTURE):
        ending = Path(name).suffix
        raise UsageError(f"--out {path}: is where the page or the plots go; name it {ending}")
    for suffix in (path.suffix, PAGE, PICTURE):
        check_writable("--out", path.with_suffix(suffix))
    return path


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def fitted(declared: T, quick: Mapping[str, Any], arguments: argparse.Namespace) -> T:
    """A dataclass with the `quick` values of its fields, if that is asked for, and those that are given."""
    case: Any = declared
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(case)}
    values = dict(quick if arguments.quick else {}) | {
        key: one for key, one in given.items() if one is not None
    }
    found: T = dataclasses.replace(case, **values)
    return found
