"""`bench offload` without a GPU: paced links, the demo pair, and random weights in small shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch

from bench.inputs import say
from bench.offload.cases import Sizes, System
from bench.offload.measure import Measured, measure
from bench.offload.references import References
from bench.offload.text import Subject
from cpu_kv import PacedLink


def paced_cases(
    subject: Subject, sizes: Sizes, cases: Mapping[str, tuple[float, Mapping[str, Sequence[System]]]]
) -> Iterator[tuple[dict[str, Any], list[Measured]]]:
    """What a subject does over links on which a stream takes so many times as long as a draft.

    Args:
        cases: by name, that ratio, and systems by placement.
    """
    with one_thread(), closing(References(subject, sizes)) as references:
        for name, (ratio, systems) in cases.items():
            references.begin(ratio)
            rate = references.rate
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s, paced anew in every turn")
            placements = {place: (sizes.shares(place), those) for place, those in systems.items()}
            link = partial(PacedLink, rate)
            case, measured = measure(name, subject, sizes, placements, link, rate, references)
            yield case | {"processor": references.processor()}, measured


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for each thread of ours: pass, drafting and a paced link share the processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
