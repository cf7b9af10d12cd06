"""Drafts phrases that a user expects, without a model: `python examples/drafter.py book.txt PHRASE …`."""

import sys
from pathlib import Path
from typing import ClassVar

from offload_rt import LLM, SamplingParams
from offload_rt.drafting.levels.sources import SourceLevel
from offload_rt.drafting.sources import Source


class Phrases(Source):
    """Continues a phrase that the sequence has begun: the longest beginning of one that it ends with."""

    name = "phrases"

    def __init__(self, phrases):
        super().__init__()
        self._phrases = phrases

    def extend(self, view):
        """Does nothing: phrases do not depend on what has been verified."""

    def find(self, view, depth):
        """Returns what may follow the end of `view`, `depth` tokens at most."""
        longest = max(map(len, self._phrases), default=0)
        end = view.part(max(0, len(view) - longest))
        for size in range(len(end), 0, -1):
            if found := [one[size : size + depth] for one in self._phrases if one[:size] == end[-size:]]:
                return [one for one in found if one]
        return []


class PhraseLevel(SourceLevel):
    """Phrases as a level."""

    name, rank = "phrases", 15
    phrases: ClassVar[list[list[int]]] = []  # token IDs

    def source(self):
        return Phrases(self.phrases)


if len(sys.argv) < 3:
    sys.exit("usage: python examples/drafter.py FILE PHRASE …")
text = Path(sys.argv[1]).read_text(encoding="utf-8")
params = SamplingParams(temperature=0, max_tokens=64)

# Phrases are rare: while they do not pay, speculation would be switched off, and none would be seen here.
overrides = {"speculation.levels": ["phrases"], "speculation.step_down": False}
with LLM(config="lookup", overrides=overrides) as llm:
    PhraseLevel.phrases = [llm.encode(phrase, special=False) for phrase in sys.argv[2:]]
    book = llm.read(text)
    result = book.generate(params=params)
    book.rewind(result.prompt_tokens)
    plain = book.generate(params=params, config="plain")

found = result.levels[0]
print(f"{found.name}: {found.accepted} of {found.proposed} drafted tokens accepted")
print(f"tokens equal to plain decoding: {result.tokens == plain.tokens}")
