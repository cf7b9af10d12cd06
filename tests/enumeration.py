"""The exact distribution of what the program emits, by enumeration of every random choice it makes.

`output_probs` runs the program once for each path of choices, weighs what it puts out with the product of
their probabilities, and so finds the distribution itself instead of samples from it. What is run is the real
code: sequences, rounds, the verifiers, the drafters, the rules of acceptance, the driver that advances many
texts at once. Only what stands for a transformer is small: `TableModel`, whose logits are a fixed random
function of the tokens it is shown, and caches that hold tokens in place of KV. The model sees the text
through its cache alone, with the positions and ancestors that the verifier stated, so a wrong commit,
rollback, position or mask shows as a wrong distribution.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from types import FunctionType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from offload_rt.caches.base import NewTokens, VerifiedTokens
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.drafting.base import Drafter
from offload_rt.drafting.growth import Growth
from offload_rt.drafting.head_drafter import HeadDrafter, HeadModel, HeadStates
from offload_rt.drafting.model_drafter import ModelDrafter, Rounds, SmallModelDrafter
from offload_rt.drafting.shapes import CHAIN, DraftShape
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.engine.controller import SpeculationController
from offload_rt.engine.decode import decode_step
from offload_rt.engine.sequence import Continuation, TokenSequence
from offload_rt.model.draft_head import Head
from offload_rt.model.layer_plan import LayerPlan
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.scheduler import BatchRunner, LevelStats, Outputs, Passed
from offload_rt.sampling import Draws, Sampler, choices
from offload_rt.timeline import NO_TIMELINE
from offload_rt.trees import ROOT, Tree

VOCABULARY = 5
NEGLIGIBLE = 1e-12  # rounding leaves branches like this one; too light to count

Entry = tuple[int, int]
"""(position, token): what a cache holds in place of KV."""

Probs = dict[tuple[int, ...], float]
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

    def categorical(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._token(row) for row in rows]).reshape(probs.shape[:-1])

    def _token(self, weights: list[float]) -> int:
        total = sum(weights)
        if total <= 0.0:
            return len(weights) - 1  # nothing is left to draw: a candidate that is never accepted
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
    """Probability of each value of `run`, over all its random choices."""
    probs: dict[Outcome, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        draws = ScriptedDraws(script)
        probs[run(draws)] += draws.probability
        script = draws.next_script()
    return probs


# ---------------------------------------------------------------------------- models without weights


class TokenCache:
    """Verified entries, speculative ones behind them, and the pending ones of a pass.

    Args:
        view: models compute other logits through each view, as they do over KV that is left out.
    """

    sinks, window = 1, 2

    def __init__(self, view: str) -> None:
        self.view = view
        self.verified: list[Entry] = []
        self.drafted: list[Entry] = []
        self.speculative = SpeculativeTokens()
        self.new: NewTokens | None = None
        self.pending: list[Entry] = []
        self.skipped = 0

    @property
    def verified_length(self) -> int:
        return self.skipped + len(self.verified)

    def begin(self, new: NewTokens) -> None:
        self.new, self.pending = new, []

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        raise NotImplementedError("a table needs no attention")

    def seen_by(self, token: int) -> list[Entry]:
        """What a new token sees, itself included."""
        assert self.new is not None
        behind = [*self.drafted, *self.pending]
        sees = self.new.sees[token]
        return self.verified + [entry for at, entry in enumerate(behind) if sees >> at & 1]

    def commit(self, kept: Sequence[int]) -> None:
        new, pending = self._end_pass()
        self.drafted += [pending[index] for index in kept]
        new.commit_to(self.speculative, kept)

    def _end_pass(self) -> tuple[NewTokens, list[Entry]]:
        assert self.new is not None, "commit without a pass"
        ended = self.new, self.pending
        self.new, self.pending = None, []
        return ended

    def keep(self, entries: Sequence[int]) -> None:
        self.drafted = [self.drafted[entry] for entry in entries]
        self.speculative.keep(entries)

    def settle(self) -> None:
        self.verified += self.drafted
        self.drafted = []
        self.speculative.clear()

    # What only some caches do.

    def adopt(self, verified: VerifiedTokens) -> None:
        came = [(int(position), int(token)) for position, token in verified.kv[0, 0].tolist()]
        assert [token for _, token in came] == verified.tokens
        path = self.speculative.match(verified.tokens)
        self.keep(self.speculative.below(path[-1]) if path and len(path) == len(came) else [])
        self.verified += came

    def reset(self) -> None:
        self.verified, self.drafted, self.new, self.skipped = [], [], None, 0
        self.speculative.clear()

    def skip(self, tokens: int) -> None:
        self.skipped += tokens


class FullTokenCache(TokenCache):
    """Everything committed is final, and the derived caches are told of it."""

    def __init__(self) -> None:
        super().__init__("full")
        self.derived: list[TokenCache] = []

    def commit(self, kept: Sequence[int]) -> None:
        new, pending = self._end_pass()
        chosen = [pending[index] for index in kept]
        self.verified += chosen
        entries = torch.tensor(chosen, dtype=torch.float64)[None, None]
        ids = [tokens.known[at] for tokens, at in map(new.token, kept)]
        for cache in self.derived:
            cache.adopt(VerifiedTokens(ids, entries, entries, new.count - 1))

    def keep(self, entries: Sequence[int]) -> None:
        assert not entries

    def catch_up(self) -> None:
        pass

    def build_derived(self) -> None:
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

    def forward(self, parts: Sequence[PassInput], plan: LayerPlan | None = None) -> list[PassOutput]:
        outputs = []
        for part in parts:
            logits = self._part(part, plan)
            outputs.append(PassOutput(logits, logits.clamp(min=-3.0) if part.hidden else None))
        return outputs

    def _part(self, part: PassInput, plan: LayerPlan | None) -> Tensor:
        cache, new = part.cache, part.new
        assert isinstance(cache, TokenCache)
        tokens = [*new.known, *([] if new.drawn is None else new.drawn.on(self.device).tolist())]
        assert len(tokens) == new.count
        cache.begin(new)
        cache.pending = list(zip(part.positions, tokens, strict=True))
        view = cache.view if plan is None else f"{cache.view} {plan}"
        return torch.stack(
            [self.logits(view, cache.seen_by(token)) for token in range(new.count - part.rows, new.count)]
        )

    def raise_nan(self, part: PassInput) -> NoReturn:
        raise AssertionError("a table has no NaN")


class HeadTable:
    """What a head takes from its target: embeddings, and logits of states.

    Args:
        support: tokens possible in a row.
    """

    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(self, seed: int, support: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._support = support
        self._embeddings = torch.randn(VOCABULARY, VOCABULARY, dtype=self.dtype, generator=generator)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embeddings[tokens][None]

    def logits(self, hidden: Tensor) -> Tensor:
        least = hidden[0].topk(self._support).values[:, -1:]
        return hidden[0].masked_fill(hidden[0] < least, -1e6)


def random_head(hidden: int, inner: int, seed: int) -> Head:
    """A head whose states are about as large as they were."""
    head = Head(hidden, inner)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
    return head


def next_probs(sampler: Sampler, logits: Tensor) -> list[float]:
    """The distribution of one token, greedy included."""
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
    view: str = "full",
) -> Probs:
    """The distribution of `count` tokens of the model alone: the product of its conditional ones."""
    grown: Probs = {(): 1.0}
    for _ in range(count):
        longer: Probs = {}
        for output, probability in grown.items():
            if output and output[-1] in stop_tokens:
                longer[output] = probability
                continue
            logits = model.logits(view, list(enumerate([*prompt, *output])))
            for token, weight in enumerate(next_probs(sampler, logits)):
                if weight > 0:
                    longer[*output, token] = probability * weight
        grown = longer
    return grown


def distance(found: Probs, expected: Probs) -> float:
    """The largest difference in the probability of any output."""
    return max(abs(found.get(o, 0.0) - expected.get(o, 0.0)) for o in found.keys() | expected.keys())


# ------------------------------------------------------------------------------------- compositions

Composition = Callable[[Sampling], Verifier]
Clock = Callable[[list[int]], bool]
"""Whether a pass is over, by the choices that were drawn since it began."""


class Parts:
    """What compositions are made of. A composition is built anew for each path."""

    def __init__(self, seed: int, support: int = VOCABULARY) -> None:
        self.target = TableModel(seed, support)
        self.small = TableModel(seed + 1, support)
        head_target: Any = HeadTable(seed, support)
        self.head = HeadModel(random_head(VOCABULARY, 7, seed).double(), head_target, "head")

    def full(self, below: Level) -> Composition:
        """The target over its full cache, with a level below it that may derive caches from that."""

        def compose(sampling: Sampling) -> Verifier:
            cache = FullTokenCache()
            drafter = below(self, cache, sampling)
            return Verifier("full", self.target, cache, drafter, sampling)

        return compose


Level = Callable[[Parts, FullTokenCache, Sampling], Drafter]


def nothing(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
    """No level: what is above it decodes plainly."""
    return Drafter()


def head(parts: Parts, full: FullTokenCache, sampling: Sampling) -> HeadDrafter:
    """A head on the target's hidden states."""
    return HeadDrafter(parts.head, sampling)


