"""A verifier turns any proposal into tokens that follow the law of its model over its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from offload_rt.caches.base import Cache, NewTokens
from offload_rt.drafting.acceptance import RunningAcceptance
from offload_rt.drafting.base import Drafter, LevelStats, Text
from offload_rt.drafting.drawn import DrawnTokens
from offload_rt.host import to_device, to_host
from offload_rt.sampling import Draws, SamplingLaw, choices
from offload_rt.verification import ROOT, Draft, Verdict, verify, verify_chain, verify_matching


class Model(Protocol):
    """What a verifier asks of a model (see `model.CausalModel`)."""

    device: torch.device
    dtype: torch.dtype

    def forward(
        self,
        cache: Cache,
        tokens: Sequence[int],
        positions: Sequence[int],
        new: NewTokens,
        rows: int,
        drawn: Tensor | None = None,
    ) -> Tensor: ...

    def raise_nan(
        self, cache: Cache, tokens: Sequence[int], positions: Sequence[int], new: NewTokens
    ) -> NoReturn: ...


@dataclass
class Sampling:
    """How all levels of a composition draw their tokens; set anew for each text."""

    law: SamplingLaw
    draws: Draws


@dataclass(frozen=True)
class Pass:
    """A verification that was begun: the draft and the logits over it.

    Attributes:
        draft: what is verified.
        chain: how many tokens of the text the pass ran over before the draft.
        logits: `[1 + nodes, vocabulary]`, after the text and after each node.
    """

    draft: Draft
    chain: int
    logits: Tensor


@dataclass(frozen=True)
class Round:
    """Tokens that follow the verifier's law.

    Attributes:
        tokens: accepted draft tokens, then one of the verifier's own.
        accepted, proposed: draft tokens.
        laws: `[tokens, vocabulary]`, the law each token followed; None where all is greedy.
        scores: `[tokens, vocabulary]`, the verifier's logits before each token.
    """

    tokens: list[int]
    accepted: int
    proposed: int
    laws: Tensor | None
    scores: Tensor


class Verifier:
    """A model over a cache, with a drafter that proposes to it.

    The cache may lag behind the text it is given: what it lacks goes through the model in front of the
    draft. It may also hold tokens that turned out otherwise: those are rolled back first.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        cache: Cache,
        drafter: Drafter,
        sampling: Sampling,
        pass_cost: Callable[[int, int], float],
    ) -> None:
        self.model = model
        self.cache = cache
        self.drafter = drafter
        self.sampling = sampling
        self.stats = LevelStats(name)
        self._pass_cost = pass_cost
        self._acceptance = RunningAcceptance(drafter.expected_acceptance)
        self._verified = 0  # the cache's verified length when last looked at
        self._speculative: list[int] = []  # the cache's tokens after those, but for …
        self._drawn: DrawnTokens | None = None  # … all but the last of these

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of all levels up to this one, the cheapest first."""
        return [*self.drafter.levels, self.stats]

    def round(self, text: Text, count: int) -> Round:
        """One verification of about `count` drafted tokens below the last token of `text`."""
        draft = self.drafter.propose(text, count) if count > 0 else Draft()
        started = perf_counter()
        result = self.verdict(text, self.begin(text, draft))
        self.stats.ms += 1e3 * (perf_counter() - started)
        return result

    def begin(self, text: Text, draft: Draft) -> Pass:
        """Runs the model over what the cache lacks of the text, and over the draft."""
        self._roll_back(text)
        chain = text.part(self.cache.length)
        drawn = draft.tokens.tensor if isinstance(draft.tokens, DrawnTokens) else None
        new = self._new(len(chain), draft.parents)
        self.stats.fixed_ms += self._pass_cost(len(text), new.count)
        logits = self.model.forward(
            self.cache,
            chain if drawn is not None else [*chain, *draft.tokens],
            _positions(len(text), len(chain), draft.parents),
            new,
            1 + len(draft.tokens),
            drawn,
        )
        return Pass(draft, len(chain), logits)

    def _new(self, chain: int, parents: Sequence[int]) -> NewTokens:
        return NewTokens.chain_and_tree(chain, parents, self.model.device, self.model.dtype)

    def verdict(self, text: Text, begun: Pass) -> Round:
        """Decides what of the draft stands, and commits its KV. The host waits once."""
        laws = None if self.sampling.law.greedy else self.sampling.law.laws(begun.logits)
        if laws is None:
            verdict = self._match(text, begun)
        elif begun.draft.is_chain:
            verdict = self._verify_chain(text, begun, laws)
        else:
            verdict = self._walk(text, begun, laws)
        path = verdict.path
        self.cache.commit([*range(begun.chain), *(begun.chain + node for node in path)])
        tokens = [begun.draft.tokens[node] for node in path]
        self._speculative += [*text.part(len(text) - begun.chain), *tokens]
        self.stats.rounds += 1
        self.stats.proposed += len(begun.draft.tokens)
        self.stats.accepted += len(tokens)
        self._acceptance.observe(len(begun.draft.tokens), len(tokens))
        rows: Tensor | slice = slice(1 + len(path))
        if path != list(range(len(path))):
            rows = to_device([0, *(1 + node for node in path)], begun.logits.device)
        return Round(
            [*tokens, verdict.token],
            len(tokens),
            len(begun.draft.tokens),
            None if laws is None else laws[rows],
            begun.logits[rows],
        )

    def _match(self, text: Text, begun: Pass) -> Verdict:
        chosen = choices(begun.logits)
        (chosen,) = self._bring(text, begun, begun.logits.gather(-1, chosen[:, None]), chosen)
        return verify_matching(begun.draft, chosen.tolist().__getitem__)

    def _verify_chain(self, text: Text, begun: Pass, laws: Tensor) -> Verdict:
        tokens, proposals = begun.draft.tokens, begun.draft.laws
        there = tokens.tensor if isinstance(tokens, DrawnTokens) else to_device(tokens, laws.device)
        decided = verify_chain(there, proposals, laws, self.sampling.draws)
        accepted, token = self._bring(text, begun, laws[:, :1], *decided)
        return Verdict(list(range(int(accepted))), int(token))

    def _walk(self, text: Text, begun: Pass, laws: Tensor) -> Verdict:
        draft = begun.draft
        reported = [] if draft.laws is None else [draft.laws]
        laws, *proposals = self._bring(text, begun, laws[:, :1], laws, *reported)
        if proposals:
            draft = replace(draft, laws=proposals[0])
        return verify(draft, laws, self.sampling.draws)

    def _read(self, *tensors: Tensor) -> list[Tensor]:
        self.stats.host_reads += 1
        return to_host(*tensors)

    def _bring(self, text: Text, begun: Pass, witness: Tensor, *results: Tensor) -> list[Tensor]:
        """Results of a pass to the host, and with them the tokens of its draft, in one read.

        Args:
            witness: values of which one is NaN where one of the logits was.

        Raises:
            NotANumber: by the model whose logits they were.
        """
        tokens = begun.draft.tokens
        drawn = (tokens.tensor, tokens.nan) if isinstance(tokens, DrawnTokens) else ()
        read = self._read(witness.isnan().any(), *drawn, *results)
        if isinstance(tokens, DrawnTokens):
            tokens.arrive(read[1], read[2])
        if read[0]:
            chain = text.part(len(text) - begun.chain)
            positions = _positions(len(text), begun.chain, begun.draft.parents)
            new = self._new(begun.chain, begun.draft.parents)
            self.model.raise_nan(self.cache, [*chain, *tokens], positions, new)
        return read[1 + len(drawn) :]

    def extend(self, text: Text, count: int) -> Draft:
        """Draws `count` tokens without a drafter, one after the other, and does not wait for them.

        Each is fed to the next pass where it is, on the device; the last one's KV is not in the cache.
        """
        started = perf_counter()
        self._roll_back(text)
        start = self.cache.length
        given = text.part(start)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        scores: list[Tensor] = []
        witnesses: list[Tensor] = []
        for length in range(len(text), len(text) + count):
            chain = given if not tokens else []
            new = self._new(len(chain) or 1, ())
            self.stats.fixed_ms += self._pass_cost(length, new.count)
            logits = self.model.forward(
                self.cache, chain, range(length - new.count, length), new, 1, tokens[-1] if tokens else None
            )
            scores.append(logits)
            if self.sampling.law.greedy:
                tokens.append(choices(logits))
                witnesses.append(logits.gather(-1, tokens[-1][:, None]))
            else:
                laws.append(self.sampling.law.laws(logits))
                tokens.append(self.sampling.draws.categorical(laws[-1][0])[None])
                witnesses.append(laws[-1][:, :1])
            self.cache.commit(range(new.count))
        self._speculative += given
        self._drawn = DrawnTokens(
            torch.cat(tokens),
            torch.cat(witnesses).isnan().any(),
            self._read,
            partial(self._raise_nan_of_draft, start, given),
        )
        self.stats.rounds += count
        self.stats.ms += 1e3 * (perf_counter() - started)
        return Draft.chain(self._drawn, torch.cat(laws) if laws else None, torch.cat(scores))

    def _raise_nan_of_draft(self, start: int, given: list[int], drawn: list[int]) -> NoReturn:
        self.cache.truncate(start)
        tokens = [*given, *drawn[:-1]]
        positions = range(start, start + len(tokens))
        self.model.raise_nan(self.cache, tokens, positions, self._new(len(tokens), ()))

    def foresee(self, text: Text) -> Tensor:
        """Takes all of `text` into the cache, as speculation; logits `[1, vocabulary]` after it."""
        begun = self.begin(text, Draft())
        self.cache.commit(range(begun.chain))
        self._speculative += text.part(len(text) - begun.chain)
        return begun.logits

    def expected_ms(self, length: int, count: int) -> float:
        """Fixed cost of a round of `count` drafted tokens, at the usual acceptance of the levels below."""
        return self._pass_cost(length, count + 1) + self.drafter.expected_ms(length, count)

    def expected_pass_ms(self, length: int, count: int) -> float:
        """Fixed cost of a verification of `count` drafted tokens."""
        return self._pass_cost(length, count + 1)

    def expected_draft_ms(self, length: int, count: int) -> float:
        """Fixed cost of drafting them."""
        return self.drafter.expected_ms(length, count)

    @property
    def acceptance(self) -> float:
        """Chance that a drafted token is accepted, by what has been seen of the text."""
        return self._acceptance.rate

    def expected_tokens(self, count: int) -> float:
        """What a round of `count` drafted tokens usually yields: 1 + a + … + a^count."""
        return sum(self.drafter.expected_acceptance**i for i in range(count + 1))

    def _roll_back(self, text: Text) -> None:
        """Truncates the cache to what it shares with `text`, whose last token it must not hold."""
        verified = self.cache.verified_length
        behind = self.cache.length - verified
        thrown_away = self._drawn is not None and not self._drawn.arrived
        if verified != self._verified and (behind == 0 or thrown_away):
            # Verified KV has come in meanwhile; what was speculative here has gone, or nobody asked for it.
            self._speculative, self._drawn = [], None
            if behind > 0:
                self.cache.truncate(verified)
            behind = 0
        if self._drawn is not None:
            self._speculative += self._drawn[:-1]
            self._drawn = None
        if verified != self._verified and behind > 0:
            # What the cache holds behind the verified KV that has come in may have come true.
            came, held = text.part(self._verified, verified), self._speculative
            self._speculative = held[len(came) :]
            if held[: len(came)] != came or len(self._speculative) != behind:
                self._speculative = []
                self.cache.truncate(verified)
        self._verified = verified
        held = self._speculative
        wanted = text.part(verified, len(text) - 1)
        shared = 0
        while shared < min(len(held), len(wanted)) and held[shared] == wanted[shared]:
            shared += 1
        if shared < len(held):
            self.cache.truncate(verified + shared)
            del held[shared:]

    def settle(self, text: Text) -> None:
        """All of `text` is verified by the full cache."""
        self._roll_back(text)
        self.cache.settle()

    def read(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the text into the cache, for good, without sampling."""
        start = self.cache.length
        positions = range(start, start + len(tokens))
        new = self._new(len(tokens), ())
        logits = self.model.forward(self.cache, tokens, positions, new, 1)
        if self._read(logits.isnan().any())[0]:
            self.model.raise_nan(self.cache, tokens, positions, new)
        self.cache.commit(range(len(tokens)))
        self.cache.settle()


def _positions(length: int, chain: int, parents: Sequence[int]) -> list[int]:
    """Of the last `chain` tokens of a text of `length`, and of the tree below it."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return [*range(length - chain, length), *(length - 1 + depth for depth in depths)]
