"""Levels that a user adds: a class with a name is planned, composed and decoded like those of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.small_engine import PROMPT, SIZES, again
from support.tiny_models import tiny_target

from offload_rt import LLM
from offload_rt.drafting.levels.base import LEVELS, Level
from offload_rt.drafting.levels.configs import load_config
from offload_rt.drafting.levels.models import RetrievedLevel
from offload_rt.model.named_shapes import SHAPES
from offload_rt.planning.memory import MemoryBudget
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import named_hardware

NAME = "target:own"
OWN = SIZES | {"speculation.levels": [NAME]}


@pytest.fixture(autouse=True)
def own_level() -> Iterator[None]:
    """A level of the user's is registered for one test."""
    type("OwnLevel", (RetrievedLevel,), {"name": NAME, "rank": RetrievedLevel.rank + 5})
    yield
    del LEVELS[NAME]


def test_another_composition_reads_the_means_that_a_level_of_the_user_kept() -> None:
    with LLM.from_models(tiny_target("llama-gqa"), config="retrieval", overrides=OWN) as llm:
        context = llm.read(PROMPT)
        own = again(context)
        assert [level.name for level in own.levels] == [NAME, "target:full"]
        assert again(context, config="retrieval", overrides=SIZES).tokens == own.tokens


def test_a_level_without_a_rank_is_not_registered() -> None:
    known = list(LEVELS)
    with pytest.raises(AttributeError, match="rank"):
        type("Unranked", (Level,), {"name": "unranked"})
    assert list(LEVELS) == known == sorted(known, key=lambda name: LEVELS[name].rank)


def test_memory_of_levels_that_give_it_one_name_is_added_up() -> None:
    def retrieved_caches(*levels: str) -> int:
        config = load_config("retrieval", {"speculation.levels": levels})
        hardware = named_hardware("none")
        return MemoryBudget(PlanRequest(SHAPES["llama2-7b"], None, config, 4096, 64, hardware)).host[
            "retrieved_caches"
        ]

    assert retrieved_caches("target:retrieved", NAME) == 2 * retrieved_caches(NAME)
