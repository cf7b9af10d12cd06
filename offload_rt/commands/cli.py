"""The command line `offload-rt COMMAND`; each command is a module of `commands/`.

Exit codes: 0: done. 2: the request cannot be fulfilled (one line on stderr says why). 130: interrupted by
Ctrl-C. 143: ended by SIGTERM. 141: the reader of stdout is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import offload_rt
from offload_rt.commands import (
    ask,
    chat,
    completion,
    config,
    datastore,
    demo,
    doctor,
    generate,
    models,
    plan,
    score,
    serve,
    sessions,
)
from offload_rt.commands.console import clear_progress
from offload_rt.commands.exits import check_address_space, run_program
from offload_rt.config.settings import fill_in
from offload_rt.errors import UsageError

COMMANDS = (
    *(demo, ask, chat, serve, generate, score, models, plan, doctor),
    *(sessions, datastore, config, completion),
)
FIRST_STEPS = """\
to begin:
  offload-rt demo                                        the embedded models, with no download and no GPU
  offload-rt doctor                                      what this machine can do
  offload-rt models                                      which models it has, and their longest contexts
  offload-rt plan --model llama2-7b --context 127000     whether it fits, and how fast it will be
  offload-rt ask --model FOLDER --file FILE "Who is …?"  ask an instruct model about a document; or chat
  offload-rt generate --model FOLDER --prompt-file FILE  continue a text; see offload-rt generate --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: the arguments of the process); returns the exit code."""
    return run_program("offload-rt", lambda: _run(_parser(), argv))


def _run(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    arguments = parser.parse_args(argv)
    if sys.stdout is None:
        raise UsageError("stdout: is closed; send it to a file, or to /dev/null")
    if arguments.command is None:
        parser.print_help()
        return 0
    fill_in(arguments)
    check_address_space()
    try:
        status: int = arguments.run(arguments)
    finally:
        clear_progress()
    return status


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors as UsageError, so that they are printed in one place."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="offload-rt",
        description="Lossless, fast generation from long prompts, with the KV cache in CPU memory.",
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"offload-rt {offload_rt.__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
