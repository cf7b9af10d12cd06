"""What the commands share: models, texts and where results go."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offload_rt.api import NO_DRAFT
from offload_rt.commands.generate import add_overrides
from offload_rt.commands.prompts import BUILT_IN, built_in, file_text
from offload_rt.errors import UsageError
from offload_rt.files import check_writable
from offload_rt.loading import (
    DEMO,
    DEVICES,
    DTYPES,
    choose_device,
    choose_dtype,
    demo_model,
    load_model,
    load_tokenizer,
)
from offload_rt.text import encode

T = TypeVar("T")

RESULTS = Path(__file__).resolve().parent / "results"
OUT = "JSON (default: in bench/results)"
PAGE, PICTURE = ".md", ".png"
"""Beside a result, by the ends of their names."""


@dataclass(frozen=True)
class Models:
    """Loaded models; `names` of target and draft, as reports write them."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase
    names: tuple[str, str | None]


def command(commands: Any, name: str, run: Callable[..., int | None], about: str) -> Any:
    """Declares a command, which says what it is `about`; returns its parser."""
    parser = commands.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False
    )
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser, *, draft: bool) -> None:
    """The arguments of every command."""
    parser.add_argument("--model", metavar="PATH|ID", help="target model (default: the demo pair)")
    if draft:
        parser.add_argument("--draft", metavar="PATH|ID|none", help="small model that drafts")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    dtypes = ("auto", *DTYPES)
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default: float32")
    parser.add_argument("--out", type=Path, metavar="FILE", help=OUT)
    add_overrides(parser, "sets a configuration key of every composition")


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


def read_tokens(
    paths: Sequence[Path] | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[int]]:
    """Names of the texts, and their tokens, one text behind the other."""
    texts = read_texts(paths)
    return [name for name, _ in texts], encode(tokenizer, "\n".join(text for _, text in texts))


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


def load(arguments: argparse.Namespace) -> Models:
    """The models that the arguments name.

    Raises:
        UsageError: as `loading` does, and where there is no tokenizer.
    """
    device = choose_device(arguments.device)
    source, draft_source = sources(arguments)
    target = load_model(source, device, choose_dtype(arguments.dtype, device))
    draft = None if draft_source is None else load_model(draft_source, device, target.dtype)
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise UsageError(f"model {source} has no tokenizer, and a text needs one")
    names = model_name(source), None if draft_source is None else model_name(draft_source)
    return Models(target, draft, tokenizer, names)


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


def fitted(case: T, arguments: argparse.Namespace) -> T:
    """A declared case, a dataclass, with those of its fields that the command line gives."""
    declared: Any = case
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(declared)}
    found: T = dataclasses.replace(declared, **{key: one for key, one in given.items() if one is not None})
    return found


def free(device: torch.device) -> None:
    """Hands memory back before the next case: what transformers holds in cycles, and cached device memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
