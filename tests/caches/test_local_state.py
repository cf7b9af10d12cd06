"""Sliding windows and recurrent states against plain references, and proofs by enumeration with them.

A state machine reads, speculates on, commits, keeps, settles, forks and takes back sequences. What a pass
computes is compared with attention over all keys under a brute-force mask, and with a mixer that runs from
the first token to the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.enumeration import outcome_probs
from support.small_engine import SIZES
from support.tiny_models import local_model, noisy_copy
from torch import Tensor
from transformers import DynamicCache

from offload_rt import LLM, SamplingParams
from offload_rt.api import frontend as api
from offload_rt.attention.backends import TorchCpuBackend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.layer_kinds import LayerKind, LayerKinds
from offload_rt.caches.local import LocalState
from offload_rt.caches.local_history import LocalHistory, LocalLayers
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.model.architecture import cache_argument
from offload_rt.sampling.sampler import Draws
from offload_rt.sampling.tokens import Tokens

REAL = local_model("qwen3.5", hidden_size=16)
MIXER = REAL.model.layers[1].linear_attn.requires_grad_(False)
KINDS = LayerKinds(
    (
        LayerKind(2, 4, window=5),
        LayerKind(mixer="linear_attn"),
        LayerKind(mixer="linear_attn"),
        LayerKind(1, 4, window=2),
    )
)
HEADS, MANY = 4, 64
DRAWN = torch.Generator().manual_seed(3)
QUERIES, KEYS, VALUES = (torch.randn(HEADS, MANY, 4, dtype=torch.float64, generator=DRAWN) for _ in range(3))
HIDDEN = torch.randn(MANY, 16, generator=DRAWN)
"""Of each token; a token has the same in all layers and at all positions."""


def mixed(layer: int, hidden: Tensor, carrier: DynamicCache) -> Tensor:
    """A real mixer, and a stand-in that forgets nothing and knows the order of its tokens exactly."""
    if layer == 1:
        out: Tensor = MIXER(hidden, **{cache_argument(MIXER.forward): carrier})
        return out
    cache: Any = carrier.layers[layer]
    outs = []
    state = cache.recurrent_states[0] if cache.is_recurrent_states_initialized[0] else torch.zeros(1, 16)
    for row in hidden[0]:
        state = torch.tanh(0.9 * state + row + 0.3 * state.roll(1))
        outs.append(state)
    cache.update_recurrent_state(state)
    return torch.stack(outs, dim=1)


def plain_window(layer: int, path: Sequence[int]) -> Tensor:
    """Attention of the last token of `path`, `[heads, head_dim]`."""
    kind, at = KINDS.kinds[layer], torch.tensor(path)
    group = HEADS // kind.kv_heads
    keys, values = (part[: kind.kv_heads, at].repeat_interleave(group, 0) for part in (KEYS, VALUES))
    scores = torch.einsum("hd,hnd->hn", QUERIES[:, path[-1]], keys) * 0.5
    scores[:, torch.arange(len(path)) <= len(path) - 1 - (kind.window or 0)] = -torch.inf
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), values)


def plain_mix(layer: int, path: Sequence[int]) -> Tensor:
    """What a mixer puts out for the last token of `path`, `[hidden_size]`."""
    return mixed(layer, HIDDEN[list(path)][None], DynamicCache(config=REAL.config))[0, -1]


@dataclass
class Plain:
    """A `LocalState`, and all of its tokens."""

    state: LocalState
    source: Plain | None = None
    read: list[int] = field(default_factory=list)
    speculative: list[tuple[int, int]] = field(default_factory=list)
    """Tokens with the numbers of their parents."""

    @property
    def verified(self) -> list[int]:
        return self.read if self.source is None else self.source.read

    def path(self, entries: Sequence[tuple[int, int]], at: int) -> list[int]:
        below: list[int] = []
        while at >= 0:
            token, at = entries[at]
            below.insert(0, token)
        return [*self.verified, *below]

    def run(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A pass, compared with the references."""
        known = SpeculativeTokens()
        for token, parent in self.speculative:
            known.add((Tokens([token]), 0), parent)
        self.state.begin(NewTokens.below(known, parents, tokens), len(known))
        entries = [*self.speculative, *zip(tokens, parents, strict=True)]
        self.compare(tokens, [self.path(entries, len(known) + at) for at in range(len(tokens))])

    def compare(self, tokens: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        for layer in range(len(KINDS.kinds)):
            found = self.layer(layer, tokens)
            plain = plain_window if KINDS.kinds[layer].windowed else plain_mix
            wanted = torch.stack([plain(layer, path) for path in paths])
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9 if plain is plain_window else 2e-5)

    def layer(self, layer: int, tokens: Sequence[int]) -> Tensor:
        at, kind = list(tokens), KINDS.kinds[layer]
        if kind.windowed:
            keys, values = KEYS[: kind.kv_heads, at], VALUES[: kind.kv_heads, at]
            return self.state.attend(layer, QUERIES[:, at], keys, values, Softmax(0.5)).transpose(0, 1)
        return self.state.mix(layer, lambda *given: mixed(layer, *given), HIDDEN[at][None])[0]


