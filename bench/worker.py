"""A process that runs one system, `python -m bench.worker ADAPTER SYSTEM`: JSON lines in and out.

It imports no more of this package than the adapter, so that it runs in an environment of the peer's own.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import traceback
from dataclasses import asdict
from typing import Any

from bench.systems import Opener, Setup, System


def main(adapter: str, name: str) -> None:
    """Answers one line for each line on stdin, until that ends."""
    # Libraries print what they like; answers go where stdout went, and stdout to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system: System | None = None
    for line in sys.stdin:
        command, argument = json.loads(line)
        try:
            if command == "open":
                systems: dict[str, Opener] = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS
                if name not in systems:
                    raise ValueError(f"{adapter} has no system {name}; there are {', '.join(systems)}")
                system = systems[name](Setup(**argument))
                answer: Any = {"label": system.label, "notes": list(system.notes)}
            else:
                assert system is not None
                if command == "prepare":
                    answer = {"ms": system.prepare(argument)}
                elif command == "run":
                    answer = asdict(system.run(argument))
                else:
                    system.close()
                    answer = {}
            answer["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        except Exception as error:
            traceback.print_exc()
            last = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {last[-1] if last else ''}".rstrip(": ")}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
