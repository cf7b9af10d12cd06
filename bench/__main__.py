"""`python -m bench COMMAND`: tables and one line of JSON to stdout, progress to stderr, results to files.

Exit codes: 0 done; 1 a check of `gpu` failed; 2 the request cannot be fulfilled (one line on stderr);
130 interrupted; 141 the reader of stdout is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from bench import COMMANDS
from offload_rt.commands.cli import Parser
from offload_rt.commands.exits import run_program


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process); returns the exit code."""
    return run_program("bench", lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(words: list[str]) -> int:
    parser = Parser(prog="bench", description="Measures offload-rt.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (module, about) in COMMANDS.items():
        description = f"{about[0].upper()}{about[1:]}."
        command = commands.add_parser(name, help=about, description=description, allow_abbrev=False)
        if words[:1] == [name]:  # torch alone takes seconds to import
            loaded_module = import_module(f"bench.{module}")
            command_module = getattr(loaded_module, "STUDY", loaded_module)
            command.set_defaults(run=command_module.run, words=words)
            command_module.add_arguments(command, name)
    arguments = parser.parse_args(words)
    return arguments.run(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
