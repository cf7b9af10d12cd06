"""Models, heads and caches without weights: the parts of compositions that `enumeration.py` enumerates.

`TableModel`'s logits are a fixed random function of the tokens it is shown, and its caches hold tokens in
place of KV. The model sees the sequence only through its cache, at the positions and with the ancestors that
the verifier states: a wrong commit, rollback, position or mask is a wrong distribution.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import LlamaConfig

from cpu_kv import CpuLink
from offload_rt.attention.selector import choose_backend
from offload_rt.attention.sums import Softmax
from offload_rt.caches.base import VerifiedTokens
from offload_rt.caches.head import HeadCache
from offload_rt.caches.local import NO_LOCAL_STATE
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.caches.split import SplitCache, SplitStreamingCache
from offload_rt.caches.target_states import TargetStates
from offload_rt.config.draft_shape import CHAIN, DraftShape
from offload_rt.drafting.base import Drafter
from offload_rt.drafting.head_drafter import HeadDrafter
from offload_rt.drafting.head_model import HeadModel
from offload_rt.drafting.model_drafter import ModelDrafter, SmallModelDrafter
from offload_rt.drafting.verifier import Sampling, Verifier
from offload_rt.model.draft_head import IMPOSSIBLE, Eagle3Head
from offload_rt.model.layer_order import LayerOrder
from offload_rt.model.passes import PassInput, PassOutput
from offload_rt.system.second_device import SecondDevice

VOCABULARY = 5
LAYERS = 5

Entry = tuple[int, int]
"""(position, token): what a cache holds in place of KV."""

Composition = Callable[[Sampling], Verifier]


class TokenCache:
    """Verified entries, then speculative ones, then the pending ones of a pass.

    Args:
        view: models have other logits for each view, as if some KV were missing.
    """

    sinks, window = 1, 2
    local, mass_chunk = NO_LOCAL_STATE, None

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

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        raise NotImplementedError("a table needs no attention")

    def seen_by(self, token: int) -> list[Entry]:
        """Entries that a new token attends to, itself included."""
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

    # Only derived and streaming caches are asked for these.

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
    """A cache whose committed entries are final and are passed on to the caches derived from it."""

    def __init__(self) -> None:
        super().__init__("full")
        self.derived: list[TokenCache] = []
        self.states: TargetStates | None = None

    def commit(self, kept: Sequence[int]) -> None:
        new, pending = self._end_pass()
        chosen = [pending[index] for index in kept]
        self.verified += chosen
        entries = torch.tensor(chosen, dtype=torch.float64).expand(LAYERS, 1, -1, -1)
        ids = [tokens.known[at] for tokens, at in map(new.token, kept)]
        for cache in self.derived:
            cache.adopt(VerifiedTokens(ids, entries, entries, new.count - 1))

    def keep(self, entries: Sequence[int]) -> None:
        assert not entries

    def catch_up(self) -> None:
        pass

    def build_derived(self) -> None:
        for cache in self.derived:
            for part in parts_of(cache):
                part.verified = list(self.verified)


SECOND = SecondDevice(torch.device("cpu"), CpuLink())


def cache_by(view: str, plan: LayerOrder | None) -> Any:
    """An empty cache: of two parts where a plan is on two devices."""
    if plan is None or not plan.remote:
        return TokenCache(view)
    home: Any = TokenCache(view)
    there: Any = TokenCache(view)
    return SplitStreamingCache(home, there, SECOND, plan.remote, LAYERS)


def parts_of(cache: Any) -> Sequence[TokenCache]:
    """The caches of its devices."""
    parts: tuple[Any, ...] = (cache.home, cache.away) if isinstance(cache, SplitCache) else (cache,)
    return parts


def states_of(logits: Tensor) -> Tensor:
    """The states of a table, from which a head continues."""
    return logits.clamp(min=-3.0)


class TableModel:
    """A model whose logits are a fixed random function of the newest three entries and their number.

    Args:
        seed: of the model; all models share a component, so that they often agree.
        support: number of possible tokens per row at most; the set differs between models.
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

    def forward(self, parts: Sequence[PassInput], plan: LayerOrder | None = None) -> list[PassOutput]:
        outputs = []
        for part in parts:
            logits = self._part(part, plan)
            outputs.append(PassOutput(logits, states_of(logits) if part.states else None))
        return outputs

    def _part(self, part: PassInput, plan: LayerOrder | None) -> Tensor:
        new, parts = part.new, parts_of(part.cache)
        tokens = [*new.ids, *([] if new.draft is None else new.draft.on(self.device).tolist())]
        assert len(tokens) == new.count
        part.cache.begin(new)
        for cache in parts:
            cache.pending = list(zip(part.positions, tokens, strict=True))
        view = parts[0].view if plan is None else f"{parts[0].view} {plan}"
        rows = range(new.count - part.rows, new.count)
        seen = [[cache.seen_by(token) for token in rows] for cache in parts]
        assert seen[0] == seen[-1], "the devices of a cache hold the same tokens"
        return torch.stack([self.logits(view, entries) for entries in seen[-1]])

    def raise_nan(self, part: PassInput) -> NoReturn:
        raise AssertionError("a table has no NaN")