def target_over(
    view: str,
    below: Level = nothing,
    shape: DraftShape = CHAIN,
    *plans: LayerPlan | None,
) -> Level:
    """The target over a cache derived from the full one; `shape` is what `below` proposes to it."""

    def level(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
        drafter, cache = below(parts, full, sampling), TokenCache(view)
        full.derived.append(cache)
        return ModelDrafter(view, parts.target, cache, drafter, sampling, *plans, shape_below=shape)

    return level


def small_model(*plans: LayerPlan) -> Level:
    """The small model over a cache of its own."""

    def level(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
        cache: Any = TokenCache("small")
        return SmallModelDrafter("small", parts.small, cache, Drafter(), sampling, *plans)

    return level


class Free:
    """Prices nothing: as many outcomes are drafted for as are asked for."""

    def pass_ms(self, length: int, shape: DraftShape) -> float:
        return 0.0

    draft_ms = pass_ms


class BackgroundAtOnce:
    """Runs a background pass at once, and says that it is over when a clock says so."""

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
    """A sequence whose caches hold tokens in place of KV, and whose pace learns nothing from its rounds."""

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
        self.full: Any = verifier.cache
        self.full.verified = list(enumerate(prompt[:-1]))
        self.controller: Any = SpeculationController(
            Free(),
            shape.candidates() if shape.depth else [shape],
            0.5,
            ahead=ahead,
            step_down=False,
            clock=clock,
        )
        self.controller.observe = lambda *given: None
        self.ready, self.rounds, self._ended = None, [], False
        self._continuation = Continuation(verifier.sampling, max_tokens)
        self.take_prompt()

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.start :])

    def state(self) -> Hashable:
        """All that the rest of the run depends on, beside its draws."""
        return (tuple(self.tokens), self._ended, _frozen(self.verifier), _frozen(self.ready))


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
    if isinstance(value, Rounds | Growth):
        left = ("_verifier", "_changes")
        held = {name: held for name, held in vars(value).items() if name not in left}
        if isinstance(value, Growth) and isinstance(value._verifier.cache, HeadStates):
            held["_states"] = value._verifier.cache  # of this draft alone
        return _frozen(held)
    if isinstance(value, SpeculativeTokens):
        tokens = [held.known[at] if held.arrived else None for held, at in value._tokens]
        return (tuple(tokens), tuple(value.parents))
    if isinstance(value, TableModel | HeadModel | Sampling | LevelStats | FunctionType):
        return None  # the same in every path, or never read
    if callable(value):
        return None
    if isinstance(value, Tensor):
        return (tuple(value.shape), *value.flatten().tolist())
    return (type(value).__name__, *((name, _frozen(held)) for name, held in vars(value).items()))


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
) -> Probs:
    """The exact distribution of the first `count` tokens that the composition puts out.

    Args:
        shape: what is drafted for the full cache in a round.
        max_tokens: where decoding ends; default: so late that it cuts no draft.
        ahead, clock: outcomes that are drafted for while a pass runs; None: no clock is asked.
    """

    def start(draws: ScriptedDraws) -> tuple[list[Text], Any]:
        text = Text(
            composition(Sampling(sampler, draws, stop_tokens)),
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
    """The joint distribution of what several texts put out that are stepped together.

    Between two rounds the program is its objects and its texts. Paths that have led to the same state have
    the same future: their probabilities are added, and one of them goes on for all.
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
    """One round of the texts that go on; `thread` is that of their background passes."""
    going = [text for text in texts if not text.ended]
    for result in BatchRunner([decode_step(text) for text in going], thread).run():
        if isinstance(result, Exception):
            raise result
