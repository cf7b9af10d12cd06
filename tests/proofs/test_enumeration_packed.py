"""Losslessness over packed pages and quantised retrieved caches, proved by enumeration.

The table models of `test_enumeration.py` have no KV. Here a tiny transformer in bfloat16 decodes over an
emulated link, and the same enumeration covers every random choice. In bfloat16, a pass of one token and one
of several round differently, so the proof has three parts:

- The output has exactly the distribution that the verifying passes computed, however these passes rounded.
- These passes compute what transformers computes in float32, as nearly as bfloat16 allows.
- Over raw pages, every run gives the same result, bit by bit.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from support.enumeration import Probs, distance, outcome_probs
from support.small_engine import PAGE, engine_overrides
from support.tiny_models import byte_ids, tiny_draft, tiny_target, to
from torch import Tensor
from transformers import PreTrainedModel

from cpu_kv import PacedLink
from cpu_kv.packed import PackedShape
from offload_rt import LLM
from offload_rt.attention.page_codec import MachineCodec
from offload_rt.caches import refresh
from offload_rt.caches.sizes import Tiers
from offload_rt.drafting.verifier import AcceptanceRule, Sampling, lossless
from offload_rt.engine import engine as engine_module
from offload_rt.engine.sequence import Continuation
from offload_rt.kernels.native import load_kernel
from offload_rt.kernels.quantize import quantize
from offload_rt.sampling.rejection import Draft, Verdict
from offload_rt.sampling.sampler import Draws, Sampler

VOCABULARY = 3
PROMPT = byte_ids(7 * PAGE - 1, vocabulary=VOCABULARY)
"""The KV of the first output token completes a page."""
TIERS = Tiers(resident_tokens=2 * PAGE, cpu_tokens=2 * PAGE)
"""Two full pages are resident, the CPU attends two, and two are streamed."""
MAX_TOKENS = 3
"""The first draft of a composition may have depth 2."""

TOLERANCE = 1e-6
"""Bounds what float32 rounds in softmax and in acceptance chances."""
BOUND = 0.03
"""Bounds what bfloat16 rounds, in the probability of a token given those before it. Measured is 0.018.

Rounding moves a logit between 2 and 4 by up to 2**-7, and the difference of two by up to 2**-6. This alone
moves a probability by up to 2**-6 / 4 = 0.004; the layers below round, too.
"""

COMPOSITIONS: dict[str, tuple[str, Mapping[str, object]]] = {
    "plain": ("plain", {}),
    "retrieval": ("retrieval", {"speculation.gamma2": 2}),
    "triforce": ("triforce", {"speculation.gamma1": 1, "speculation.gamma2": 2}),
    "tree": (
        "retrieval",
        {
            "speculation.levels": [{"model": "target", "cache": "retrieved", "draft": "tree:2"}],
            "speculation.gamma2": 1,
        },
    ),
}
"""By name: a shipped config, and the keys that it changes."""

CASES = [
    ("plain", 16, 3),
    ("retrieval", 16, 2),
    ("retrieval", 8, 2),
    ("retrieval", 4, 2),
    ("triforce", 8, 2),
    ("tree", 4, 2),
]
"""Composition, bits of a retrieved entry, and number of output tokens. The third reads the new page."""

Outcome = tuple[tuple[int, ...], tuple[tuple[float, ...], ...], tuple[tuple[int, int], ...]]
"""Output tokens, the target's distribution of each as verified, and (proposed, accepted) of each round."""


@cache
def target() -> PreTrainedModel:
    """A bfloat16 model with more attention than `tiny_target` has, so that distant pages matter."""
    model = tiny_target("llama-gqa", vocabulary=VOCABULARY, seed=4, spread=0.3)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.o_proj.weight *= 10
        model.lm_head.weight *= 0.5
    return to(model, torch.bfloat16)


@cache
def exact_target() -> PreTrainedModel:
    """The same weights in float32."""
    return to(copy.deepcopy(target()), torch.float32)


@cache
def exact(prefix: tuple[int, ...]) -> list[float]:
    """The distribution of the token after an output by transformers, in float32 with the same weights."""
    with torch.inference_mode():
        logits = exact_target()(torch.tensor([[*PROMPT, *prefix]])).logits[0, -1]
    probs: list[float] = logits.softmax(-1).tolist()
    return probs


