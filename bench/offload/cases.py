"""The declared cases of `bench offload`: systems, placements, sizes and how much is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.offload.held import Hold
from offload_rt.caches.places import EVERYTHING_STREAMED, Shares
from offload_rt.config import Config, load_config

STREAMED = "streamed"

SHARES = {STREAMED: (0.0, 0.0), "resident": (0.25, 0.0), "cpu": (0.0, 0.25), "both": (0.25, 0.25)}
"""Which shares of the context are (resident, attended by the CPU)."""

BALANCED = "balanced"
LINK_CASES = {BALANCED: 1.0, "stream-bound": 2.0, "draft-bound": 0.5}
"""Paced links: how long a stream takes, over how long a draft does."""


BUDGET_SHARE = 8  # of the context, that the retrieved cache holds where its budget is not set


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        context: tokens of the prompt.
        gamma: drafted for each pass.
        new_tokens: generated a run; `plain_tokens` by plain decoding, which is steady and slow.
        repeats: interleaved runs of every system, after one that is not reported.
        settings: config keys of every composition.
    """

    context: int
    gamma: int
    new_tokens: int
    plain_tokens: int
    repeats: int
    settings: Mapping[str, object]

    def config(self, composition: str, **offload: object) -> Config:
        """A composition of these sizes, with keys of `offload`."""
        keys = {f"offload.{key}": value for key, value in offload.items()}
        return load_config(composition, self.keys | keys)

    @property
    def keys(self) -> dict[str, object]:
        """Config keys of every composition."""
        given: dict[str, object] = {
            "speculation.gamma2": self.gamma,
            "speculation.step_down": False,
            "offload.refresh_from": "stream",
            "retrieval.budget": self.context // BUDGET_SHARE,
        }
        return given | dict(self.settings)

    def placement(self, name: str) -> Shares:
        """Shares by their name in `SHARES`, in whole pages."""
        page = self.config("plain").store.page
        resident, cpu = (int(share * self.context) // page * page for share in SHARES[name])
        return Shares(resident, cpu) if resident or cpu else EVERYTHING_STREAMED


PACED: dict[str, object] = {
    "retrieval.recent": 64,
    # Large ones: each costs Python some work, which drafting in another thread then waits for.
    "store.segment_tokens": 4096,
    "store.slab_tokens": 4096,
    "store.ring_buffers": 4,
}
FULL = Sizes(16_384, 12, new_tokens=256, plain_tokens=16, repeats=5, settings=PACED)
QUICK = Sizes(8192, 12, new_tokens=104, plain_tokens=10, repeats=2, settings=PACED)
SYNTHETIC_FULL = Sizes(8192, 8, new_tokens=160, plain_tokens=12, repeats=5, settings=PACED)
SYNTHETIC_QUICK = Sizes(8192, 8, new_tokens=40, plain_tokens=6, repeats=1, settings=PACED)
ON_GPU = Sizes(
    16_384,
    16,
    new_tokens=128,
    plain_tokens=8,
    repeats=3,
    settings={"retrieval.budget": 4096, "store.slab_tokens": 16_384, "store.segment_tokens": 4096},
)
GPU_CONTEXTS = (16_384, 32_768, 65_536, 131_072)
GPU_MEMORY_BYTES = 24 * 2**30
ACCEPTANCES = (0.8, 0.92, 0.97)


@dataclass(frozen=True)
class System:
    """What is run.

    Attributes:
        name: in reports.
        composition: name of its config.
        placement: name in `SHARES`.
        offload: keys of the config's section.
        held: the acceptance is held by a synthetic verdict.
    """

    name: str
    composition: str
    placement: str = STREAMED
    offload: Mapping[str, object] = field(default_factory=dict)
    held: Hold | None = None

    @property
    def plain(self) -> bool:
        """Without speculation."""
        return self.composition == "plain"


def ahead(composition: str, outcomes: int, placement: str = STREAMED, held: Hold | None = None) -> System:
    """Speculation, drafted ahead for `outcomes` outcomes of a pass."""
    return System(f"ahead {outcomes}", composition, placement, {"ahead": outcomes}, held)


def gathered(composition: str, outcomes: int) -> System:
    """The same with a refresh that gathers what it wants instead of taking it as it passes by."""
    settings = {"ahead": outcomes, "refresh_from": "store"}
    return System(f"ahead {outcomes}, refresh gathered", composition, STREAMED, settings)


def paced_systems(composition: str, link_case: str, outcomes: int) -> list[System]:
    """What is compared over one paced link; placements are where the link is balanced.

    Args:
        outcomes: how many are drafted for where nothing else is said.
    """
    systems = [System("plain", "plain"), ahead(composition, 0)]
    systems += [ahead(composition, one) for one in dict.fromkeys((1, outcomes))]
    if link_case == BALANCED:
        systems.append(gathered(composition, outcomes))
        for placement in SHARES:
            if placement != STREAMED:
                systems += [
                    System("plain", "plain", placement),
                    ahead(composition, 0, placement),
                    ahead(composition, outcomes, placement),
                ]
    return systems


def held_systems(acceptances: tuple[float, ...], outcomes: int, *placements: str) -> list[System]:
    """Plain decoding, and speculation whose acceptance is held at each value."""
    systems = []
    for placement in placements:
        systems.append(System("plain", "plain", placement))
        for rate in acceptances:
            for one in (0, outcomes):
                systems.append(ahead("retrieval", one, placement, Hold(rate)))
    return systems
