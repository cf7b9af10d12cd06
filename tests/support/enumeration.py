"""The exact output distribution of the program, by enumeration of every random choice it makes.

`output_probs` runs the program once per path of choices and weights each output with the product of the
probabilities of its choices: it computes the distribution instead of sampling it. It runs the real sequences,
decode steps, verifiers, drafters, acceptance rules and batches. Only the models and their caches are small:
see `table_models.py`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload_rt.caches.head import HeadCache
from offload_rt.caches.local import LocalState
from offload_rt.caches.target_states import TargetStates
from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting.base import Round
from offload_rt.drafting.head_model import HeadModel
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.engine.batching import BatchRunner
from offload_rt.engine.controller import RoundTimes, SpeculationController
from offload_rt.engine.decode import decode_step
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.model.work import LevelStats, Outputs, Passed
from offload_rt.planning.sequence_costs import SequenceCosts
from offload_rt.sampling.sampler import Draws, Sampler, choices
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import ROOT, Tree
from offload_rt.system.second_device import SecondDevice
from offload_rt.system.timeline import NO_TIMELINE
from support.table_models import VOCABULARY, Composition, TableModel, states_of

NEGLIGIBLE = 1e-12
"""Choices of a lower probability come from rounding, and are left out."""

Probs = dict[tuple[int, ...], float]
"""Probability of each output."""

Outcome = TypeVar("Outcome", bound=Hashable)

Clock = Callable[[list[int]], bool]
"""Whether a pass is over, given the choices made since it began."""


# ------------------------------------------------------------------------------ every random choice


class ScriptedDraws:
    """Makes the choices of a script, then the first possible choice each time.

    Args:
        fixed: number of choices that are the same on every path.

    Attributes:
        taken: index of each choice made so far, among the outcomes of positive probability.
        possible: number of those outcomes.
        probability: product of the probabilities of the choices behind the fixed ones.
    """

    def __init__(self, script: Sequence[int] = (), fixed: int = 0) -> None:
        self._script = script
        self._fixed = fixed
        self.taken: list[int] = []
        self.possible: list[int] = []
        self.probability = 1.0

    def _take(self, outcomes: list[tuple[int, float]]) -> int:
        outcomes = [(outcome, weight) for outcome, weight in outcomes if weight > NEGLIGIBLE]
        at = len(self.taken)
        which = self._script[at] if at < len(self._script) else 0
        self.taken.append(which)
        self.possible.append(len(outcomes))
        outcome, weight = outcomes[which]
        if at >= self._fixed:
            self.probability *= weight
        return outcome

    def categorical(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._token(row) for row in rows]).reshape(probs.shape[:-1])

    def _token(self, weights: list[float]) -> int:
        total = sum(weights)
        if total <= 0.0:
            return len(weights) - 1  # no token is left to draw: this one is never accepted
        return self._take([(token, weight / total) for token, weight in enumerate(weights)])

    def descend(self, tree: Tree, chances: Tensor) -> Tensor:
        ends: list[tuple[int, float]] = []

        def walk(node: int, reached: float) -> None:
            for child in (c for c, parent in enumerate(tree.parents) if parent == node):
                chance = min(1.0, float(chances[child]))
                walk(child, reached * chance)
                reached *= 1.0 - chance
            ends.append((node + 1, reached))

        walk(ROOT, 1.0)
        return torch.tensor(self._take(sorted(ends)))

    def next_script(self) -> list[int] | None:
        """The next path in depth-first order; None after the last one."""
        script = list(self.taken)
        while len(script) > self._fixed and script[-1] + 1 == self.possible[len(script) - 1]:
            script.pop()
        if len(script) == self._fixed:
            return None
        script[-1] += 1
        return script


def outcome_probs(run: Callable[[Draws], Outcome]) -> dict[Outcome, float]:
    """Probability of each return value of `run`, over all its random choices."""
    probs: dict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        draws = ScriptedDraws(script)
        probs[run(draws)] += draws.probability
        script = draws.next_script()
    return probs


def penalised(sampler: Sampler, logits: Tensor, prompt: Sequence[int], generated: Sequence[int]) -> Tensor:
    """Logits `[vocabulary]` after `prompt` and `generated`, penalised token by token."""
    found = logits.clone()
    for token in {*prompt, *generated}:
        factor = sampler.repetition_penalty
        found[token] *= factor if found[token] < 0 else 1 / factor
    for token in generated:
        found[token] -= sampler.frequency_penalty
    for token in set(generated):
        found[token] -= sampler.presence_penalty
    return found


class SomePaths:
    """A grammar over few tokens: what may follow a path is a fixed random choice of one to three.

    Args:
        ends: tokens that end a text.
        longest: of so many tokens, half of the texts are complete; all of more are. None: they never end.
    """

    def __init__(self, seed: int, ends: Collection[int] = (), longest: int | None = None) -> None:
        self._seed, self._ends, self._longest = seed, ends, longest

    def followers(self, tokens: Sequence[int]) -> Collection[int]:
        """Tokens that may follow a beginning of a text; none where it is complete."""
        at = random.Random(f"{self._seed} {list(tokens)}")
        if self._longest is not None and len(tokens) >= self._longest + at.randint(0, 1):
            return self._ends
        inner = [token for token in range(VOCABULARY) if token not in self._ends]
        return at.sample(inner, at.randint(1, 3))

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        if not self._begins(tokens):
            return None
        following = self.followers(tokens)
        return torch.tensor([sum(1 << token for token in following)]) if following else None

    def _begins(self, tokens: Sequence[int]) -> bool:
        return all(token in self.followers(tokens[:at]) for at, token in enumerate(tokens))

    def complete(self, tokens: Sequence[int]) -> bool:
        assert self._begins(tokens), f"{tokens} were verified against the grammar"
        return not self.followers(tokens)


def next_probs(
    sampler: Sampler,
    logits: Tensor,
    prompt: Sequence[int] = (),
    generated: Sequence[int] = (),
    grammar: SomePaths | None = None,
) -> list[float]:
    """The distribution of the next token, one-hot if the sampler is greedy."""
    logits = penalised(sampler, logits, prompt, generated)
    if grammar is not None:
        allowed = grammar.followers(generated)
        logits[[token for token in range(VOCABULARY) if token not in allowed]] = -torch.inf
    if sampler.greedy:
        return [float(token == int(choices(logits))) for token in range(VOCABULARY)]
    probabilities: list[float] = sampler.probs(logits[None])[0].tolist()
    return probabilities


def own_probs(
    model: TableModel,
    sampler: Sampler,
    prompt: Sequence[int],
    count: int,
    stop_tokens: Collection[int] = (),
    grammar: SomePaths | None = None,
) -> Probs:
    """The distribution of `count` tokens of the model alone: the product of its conditional distributions."""
    grown: Probs = {(): 1.0}
    for _ in range(count):
        longer: Probs = {}
        for output, probability in grown.items():
            over = grammar is not None and not grammar.followers(output)
            if output and (over or output[-1] in stop_tokens):
                longer[output] = probability
                continue
            logits = model.logits("full", list(enumerate([*prompt, *output])))
            for token, weight in enumerate(next_probs(sampler, logits, prompt, output, grammar)):
                if weight > 0:
                    longer[*output, token] = probability * weight
        grown = longer
    return grown


def distance(found: Probs, expected: Probs) -> float:
    """The largest difference in the probability of any output."""
    return max(abs(found.get(o, 0.0) - expected.get(o, 0.0)) for o in found.keys() | expected.keys())


# ------------------------------------------------------------------------------------------- runs


class Free(SequenceCosts):
    """Predicts that passes and drafts take no time, so that all outcomes are drafted for."""

    def __init__(self) -> None:
        pass

    def pass_ms(self, length: int, shape: DraftShape) -> float:
        return 0.0

    draft_ms = pass_ms

    def ahead_ms(self, length: int, shape: DraftShape, outcomes: int) -> list[float]:
        return outcomes * [0.0]


class Steady(SpeculationController):
    """A controller that never adapts."""

    def observe(self, length: int, round: Round, times: RoundTimes) -> None:
        pass


class BackgroundAtOnce:
    """A pass thread that runs a pass at once and reports its end when the clock says so."""

    def __init__(self, draws: ScriptedDraws, clock: Clock) -> None:
        self._draws = draws
        self._clock = clock

    def start(self, caches: Any, forward: Callable[[], Outputs]) -> Any:
        outputs, first, clock, draws = forward(), len(self._draws.taken), self._clock, self._draws

        class Begun:
            def done(self) -> bool:
                return clock(draws.taken[first:])

            def result(self) -> Passed:
                return outputs, 0.0

        return Begun()


class Text(TokenSequence):
    """A sequence over table models."""

    def __init__(
        self,
        verifier: Verifier,
        prompt: Sequence[int],
        max_tokens: int,
        shape: DraftShape,
        ahead: int = 0,
        clock: bool = True,
    ) -> None:
        self.timeline = NO_TIMELINE
        self.tokens, self.start = list(prompt), len(prompt)
        self.verifier = verifier
        cache: Any = verifier.cache  # of tokens in place of KV
        cache.verified = list(enumerate(prompt[:-1]))
        self.full = cache
        if cache.states is not None:
            model: Any = verifier.model
            rows = [model.logits("full", list(enumerate(prompt[: at + 1]))) for at in range(len(prompt) - 1)]
            cache.states.append(0, states_of(torch.stack(rows)))
        self.controller = Steady(
            Free(),
            shape.candidates() if shape.depth else [shape],
            0.5,
            ahead=ahead,
            step_down=False,
            clock=clock,
        )
        self.next_proposal, self.rounds, self._ended = None, [], False
        self._continuation = Continuation(verifier.sampling, max_tokens)
        self.take_prompt()

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.start :])

    def state(self) -> Hashable:
        """All that the rest of the run depends on, beside its draws."""
        return (tuple(self.tokens), self._ended, _frozen(self.verifier), _frozen(self.next_proposal))


def _frozen(value: Any) -> Hashable:
    """The value of an object and of all it holds, without statistics."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple) and value and isinstance(value[0], Tokens):  # of a cache: one of some tokens
        tokens, at = value
        return tokens.known[at] if tokens.arrived else None
    if isinstance(value, list | tuple | range):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, dict):
        return tuple((key, _frozen(held)) for key, held in value.items())
    if isinstance(value, LocalState) and not value.layers.kinds.local:
        return None  # the one that all caches share
    if isinstance(
        value, TableModel | HeadModel | SecondDevice | Sampling | LevelStats | FunctionType
    ) or callable(value):
        return None  # the same in every path, or never read
    if isinstance(value, HeadCache):
        parts = (value.kv[:, :, :, : value.end], value.states, value.given, value.speculative)
        return (value.verified_length, value.entries, *map(_frozen, parts))
    if isinstance(value, TargetStates):
        return _frozen(value.parts(value.end))
    if isinstance(value, Tensor):
        return (tuple(value.shape), *(round(number, 9) for number in value.flatten().tolist()))
    held = {name: _frozen(held) for name, held in vars(value).items() if name.lstrip("_") != "changes"}
    return (type(value).__name__, *held.items())


