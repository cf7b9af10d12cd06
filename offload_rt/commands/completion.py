"""`offload-rt completion`: prints a script that completes the command line in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "tcsh")
INSTALL = """\
to install:
  bash  offload-rt completion bash > ~/.local/share/bash-completion/completions/offload-rt
  zsh   offload-rt completion zsh > FOLDER/_offload-rt, where FOLDER is one of your $fpath
  tcsh  offload-rt completion tcsh > ~/.offload-rt.tcsh, and in ~/.tcshrc: source ~/.offload-rt.tcsh
A new shell completes commands, flags, their choices, files and folders.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    completion = commands.add_parser(
        "completion",
        help="a script that completes commands and flags in your shell",
        description="Prints a script for a shell.",
        epilog=INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    completion.add_argument("shell", choices=SHELLS, help="the shell")
    completion.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import shtab

    for action in _actions(arguments.parser):
        names = str(action.metavar or "").rstrip("….").split("|")
        if "FILE" in names:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif "FOLDER" in names:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(arguments.parser, arguments.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
