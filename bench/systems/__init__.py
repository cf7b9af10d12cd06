"""Systems that run side by side: one small adapter each.

An adapter is a module with `SYSTEMS`: how to open each of its systems, by name. It imports what it needs
itself and nothing of another adapter. The adapter of a peer with its own environment imports nothing of
offload-rt, which is not installed there. To add such a peer, add a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Prompt = Sequence[Sequence[int]]
"""Token IDs of one sequence, or of several that are equally long."""


@dataclass(frozen=True)
class Setup:
    """The settings that a system is opened with.

    Attributes:
        model, draft: folders of checkpoints as transformers saves them.
        dtype: of weights and, unless a system says otherwise, of KV: `float32`, `bfloat16`, `float16`.
        device: `cpu` or `cuda:N`.
        threads: compute threads on a CPU.
        capacity: tokens of the longest prompt and its continuation together.
        chunk: prompt tokens read at a time, where a system lets one choose.
        work: a folder for files that are kept between runs (converted weights, compiled extensions).
        link_gb_s: bandwidth of an emulated link that the KV is behind; 0: none.
        gpus: how many more such links there are, each to an emulated GPU that attends to a share of the KV.
        gpu_memory_gib: GPU memory that the process may use; 0: all. The worker limits torch to it.
        batch: most sequences of a prompt.
        kv_token_bytes: of a token's keys and values in all layers, in `dtype`.
        weight_bytes: of the target.
        options: configuration keys for all systems of ours.
        settings, acceptance: keys for one system of ours, and the rate at which its acceptance is held.
    """

    model: str
    draft: str | None
    dtype: str
    device: str
    threads: int
    capacity: int
    chunk: int
    work: str
    link_gb_s: float = 0.0
    gpus: int = 0
    gpu_memory_gib: float = 0.0
    batch: int = 1
    kv_token_bytes: int = 0
    weight_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    acceptance: float | None = field(default=None, compare=False)

    @property
    def folder(self) -> Path:
        """`work`, created if need be."""
        path = Path(self.work)
        path.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Run:
    """A continuation of the prompt.

    Attributes:
        tokens: IDs, sequence after sequence, each as many as were asked for: no end token stops them.
        ms: from the end of the prefill to the last token; from the first token on, where a system computes it
            with its prefill.
        timed: number of tokens in that time.
        rounds: passes of the target over all sequences, where a system counts them.
        accepted: share of the drafted tokens that were accepted, by drafter.
        notes: what readers need to know of this run.
        figures: of its rounds, by name, where a system measures them.
    """

    tokens: list[int]
    ms: float
    timed: int
    rounds: int | None = None
    accepted: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)


class System(Protocol):
    """One way to continue a prompt. Used from one thread; what it raises becomes its row.

    Optional: `logits_after(tokens)`, the logits as a list after the one sequence and `tokens`; and
    `draw(path)`, a picture of the last run.
    """

    label: str
    """Its name with its version: `transformers 5.23.0, StaticCache`."""
    notes: tuple[str, ...]
    """Remarks for readers: another precision of its KV, that it is rebuilt, …"""

    def prepare(self, prompt: Prompt) -> float:
        """Reads a prompt, perhaps without the last tokens, in place of the one before. Returns ms."""

    def run(self, new_tokens: int) -> Run:
        """Continues the prompt from its end, each time anew."""

    def close(self) -> None:
        """Releases everything."""


Opener = Callable[[Setup], System]
"""Loads what a system needs. Raises ImportError if it is not installed, ValueError if it cannot do what is
asked."""
