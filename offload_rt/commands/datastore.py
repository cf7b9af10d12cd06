"""`offload-rt datastore build`: builds a datastore, in whose texts drafts are looked up."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from offload_rt.commands.console import Console
from offload_rt.commands.options import SETTING
from offload_rt.commands.prompts import add_encoding
from offload_rt.config.settings import SettingDefault
from offload_rt.errors import UsageError
from offload_rt.system.files import check_new
from offload_rt.text.documents import decode, read_bytes

EXTENSIONS = ".txt, .md, .py, .rst, .json, .html, .c, .h, .cpp, .js, .ts, .java, .go, .rs"
ENVIRONMENT_MARKS = ("pyvenv.cfg", "conda-meta")
"""Names in a folder that make it a virtual environment."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    datastore = commands.add_parser(
        "datastore",
        help="texts in which drafts are looked up (REST)",
        description="Builds a datastore: texts in which the end of a sequence is looked up for a draft.",
        allow_abbrev=False,
    )
    actions = datastore.add_subparsers(dest="action", metavar="build", required=True)
    build = actions.add_parser(
        "build",
        help="from a folder of text files",
        description="Reads the text files of a folder and of the folders in it, but for hidden folders and"
        " virtual environments.",
        allow_abbrev=False,
    )
    add = build.add_argument
    add("folder", type=Path, metavar="FOLDER", help=f"text files: {EXTENSIONS}")
    add_encoding(add)
    meaning = f"model with the tokenizer to use (default: {SETTING}, or the demo pair)"
    add("--model", default=SettingDefault("model"), metavar="FOLDER|ID", help=meaning)
    place = "file to write; must not exist (default: FOLDER.datastore.safetensors, beside the folder)"
    add("--out", type=Path, metavar="FILE", help=place)
    build.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Builds a datastore, and prints how to use it."""
    from safetensors import SafetensorError

    from offload_rt.drafting.datastore import build
    from offload_rt.model.embedded import model_source
    from offload_rt.model.loading import load_tokenizer
    from offload_rt.text.tokenize import encode

    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder}: is not a folder; name one that holds text files")
    whole = folder.absolute()
    out: Path = arguments.out or whole.with_name(f"{whole.name}.datastore.safetensors")
    check_new("--out", out)
    if out.suffix != ".safetensors":
        raise UsageError(f"--out {out}: must end with .safetensors; name it {out.name}.safetensors")
    tokenizer = load_tokenizer(model_source(arguments.model))
    if tokenizer is None:
        raise UsageError(f"--model {arguments.model}: has no tokenizer, and a text needs one")
    console, texts = Console(quiet=False), []
    for path in _text_files(folder):
        try:
            text = decode(str(path), read_bytes(str(path), path), arguments.encoding)
        except UsageError as error:
            console.notice(f"skipped {error}")
        else:
            texts.append(encode(tokenizer, text))
    if not any(texts):
        raise UsageError(f"{folder}: holds no text in files of {EXTENSIONS}")
    try:
        tokens = build(texts, tokenizer, out)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--out {out}: cannot be written ({error})") from None
    print(f"{out}: {tokens:,} tokens of {len(texts)} files")
    print(f"offload-rt generate --set speculation.levels='[\"datastore\"]' --set datastore.path={out} …")
    return 0


def _text_files(folder: Path) -> Iterator[Path]:
    """Yields the text files of a folder in a fixed order, without hidden folders and virtual environments."""
    for parent, folders, files in os.walk(folder):
        inside = Path(parent)
        if inside != folder and any((inside / mark).exists() for mark in ENVIRONMENT_MARKS):
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = inside / name
            if path.suffix in EXTENSIONS.split(", ") and path.is_file():
                yield path