TOKENS = st.lists(st.integers(0, MANY - 1), min_size=1, max_size=6)
WHO = st.integers(0, 2)


class LocalMachine(RuleBasedStateMachine):
    """A sequence, a cache derived from it, and a second sequence that shares histories with it."""

    @initialize()
    def open(self) -> None:
        layers = LocalLayers(KINDS, REAL.config, torch.float64, torch.device("cpu"))
        full, second = (Plain(LocalState(layers, TorchCpuBackend())) for _ in range(2))
        self.all = [full, Plain(full.state.derived(), full), second]
        self.saved: list[tuple[LocalHistory, list[int]]] = [(full.state.history, [])]
        self.pending: tuple[list[int], list[int]] | None = None

    @rule(who=st.sampled_from([0, 2]), tokens=TOKENS, size=st.integers(1, 7), keeps=st.booleans())
    def read(self, who: int, tokens: list[int], size: int, keeps: bool) -> None:
        one = self.all[who]
        self.forget(who)
        tokens = tokens * 2
        one.state.start_prefill()
        paths = [[*one.read, *tokens[: at + 1]] for at in range(len(tokens))]
        for start in range(0, len(tokens), size):
            one.compare(tokens[start : start + size], paths[start : start + size])
        if keeps:
            one.state.finish_prefill(len(tokens))
            one.read = [*one.read, *tokens]
        else:
            one.state.give_up_prefill()

    def forget(self, who: int) -> None:
        for one in self.all[:2] if who == 0 else [self.all[who]]:
            one.state.keep([])
            one.speculative = []

    @rule(who=WHO, tokens=TOKENS, data=st.data())
    def run(self, who: int, tokens: list[int], data: st.DataObject) -> None:
        """A pass of chains or trees, of which some tokens are committed, or which is given up."""
        one = self.all[who]
        behind = len(one.speculative)
        chain = data.draw(st.booleans())
        parents = [
            behind + at - 1 if chain else data.draw(st.integers(-1, behind + at - 1))
            for at in range(len(tokens))
        ]
        one.run(tokens, parents)
        if not data.draw(st.integers(0, 3)):
            return  # the next pass begins without a commit
        kept: list[int] = []
        for at, parent in enumerate(parents):
            if (parent < behind or parent - behind in kept) and data.draw(st.integers(0, 3)):
                kept.append(at)
        one.state.commit(kept)
        place = {behind + at: behind + number for number, at in enumerate(kept)}
        one.speculative += [(tokens[at], place.get(parents[at], parents[at])) for at in kept]

    @rule(who=WHO, data=st.data())
    def keep(self, who: int, data: st.DataObject) -> None:
        one = self.all[who]
        kept: list[int] = []
        for at, (_, parent) in enumerate(one.speculative):
            if (parent < 0 or parent in kept) and data.draw(st.integers(0, 2)):
                kept.append(at)
        self.kept(one, kept)

    def kept(self, one: Plain, kept: Sequence[int]) -> None:
        one.state.keep(kept)
        place = {-1: -1} | {at: number for number, at in enumerate(kept)}
        one.speculative = [(one.speculative[at][0], place.get(one.speculative[at][1], -1)) for at in kept]

    @rule(who=st.sampled_from([0, 2]), data=st.data())
    def settle(self, who: int, data: st.DataObject) -> None:
        """What descends from it in the derived cache, if that drafted it, stays."""
        one = self.all[who]
        if not one.speculative:
            return
        path, at = list[int](), data.draw(st.integers(0, len(one.speculative) - 1))
        while at >= 0:
            path.insert(0, at)
            at = one.speculative[at][1]
        self.kept(one, path)
        tokens = [token for token, _ in one.speculative]
        one.state.settle()
        one.read, one.speculative = [*one.read, *tokens], []
        if who == 0:
            self.adopt(self.all[1], tokens)

    def adopt(self, derived: Plain, tokens: Sequence[int]) -> None:
        end: int | None = -1
        for token in tokens:
            found = (at for at, entry in enumerate(derived.speculative) if entry == (token, end))
            end = next(found, None)
            if end is None:
                break
        below = list[int]()
        for at, (_, parent) in enumerate(derived.speculative):
            if end is not None and (parent == end or parent in below):
                below.append(at)
        self.kept(derived, below)

    @rule(who=st.sampled_from([0, 2]))
    def save(self, who: int) -> None:
        self.saved.append((self.all[who].state.history, list(self.all[who].read)))

    @rule(who=st.sampled_from([0, 2]), at=st.integers(0, 5))
    def restart(self, who: int, at: int) -> None:
        """Goes back to a history, which the other sequence may have grown from too."""
        self.forget(who)
        history, tokens = self.saved[at % len(self.saved)]
        self.all[who].state.restart(history)
        self.all[who].read = list(tokens)


