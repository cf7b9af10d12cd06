"""`offload-rt COMMAND`: one module of `commands/` each.

Exit codes: 0 done; 2 the request cannot be fulfilled (one line on stderr); 130 interrupted by Ctrl-C; 141
the reader of stdout is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from offload_rt.commands import demo, doctor, generate, plan
from offload_rt.commands.generate import INTERRUPTED
from offload_rt.errors import UsageError

COMMANDS = (demo, generate, plan, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process); returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
        return status
    except UsageError as error:
        print(f"offload-rt: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("offload-rt: interrupted", file=sys.stderr)
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Takes its errors to the one place where errors are printed."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="offload-rt", description="Lossless, fast generation from long prompts.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    return parser
