"""Shared by the tests of the benchmarks: tiny models, tiny sizes, and a worker without a process."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
from pathlib import Path
from threading import Thread
from typing import Any

import bench.__main__
from bench import worker
from bench.random_models import SHAPES
from bench.runner import Worker
from bench.systems import Setup
from support.tiny_models import byte_tokenizer, noisy_copy, real_text, tiny_target

SMALL: dict[str, object] = {
    "retrieval.budget": 64,
    "retrieval.recent": 16,
    "retrieval.refresh": "stride:1000",
    "streaming.sinks": 4,
    "streaming.window": 28,
    "speculation.gamma2": 3,
    "speculation.step_down": False,
    "store.page": 16,
    "store.slab_tokens": 64,
    "store.segment_bytes": 8192,
    "offload.refresh_from": "stream",
}
SETTINGS = [word for key, value in SMALL.items() for word in ("--set", f"{key}={json.dumps(value)}")]
SMALLER = dataclasses.replace(
    SHAPES["tiny"], hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16
)


def save_pair(folder: Path, layers: int = 2) -> list[str]:
    """Saves a target with a tokenizer, its draft and a book; returns the arguments that name them."""
    target = tiny_target("llama-gqa", seed=3, layers=layers)
    for name, model in (("target", target), ("draft", noisy_copy(target))):
        model.save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "book.txt").write_bytes(real_text().encode()[:6000])
    return ["--model", f"{folder}/target", "--draft", f"{folder}/draft", "--text", f"{folder}/book.txt"]


def bench_main(*words: object) -> int:
    """Runs a command line, whose words may be joined by spaces."""
    return bench.__main__.main([part for word in words for part in str(word).split()])


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file, which goes elsewhere: no paths of this machine are in it."""
    text = path.read_text()
    assert str(path.parent) not in text
    return [json.loads(line) for line in text.splitlines()]


def setup(folder: Path, **changes: Any) -> Setup:
    given = {"model": "none", "draft": None, "dtype": "float32", "device": "cpu", "threads": 1}
    return Setup(**given | {"capacity": 400, "chunk": 64, "work": str(folder / "work")} | changes)


class Inside(Worker):
    """A worker in a thread of this process: to start a process takes longer than its work here."""

    def __init__(self, adapter: str, setup: Setup) -> None:
        self._patience_s = 100.0
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._thread = Thread(target=worker.main, args=(adapter, str(os.dup(theirs.fileno()))))
        self._thread.start()

    def close(self) -> None:
        self._connection.close()
        self._thread.join()
