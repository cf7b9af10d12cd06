"""Counts of what a server did, and their form for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from offload_rt.engine.results import GenerationResult


@dataclass
class Metrics:
    """Counts since the server began. The worker's thread and the event loop add to different ones.

    Attributes:
        requests: number of answers by HTTP status.
        errors: number of jobs that ended by a failure of the engine.
    """

    requests: Counter[int] = field(default_factory=Counter)
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_seconds: float = 0.0

    def answered(self, status: int) -> None:
        """Counts an answer."""
        self.requests[status] += 1

    def prompt(self, tokens: int, cached: int) -> None:
        """Counts a prefilled prompt, of which `cached` tokens had their KV already."""
        self.prompt_tokens += tokens
        self.cached_tokens += cached

    def generated(self, result: GenerationResult) -> None:
        """Counts a generation."""
        timings = result.timings
        self.generated_tokens += timings.new_tokens
        self.drafted_tokens += timings.drafted_tokens
        self.accepted_tokens += timings.accepted_tokens
        self.decode_seconds += timings.decode_ms / 1e3

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """Returns everything in Prometheus' text format.

        Args:
            gauges: current values by name, each with its meaning.
        """
        counters = {
            "prompt_tokens": ("Prompt tokens of requests.", self.prompt_tokens),
            "cached_tokens": ("Prompt tokens whose KV was there already.", self.cached_tokens),
            "generated_tokens": ("Tokens generated.", self.generated_tokens),
            "drafted_tokens": ("Tokens proposed to the full cache.", self.drafted_tokens),
            "accepted_tokens": ("Proposed tokens that were accepted.", self.accepted_tokens),
            "decode_seconds": ("Time in decode steps, summed over sequences.", self.decode_seconds),
            "engine_errors": ("Requests that ended by a failure of the engine.", self.errors),
        }
        lines = []
        for kind, suffix, values in (("counter", "_total", counters), ("gauge", "", gauges)):
            for name, (meaning, value) in values.items():
                metric = f"offload_rt_{name}{suffix}"
                lines += [f"# HELP {metric} {meaning}", f"# TYPE {metric} {kind}", f"{metric} {value}"]
        metric = "offload_rt_requests_total"
        lines += [f"# HELP {metric} Requests by HTTP status.", f"# TYPE {metric} counter"]
        lines += [f'{metric}{{status="{status}"}} {count}' for status, count in sorted(self.requests.items())]
        return "\n".join(lines) + "\n"
