"""Reads the prompt: from flags, files, stdin, or the built-in text."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.errors import UsageError, first_line
from offload_rt.text.documents import decode, read_bytes, read_document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = "Moby-Dick, chapters 1 to 48"
BUILT_IN_TOKENS = 32768
"""Tokens of the built-in prompt that are kept without --max-prompt-tokens."""
TOKENS = "--prompt-tokens"
IDS = "token IDs, separated by spaces or commas, or a JSON list"
UNITS = {"k": 2**10, "m": 2**20}
DECIMAL_UNITS = {"k": 1000, "m": 1000**2}
"""Tokens per unit of a token count, by its letter."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `read` and `tokens` look at."""
    title = f"prompt (default: {BUILT_IN}; several are joined in order)"
    add = parser.add_argument_group(title).add_argument
    ids = f"{IDS}; the output is token IDs too"
    for flag, metavar, meaning in (
        ("--prompt", "TEXT", "the text itself"),
        ("--prompt-file", "FILE", "a document, such as a book: txt, md, html, pdf or epub"),
        (TOKENS, "FILE", ids),
    ):

        def with_flag(value: str, flag: str = flag) -> tuple[str, str]:
            return flag, value

        meaning += " (default: none)"
        add(flag, type=with_flag, action="append", dest="prompts", default=[], metavar=metavar, help=meaning)
    add("stdin", nargs="?", metavar="-", help="read a text from stdin; it follows the other prompts")
    add_encoding(add)
    limit = f"keep the last N tokens (default: all, or {BUILT_IN_TOKENS} of the built-in prompt)"
    add("--max-prompt-tokens", type=token_count, metavar="N", help=limit)


def add_encoding(add: Callable[..., object]) -> None:
    """Adds `--encoding`."""
    meaning = "encoding of text and HTML files, e.g. cp1252 (default: by their own mark, else utf-8)"
    add("--encoding", metavar="NAME", help=meaning)


