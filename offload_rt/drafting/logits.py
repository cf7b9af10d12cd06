"""The logits that tokens are drawn from: a model's own, penalised, and masked by a grammar.

Both depend on nothing but the tokens so far, speculative ones included. So they are part of the distribution
of every level: what drafts are drawn from and what verifies them get their logits here, and speculation stays
exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.drafting.base import TokenView
from offload_rt.drafting.penalties import Penalties
from offload_rt.model.work import CopyToHost, LevelStats, Work
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import Tree, on_device
from offload_rt.system.device_copies import to_device

WORD = 64
"""Tokens of which one word of a mask tells."""


class Grammar(Protocol):
    """The texts that a continuation may be.

    An answer depends on the generated tokens that are asked about, and on nothing that was asked before.
    """

    def allowed(self, tokens: Sequence[int]) -> Tensor | None:
        """Returns the tokens that may follow generated ones: a bit of each, `[vocabulary / 64]` int64.

        None where no token may: `tokens` begin no text of the grammar, or are one that is complete.
        """

    def complete(self, tokens: Sequence[int]) -> bool:
        """Returns whether generated tokens are a text that nothing may follow, no end token either.

        Raises:
            UsageError: they begin no text of the grammar.
        """


class LogitsProcessor:
    """Penalises and masks the logits of one continuation of a sequence.

    Args:
        grammar: None: any text may be generated.
    """

    def __init__(self, sampler: Sampler, grammar: Grammar | None = None) -> None:
        self._penalties = Penalties(sampler)
        self._grammar = grammar
        self._generated: list[int] = []  # verified tokens of the continuation, where there is a grammar
        self._length = 0  # verified tokens of the sequence
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by the speculative tokens behind them

    def begin(self, tokens: Sequence[int]) -> None:
        """A continuation of `tokens` begins, which are its prompt."""
        self._penalties.begin(tokens)
        self._length, self._generated = len(tokens), []
        self._masks.clear()

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes verified tokens that follow those so far."""
        self._penalties.extend(tokens)
        self._length += len(tokens)
        if self._grammar is not None:
            self._generated += tokens
            self._masks.clear()

    def complete(self, tokens: Sequence[int]) -> bool:
        """Returns whether the text is complete with verified `tokens` that follow those so far.

        Raises:
            UsageError: they are not what the grammar allows, as the vocabulary cannot write what it wants.
        """
        return self._grammar is not None and self._grammar.complete([*self._generated, *tokens])

    def process(
        self,
        logits: Tensor,
        view: TokenView,
        tokens: Sequence[Tokens],
        parents: Sequence[int],
        stats: LevelStats,
    ) -> Work[Tensor]:
        """Returns the logits that tokens are drawn from; `logits` themselves where nothing changes them.

        The host waits only where there is a grammar: it must know the tokens of a draft then.

        Args:
            logits: `[rows, vocabulary]`, after the last `rows` of the end of `view` and the nodes of a draft
                below it.
            tokens: of the nodes, in pieces.
            parents: of the nodes; see `Tree`.
        """
        logits = self._penalties.apply(logits, view, tokens, parents)
        if self._grammar is None:
            return logits
        for piece in tokens:  # one of them at most is on the device alone
            if not piece.arrived:
                piece.arrive((yield CopyToHost(piece.pending(), stats)))
        ids = [token for piece in tokens for token in piece.known]
        speculative, tree = view.part(self._length), Tree(tuple(parents))
        rows = range(1 + len(tree) - len(logits), 1 + len(tree))
        paths = [(*speculative, *(ids[node] for node in tree.path(row))) for row in rows]
        masks = [self._mask(path) for path in paths]
        # What no token may follow is not followed by any: nothing is left to forbid there.
        whole = torch.full((-(-logits.shape[1] // WORD),), -1)
        words = torch.stack([whole if mask is None else mask for mask in masks])
        return masked(logits, to_device(words, logits.device))

    def _mask(self, speculative: tuple[int, ...]) -> Tensor | None:
        """Returns what may follow the verified tokens and speculative ones."""
        assert self._grammar is not None
        if speculative not in self._masks:
            self._masks[speculative] = self._grammar.allowed([*self._generated, *speculative])
        return self._masks[speculative]


def masked(logits: Tensor, words: Tensor) -> Tensor:
    """Returns logits `[rows, vocabulary]` that are minus infinity where the bits of `words` are 0.

    Args:
        words: `[rows, vocabulary / 64]` int64.
    """
    bits = on_device(tuple(range(WORD)), logits.device)
    allowed = (words[..., None] >> bits & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, -torch.inf)