def output_probs(
    composition: Composition,
    sampler: Sampler,
    prompt: Sequence[int],
    count: int,
    shape: DraftShape,
    *,
    max_tokens: int | None = None,
    stop_tokens: Collection[int] = (),
    ahead: int = 0,
    clock: Clock | None = None,
    grammar: SomePaths | None = None,
) -> Probs:
    """The exact distribution of the first `count` tokens that a composition emits.

    Args:
        shape: of the drafts for the full cache.
        max_tokens: where decoding ends; by default so late that it cuts no draft.
        ahead: number of outcomes that are drafted for while a pass runs.
        clock: None: the controller asks no clock.
    """

    def start(draws: ScriptedDraws) -> tuple[list[Text], Any]:
        text = Text(
            composition(Sampling(sampler, draws, stop_tokens, grammar)),
            prompt,
            max_tokens or count + shape.depth,
            shape,
            ahead,
            clock is not None,
        )
        return [text], BackgroundAtOnce(draws, clock or (lambda drawn: False)) if ahead else None

    joint = joint_probs(start, lambda texts: texts[0].ended or len(texts[0].output) >= count)
    probs: Probs = defaultdict(float)
    for (output,), weight in joint.items():
        probs[output[:count]] += weight
    return probs


def joint_probs(
    start: Callable[[ScriptedDraws], tuple[list[Text], Any]], finished: Callable[[list[Text]], bool]
) -> dict[tuple[tuple[int, ...], ...], float]:
    """The joint distribution of the outputs of several sequences that are stepped together.

    Paths that lead to the same state have the same future: one of them continues with their total
    probability.
    """
    ended: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    waiting: dict[Hashable, tuple[list[int], float]] = {(): ([], 1.0)}  # state -> (a script to it, mass)
    rounds = 0
    while waiting:
        reached: dict[Hashable, tuple[list[int], float]] = {}
        for fixed, mass in waiting.values():
            script: list[int] | None = fixed
            while script is not None:
                draws = ScriptedDraws(script, fixed=len(fixed))
                texts, thread = start(draws)
                for _ in range(rounds):
                    step(texts, thread)
                assert draws.taken == fixed
                step(texts, thread)
                weight = mass * draws.probability
                if finished(texts):
                    ended[tuple(text.output for text in texts)] += weight
                else:
                    state = tuple(text.state() for text in texts)
                    way, held = reached.get(state, (draws.taken, 0.0))
                    reached[state] = (way, held + weight)
                script = draws.next_script()
        waiting = reached
        rounds += 1
    return ended


def step(texts: Sequence[Text], thread: Any = None) -> None:
    """One decode step of the sequences that have not ended; `thread` runs their background passes."""
    going = [text for text in texts if not text.ended]
    for result in BatchRunner([decode_step(text) for text in going], thread).run():
        if isinstance(result, Exception):
            raise result
