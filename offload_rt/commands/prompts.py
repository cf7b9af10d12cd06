"""Where a prompt comes from: a flag, a file, stdin, or the built-in text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offload_rt.commands.console import Console

BUILT_IN = "Python's help pages"
BUILT_IN_TOKENS = 32768
"""How much of the built-in prompt is kept without --max-prompt-tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `read` and `encode` look at."""
    prompt = parser.add_argument_group(f"prompt (default: {BUILT_IN})")
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 text file, such as a book")
    prompt.add_argument("stdin", nargs="?", metavar="-", help="read the prompt from stdin")
    prompt.add_argument(
        "--max-prompt-tokens",
        type=_positive,
        metavar="N",
        help=f"keep the last N tokens (default: all, or {BUILT_IN_TOKENS} of the built-in prompt)",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read(arguments: argparse.Namespace) -> str:
    """The prompt the user gave, or the built-in one.

    Raises:
        UsageError: more than one prompt, an empty one, or one that cannot be read as UTF-8.
    """
    if arguments.stdin not in (None, "-"):
        raise UsageError(f"unexpected argument {arguments.stdin!r}; a prompt is given with --prompt TEXT")
    named = _named(arguments)
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: give one prompt only")
    if not named:
        # Every Python ships these pages; together they are as long as a book.
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    source = named[0]
    try:
        if source == "--prompt":
            # Bytes of the command line that are not UTF-8 arrive as lone surrogates.
            text = os.fsencode(arguments.prompt).decode("utf-8")
        elif source == "--prompt-file":
            source = f"prompt file {arguments.prompt_file}"
            text = Path(arguments.prompt_file).read_bytes().decode("utf-8")
        else:
            source = "stdin"
            if sys.stdin is None:
                raise UsageError("stdin: is closed; pipe a text into it")
            text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{source}: cannot be read ({reason}); give a text file") from None
    if not text:
        raise UsageError(f"{source}: the prompt is empty; give at least one character")
    return text


def encode(
    tokenizer: PreTrainedTokenizerBase | None, text: str, arguments: argparse.Namespace, console: Console
) -> list[int]:
    """Token ids of the prompt: the last of them if there are more than the limit.

    Raises:
        UsageError: there is no tokenizer.
    """
    from offload_rt.text import encode as encoded

    if tokenizer is None:
        raise UsageError(f"model {arguments.model} has no tokenizer: a text cannot be its prompt")
    limit: int | None = arguments.max_prompt_tokens
    built_in = not _named(arguments)
    if limit is None and built_in:
        limit = BUILT_IN_TOKENS
    prompt = encoded(tokenizer, text)
    if limit is not None and len(prompt) > limit:
        source = f" of {BUILT_IN}" if built_in else ""
        console.notice(f"prompt: kept the last {limit:,} of {len(prompt):,} tokens{source}")
        prompt = encoded(tokenizer, text, last=limit)
    console.tokens["prefill"] = len(prompt)
    return prompt


def _named(arguments: argparse.Namespace) -> list[str]:
    """The ways in which the user gave a prompt."""
    given = {"--prompt": arguments.prompt, "--prompt-file": arguments.prompt_file, "-": arguments.stdin}
    return [name for name, value in given.items() if value is not None]
