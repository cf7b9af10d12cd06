"""What theory expects, next to what is measured: the ceiling of speculation (TriForce, figure 5)."""

from __future__ import annotations

from bench.inputs import say
from bench.paper.runs import STRIDE, Continued
from bench.studies import Row
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


def ceilings(study: Continued) -> list[Row]:
    """Theory and measurement.

    TriForce, figure 5. `ceiling`: every drafted token stands, and every pass hides behind drafting.
    `expected`: by the measured parts, with nothing drafted ahead; drafting ahead may exceed it.
    """
    longest, common, rows = study.sizes.context, study.keys | STRIDE, list[Row]()
    for context in (longest // 4, longest // 2, longest):
        say(f"ceiling at {context} tokens")
        with study.llm(context) as llm:
            deep = study.measured(llm, common | {"speculation.gamma2": DEPTH})
            pass_ms = study.plain_ms(llm, PLAIN_TOKENS)
            token_ms = deep["draft_ms_per_pass"] / deep["proposed_per_pass"]
            accepted = acceptance_of(deep["tokens_per_pass"], DEPTH)
            expected = {n: expected_speedup(pass_ms, token_ms, accepted, n) for n in DRAFT_LENGTHS}
            best = max(expected, key=expected.__getitem__)
            found = study.measured(llm, common | {"speculation.gamma2": best})
        row = {"context": context, "pass_ms": pass_ms, "draft_token_ms": token_ms}
        row |= {"tokens_at_16": deep["tokens_per_pass"], "acceptance": accepted}
        row |= {"ceiling": ceiling(pass_ms, token_ms), "best_depth": best, "expected": expected[best]}
        rows.append(row | {"measured": pass_ms / found["ms_per_token"], "paper_ceiling": PAPER_CEILING})
    return rows
