"""`python -m bench COMMAND`: tables to stdout, progress to stderr, results as JSON.

The last line on stdout is the result as JSON. Exit codes: 0 done; 1 a check of `gpu` failed;
2 the request cannot be fulfilled (one line on stderr); 130 interrupted; 141 the reader of stdout is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from offload_rt.cli import Parser
from offload_rt.commands.exits import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process); returns the exit code."""
    return run_program("bench", lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def commands() -> Sequence[Any]:
    """The commands; imported where an interrupt is one as any other, since torch alone takes seconds."""
    from bench import compare, gpu, prediction_accuracy, side_by_side
    from bench.attention import ATTENTION
    from bench.model_card import MODEL_CARD
    from bench.paper import PAPER

    return side_by_side, compare, PAPER, MODEL_CARD, ATTENTION, prediction_accuracy, gpu


def _run(words: list[str]) -> int:
    parser = Parser(prog="bench", description="Measures offload-rt.", allow_abbrev=False)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for command in commands():
        command.add_parser(subparsers)
    arguments = parser.parse_args(words, argparse.Namespace(words=words))
    return arguments.run(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
