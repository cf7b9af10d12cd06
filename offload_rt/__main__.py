"""The program `offload-rt`, also `python -m offload_rt`."""

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C ends the process without a traceback until `run_program` handles it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Runs the command line of the process; returns the exit code."""
    from offload_rt import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
