"""Levels without a model: they look up what followed the end of the sequence where it occurred before.

The look-ups are imported where they are built: a plan needs none of them, nor torch.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.priors import LOOKUP_ACCEPTANCE
from offload_rt.config.validation import require
from offload_rt.drafting.levels.base import Level, Resources, Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from offload_rt.drafting.base import Drafter
    from offload_rt.drafting.datastore import Datastore
    from offload_rt.drafting.sources import Source


class SourceLevel(Level):
    """A look-up. It runs no model, and its finds may join another level's drafts (`merge`) or replace them
    (`prefer`)."""

    shapes: ClassVar[tuple[str, ...]] = ("chain",)
    verifies = False
    guesses = False

    @abstractmethod
    def source(self) -> Source:
        """Builds the look-up."""

    def acceptance(self, sizes: Sizes | None = None) -> float:
        return LOOKUP_ACCEPTANCE

    def drafter(
        self, below: Drafter, shape_below: DraftShape, shape: DraftShape, resources: Resources
    ) -> Drafter:
        return self.source()

    def check(self, key: str) -> None:
        level = self.settings
        for name in ("merge", "prefer"):
            value = getattr(level, name)
            require(not value, f"{key}.{name}", value, f"must be empty for {level.model}")
        require(level.layers == "all", f"{key}.layers", level.layers, f"must be all for {level.model}")


class LookupLevel(SourceLevel):
    """Prompt look-up: the newest earlier occurrence of the last n-gram."""

    name = "lookup"
    rank = 0

    def source(self) -> Source:
        from offload_rt.drafting.sources import NGrams

        return NGrams(self.config.lookup.min_ngram, self.config.lookup.max_ngram)


class SuffixLevel(SourceLevel):
    """The longest end of the sequence that occurred before, whatever its length."""

    name = "suffix"
    rank = 10

    def source(self) -> Source:
        from offload_rt.drafting.sources import SuffixAutomaton

        return SuffixAutomaton(self.config.lookup.min_ngram)


class DatastoreLevel(SourceLevel):
    """The end of the sequence, looked up in a datastore of other texts (REST)."""

    name = "datastore"
    rank = 20
    shapes = ("chain", "grown")

    def source(self) -> Datastore:
        from offload_rt.drafting.datastore import Datastore

        settings = self.config.datastore
        return Datastore(Path(settings.path), settings.longest, settings.occurrences)

    def check(self, key: str) -> None:
        super().check(key)
        path = self.config.datastore.path
        rule = "names no file: build one with offload-rt datastore build FOLDER"
        require(bool(path), "datastore.path", path, rule)

    def check_files(self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int | None) -> None:
        self.source().check(tokenizer, vocabulary)
