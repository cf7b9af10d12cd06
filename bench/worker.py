"""A process that runs systems of one adapter, `python -m bench.worker ADAPTER DESCRIPTOR`.

Over the connection it is asked one thing of one system at a time: `[command, system, argument, …]`. It
imports no more of this package than the adapter, so that it runs in an environment of the peer's own.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.systems import Opener, Setup, System


def main(adapter: str, descriptor: str) -> None:
    """Answers whatever is asked until the connection is closed."""
    os.set_inheritable(int(descriptor), False)  # what a system starts must not keep it open
    connection = Connection(int(descriptor))
    opened: dict[str, System] = {}
    with suppress(EOFError, OSError):  # of the connection
        while True:
            command, name, *arguments = connection.recv()
            try:
                if command == "open":
                    systems: dict[str, Opener] = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS
                    setup: Setup
                    (setup,), system = arguments, name.partition("+")[0]
                    if system not in systems:
                        raise ValueError(f"{adapter} has no system {system}; there are {', '.join(systems)}")
                    if setup.gpu_memory_gib and "torch" in sys.modules:  # not for llama.cpp, nor vLLM
                        cap(setup.gpu_memory_gib, setup.device)
                    opened[name] = systems[system](setup)
                    with suppress(OSError):  # its peak counts from here on: not what was converted for it
                        Path("/proc/self/clear_refs").write_text("5")
                answer = _ask(opened[name], command, *arguments) | memory()
            except Exception as error:
                traceback.print_exc()
                last = str(error).strip().splitlines()
                answer = {"error": f"{type(error).__name__}: {last[-1] if last else ''}".rstrip(": ")}
            connection.send(answer)
    for system in opened.values():
        system.close()


def _ask(system: System, command: str, *arguments: Any) -> dict[str, Any]:
    if command == "prepare":
        return {"ms": system.prepare(*arguments)}
    if command == "run":
        return asdict(system.run(*arguments))
    if command == "logits_after":
        return {"logits": system.logits_after(*arguments)}  # type: ignore[attr-defined]
    if command == "draw":
        system.draw(*arguments)  # type: ignore[attr-defined]
    return {"label": system.label, "notes": list(system.notes)}


def cap(gib: float, device: Any) -> None:
    """Keeps torch to a part of a GPU's memory."""
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def memory() -> dict[str, int]:
    """Bytes: the peaks of the process on host and device, and what it holds page-locked."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = {name: 1024 * int(status.get(key, "0").split()[0]) for name, key in _STATUS.items()}
    torch = sys.modules.get("torch")
    device = torch.cuda.max_memory_reserved() if torch and torch.cuda.is_available() else 0
    return held | {"device_bytes": device}


_STATUS = {"peak_bytes": "VmHWM", "locked_bytes": "VmPin"}


if __name__ == "__main__":
    main(*sys.argv[1:])
