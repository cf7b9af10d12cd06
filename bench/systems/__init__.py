"""Systems that `bench peers` runs side by side: one small adapter each, in a process of its own.

An adapter is a module here that names `SYSTEMS`: each system's name and how to open it. It imports what it
needs itself, nothing of another adapter, and nothing of offload-rt but in `ours`: a peer may live in an
environment in which offload-rt is not installed. To add a peer is to add a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Setup:
    """What a system is opened with; JSON values throughout, so that it can be sent to a worker.

    Attributes:
        model, draft: folders of checkpoints as transformers saves them.
        dtype: of weights and, unless a system says otherwise, of KV: `float32`, `bfloat16`.
        device: `cpu` or `cuda:N`.
        threads: that compute, on a CPU.
        capacity: tokens of the longest prompt and its continuation together.
        chunk: prompt tokens read at a time, where a system lets one choose.
        work: a folder for files that may be kept between runs (converted weights, compiled extensions).
        options: of the one system.
    """

    model: str
    draft: str | None
    dtype: str
    device: str
    threads: int
    capacity: int
    chunk: int
    work: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """`work`, made if need be."""
        path = Path(self.work)
        path.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Run:
    """A greedy continuation of the prompt.

    Attributes:
        tokens: ids, as many as were asked for: no end token ends it.
        ms: from the end of the prefill to the last token. Where a system computes the first token with its
            prefill, from that token on; `timed` are the tokens of that time.
    """

    tokens: list[int]
    ms: float
    timed: int


class System(Protocol):
    """One way to continue a prompt. Used from one thread; whatever it raises becomes its row."""

    label: str
    """What it is, with its version: `transformers 5.23.0, StaticCache`."""
    notes: tuple[str, ...]
    """What a reader must know: another precision of its KV, that it is rebuilt, …"""

    def prepare(self, prompt: Sequence[int]) -> float:
        """Reads a prompt, but perhaps its last token; forgets what was read before. Returns ms."""

    def run(self, new_tokens: int) -> Run:
        """Continues the prompt from its end, greedily; any number of times, always from there."""

    def close(self) -> None:
        """Gives everything back."""


Opener = Callable[[Setup], System]
"""Loads what it needs; raises ImportError where the system is not installed."""