def positive(text: str) -> int:
    """An argument type: an integer of at least 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not an integer of at least 1")
    return int(text)


class TokenCount(int):
    """A number of tokens, with the decimal reading of its unit: 1M is 1,048,576 tokens, or 1,000,000."""

    decimal: int


def token_count(text: str) -> TokenCount:
    """An argument type: a number of tokens, as 100000, 100,000, 1e5, 96k (96 × 1,024) or 1M (1,024²)."""
    match = re.fullmatch(
        r"([0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,18}(?:\.[0-9]{1,9})?(?:e[0-9]{1,2})?)([km]?)", text.lower()
    )
    number, unit = (float(match[1].replace(",", "")), match[2]) if match else (0.0, "")
    count = number * UNITS.get(unit, 1)
    if count < 1 or count != int(count):
        wrong = f"{reprlib.repr(text)} is not a number of tokens, like 100000, 96k or 1M"
        raise argparse.ArgumentTypeError(wrong)
    tokens = TokenCount(count)
    tokens.decimal = int(number * DECIMAL_UNITS.get(unit, 1))
    return tokens


def read(arguments: argparse.Namespace, console: Console) -> str | list[int]:
    """Returns the prompts that the user gave, joined, or the built-in one: a text, or token IDs.

    Notices on the console name what cannot be read of a document.

    Raises:
        UsageError: texts together with token IDs, an empty prompt, or one that cannot be read.
    """
    if arguments.stdin not in (None, "-"):
        unexpected = reprlib.repr(arguments.stdin)
        raise UsageError(f"unexpected argument {unexpected}; give a prompt with --prompt TEXT")
    named = [*arguments.prompts, *([("-", "-")] if arguments.stdin else [])]
    if not named:
        return built_in()
    prompts = [_read_one(flag, value, arguments.encoding, console) for flag, value in named]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    ids = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts and ids:
        text = next(flag for flag, _ in named if flag != TOKENS)
        raise UsageError(f"{TOKENS} and {text}: token IDs cannot be joined with a text; give one kind")
    return _joined(texts) if texts else [token for prompt in ids for token in prompt]


def _read_one(flag: str, value: str, encoding: str | None, console: Console) -> str | list[int]:
    if flag == "--prompt-file":
        return read_document(value, console.notice, encoding, f"prompt file {value}")
    if flag == "--prompt":  # bytes that are not UTF-8 have arrived as lone surrogates
        return decode(flag, os.fsencode(value))
    if flag == "-":
        return stdin_text(encoding, lambda fault: console.notice(f"stdin: {fault}"))
    return token_file(value)


def token_file(path: str) -> list[int]:
    """Returns the token IDs in a file. Raises UsageError where it has none, or something else."""
    source = f"token file {path}"
    return _token_ids(source, decode(source, read_bytes(source, path)))


def stdin_text(encoding: str | None = None, on_notice: Callable[[str], None] | None = None) -> str:
    """Returns what stdin holds; see `decode`. Raises UsageError where it is closed, empty or no text."""
    if sys.stdin is None:
        raise UsageError("stdin: is closed; pipe a text into it")
    try:
        data = sys.stdin.buffer.read()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"stdin: cannot be read ({reason}); pipe a text into it") from None
    return decode("stdin", data, encoding, on_notice)


def _joined(texts: list[str]) -> str:
    """Joins texts; each begins on a new line."""
    *before, last = texts
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in before) + last


def built_in() -> str:
    """Returns a novel in the public domain, as much of it as a prompt of 128K tokens needs."""
    return gzip.decompress((resources.files("offload_rt.demo") / "moby-dick.txt.gz").read_bytes()).decode()


def _token_ids(source: str, text: str) -> list[int]:
    try:
        entries = json.loads(text) if text.lstrip().startswith("[") else text.replace(",", " ").split()
    except (ValueError, RecursionError) as error:
        wrong = f"starts with [ but is not a JSON list ({first_line(error)})"
        raise UsageError(f"{source}: {wrong}") from None
    for number, entry in enumerate(entries, 1):
        if not re.fullmatch("[0-9]{1,18}", str(entry)):
            raise UsageError(
                f"{source}: entry {number} is {reprlib.repr(entry)}; give integers of at least 0"
            )
    if not entries:
        raise UsageError(f"{source}: the prompt is empty; give at least one token ID")
    return [int(entry) for entry in entries]


def tokens(prompt: str | list[int], arguments: argparse.Namespace, console: Console) -> list[int]:
    """Returns the prompt as token IDs of the model that the arguments name, the last ones up to the limit.

    Raises:
        UsageError: the prompt is a text, and the model has no tokenizer.
    """
    from offload_rt.model.embedded import model_source
    from offload_rt.model.loading import load_tokenizer

    tokenizer = load_tokenizer(model_source(arguments.model))
    limit: int | None = arguments.max_prompt_tokens
    built_in = not (arguments.prompts or arguments.stdin)
    if limit is None and built_in:
        limit = BUILT_IN_TOKENS
    tokens = encoded(prompt, tokenizer, arguments.model, console)
    tokens = kept(tokens, limit, tokenizer, console, "prompt", f" of {BUILT_IN}" if built_in else "")
    console.tokens["prefill"] = len(tokens)
    return tokens


def encoded(
    prompt: str | list[int], tokenizer: PreTrainedTokenizerBase | None, model: str, console: Console
) -> list[int]:
    """Returns a prompt as token IDs. Raises UsageError for a text where `model` has no tokenizer."""
    from offload_rt.text.tokenize import encode

    if isinstance(prompt, list):
        return prompt
    if tokenizer is None:
        raise UsageError(
            f"model {model} has no tokenizer and cannot read a text; give token IDs with {TOKENS} FILE"
        )
    console.working("encode", f"{len(prompt):,} characters")
    tokens = encode(tokenizer, prompt)
    console.clear()
    return tokens


def kept(
    tokens: list[int],
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    console: Console,
    name: str,
    source: str = "",
) -> list[int]:
    """Returns the last tokens up to a limit; a notice that begins with `name` says so."""
    from offload_rt.text.tokenize import keep_last

    if limit is None or len(tokens) <= limit:
        return tokens
    console.notice(f"{name}: kept the last {limit:,} of {len(tokens):,} tokens{source}")
    return keep_last(tokens, limit, tokenizer)
