"""The exact law of what the program emits, by enumeration of every random choice it makes.

`output_law` runs the program once for each path of choices, weighs what it puts out with the product of
their probabilities, and so finds the law itself instead of samples from it. What is run is the real code:
`decode`, the verifiers, the drafters, the rules of acceptance. Only what stands for a transformer is small:
`TableModel`, whose logits are a fixed random function of the tokens it is shown, and caches that hold
tokens in place of KV. The model sees the text through its cache alone, with the positions that the
verifier stated, so a wrong commit, truncation, position or mask shows as a wrong law.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload_rt.caches.base import Cache, NewTokens, Verified
from offload_rt.decoding import Token, decode
from offload_rt.drafting.base import Drafter, LevelStats, NoDrafter, Text
from offload_rt.drafting.hierarchical import SmallModelDrafter, VerifierDrafter, VerifierProposal
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.governor import Governor
from offload_rt.sampling import Draws, SamplingLaw, choices
from offload_rt.schedule import Schedule

VOCABULARY = 5
NEGLIGIBLE = 1e-12  # rounding leaves branches like this one; too light to count

Entry = tuple[int, int]
"""(position, token): what a cache holds in place of KV."""

Law = dict[tuple[int, ...], float]
"""Probability of each output."""

Outcome = TypeVar("Outcome", bound=Hashable)


# ------------------------------------------------------------------------------ every random choice


class ScriptedDraws:
    """Makes the choices of a script, then the first possible one each time.

    Args:
        fixed: how many choices are the same on every path.

    Attributes:
        taken: which of its possible outcomes each choice took so far.
        possible: how many it had; outcomes of probability 0 do not count.
        probability: product of the probabilities of what was taken, the fixed choices left out.
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

    def categorical(self, law: Tensor) -> Tensor:
        weights: list[float] = law.tolist()
        total = sum(weights)
        return torch.tensor(self._take([(token, weight / total) for token, weight in enumerate(weights)]))

    def accept(self, probability: float) -> bool:
        probability = min(1.0, probability)
        return bool(self._take([(1, probability), (0, 1.0 - probability)]))

    def accepted(self, probabilities: Tensor) -> Tensor:
        outcomes, reached = [], 1.0
        for count, probability in enumerate(probabilities.clamp(max=1.0).tolist()):
            outcomes.append((count, reached * (1.0 - probability)))
            reached *= probability
        return torch.tensor(self._take([*outcomes, (len(probabilities), reached)]))

    def next_script(self) -> list[int] | None:
        """The next path in depth-first order; None after the last one."""
        script = list(self.taken)
        while len(script) > self._fixed and script[-1] + 1 == self.possible[len(script) - 1]:
            script.pop()
        if len(script) == self._fixed:
            return None
        script[-1] += 1
        return script


def outcome_law(run: Callable[[Draws], Outcome]) -> dict[Outcome, float]:
    """Probability of each value of `run`, over all its random choices."""
    law: dict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        draws = ScriptedDraws(script)
        law[run(draws)] += draws.probability
        script = draws.next_script()
    return law


# ---------------------------------------------------------------------------- models without weights


class TokenCache:
    """Verified entries, speculative ones behind them, and the pending ones of a pass.

    Args:
        view: models compute another law through each view, as they do over KV that is left out.
        reads_itself: what it holds becomes verified by `settle`, not by `adopt`.
    """

    sinks, window = 1, 2

    def __init__(self, view: str) -> None:
        self.view = view
        self.verified: list[Entry] = []
        self.speculative: list[Entry] = []
        self.pending: list[Entry] | None = None
        self.skipped = 0

    @property
    def entries(self) -> list[Entry]:
        return self.verified + self.speculative

    @property
    def length(self) -> int:
        return self.skipped + len(self.verified) + len(self.speculative)

    @property
    def verified_length(self) -> int:
        return self.skipped + len(self.verified)

    def begin(self, new: NewTokens) -> None:
        self.pending = []

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        raise NotImplementedError("a table needs no attention")

    def receive(self, entries: list[Entry]) -> None:
        """What `attend` does in a real cache: takes in the new tokens of a pass."""
        assert self.pending == [], "a pass starts with begin"
        self.pending = entries

    def _accepted(self, path: Sequence[int]) -> list[Entry]:
        assert self.pending is not None, "commit without a pass"
        chosen = [self.pending[node] for node in path]
        self.pending = None
        return chosen

    def commit(self, path: Sequence[int]) -> None:
        self.speculative += self._accepted(path)

    def truncate(self, length: int) -> None:
        if not self.verified_length <= length <= self.length:
            raise ValueError(f"cannot truncate to {length}")
        del self.speculative[length - self.verified_length :]

    def settle(self) -> None:
        self.verified += self.speculative
        self.speculative = []

    # What only some caches do.

    def adopt(self, verified: Verified) -> None:
        came = [(int(position), int(token)) for position, token in verified.keys[0, 0].tolist()]
        self.verified += came
        self.speculative = self.speculative[len(came) :]

    def reset(self) -> None:
        self.verified, self.speculative, self.pending, self.skipped = [], [], None, 0

    def skip(self, tokens: int) -> None:
        self.skipped += tokens


