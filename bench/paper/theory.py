"""What theory expects, next to what is measured: the ceiling of speculation (TriForce, figure 5)."""

from __future__ import annotations

from bench.inputs import say
from bench.paper.runs import STRIDE, Row, Study
from bench.report import tokens_name
from offload_rt.drafting.sequoia import Plan
from offload_rt.expectations import DRAFT_LENGTHS, LATER_CHOICES, ceiling, expected_speedup, expected_tokens

DEPTH = 16
PLAIN_TOKENS = 16
PAPER_CEILING = 13.1


def acceptance_of(tokens: float, depth: int) -> float:
    """The acceptance of each drafted token at which chains of `depth` yield so many tokens a pass."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, depth) < tokens else (low, middle)
    return low


def expected_of(shape: str, depth: int, acceptance: float) -> float:
    """Tokens that a chain or a Sequoia tree yields by the acceptance of first children."""
    kind, _, nodes = shape.partition(":")
    if kind == "chain":
        return expected_tokens(acceptance, depth)
    return Plan((acceptance, *LATER_CHOICES), int(nodes)).tokens(depth)


def ceilings(study: Study) -> list[Row]:
    """By context: measured parts, what they allow, and what a chain of the best depth brings."""
    longest, common, rows = study.arguments.context, study.keys | STRIDE, []
    for context in (longest // 4, longest // 2, longest):
        say(f"ceiling at {tokens_name(context)}")
        with study.reader(context) as llm:
            deep = study.measured(llm, common | {"speculation.gamma2": DEPTH})
            pass_ms = study.plain_ms(llm, PLAIN_TOKENS)
            token_ms = deep["draft_ms_per_pass"] / deep["proposed_per_pass"]
            accepted = acceptance_of(deep["tokens_per_pass"], DEPTH)
            best = max(DRAFT_LENGTHS, key=lambda depth: expected_speedup(pass_ms, token_ms, accepted, depth))
            found = study.measured(llm, common | {"speculation.gamma2": best})
        rows.append(
            {
                "context": context,
                "pass_ms": pass_ms,
                "draft_token_ms": token_ms,
                "tokens_at_16": deep["tokens_per_pass"],
                "acceptance": accepted,
                "ceiling": ceiling(pass_ms, token_ms),
                "best_depth": best,
                "expected": expected_speedup(pass_ms, token_ms, accepted, best),
                "measured": pass_ms / found["ms_per_token"],
                "paper_ceiling": PAPER_CEILING,
            }
        )
    return rows
