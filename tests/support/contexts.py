"""Contexts over tiny models, wherever their KV lies, and what they are held against."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from offload_rt import LLM, Context, SamplingParams
from offload_rt.caches.sizes import EVERYTHING_STREAMED, Tiers
from support.small_engine import BY_GPUS, again
from support.tiny_models import byte_ids

ASCII = 128
PROMPT = byte_ids(100, vocabulary=ASCII)
PARAMS = SamplingParams(max_tokens=60)
CHUNK = 40
TEXT = byte_ids(230, vocabulary=ASCII)
OTHER = byte_ids(230, start=700, vocabulary=ASCII)
NEXT = SamplingParams(max_tokens=8)
HOT = SamplingParams(temperature=0.8, max_tokens=12, seed=3)
PLACES: dict[str, Tiers | None] = {
    "in place": None,
    "streamed": EVERYTHING_STREAMED,
    "tiers": Tiers(32, 48),
    **{f"other GPUs {at}": tiers for at, tiers in enumerate(BY_GPUS)},
}
SOME = ("in place", "tiers", "other GPUs 0")
CONFIGS_AND_PLACES = pytest.mark.parametrize(
    ("config", "place"),
    [
        ("triforce", "tiers"),
        ("triforce", "other GPUs 1"),
        ("retrieval", "tiers"),
        ("trees", "streamed"),
        ("lookup", "in place"),
    ],
)
"""Each kind of drafting, and each kind of tier."""

Make = Callable[..., LLM]


def fresh(llm: LLM, tokens: Sequence[int], config: str | None = "plain") -> list[int]:
    """What follows tokens that are read at once."""
    with llm.read(tokens) as context:
        return context.generate((), NEXT, config).tokens


def check(llm: LLM, context: Context, tokens: Sequence[int], config: str | None = None) -> None:
    """The context is these tokens, and is continued as they are."""
    assert context.tokens == list(tokens) and len(context) == len(tokens)
    assert again(context, NEXT, config).tokens == fresh(llm, tokens)
    assert context.tokens == list(tokens)


def rewritten(data: bytes, change: Callable[[dict[str, Any], dict[str, str]], object]) -> bytes:
    """A file with another header, whose checksum is right."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header, header["__metadata__"])
    text = json.dumps(header).encode()
    text = len(text).to_bytes(8, "little") + text
    count = 8 * header["checksums"]["shape"][0]
    checksum = zlib.crc32(text).to_bytes(8, "little")
    return text + data[end : len(data) - count] + (checksum + data[len(data) - count + 8 :])[:count]