class FullTokenCache(TokenCache):
    """Everything committed is final, and the derived caches are told of it."""

    def __init__(self) -> None:
        super().__init__("full")
        self.derived: list[TokenCache] = []

    def commit(self, path: Sequence[int]) -> None:
        assert self.pending is not None
        proposed = len(self.pending) - 1
        chosen = self._accepted(path)
        self.verified += chosen
        for cache in self.derived:
            entries = torch.tensor(chosen, dtype=torch.float64)[None, None]
            cache.adopt(Verified(entries, entries, entries, proposed))

    def prefill(self, tokens: Sequence[int]) -> None:
        self.verified = list(enumerate(tokens))
        for cache in self.derived:
            cache.verified = list(self.verified)


class TableModel:
    """Logits are a fixed random function of the newest three entries in sight and of how many there are.

    Args:
        seed: another seed is another model; all models share a part, so that they often agree.
        support: tokens possible in a row are at most so many, another set in each model.
    """

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(self, seed: int, support: int = VOCABULARY) -> None:
        self._seed = seed
        self._support = support
        self._rows: dict[tuple[Hashable, ...], Tensor] = {}

    def logits(self, view: str, entries: Collection[Entry]) -> Tensor:
        """`[vocabulary]` after the entry of the highest position, which sees `entries`."""
        key = (view, len(entries), *sorted(entries)[-3:])
        if key not in self._rows:
            shared, own = random.Random(str(key[1:])), random.Random(f"{self._seed} {key}")
            row = [1.5 * shared.gauss() + 0.9 * own.gauss() for _ in range(VOCABULARY)]
            support = own.randint(max(2, self._support - 1), self._support)
            least = sorted(row)[-support]
            self._rows[key] = torch.tensor([x if x >= least else -1e6 for x in row], dtype=self.dtype)
        return self._rows[key]

    def forward(
        self,
        cache: Cache,
        tokens: Sequence[int],
        positions: Sequence[int],
        new: NewTokens,
        rows: int,
        drawn: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(cache, TokenCache)
        if drawn is not None:
            tokens = [*tokens, *drawn.tolist()]
        assert len(tokens) == len(positions) == new.count
        cache.begin(new)
        fresh = list(zip(positions, tokens, strict=True))
        cache.receive(fresh)
        sees = [[0.0]] if new.mask is None else new.mask.tolist()
        held = cache.entries
        return torch.stack(
            [
                self.logits(
                    cache.view, held + [e for e, hidden in zip(fresh, row, strict=True) if not hidden]
                )
                for row in sees[len(tokens) - rows :]
            ]
        )


def next_law(law: SamplingLaw, logits: Tensor) -> list[float]:
    """The law of one token, greedy included."""
    if law.greedy:
        return [float(token == int(choices(logits))) for token in range(VOCABULARY)]
    probabilities: list[float] = law.laws(logits[None])[0].tolist()
    return probabilities


def own_law(
    model: TableModel,
    law: SamplingLaw,
    prompt: Sequence[int],
    count: int,
    stop_tokens: Collection[int] = (),
    view: str = "full",
) -> Law:
    """The law of `count` tokens of the model alone: the product of its conditional laws."""
    grown: Law = {(): 1.0}
    for _ in range(count):
        longer: Law = {}
        for output, probability in grown.items():
            if output and output[-1] in stop_tokens:
                longer[output] = probability
                continue
            logits = model.logits(view, list(enumerate([*prompt, *output])))
            for token, weight in enumerate(next_law(law, logits)):
                if weight > 0:
                    longer[*output, token] = probability * weight
        grown = longer
    return grown


def distance(found: Law, expected: Law) -> float:
    """The largest difference in the probability of any output."""
    return max(abs(found.get(o, 0.0) - expected.get(o, 0.0)) for o in found.keys() | expected.keys())


# ------------------------------------------------------------------------------------- compositions

Composition = Callable[[Sampling], Verifier]


class Parts:
    """Models, and from them the levels of compositions. A composition is built anew for each path."""

    def __init__(self, seed: int, support: int = VOCABULARY, stop_tokens: Collection[int] = ()) -> None:
        self.target = TableModel(seed, support)
        self.small = TableModel(seed + 1, support)
        self.stop_tokens = stop_tokens

    def full(self, drafter: Callable[[FullTokenCache, Sampling], Drafter]) -> Composition:
        """The target over its full cache, with a drafter that may derive caches from that."""

        def compose(sampling: Sampling) -> Verifier:
            cache = FullTokenCache()
            below = drafter(cache, sampling)
            return Verifier("full", self.target, cache, below, sampling, _no_cost)

        return compose

    def derived(
        self, view: str, full: FullTokenCache, sampling: Sampling, below: Drafter, gamma: int
    ) -> VerifierDrafter:
        """The target over a cache derived from the full one."""
        cache = TokenCache(view)
        full.derived.append(cache)
        verifier = Verifier(view, self.target, cache, below, sampling, _no_cost)
        return VerifierDrafter(verifier, gamma, self.stop_tokens)

    def draft_model(self, sampling: Sampling) -> SmallModelDrafter:
        """The small model over a cache of its own."""
        cache: Any = TokenCache("small")
        verifier = Verifier("small", self.small, cache, NoDrafter(), sampling, _no_cost)
        return SmallModelDrafter(verifier, cache)


def _no_cost(length: int, queries: int) -> float:
    return 0.0


class Run:
    """One path of the program: a prefilled composition that continues a prompt round by round.

    Attributes:
        over: decoding has come to its end.
    """

    def __init__(
        self,
        composition: Composition,
        sampling: Sampling,
        prompt: Sequence[int],
        max_tokens: int,
        gamma: int,
        stop_tokens: Collection[int] = (),
        schedule: Callable[[Verifier], Schedule] = Schedule,
    ) -> None:
        self.verifier = composition(sampling)
        assert isinstance(self.verifier.cache, FullTokenCache)
        self.verifier.cache.prefill(prompt[:-1])
        self.text = list(prompt)
        self.verifier.drafter.prefill(Text(self.text))
        self.tokens: list[Token] = []
        self.over = False
        self._start = len(prompt)
        self._max_tokens = max_tokens
        governor = Governor(gamma, step_down=False, forecast=self.verifier, clock=False)
        self.schedule = schedule(self.verifier)
        self._source = decode(self.schedule, self.text, max_tokens, stop_tokens, governor)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.text[self._start :])

    def round(self) -> None:
        """Takes all tokens of one round; the generator then stands between two rounds."""
        while True:
            token = next(self._source)
            self.tokens.append(token)
            if token.ends or len(self.tokens) == len(self.output):
                self.over = token.ends or len(self.tokens) == self._max_tokens
                return

    def state(self) -> Hashable:
        """All that the rest of the run depends on, beside its draws."""
        return (tuple(self.text), _frozen(self.verifier), _frozen(self.schedule._ready))


