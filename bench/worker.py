"""A process that runs systems of one adapter: `python -m bench.worker ADAPTER DESCRIPTOR`.

The connection carries commands for one system at a time: `[command, system, argument, …]`. Only the adapter
is imported from this package, so that the process can run in the environment of a peer.
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
    """Answers commands until the connection is closed."""
    os.set_inheritable(int(descriptor), False)  # processes that a system starts must not keep it open
    connection = Connection(int(descriptor))
    opened: dict[str, System] = {}
    with suppress(EOFError, OSError):  # of the connection
        while True:
            command, name, *arguments = connection.recv()
            try:
                if command == "open":
                    opened[name] = _open(adapter, name.partition("+")[0], *arguments)
                answer = _ask(opened[name], command, *arguments) | memory()
            except Exception as error:
                traceback.print_exc()
                last = str(error).strip().splitlines()
                answer = {"error": f"{type(error).__name__}: {last[-1] if last else ''}".rstrip(": ")}
            connection.send(answer)
    for system in opened.values():
        system.close()


def _open(adapter: str, name: str, setup: Setup) -> System:
    systems: dict[str, Opener] = importlib.import_module(f"bench.systems.{adapter}").SYSTEMS
    if name not in systems:
        raise ValueError(f"{adapter} has no system {name}; there are {', '.join(systems)}")
    if setup.gpu_memory_gib and "torch" in sys.modules:  # llama.cpp does not use torch
        cap(setup.gpu_memory_gib, setup.device)
    system = systems[name](setup)
    with suppress(OSError):  # resets the peak: conversion of weights does not count
        Path("/proc/self/clear_refs").write_text("5")
    return system


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
    """Limits torch to a part of a GPU's memory."""
    import torch

    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), device)


def memory() -> dict[str, int]:
    """Peaks of the process on host and device, in bytes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    torch = sys.modules.get("torch")
    device = torch.cuda.max_memory_reserved() if torch and torch.cuda.is_available() else 0
    return {"peak_bytes": 1024 * int(status["VmHWM"].split()[0]), "device_bytes": device}


if __name__ == "__main__":
    main(*sys.argv[1:])
