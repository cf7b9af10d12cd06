"""Texts that configurations continue, for the studies that compare them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import median, stdev
from typing import Any

from bench.results import Row
from bench.studies.texts import Texts
from cpu_kv import PacedLink
from offload_rt.api.context import Context
from offload_rt.api.llm import LLM
from offload_rt.engine.results import GenerationResult
from offload_rt.sampling.params import SamplingParams

BUDGET_SHARE = 32  # the retrieved cache holds one over this of the context
PLAIN_TOKENS = 16  # that plain decoding is timed over


class Continued(Texts):
    """Texts that configurations continue."""

    @property
    def settings(self) -> dict[str, Any]:
        path = getattr(self.arguments, "datastore", None)
        return super().settings | {"datastore": path and Path(path).name}

    @property
    def tokens(self) -> list[int]:
        """Tokens of all texts, joined."""
        return list(chain(*self.books.values()))

    def keys(self, own: Mapping[str, object] = {}) -> dict[str, object]:
        """Configuration keys: common ones, those of a row, and above them those of the command line."""
        budget = max(256, self.sizes.context // BUDGET_SHARE)
        common = {"retrieval.budget": budget, "retrieval.recent": budget // 4, "speculation.step_down": False}
        return {**common, **own, **dict(self.arguments.overrides)}

    def drafting(self, depth: int, **level: object) -> dict[str, object]:
        """Keys for one level: the target over its retrieved cache, refreshed in every round."""
        levels = [{"model": "target", "cache": "retrieved", **level}]
        own = {"speculation.levels": levels, "retrieval.refresh": "every"}
        return self.keys(own) | {"speculation.gamma2": depth}

    @contextmanager
    def read(self, context: int | None = None, *, linked: bool = True) -> Iterator[Context]:
        """Reads the beginning of the text, for every configuration to continue.

        Args:
            linked: whether the KV is behind the paced link.
        """
        config = "retrieval" if self.draft is None else "triforce"
        link = PacedLink(self.sizes.rate * 1e9) if linked else None
        prompt = self.tokens[: context or self.sizes.context]
        with LLM.from_models(self.target, self.draft, self.tokenizer, config, self.keys(), link=link) as llm:
            yield llm.read(prompt)

    def measured(
        self, context: Context, overrides: Mapping[str, object], config: str = "retrieval", **sampling: Any
    ) -> Row:
        """Continues the context once with each seed.

        `error` is the standard error of `tokens_per_pass` over the seeds.

        Args:
            sampling: sampling parameters that differ from those of the study.
        """
        params = SamplingParams(self.sizes.temperature, max_tokens=self.sizes.new_tokens, ignore_eos=True)
        seeds = range(1, self.sizes.seeds + 1)
        seeded = (replace(params, **sampling, seed=seed) for seed in seeds)
        results = [continued(context, result, config, overrides) for result in seeded]
        yields = [len(result.tokens) / result.rounds for result in results]
        rounds = sum(result.rounds for result in results)
        proposed = sum(result.timings.drafted_tokens for result in results)
        return {
            "tokens_per_pass": sum(len(result.tokens) for result in results) / rounds,
            "error": stdev(yields) / len(yields) ** 0.5 if len(yields) > 1 else None,
            "proposed_per_pass": proposed / rounds,
            "accepted": sum(result.timings.accepted_tokens for result in results) / max(1, proposed),
            "draft_ms_per_pass": sum(result.levels[0].ms for result in results) / rounds,
            "ms_per_token": median(1e3 / result.timings.tokens_per_second for result in results),
        }

    def plain_ms(self, context: Context) -> float:
        """Milliseconds per token of plain decoding."""
        params = SamplingParams(max_tokens=PLAIN_TOKENS, ignore_eos=True)
        return 1e3 / continued(context, params, "plain", self.keys()).timings.tokens_per_second


def continued(
    context: Context, params: SamplingParams, config: str, overrides: Mapping[str, object]
) -> GenerationResult:
    """Continues a context, and rewinds it."""
    result = context.generate((), params, config, overrides)
    context.rewind(result.prompt_tokens)
    return result
