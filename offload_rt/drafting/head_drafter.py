"""Drafts from a target's hidden states: a head takes the place of a model, and its states that of KV."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

import torch
from torch import Tensor

from offload_rt.attention.sums import Softmax
from offload_rt.caches.local import NO_LOCAL_STATE
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.schema import HeadConfig
from offload_rt.drafting.base import DraftAhead, Drafter, HiddenState, Outcome, Proposal, Round, TokenView
from offload_rt.drafting.model_drafter import ModelDrafter
from offload_rt.drafting.verifier import Sampling
from offload_rt.model.decoder import NotANumber
from offload_rt.model.draft_head import DEMO_HEAD, Head, load_head
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.model.runner import CausalModel
from offload_rt.system.device_copies import joined, to_device


class HeadStates:
    """A head's states of one draft, below a state that a model has left (a `caches.base.Cache`).

    Attributes:
        speculative: tokens of the states behind the model's.
        verified_length: tokens that the model's state stands for.
        states: `[1 + held, hidden_size]`, the model's first.
        pending: `[new tokens, hidden_size]`, states of a pass that are not committed yet.
    """

    def __init__(self, state: HiddenState) -> None:
        self.speculative = SpeculativeTokens()
        self.local = NO_LOCAL_STATE
        self.verified_length = state.length
        self.states = state.hidden[None]
        self.pending = self.states[:0]
        self._new_tokens = NewTokens((), (), ())

    def begin(self, new: NewTokens) -> None:
        self._new_tokens = new

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        raise RuntimeError("a head has no attention")

    def commit(self, indices: Sequence[int]) -> None:
        self._new_tokens.commit_to(self.speculative, indices)
        self.states = torch.cat([self.states, self.pending[to_device(indices, self.states.device)]])

    def keep(self, entries: Sequence[int]) -> None:
        rows = to_device([0, *(1 + entry for entry in entries)], self.states.device)
        self.states = self.states[rows]
        self.speculative.keep(entries)

    def settle(self) -> None:
        self.verified_length += len(self.speculative)
        self.states = self.states[-1:]
        self.speculative.clear()


class HeadModel:
    """A head with its target's embedding and output head: a `work.Model` over `HeadStates`."""

    def __init__(self, head: Head, target: CausalModel, name: str) -> None:
        self.name = name
        self.head = head
        self.target = target
        self.device = target.device
        self.dtype = target.dtype

    @torch.inference_mode()
    def forward(self, parts: Sequence[PassInput], order: LayerOrder | None = None) -> list[PassOutput]:
        """Runs new tokens of several sequences, one generation of the trees after another."""
        caches = [cast(HeadStates, part.cache) for part in parts]
        embedded = self.target.embed(joined([part.ids(self.device) for part in parts]))[0]
        earlier = sum(len(cache.states) for cache in caches)
        rows = torch.cat([*(cache.states for cache in caches), embedded.new_empty(embedded.shape)])
        for tokens, above in _generations(parts, earlier):
            at, before = (to_device(numbers, self.device) for numbers in (tokens, above))
            rows[earlier + at] = self.head(embedded[at], rows[before])
        states = rows[earlier:].split([part.new.count for part in parts])
        for part, cache, own in zip(parts, caches, states, strict=True):
            cache.begin(part.new)
            cache.pending = own
        last_rows = [own[-part.rows :] for part, own in zip(parts, states, strict=True)]
        logits = self.target.logits(joined(last_rows)[None]).split([part.rows for part in parts])
        return [
            PassOutput(row, own if part.hidden else None)
            for part, row, own in zip(parts, logits, last_rows, strict=True)
        ]

    def raise_nan(self, part: PassInput) -> NoReturn:
        raise NotANumber(
            f"{self.name}: its logits are NaN with {self.dtype}; try a wider dtype, or train it anew"
        )


def _generations(parts: Sequence[PassInput], earlier: int) -> list[tuple[list[int], list[int]]]:
    """Returns the tokens of a pass by generation, each with the rows of their parents.

    Parents of the first generation are in the caches.


    Args:
        earlier: rows of the states that come before those of the pass.
    """
    generations: dict[int, tuple[list[int], list[int]]] = {}
    behind = first = 0
    for part in parts:
        size = len(part.cache.speculative)
        for at, (parent, sees) in enumerate(zip(part.new.parents, part.new.sees, strict=True)):
            tokens, above = generations.setdefault((sees >> size).bit_count(), ([], []))
            tokens.append(first + at)
            above.append(behind + 1 + parent if parent < size else earlier + first + parent - size)
        behind += 1 + size
        first += part.new.count
    return list(generations.values())


class HeadDrafter(ModelDrafter):
    """A head that proposes below the newest hidden state that its verifier, a level of the target, has left.

    Before the first one there is nothing to go on from, and it proposes nothing. Tokens that come after the
    state and before the draft (a guessed outcome) go through the head too.
    """

    def __init__(self, model: HeadModel, sampling: Sampling) -> None:
        super().__init__("head", model, HeadStates(HiddenState(0, torch.empty(0))), Drafter(), sampling)
        self.wants_hidden = True
        self._verified: HiddenState | None = None

    def observe(self, view: TokenView, round: Round) -> None:
        assert round.hidden is not None
        self._verified = HiddenState(len(view) - 1, round.hidden[-1])

    def proposal(self, view: TokenView, shape: DraftShape) -> Proposal:
        state = view.state or self._verified
        if state is None:
            return Proposal()
        # A draft keeps its states to itself: they are few, and others may begin at another state.
        drafter = copy.copy(self)
        drafter.cache = HeadStates(state)
        return ModelDrafter.proposal(drafter, view, shape)

    def ahead(self, view: TokenView, shapes: Mapping[Outcome, DraftShape]) -> Iterator[DraftAhead]:
        return Drafter.ahead(self, view, shapes)  # each with states of its own


class Heads:
    """The heads of one target by their files; each file is read once."""

    def __init__(self) -> None:
        self._models: dict[Path, HeadModel] = {}

    def of(self, config: HeadConfig, target: CausalModel) -> HeadModel:
        """Returns the head that a config names. Raises UsageError; see `model.draft_head.load_head`."""
        path = Path(config.path) if config.path else DEMO_HEAD
        if path not in self._models:
            self._models[path] = HeadModel(load_head(path, target), target, f"head {path}")
        return self._models[path]

    @property
    def weight_bytes(self) -> int:
        return sum(model.head.weight_bytes for model in self._models.values())
