"""`python -m bench COMMAND`: tables to stdout, progress to stderr, results as JSON.

The last line on stdout is the result as JSON. Exit codes: 0 done; 1 a check of `gpu` failed;
2 the request cannot be fulfilled (one line on stderr); 130 interrupted; 141 the reader of stdout is gone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import bench.compare
import bench.gpu
import bench.prediction_accuracy
import bench.side_by_side
from bench.attention import ATTENTION
from bench.model_card import MODEL_CARD
from bench.paper import PAPER
from offload_rt.cli import Parser
from offload_rt.commands.exits import READER_GONE, drop_stdout
from offload_rt.errors import UsageError

COMMANDS = (
    bench.side_by_side,
    bench.compare,
    PAPER,
    MODEL_CARD,
    ATTENTION,
    bench.prediction_accuracy,
    bench.gpu,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process); returns the exit code."""
    parser = Parser(prog="bench", description="Measures offload-rt.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for command in COMMANDS:
        command.add_parser(commands)
    try:
        words = sys.argv[1:] if argv is None else list(argv)
        arguments = parser.parse_args(words, argparse.Namespace(words=words))
        return arguments.run(arguments) or 0
    except BrokenPipeError:
        drop_stdout()
        return READER_GONE
    except (UsageError, OSError) as error:
        print(f"bench: error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
