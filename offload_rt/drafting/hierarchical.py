"""A verifier is a drafter for a dearer one: its rounds, until enough tokens stand.

A small model without a drafter of its own, run for γ rounds, is the classic draft model; a target over
a retrieved cache with that model as its drafter is TriForce's middle level (arXiv 2404.11912, algorithm 1).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from offload_rt.caches.streaming import StreamingCache
from offload_rt.drafting.base import LevelStats, Text
from offload_rt.drafting.outcomes import likely_outcomes
from offload_rt.drafting.verifier import Round, Verifier
from offload_rt.sampling import SamplingLaw
from offload_rt.verification import Draft

# What papers and our own runs see; used only until a text has shown its own.
SAME_MODEL_ACCEPTANCE = 0.9
SMALL_MODEL_ACCEPTANCE = 0.5

LIKELY = SamplingLaw(temperature=1.0)  # how sure a greedy draft was of its tokens


class VerifierProposal:
    """A chain that grows by rounds of its verifier, until `count` tokens stand.

    Without a level below, token by token, each of which the host waits for: a verdict that comes meanwhile
    has not to wait for more.
    """

    def __init__(self, drafter: VerifierDrafter, text: Text, count: int) -> None:
        self._drafter = drafter
        self._start = len(text)
        self._end = len(text) + count
        self._grown = text
        self._laws: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._stopped = False

    def step(self) -> bool:
        missing = self._end - len(self._grown)
        if missing <= 0 or self._stopped:
            return False
        drafter = self._drafter
        made: Draft | Round
        if drafter.draft_count == 0:
            made = drafter.verifier.extend(self._grown, 1)
        else:
            made = drafter.verifier.round(self._grown, min(drafter.draft_count, missing - 1))
        tokens, laws = list(made.tokens), made.laws
        if made.scores is not None:
            self._scores.append(made.scores)
        self._grown = self._grown.extended(tokens)
        if laws is not None:
            self._laws.append(laws)
        self._stopped = any(token in drafter.stop_tokens for token in tokens)
        return True

    def draft(self) -> Draft:
        return Draft.chain(
            self._grown.part(self._start),
            torch.cat(self._laws) if self._laws else None,
            torch.cat(self._scores) if self._scores else None,
        )


class VerifierDrafter:
    """A verifier that proposes to a dearer one: its rounds, until `count` tokens stand.

    The laws it reports are its verifier's: that is the law its tokens follow, however they were drafted.
    How many tokens are proposed depends only on tokens already proposed, which leaves each one's law as
    reported (a stopping time).

    Args:
        draft_count: how many tokens the level below proposes to each of its rounds (γ of that level);
            0: there is none, and the tokens stay on the device.
        stop_tokens: no use to draft beyond one of these, where the tokens are known.
    """

    def __init__(self, verifier: Verifier, draft_count: int, stop_tokens: Collection[int] = ()) -> None:
        self.verifier = verifier
        self.draft_count = draft_count
        self.stop_tokens = stop_tokens

    @property
    def levels(self) -> list[LevelStats]:
        return self.verifier.levels

    def prefill(self, text: Text) -> None:
        self.verifier.drafter.prefill(text)

    def propose(self, text: Text, count: int) -> Draft:
        if self.draft_count == 0:
            return self.verifier.extend(text, count)
        proposal = self.proposal(text, count)
        while proposal.step():
            pass
        return proposal.draft()

    def proposal(self, text: Text, count: int) -> VerifierProposal:
        return VerifierProposal(self, text, count)

    def outcomes(self, text: Text, draft: Draft, most: int, acceptance: float) -> list[tuple[int, ...]]:
        if not draft.is_chain or draft.scores is None:
            return []
        logits = torch.cat([draft.scores, self.verifier.foresee(text.extended(draft.tokens))])
        law = self.verifier.sampling.law
        laws = LIKELY.laws(logits) if law.greedy else law.laws(logits)
        return likely_outcomes(list(draft.tokens), laws, most, acceptance, greedy=law.greedy)

    def settle(self, text: Text) -> None:
        # A cache derived from the full one has adopted the verified KV already, and may hold what was
        # drafted ahead behind it.
        self.verifier.drafter.settle(text)

    @property
    def expected_acceptance(self) -> float:
        return SAME_MODEL_ACCEPTANCE

    def expected_ms(self, length: int, count: int) -> float:
        rounds = count / self.verifier.expected_tokens(self.draft_count)
        return rounds * self.verifier.expected_ms(length, self.draft_count)


class SmallModelDrafter(VerifierDrafter):
    """A model of its own over a streaming cache: it reads the prompt itself.

    Only what its cache will hold, and `LEAD` windows before that, so that the window's hidden states have
    seen what they would have seen: a draft may be any approximation.
    """

    LEAD = 2

    @property
    def expected_acceptance(self) -> float:
        return SMALL_MODEL_ACCEPTANCE

    def __init__(self, verifier: Verifier, cache: StreamingCache) -> None:
        super().__init__(verifier, 0)
        self._cache = cache

    def settle(self, text: Text) -> None:
        self.verifier.settle(text)

    def prefill(self, text: Text) -> None:
        cache, read = self._cache, self.verifier.read
        cache.reset()
        end = len(text) - 1
        start = min(cache.sinks, end)
        if start:
            read(text.part(0, start))
        recent = max(start, end - (1 + self.LEAD) * cache.window)
        if recent > start:
            cache.skip(recent - start)
        for at in range(recent, end, cache.window):
            read(text.part(at, min(at + cache.window, end)))