LocalMachine.TestCase.settings = settings(
    derandomize=True, max_examples=12, stateful_step_count=20, deadline=None
)
TestLocalState = LocalMachine.TestCase


# -------------------------------------------------------------------------------------- enumeration

NAIVE = {"model": "draft", "cache": "streaming"}
STREAMING = {"model": "target", "cache": "streaming"}


@pytest.mark.parametrize(
    ("level", "shape"),
    [(NAIVE, "chain"), (NAIVE, "tree:2,1"), (NAIVE, "sequences:2"), (STREAMING, "chain")],
    ids=["draft, chain", "draft, tree", "draft, sequences", "target, chain"],
)
@pytest.mark.parametrize("arch", ["gemma3", "qwen3.5"])
def test_the_output_has_the_distribution_of_the_target(
    arch: str, level: dict[str, object], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole program with real models, whose window the prompt exceeds."""
    model = local_model(
        arch, vocabulary=2, hidden_size=16, **({"sliding_window": 3} if arch == "gemma3" else {})
    )
    draft, prompt, count = noisy_copy(model, noise=0.3), [0, 1, 1, 0, 1, 0, 0], 3
    overrides = SIZES | {
        "speculation.levels": [level | {"draft": shape}],
        "speculation.gamma2": 2,
        "streaming.sinks": 1,
        "streaming.window": 3,
    }
    given: list[Draws] = []
    monkeypatch.setattr(api, "GeneratorDraws", lambda seed, device: given[-1])
    with LLM.from_models(model, draft, config="naive", overrides=overrides) as llm:
        context, drafted = llm.read(prompt), Counter[str]()

        def run(draws: Draws) -> tuple[int, ...]:
            given.append(draws)
            result = context.generate((), SamplingParams(temperature=1.0, max_tokens=count))
            context.rewind(len(prompt))
            timings = result.timings
            drafted.update(accepted=timings.accepted_tokens, proposed=timings.drafted_tokens)
            return tuple(result.tokens)

        found = outcome_probs(run)
    assert 0 < drafted["accepted"] < drafted["proposed"]
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)
    for tokens, probability in found.items():
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            rows = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1)
        wanted = float(rows[range(count), list(tokens)].prod())
        assert probability == pytest.approx(wanted, abs=1e-6)
