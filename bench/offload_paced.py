"""`bench offload` without a GPU: paced links, the demo pair and random weights in small shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.engine import Run
from bench.inputs import Models, say
from bench.offload_cases import LINK_CASES, Sizes, System, held_systems, paced_systems
from bench.offload_measure import InPlace, Subject, measure, measure_in_place, one_thread
from bench.primitives import processor
from bench.random_models import random_model
from bench.timeline_plot import best_run, draw
from cpu_kv import PacedLink
from offload_rt.config import OffloadConfig
from offload_rt.errors import UsageError
from offload_rt.model import CausalModel
from offload_rt.shapes import from_config

AHEAD = OffloadConfig().ahead


def measure_pair(
    models: Models, prompt: Sequence[int], sizes: Sizes, composition: str, picture: Path | None
) -> list[dict[str, Any]]:
    """The pair over links on which a stream takes as long as a draft, twice as long, and half.

    Raises:
        UsageError: a system's tokens are not those of plain decoding.
    """
    target = CausalModel(models.target, models.names[0])
    draft = None if models.draft is None else CausalModel(models.draft, models.names[1] or "")
    subject = Subject(target, draft, prompt)
    cases = []
    with one_thread():
        say(f"{len(prompt):,} tokens in place: what drafting and passes take")
        in_place = measure_in_place(subject, sizes, composition)
        figures = processor(target, len(prompt), sizes.gamma, in_place)
        for name, ratio in LINK_CASES.items():
            rate = _rate(target, sizes, in_place, ratio)
            say(f"{name}: a link of {rate / 1e9:.2f} GB/s")
            shown: dict[str, list[Run]] = {}
            rows = measure(
                subject,
                sizes,
                paced_systems(composition, name, AHEAD),
                lambda rate=rate: PacedLink(rate),
                rate,
                lambda system: _compute(system, in_place),
                runs_of=shown,
            )
            for one in rows:
                _check_tokens(one, in_place.tokens)
            cases.append(_case(name, target, draft, sizes, rows, figures, models.names[0]))
            if picture is not None and not picture_drawn(cases):
                run = best_run(shown[f"ahead {AHEAD}"])
                draw(run, _title(models.names[0], name, rate, rows[-1]["context"]), picture)
    return cases
