"""Systems that run side by side: one small adapter each.

An adapter is a module here that names `SYSTEMS`: each system's name and how to open it. It imports what it
needs itself and nothing of another adapter; a peer with an environment of its own nothing of offload-rt,
which is not installed there. To add a peer of that kind is to add a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Prompt = Sequence[Sequence[int]]
"""A text, or several that are equally long, as token ids."""


@dataclass(frozen=True)
class Setup:
    """What a system is opened with.

    Attributes:
        model, draft: folders of checkpoints as transformers saves them.
        dtype: of weights and, unless a system says otherwise, of KV: `float32`, `bfloat16`, `float16`.
        device: `cpu` or `cuda:N`.
        threads: that compute, on a CPU.
        capacity: tokens of the longest prompt and its continuation together.
        batch: most texts of a prompt; they are continued together.
        kv_token_bytes: of a token's keys and values in all layers, in `dtype`.
        weight_bytes: of the target.
        chunk: prompt tokens read at a time, where a system lets one choose.
        work: a folder for files that may be kept between runs (converted weights, compiled extensions).
        temperature: 0 decodes greedily.
        link_gb_s: KV lies behind an emulated link of that bandwidth; 0: where the system has it. Only the
            systems of `runner.LINKED` are opened with one.
        cards: how many more such links there are, each to an emulated card that attends a share of the KV.
        gpu_memory_gib: of a GPU's memory that the process may take; 0: all. The worker keeps torch to it.
        options: keys of our configurations.
        settings, acceptance: of one system of ours: keys for it alone, and what its acceptance is held at.
    """

    model: str
    draft: str | None
    dtype: str
    device: str
    threads: int
    capacity: int
    chunk: int
    work: str
    temperature: float = 0.0
    link_gb_s: float = 0.0
    cards: int = 0
    gpu_memory_gib: float = 0.0
    batch: int = 1
    kv_token_bytes: int = 0
    weight_bytes: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    acceptance: float | None = field(default=None, compare=False)

    @property
    def folder(self) -> Path:
        """`work`, made if need be."""
        path = Path(self.work)
        path.mkdir(parents=True, exist_ok=True)
        return path


@dataclass(frozen=True)
class Run:
    """A continuation of the prompt, or of each of its texts.

    Attributes:
        tokens: ids, text after text, of each as many as were asked for: no end token ends it.
        ms: from the end of the prefill to the last token. Where a system computes the first token with its
            prefill, from that token on; `timed` are the tokens of that time.
        rounds: passes of the target, each over all texts, where a system tells.
        accepted: share of the drafted tokens that stood, by what drafted them.
        parts_ms: what the time went to.
        notes: what a reader must know of this run.
        figures: of its rounds, by name, where a system looks into them.
    """

    tokens: list[int]
    ms: float
    timed: int
    rounds: int | None = None
    accepted: dict[str, float] = field(default_factory=dict)
    parts_ms: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)


class System(Protocol):
    """One way to continue a prompt. Used from one thread; whatever it raises becomes its row.

    One that can has `logits_after(tokens)`: the logits, a list, behind the one text and `tokens`; and
    `draw(path)`: a picture of its last run.
    """

    label: str
    """What it is, with its version: `transformers 5.23.0, StaticCache`."""
    notes: tuple[str, ...]
    """What a reader must know: another precision of its KV, that it is rebuilt, …"""

    def prepare(self, prompt: Prompt) -> float:
        """Reads a prompt, but perhaps its texts' last tokens; forgets what was read before. Returns ms."""

    def run(self, new_tokens: int) -> Run:
        """Continues the prompt from its end; any number of times, always from there."""

    def close(self) -> None:
        """Gives everything back."""


Opener = Callable[[Setup], System]
"""Loads what it needs; raises ImportError where the system is not installed, ValueError where it lacks what
is asked of it."""
