"""Which blocks a model leaves out while it drafts: Bayesian optimisation of its speed.

Draft & Verify (arXiv 2309.08168) chooses them so. A clock is noisy, mostly by drift (other work, heat): so
every plan is measured beside all layers at the same moment, and the fastest ones once more, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean

from offload_rt.layers import EXACT, blocks_of, skipping

PLAIN = "plain"
"""In place of `layers`: decoding without drafts."""

Rate = Callable[[str, int], float]
"""Tokens a second of the text of a seed, drafted with such `layers`."""


@dataclass(frozen=True)
class Trial:
    """`speed` of drafting with `layers`, over that with all of them."""

    layers: str
    speed: float


def search(layers: int, trials: int, seed: int, rate: Rate) -> Iterator[Trial]:
    """Measures so many plans for a model of `layers` layers; one may come again, on another text.

    First none is left out, then each block alone, then the harmless ones together, more and more of them: a
    search that began with random plans, without half of the blocks, would learn nothing of those that draft
    well. From there on, a tree-structured Parzen estimator proposes. Plans without any attention are passed
    over.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=0, multivariate=True)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    blocks, texts = blocks_of(layers), count(seed)
    speeds: dict[tuple[str, ...], float] = {}
    first = _first(blocks, speeds)
    while trials:
        if (given := next(first, None)) is not None:
            study.enqueue_trial({block: block in given for block in blocks})
        asked = study.ask()
        skipped = tuple(block for block in blocks if asked.suggest_categorical(block, [False, True]))
        plan, speed = skipping(skipped), 0.0
        attends = sum(block.endswith("a") for block in skipped) < layers
        if attends:
            text = next(texts)
            speed = rate(plan, text) / rate(EXACT, text) if skipped else 1.0
        speeds[skipped] = speed
        study.tell(asked, speed)
        if attends:
            trials -= 1
            yield Trial(plan, speed)


def _first(blocks: Sequence[str], speeds: Mapping[tuple[str, ...], float]) -> Iterator[tuple[str, ...]]:
    """Plans to begin with; `speeds` are those of the plans before."""
    yield ()
    for block in blocks:
        yield (block,)
    harmless = sorted(blocks, key=lambda block: -speeds[block,])
    together = 2
    while together < len(blocks):
        chosen = harmless[:together]
        yield tuple(block for block in blocks if block in chosen)
        together += together // 2


def fastest(trials: Sequence[Trial], most: int) -> list[Trial]:
    """The fastest plans that leave something out, by the mean of their trials; the fastest first."""
    speeds: dict[str, list[float]] = {}
    for trial in trials:
        speeds.setdefault(trial.layers, []).append(trial.speed)
    speeds.pop(EXACT, None)
    means = [Trial(layers, fmean(measured)) for layers, measured in speeds.items()]
    return sorted(means, key=lambda mean: -mean.speed)[:most]


def compare(trials: Sequence[Trial], seed: int, rate: Rate, most: int = 3) -> Iterator[dict[str, float]]:
    """Tokens a second of plain decoding, all layers and the `most` fastest plans, again and again.

    On texts that the search has not seen, where texts are drawn.
    """
    plans = [PLAIN, EXACT, *(trial.layers for trial in fastest(trials, most))]
    for text in count(seed + len(trials)):
        yield {plan: rate(plan, text) for plan in plans}