class SparseHead(Eagle3Head):
    """A head that gives few tokens a chance.

    Attributes:
        support: their number.
    """

    support = VOCABULARY

    def logits(self, states: Tensor) -> Tensor:
        logits = super().logits(states)
        least = logits.topk(self.support).values[:, -1:]
        return logits.where(logits >= least, logits + IMPOSSIBLE)


def random_head(seed: int, support: int = VOCABULARY - 1) -> SparseHead:
    """A head with random weights over states as wide as the vocabulary, which never predicts the last token.

    Args:
        support: number of tokens that it gives a chance.
    """
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=VOCABULARY,
        intermediate_size=7,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=2,
    )
    config.draft_vocab_size = VOCABULARY - 1
    embeddings = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64)
    head = SparseHead(config, (0,), VOCABULARY, lambda tokens: embeddings[tokens][None])
    generator = torch.Generator().manual_seed(seed)
    embeddings.normal_(generator=generator)
    for weight in head.parameters():
        if weight.ndim == 2:
            weight.data.normal_(std=1.5 * weight.shape[1] ** -0.5, generator=generator)
    head.ready()
    head.support = min(support, VOCABULARY - 1)
    return head.double().requires_grad_(False)


class Parts:
    """The models of compositions. A composition is built anew for each path."""

    def __init__(self, seed: int, support: int = VOCABULARY) -> None:
        self.target = TableModel(seed, support)
        self.small = TableModel(seed + 1, support)
        self.head = HeadModel(random_head(seed, support), "head")

    def full(self, below: Level) -> Composition:
        """The target over its full cache, with a level below it that may derive caches from it."""

        def compose(sampling: Sampling) -> Verifier:
            cache = FullTokenCache()
            drafter = below(self, cache, sampling)
            return Verifier("full", self.target, cache, drafter, sampling)

        return compose


Level = Callable[[Parts, FullTokenCache, Sampling], Drafter]


def nothing(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
    """No level: the one above decodes plainly."""
    return Drafter()


def head(parts: Parts, full: FullTokenCache, sampling: Sampling) -> HeadDrafter:
    """A head on the target's states."""
    module, device = parts.head.head, torch.device("cpu")
    full.states = TargetStates("", 1, 2, module.state_size, module.dtype, device)
    cache = HeadCache(
        module.kv_layout(),
        module.rotary_frequencies,
        module.state_size,
        sinks=1,
        window=2,
        backend=choose_backend(device),
    )
    return HeadDrafter(parts.head, cache, full.states, sampling)


def target_over(
    view: str,
    below: Level = nothing,
    shape: DraftShape = CHAIN,
    order: LayerOrder | None = None,
    first_order: LayerOrder | None = None,
) -> Level:
    """The target over a cache derived from the full one; `shape` is what `below` proposes to it."""

    def level(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
        drafter, cache = below(parts, full, sampling), cache_by(view, order)
        full.derived.append(cache)
        orders = order, first_order
        return ModelDrafter(view, parts.target, cache, drafter, sampling, *orders, shape_below=shape)

    return level


def small_model(order: LayerOrder | None = None, first_order: LayerOrder | None = None) -> Level:
    """The small model over a cache of its own."""

    def level(parts: Parts, full: FullTokenCache, sampling: Sampling) -> Drafter:
        cache = cache_by("small", order)
        return SmallModelDrafter("small", parts.small, cache, Drafter(), sampling, order, first_order)

    return level
