"""Penalties of tokens that a sequence has already, in the logits of every level.

They make the distribution of the next token depend on the whole sequence, speculative tokens included. What
drafts are drawn from and what verifies them get their logits here, so that speculation stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload_rt.drafting.base import TokenView
from offload_rt.sampling.sampler import Sampler
from offload_rt.sampling.tokens import Tokens
from offload_rt.sampling.trees import Tree
from offload_rt.system.device_copies import to_device


class Penalties:
    """Counts the tokens of one continuation of a sequence, and penalises logits by them.

    Verified tokens are counted once, on the device; those of a view and of a draft are added to the counts
    for each call. Without a penalty nothing is counted.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._length = 0  # verified tokens
        self._prompt: list[int] = []  # its tokens, each once; empty once they are in `_in_prompt`
        self._uncounted: list[int] = []  # generated and verified, but not in `_counts`
        self._in_prompt = torch.empty(0)  # [vocabulary], tokens of the prompt
        self._counts: Tensor | None = None  # [vocabulary], of generated tokens; None before the first logits

    def begin(self, tokens: Sequence[int]) -> None:
        """A continuation of `tokens` begins, which are its prompt."""
        self._counts, self._length, self._uncounted = None, len(tokens), []
        self._prompt = list(set(tokens)) if self._sampler.penalises else []

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes verified tokens that follow those so far."""
        self._length += len(tokens)
        if self._sampler.penalises:
            self._uncounted += tokens

    def apply(
        self, logits: Tensor, view: TokenView, tokens: Sequence[Tokens], parents: Sequence[int]
    ) -> Tensor:
        """Returns penalised logits, in float32 or wider; `logits` themselves where there is no penalty.

        The host does not wait: tokens of a draft may be on the device alone.

        Args:
            logits: `[rows, vocabulary]`, after the last `rows` of the end of `view` and the nodes of a draft
                below it.
            tokens: of the nodes, in pieces.
            parents: of the nodes; see `Tree`.
        """
        if not self._sampler.penalises:
            return logits
        rows, vocabulary = logits.shape
        counts = self._counted(logits)
        speculative = view.part(self._length)
        if speculative:
            counts = _added(counts, to_device(speculative, logits.device))
        counts = counts.repeat(rows, 1)
        tree = Tree(tuple(parents))
        above = [tree.path(row) for row in range(1 + len(tree) - rows, 1 + len(tree))]
        nodes = [node for path in above for node in path]
        if nodes:
            starts = [row * vocabulary for row, path in enumerate(above) for _ in path]
            starts_and_nodes = to_device([*starts, *nodes], logits.device)
            ids = torch.cat([level.on(logits.device) for level in tokens])
            at = starts_and_nodes[: len(starts)] + ids[starts_and_nodes[len(starts) :]]
            counts = _added(counts.flatten(), at).view(rows, vocabulary)
        return self._sampler.penalised(logits, counts, self._in_prompt)

    def _counted(self, logits: Tensor) -> Tensor:
        """Returns how often each token was generated and verified, `[vocabulary]`."""
        if self._counts is None:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            self._counts = logits.new_zeros(logits.shape[1], dtype=dtype)
            self._in_prompt = torch.zeros_like(self._counts, dtype=torch.bool)
            self._in_prompt.index_fill_(0, to_device(self._prompt, logits.device), True)
            self._prompt = []
        if self._uncounted:
            self._counts = _added(self._counts, to_device(self._uncounted, logits.device))
            self._uncounted = []
        return self._counts


def _added(counts: Tensor, tokens: Tensor) -> Tensor:
    """Returns `counts` with one more of each of `tokens`; a token may occur several times."""
    return counts.index_add(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
