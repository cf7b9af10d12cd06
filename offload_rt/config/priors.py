"""Expected acceptance and yield of speculation, before anything has been measured."""

from __future__ import annotations

import functools

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 15, 19, 23, 31, 39, 47, 55)
"""Of chains to choose among: with its root, a draft fills tiles of queries."""
SAME_MODEL_ACCEPTANCE = 0.965
"""Of a token that the target drafts itself over 1/32 of its KV or less: TriForce (arXiv 2404.11912) measured
0.9649 for Llama-2-7B-128K over 4K of 120K tokens of PG-19."""
DEMO_ACCEPTANCE = 0.92
"""The same of the embedded target, which is far smaller."""
SMALL_MODEL_ACCEPTANCE = 0.5  # of a token a small model drafts
REJECTIONS_POWER = 0.45
"""By what power of the retrieved share rejections fall. Measured on two held-out books of 32K tokens with the
demo target, at 1/32, 1/8 and 1/4: 8.1, 5.7 and 3.5 %, and 10.4, 5.4 and 3.4 % of tokens are rejected."""
DRAFT_PLANE_REJECTIONS = 0.008
"""Share of drafts more that are rejected where the target drafts by one plane of its weights. Measured with
the demo target, whose 4.5M weights are the hardest case: 0.005 to 0.008, by `python -m bench model-card
--dtype bfloat16 --parts acceptance` (docs/measurements.md)."""
FOUR_BITS_REJECTIONS = 1.25
"""Rejections over entries of 4 bits, as a multiple of those over 8 or 16; there 1.1 to 1.6."""
RUNNER_UP_HITS = 0.5
"""Share of rejections whose token is the draft's runner-up. The demo pair, greedy at 16K tokens of three
books: 49 of 68 where the target drafted over retrieved KV, 129 of 358 where the small model did."""
HEAD_ACCEPTANCE = 0.7  # of a token that an EAGLE-3 head drafts
MTP_ACCEPTANCE = 0.8  # of one that the head for multi-token prediction in a checkpoint drafts
LOOKUP_ACCEPTANCE = 0.3  # of a token looked up in the context
SECOND_CHOICE = 0.5  # of a second child that is sampled, once the first one was rejected
NEXT_CHOICE = 0.8  # of each further child, as a share of that of the one before
LATER_CHOICES = tuple(SECOND_CHOICE * NEXT_CHOICE**elder for elder in range(7))  # all before were rejected


def rejections(share: float, bits: int) -> float:
    """Returns how often a token that the target drafts over retrieved KV is rejected, against 1/32 of the KV.

    Args:
        share: of the context that is retrieved, at most 1.
        bits: of an entry.
    """
    return float((32 * share) ** -REJECTIONS_POWER * (FOUR_BITS_REJECTIONS if bits < 8 else 1.0))


@functools.lru_cache(maxsize=1024)
def outcome_chances(acceptance: float, gamma: int, hits: float = RUNNER_UP_HITS) -> tuple[float, ...]:
    """Returns the chances of the verdicts that can be guessed, the likeliest first.

    One verdict is that all tokens are accepted and the next one is the drafter's own: α^γ·α. The others are
    rejections at the first, second … token, α^j·(1−α) each, where the runner-up is guessed.

    Args:
        hits: share of the rejections that it is right for.
    """
    rejected = (acceptance**place * (1 - acceptance) * hits for place in range(gamma))
    return tuple(sorted((acceptance ** (gamma + 1), *rejected), reverse=True))


@functools.lru_cache(maxsize=1024)
def expected_tokens(acceptance: float, count: int) -> float:
    """Returns the tokens that a verification of `count` yields: 1 + α + … + α^γ (arXiv 2211.17192, eq. 1)."""
    return sum(acceptance**accepted for accepted in range(count + 1))


def ceiling(pass_ms: float, draft_ms: float) -> float:
    """Returns the largest speed-up over plain decoding: every draft is accepted, every pass is hidden.

    TriForce's figure 5, by the time of a plain pass and of a drafted token.
    """
    return pass_ms / draft_ms


def expected_speedup(pass_ms: float, draft_ms: float, acceptance: float, depth: int) -> float:
    """Returns the speed-up over plain decoding with drafts of `depth` tokens, none of them made ahead."""
    return pass_ms * expected_tokens(acceptance, depth) / (pass_ms + depth * draft_ms)
