"""What the parts share: a text that is read once and continued by composition after composition."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from statistics import median, stdev

from bench.studies import Row
from bench.texts import Texts
from cpu_kv import PacedLink
from offload_rt.api import LLM
from offload_rt.results import SamplingParams

BUDGET_SHARE = 32


class Continued(Texts):
    """Texts that compositions continue."""

    @property
    def tokens(self) -> list[int]:
        """Of all texts, one behind the other."""
        return list(chain(*self.books.values()))

    @property
    def keys(self) -> dict[str, object]:
        """Keys of every composition."""
        budget = max(256, self.sizes.context // BUDGET_SHARE)
        keys = {"retrieval.budget": budget, "retrieval.recent": budget // 4}
        return {"speculation.step_down": False, **keys, **dict(self.arguments.overrides)}

    def drafting(self, depth: int, **level: object) -> dict[str, object]:
        """The same, with the target over its retrieved cache, always the newest one, as the one level."""
        levels = [{"model": "target", "cache": "retrieved", **level}]
        keys = {"speculation.levels": levels, "retrieval.refresh": "every"}
        return {**keys, **self.keys, "speculation.gamma2": depth}

    def llm(self, context: int | None = None, *, linked: bool = True) -> LLM:
        """An LLM that has read the beginning of the text, for every composition to go on from.

        Args:
            linked: its KV lies behind the paced link.
        """
        models, config = self.models, "retrieval" if self.models.draft is None else "triforce"
        link = PacedLink(self.sizes.rate * 1e9) if linked else None
        llm = LLM.from_models(models.target, models.draft, models.tokenizer, config, self.keys, link=link)
        prompt = self.tokens[: context or self.sizes.context]
        llm.generate(prompt, SamplingParams(max_tokens=2, seed=0, ignore_eos=True))
        return llm

    def measured(
        self,
        llm: LLM,
        overrides: Mapping[str, object],
        config: str = "retrieval",
        temperature: float | None = None,
        new_tokens: int | None = None,
    ) -> Row:
        """Of a text of each seed, from the end of the prompt that was read last.

        `error` is the standard error of `tokens_per_pass`, over the texts.
        """
        heat = self.sizes.temperature if temperature is None else temperature
        count = new_tokens or self.sizes.new_tokens
        results = [
            llm.rerun(SamplingParams(heat, max_tokens=count, seed=seed, ignore_eos=True), config, overrides)
            for seed in range(1, self.sizes.seeds + 1)
        ]
        yields = [len(one.tokens) / one.rounds for one in results]
        rounds = sum(one.rounds for one in results)
        proposed = sum(one.timings.draft_n for one in results)
        return {
            "tokens_per_pass": sum(len(one.tokens) for one in results) / rounds,
            "error": stdev(yields) / len(yields) ** 0.5 if len(yields) > 1 else None,
            "proposed_per_pass": proposed / rounds,
            "accepted": sum(one.timings.draft_n_accepted for one in results) / max(1, proposed),
            "draft_ms_per_pass": sum(one.levels[0].ms for one in results) / rounds,
            "ms_per_token": median(1e3 / one.timings.predicted_per_second for one in results),
        }

    def plain_ms(self, llm: LLM, tokens: int) -> float:
        """ms a token of plain decoding."""
        result = llm.rerun(SamplingParams(max_tokens=tokens, ignore_eos=True), "plain", self.keys)
        return 1e3 / result.timings.predicted_per_second