def _frozen(value: Any) -> Hashable:
    """The value of an object and of all it holds, without its statistics."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple | range):
        return tuple(map(_frozen, value))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, dict):
        return tuple((key, _frozen(held)) for key, held in value.items())
    if isinstance(value, VerifierProposal):  # its drafter is part of the verifier
        return _frozen([vars(value)[name] for name in ("_start", "_end", "_grown", "_laws", "_stopped")])
    if isinstance(value, TableModel | Sampling | LevelStats | FunctionType):
        return None  # the same in every path, or never read
    if isinstance(value, Tensor):
        return (tuple(value.shape), *value.flatten().tolist())
    return (type(value).__name__, *((name, _frozen(held)) for name, held in vars(value).items()))


def output_law(
    composition: Composition,
    law: SamplingLaw,
    prompt: Sequence[int],
    count: int,
    gamma: int,
    *,
    max_tokens: int | None = None,
    stop_tokens: Collection[int] = (),
    schedule: Callable[[Verifier], Schedule] = Schedule,
) -> Law:
    """The exact law of the first `count` tokens that the composition puts out.

    Between two rounds the program is its objects and its text. Paths that have led to the same state have
    the same future: their probabilities are added, and one of them goes on for all.

    Args:
        gamma: tokens drafted for the full cache in a round.
        max_tokens: where decoding ends; default: so late that it cuts no draft.
    """
    finished: Law = defaultdict(float)
    waiting: dict[Hashable, tuple[list[int], float]] = {(): ([], 1.0)}  # state -> (a script to it, mass)
    rounds = 0
    while waiting:
        reached: dict[Hashable, tuple[list[int], float]] = {}
        for fixed, mass in waiting.values():
            script: list[int] | None = fixed
            while script is not None:
                draws = ScriptedDraws(script, fixed=len(fixed))
                path = Run(
                    composition,
                    Sampling(law, draws),
                    prompt,
                    max_tokens or count + gamma,
                    gamma,
                    stop_tokens,
                    schedule,
                )
                for _ in range(rounds):
                    path.round()
                assert draws.taken == fixed
                path.round()
                weight = mass * draws.probability
                if path.over or len(path.output) >= count:
                    finished[path.output[:count]] += weight
                else:
                    way, held = reached.get(path.state(), (draws.taken, 0.0))
                    reached[path.state()] = (way, held + weight)
                script = draws.next_script()
        waiting = reached
        rounds += 1
    return finished
