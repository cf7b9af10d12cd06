"""Verifier: turns any draft into tokens that have its model's output distribution over its cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from torch import Tensor

from offload_rt.caches.base import Cache
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.config.draft_shape import DraftShape
from offload_rt.drafting.base import Drafter, Round, TokenView
from offload_rt.drafting.logits import Grammar, LogitsProcessor
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.work import CopyToHost, Forward, LevelStats, Model, Work
from offload_rt.sampling.rejection import Draft, Verdict, verify, verify_greedy
from offload_rt.sampling.sampler import Draws, Sampler, choices
from offload_rt.sampling.tokens import Tokens
from offload_rt.system.device_copies import to_device


@dataclass
class Sampling:
    """Sampling settings that all levels of a composition share.

    Attributes:
        stop_tokens: the sequence ends with the first of these: no use to draft beyond one.
        grammar: of the text that is generated; None: it may be any.
        processor: of the logits of the sequence that is continued by these settings.
    """

    sampler: Sampler
    draws: Draws
    stop_tokens: Collection[int] = ()
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self.processor = LogitsProcessor(self.sampler, self.grammar)

    def end(self, tokens: Sequence[int]) -> int | None:
        """Returns which of new verified tokens ends the sequence; None: it goes on.

        Raises:
            UsageError: one of them is not what the grammar allows; see `LogitsProcessor.complete`.
        """
        for at, token in enumerate(tokens):
            if token in self.stop_tokens or self.processor.complete(tokens[: at + 1]):
                return at
        return None


class AcceptanceRule(Protocol):
    """Decides which tokens of a draft are accepted, and which token follows them."""

    def __call__(
        self, draft: Draft, logits: Tensor, probs: Tensor | None, draws: Draws
    ) -> tuple[Verdict, Tensor]:
        """Returns the verdict, and a tensor with a NaN exactly if `logits` has one.

        Args:
            logits: `[1 + nodes, vocabulary]`, the verifier's before each node and after the last, processed.
            probs: the same after temperature, top-k, top-p and min-p; None for greedy decoding.
        """


def lossless(draft: Draft, logits: Tensor, probs: Tensor | None, draws: Draws) -> tuple[Verdict, Tensor]:
    """Keeps the output distribution that of the verifier; see `rejection_sampling`."""
    if probs is None:
        likeliest = choices(logits)
        return verify_greedy(draft, likeliest), logits.gather(-1, likeliest[:, None])
    return verify(draft, probs, draws), probs[:, :1]


@dataclass(eq=False)
class Verifier:
    """A model over a cache, with a drafter that proposes to it.

    The cache may lag behind the sequence it is given: what it lacks goes through the model in front of the
    draft. It may also hold tokens that turned out otherwise: those are rolled back first.

    Attributes:
        name: of the level.
        order: order of layers; None: as the model runs them.
        first_order: order of layers of a draft's first pass, over the newest verified tokens: all layers in
            turn calibrate a verifier with a rougher order (EasySpec's bonus calibration); None: `order`.
        wants_states: its rounds carry states.
        rule: accepts and rejects drafted tokens. Any other than `lossless` changes the output; benchmarks
            hold the acceptance rate of random weights with one.
    """

    name: str
    model: Model
    cache: Cache
    drafter: Drafter
    sampling: Sampling
    order: LayerOrder | None = None
    first_order: LayerOrder | None = None
    rule: AcceptanceRule = field(default=lossless, kw_only=True)

    def __post_init__(self) -> None:
        self.stats = LevelStats(self.name)
        self.wants_states = self.drafter.wants_states

    @property
    def levels(self) -> list[LevelStats]:
        """Statistics of all levels up to this one, the cheapest first."""
        return [*self.drafter.levels, self.stats]

    def round(self, view: TokenView, shape: DraftShape) -> Work[Round]:
        """One verification of a draft of `shape` below the last token of `view`."""
        draft = yield from self.drafter.proposal(view, shape).complete()
        verification = self.verification(view, draft)
        output = yield verification
        return (yield from self.verdict(view, draft, verification.input, output))

    def verification(self, view: TokenView, draft: Draft) -> Forward:
        """Rolls the cache back and returns the pass over the tokens that it lacks, and over `draft`."""
        missing, entries = self.roll_back(view), len(self.cache.speculative)
        behind = entries + len(missing)
        parents = [*range(entries - 1, behind - 1), *(behind + parent for parent in draft.tree.parents)]
        return self.forward(
            view, parents, missing, draft.tokens, rows=1 + len(draft), states=self.wants_states
        )

    def roll_back(self, view: TokenView) -> list[int]:
        """Drops speculative entries that are not in the sequence; returns the tokens that the cache lacks."""
        cache = self.cache
        matched = cache.speculative.match(view.part(cache.verified_length, len(view) - 1))
        if len(matched) != len(cache.speculative):
            cache.keep(matched)
        return view.part(cache.verified_length + len(matched))

    def catch_up(self) -> Work[None]:
        """Computes anew what verified tokens have from the state of a draft; see `HeadDrafter`."""
        yield from ()

    def forward(
        self,
        view: TokenView,
        parents: Sequence[int],
        ids: Sequence[int],
        draft: Tokens | None = None,
        *,
        rows: int,
        states: bool = False,
        first: bool = False,
    ) -> Forward:
        """A pass of new tokens below the cache's speculative entries; see `NewTokens`.

        Args:
            view: the first tokens are the end of it.
            first: in the order of layers of a draft's first pass.
        """
        new = NewTokens.below(self.cache.speculative, parents, ids, draft)
        order = self.first_order if first and self.first_order else self.order
        self.stats.passes += 1
        return Forward(self.model, PassInput(self.cache, new, rows, states), order, self.stats)

    def verdict(self, view: TokenView, draft: Draft, part: PassInput, output: PassOutput) -> Work[Round]:
        """Accepts or rejects `draft`, below `view` and the last tokens of `part`, and commits its KV.

        The host waits once, with a grammar twice.
        """
        logits, sampler, missing = output.logits, self.sampling.sampler, part.new.count - len(draft)
        processor, tree = self.sampling.processor, draft.tree
        processed = yield from processor.process(logits, view, [draft.tokens], tree.parents, self.stats)
        probs = None if sampler.greedy else sampler.probs(processed)
        verdict, probe = self.rule(draft, processed, probs, self.sampling.draws)
        # One of the probed values is NaN exactly if any logit is.
        row, token, nan, *copies = yield CopyToHost(
            [verdict.row, verdict.token, probe.isnan().any(), *draft.tokens.pending()], self.stats
        )
        draft.tokens.arrive(copies)
        if nan:
            self.model.raise_nan(part)
        path = tree.path(int(row))
        tokens = [*(draft.tokens.known[node] for node in path), int(token)]
        self.cache.commit([*range(missing), *(missing + node for node in path)])
        self.stats.proposed += len(draft)
        self.stats.accepted += len(path)
        rows: Tensor | slice = slice(1 + len(path))
        if path != list(range(len(path))):
            rows = to_device([0, *(1 + node for node in path)], logits.device)
        path_logits = logits[rows]
        return Round(
            tokens,
            len(path),
            len(draft),
            tree.tries(path, len(draft) - draft.source_nodes),
            None if probs is None else probs[rows],
            path_logits,
            path_logits if processed is logits else processed[rows],
            None if output.states is None else output.states[rows],
        )

    def trace_nan(self, view: TokenView, draft: Draft) -> NoReturn:
        """Names the cause of NaN logits that tokens below `view` were drawn from; they are on the host by
        now.

        Raises:
            NotANumber: naming the weight or the layer.
        """
        self.cache.keep([])
        on_host = Draft(Tokens(draft.tokens.known), draft.tree)
        self.model.raise_nan(self.verification(view, on_host).input)
