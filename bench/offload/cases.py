"""The declared cases of `bench offload`: systems, placements, sizes and how much is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offload_rt.caches.places import Shares
from offload_rt.config import Config, OffloadConfig, load_config

STREAMED = "streamed"
SHARES = {STREAMED: (0.0, 0.0), "resident": (0.25, 0.0), "cpu": (0.0, 0.25), "both": (0.25, 0.25)}
"""Which shares of the context are (resident, attended by the CPU)."""

BALANCED = "balanced"
SYNTHETIC = "synthetic acceptance"
LINK_CASES = {BALANCED: 1.0, "stream-bound": 2.0, "draft-bound": 0.5, SYNTHETIC: 1.0}
"""Paced links: how long a stream takes, over how long a draft does."""

AHEAD = OffloadConfig().ahead
ACCEPTANCES = (0.8, 0.92, 0.97)
BUDGET_SHARE = 8  # of the context, that the retrieved cache holds where its budget is not set
WARM_UP_DRAFTS = 3  # of a run that is not reported


@dataclass(frozen=True)
class System:
    """What is run.

    Attributes:
        ahead: for how many outcomes of a pass the next round is drafted; None: plain decoding.
        gathered: a refresh gathers what it wants instead of taking it as it passes by.
        held: at what a synthetic verdict holds the acceptance.
    """

    ahead: int | None = None
    gathered: bool = False
    held: float | None = None

    @property
    def plain(self) -> bool:
        """Without speculation."""
        return self.ahead is None

    @property
    def name(self) -> str:
        """In reports."""
        gathered = ", refresh gathered" if self.gathered else ""
        return "plain" if self.plain else f"ahead {self.ahead}{gathered}"


PLAIN = System()

Systems = Mapping[str, list[System]]
"""What is compared, by placement: plain decoding first."""


def paced_systems(link_case: str) -> Systems:
    """What is compared over one paced link."""
    systems = [PLAIN, *map(System, (0, 1, AHEAD))]
    if link_case != BALANCED:
        return {STREAMED: systems}
    others = {placement: [PLAIN, System(0), System(AHEAD)] for placement in SHARES}
    return others | {STREAMED: [*systems, System(AHEAD, gathered=True)]}


def held_systems(acceptances: tuple[float, ...]) -> list[System]:
    """Plain decoding, and speculation whose acceptance is held at each value."""
    return [PLAIN, *(System(ahead, held=rate) for rate in acceptances for ahead in (0, AHEAD))]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        context: tokens of the prompt.
        gamma: drafted for each pass.
        new_tokens: generated a run; `plain_tokens` by plain decoding, which is steady and slow.
        repeats: interleaved runs of every system, after one that is not reported.
        settings: config keys of every system.
        composition: who drafts.
    """

    context: int
    gamma: int
    new_tokens: int
    plain_tokens: int
    repeats: int
    settings: Mapping[str, object]
    composition: str = "retrieval"

    def config(self, system: System = PLAIN) -> Config:
        """The composition that a system runs."""
        if system.plain:
            return load_config("plain", self.keys)
        keys = self.keys | {"offload.ahead": system.ahead}
        if system.gathered:
            keys["offload.refresh_from"] = "store"
        return load_config(self.composition, keys)

    @property
    def keys(self) -> dict[str, object]:
        """Config keys of every system."""
        given: dict[str, object] = {
            "speculation.gamma2": self.gamma,
            "speculation.step_down": False,
            "offload.refresh_from": "stream",
            "retrieval.budget": self.context // BUDGET_SHARE,
        }
        return given | dict(self.settings)

    @property
    def warm_up(self) -> int:
        """Tokens of a run that is not reported."""
        return WARM_UP_DRAFTS * (self.gamma + 1)

    @property
    def room(self) -> int:
        """Tokens that a run may generate."""
        return max(self.new_tokens, self.plain_tokens, self.warm_up)

    def shares(self, placement: str) -> Shares:
        """By a name in `SHARES`, in whole pages."""
        page = self.config().store.page
        return Shares(*(int(share * self.context) // page * page for share in SHARES[placement]))


PACED: dict[str, object] = {
    "retrieval.recent": 64,
    # Large ones: each costs Python some work, which drafting in another thread then waits for.
    "store.segment_tokens": 4096,
    "store.slab_tokens": 4096,
    "store.ring_buffers": 4,
}
LARGE: dict[str, object] = {
    "retrieval.budget": 4096,
    "store.slab_tokens": 16_384,
    "store.segment_tokens": 4096,
}
FULL = Sizes(16_384, 12, new_tokens=256, plain_tokens=16, repeats=5, settings=PACED)
QUICK = Sizes(8192, 12, new_tokens=104, plain_tokens=10, repeats=2, settings=PACED)
SYNTHETIC_FULL = Sizes(8192, 8, new_tokens=160, plain_tokens=12, repeats=5, settings=PACED)
SYNTHETIC_QUICK = Sizes(8192, 8, new_tokens=40, plain_tokens=6, repeats=1, settings=PACED)
ON_GPU = Sizes(16_384, 16, new_tokens=128, plain_tokens=8, repeats=3, settings=LARGE)
GPU_CONTEXTS = (16_384, 32_768, 65_536, 131_072)
GPU_MEMORY_BYTES = 24 * 2**30