def enumerated(
    name: str, bits: int, count: int, code: str = "packed", rule: AcceptanceRule = lossless
) -> dict[Outcome, float]:
    """The probability of each outcome of the first `count` tokens over pages of a code."""
    config, changes = COMPOSITIONS[name]
    overrides = {
        **engine_overrides(ahead=0),
        "retrieval.budget": 40,
        "retrieval.recent": 8,
        "retrieval.rest": False,
        "retrieval.bits": bits,
        "store.code": code,
        **changes,
    }
    draft = to(tiny_draft(VOCABULARY), torch.bfloat16)
    with LLM.from_models(target(), draft, config=config, overrides=overrides, link=PacedLink(1e9)) as llm:
        engine = llm.engine
        sequence = engine.open(PROMPT, MAX_TOKENS, tiers=TIERS)
        assert engine.store.layout.packed == (code == "packed")

        def run(draws: Draws) -> Outcome:
            engine.rewind(sequence, len(PROMPT))
            engine.begin(sequence, sequence.plan, Continuation(Sampling(Sampler(1.0), draws), MAX_TOKENS))
            sequence.verifier.rule = rule
            rows, rounds = list[tuple[float, ...]](), list[tuple[int, int]]()
            while len(rows) < count:
                (round,) = engine.step([sequence])
                assert not isinstance(round, Exception) and round.probs is not None
                rows += map(tuple, round.probs.tolist())
                rounds.append((round.proposed, round.accepted))
            tokens = sequence.tokens[len(PROMPT) :]
            return tuple(tokens[:count]), tuple(rows[:count]), tuple(rounds)

        return outcome_probs(run)


packed = cache(enumerated)


def deviation(outcomes: Mapping[Outcome, float]) -> float:
    """The largest difference between a probability that verification computed and the exact one."""
    return max(
        abs(found - wanted)
        for tokens, rows, _ in outcomes
        for length, row in enumerate(rows)
        for found, wanted in zip(row, exact(tokens[:length]), strict=True)
    )


def bias(outcomes: Mapping[Outcome, float]) -> float:
    """The largest difference between how often a token follows a prefix and what verification computed.

    For every prefix, the mean is over all runs that begin with it: passes of different shapes may have
    computed different distributions.
    """
    found: Probs = defaultdict(float)
    computed: Probs = defaultdict(float)
    for (tokens, rows, _), weight in outcomes.items():
        for length, row in enumerate(rows):
            found[tokens[: length + 1]] += weight
            for token, probability in enumerate(row):
                computed[*tokens[:length], token] += weight * probability
    return distance(found, computed)


def acceptance(outcomes: Mapping[Outcome, float]) -> float:
    """The share of drafted tokens that are accepted."""
    proposed = accepted = 0.0
    for (_, _, rounds), weight in outcomes.items():
        proposed += weight * sum(made for made, _ in rounds)
        accepted += weight * sum(kept for _, kept in rounds)
    return accepted / proposed


def check(outcomes: Mapping[Outcome, float]) -> None:
    assert sum(outcomes.values()) == pytest.approx(1.0, abs=TOLERANCE)
    assert bias(outcomes) < TOLERANCE
    assert deviation(outcomes) < BOUND


@pytest.mark.parametrize(("name", "bits", "count"), CASES)
def test_the_output_has_the_distribution_of_the_target(name: str, bits: int, count: int) -> None:
    outcomes = packed(name, bits, count)
    check(outcomes)
    assert name == "plain" or 0.2 < acceptance(outcomes) < 0.95, "the drafts prove little"


@pytest.mark.parametrize(("name", "bits", "count"), [CASES[0], CASES[1], CASES[-1]])
def test_packed_pages_change_no_bit(name: str, bits: int, count: int) -> None:
    """Every outcome has the same tokens, distributions, rounds and probability as over raw pages."""
    assert packed(name, bits, count) == enumerated(name, bits, count, "raw")


@pytest.mark.parametrize(("name", "bits"), [("retrieval", 8), ("tree", 4)])
def test_what_a_quantised_cache_holds_changes_only_the_drafts(
    name: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = packed(name, bits, 2)  # kept for other tests, so without the patch
    monkeypatch.setattr(refresh, "quantize", lambda layer, keys, values: quantize(layer, values, keys))
    outcomes = enumerated(name, bits, 2)
    assert abs(acceptance(outcomes) - acceptance(right)) > 0.02
    check(outcomes)


class OneWrongSign(MachineCodec):
    """Packs each page with the sign of one value flipped."""

    def encode(self, shape: PackedShape, pages: Tensor) -> Tensor:
        values = pages[:, 1].flatten(1)
        largest = values.abs().argmax(1, keepdim=True)
        wrong = values.scatter(1, largest, -values.gather(1, largest)).view_as(pages[:, 1])
        return super().encode(shape, torch.stack([pages[:, 0], wrong], 1))


def test_one_wrong_value_in_every_page_is_far_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "machine_codec", lambda: OneWrongSign(load_kernel()))
    assert deviation(enumerated("plain", 16, 2)) > 5 * BOUND


def accept_first(draft: Draft, logits: Tensor, probs: Tensor | None, draws: Draws) -> tuple[Verdict, Tensor]:
    """Accepts the first node of any draft."""
    assert probs is not None
    row = torch.tensor(min(1, len(draft)))
    return Verdict(row, draws.categorical(probs[row])), probs[:, :1]


def test_a_biased_rule_is_far_beyond_the_tolerance() -> None:
    assert bias(enumerated("retrieval", 16, 2, rule=accept_first)) > 10_000 * TOLERANCE
