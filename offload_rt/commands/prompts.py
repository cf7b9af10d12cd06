"""Where a prompt comes from: a flag, a file, stdin, or the built-in text."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import reprlib
import sys
from importlib import resources
from pathlib import Path

from offload_rt.commands.console import Console
from offload_rt.errors import UsageError

BUILT_IN = "Moby-Dick, chapters 1 to 48"
BUILT_IN_TOKENS = 32768
"""How much of the built-in prompt is kept without --max-prompt-tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `read` and `tokens` look at."""
    add = parser.add_argument_group(f"prompt (default: {BUILT_IN})").add_argument
    ids = "token ids, with spaces or commas or as a JSON list; token ids are written too"
    for flag, metavar, meaning in (
        ("--prompt", "TEXT", "the text itself"),
        ("--prompt-file", "FILE", "a UTF-8 text file, such as a book"),
        ("--prompt-tokens", "FILE", ids),
    ):

        def given(value: str, flag: str = flag) -> tuple[str, str]:
            return flag, value

        meaning += " (default: none)"
        add(flag, type=given, action="append", dest="prompts", default=[], metavar=metavar, help=meaning)
    add("stdin", nargs="?", metavar="-", help="read a text from stdin")
    limit = f"keep the last N tokens (default: all, or {BUILT_IN_TOKENS} of the built-in prompt)"
    add("--max-prompt-tokens", type=positive, metavar="N", help=limit)


def positive(text: str) -> int:
    """A flag's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read(arguments: argparse.Namespace) -> str | list[int]:
    """The prompt the user gave, or the built-in one: a text, or token ids.

    Raises:
        UsageError: more than one prompt, an empty one, or one that cannot be read.
    """
    if arguments.stdin not in (None, "-"):
        raise UsageError(f"unexpected argument {arguments.stdin!r}; a prompt is given with --prompt TEXT")
    named = [*arguments.prompts, *([("-", "-")] if arguments.stdin else [])]
    if len(named) > 1:
        raise UsageError(f"{' and '.join(flag for flag, _ in named)}: give one prompt only")
    if not named:
        return built_in()
    ((flag, value),) = named
    files = {"--prompt-file": f"prompt file {value}", "--prompt-tokens": f"token file {value}", "-": "stdin"}
    source = files.get(flag, flag)
    text = _text(source, _bytes(source, flag, value))
    return _token_ids(source, text) if flag == "--prompt-tokens" else text


def built_in() -> str:
    """A novel in the public domain, as far as a prompt of 128K tokens needs it."""
    return gzip.decompress((resources.files("offload_rt.demo") / "moby-dick.txt.gz").read_bytes()).decode()


def file_text(source: str, path: Path) -> str:
    """What a text file holds; errors call it `source`."""
    return _text(source, _bytes(source, "", str(path)))


def _bytes(source: str, flag: str, value: str) -> bytes:
    if flag == "--prompt":
        return os.fsencode(value)  # what of it is not UTF-8 has arrived as lone surrogates
    try:
        if flag != "-":
            return Path(value).read_bytes()
        if sys.stdin is None:
            raise UsageError("stdin: is closed; pipe a text into it")
        return sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{source}: cannot be read ({reason}); give a text file") from None


def _text(source: str, data: bytes) -> str:
    if not data:
        raise UsageError(f"{source}: the prompt is empty; give at least one character")
    if data.startswith(b"%PDF-"):
        raise UsageError(f"{source}: is a PDF; give its text instead, e.g. what pdftotext makes of it")
    if b"\0" in data:
        at = data.index(b"\0")
        raise UsageError(f"{source}: byte {at} is zero, as in no text; give a text file in UTF-8")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None


def _token_ids(source: str, text: str) -> list[int]:
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
    except ValueError as error:
        raise UsageError(f"{source}: begins like a JSON list and is none ({error})") from None
    for number, entry in enumerate(entries, 1):
        if not re.fullmatch("[0-9]{1,18}", str(entry)):
            raise UsageError(
                f"{source}: entry {number} is {reprlib.repr(entry)}; give whole numbers of at least 0"
            )
    if not entries:
        raise UsageError(f"{source}: the prompt is empty; give at least one token id")
    return [int(entry) for entry in entries]


def tokens(prompt: str | list[int], arguments: argparse.Namespace, console: Console) -> list[int]:
    """Token ids of the prompt for the model that the arguments name: the last of them, up to the limit.

    Raises:
        UsageError: the prompt is a text, and the model has no tokenizer.
    """
    from offload_rt.model.loading import demo_model, load_tokenizer
    from offload_rt.text import encode, keep_last

    tokenizer = load_tokenizer(arguments.model or demo_model("target"))
    limit: int | None = arguments.max_prompt_tokens
    built_in = not (arguments.prompts or arguments.stdin)
    if limit is None and built_in:
        limit = BUILT_IN_TOKENS
    if isinstance(prompt, list):
        tokens = prompt
    elif tokenizer is None:
        raise UsageError(
            f"model {arguments.model} has no tokenizer, so a text cannot be its prompt; give token ids with"
            " --prompt-tokens FILE"
        )
    else:
        console.working("encode", f"{len(prompt):,} characters")
        tokens = encode(tokenizer, prompt)
        console.clear()
    if limit is not None and len(tokens) > limit:
        source = f" of {BUILT_IN}" if built_in else ""
        console.notice(f"prompt: kept the last {limit:,} of {len(tokens):,} tokens{source}")
        tokens = keep_last(tokens, limit, None if tokenizer is None else tokenizer.bos_token_id)
    console.tokens["prefill"] = len(tokens)
    return tokens
