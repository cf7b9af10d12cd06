"""Levels that a user adds: a class with a name is planned, composed and decoded like those of the package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from small_engine import PROMPT, SIZES, again
from tiny_models import tiny_target

from offload_rt import LLM
from offload_rt.levels.base import LEVELS
from offload_rt.levels.models import RetrievedLevel

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
