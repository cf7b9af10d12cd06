"""The program `offload-rt`, also `python -m offload_rt`."""

# The module `signal` imports others, which takes a while.
import _signal  # type: ignore[import-not-found]
import sys

if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    # Ctrl-C ends the process without a traceback until `run_program` handles it.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def main() -> int:
    """Runs the command line of the process; returns the exit code."""
    from offload_rt.commands import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
