"""Passes in the background: what is known of one when its result is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from small_engine import PROMPT, engine_overrides
from small_engine import target as target
from transformers import PreTrainedModel

from cpu_kv import PacedLink
from offload_rt import LLM, SamplingParams


def test_a_pass_has_its_time_before_callbacks_run(
    target: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A future wakes who waits for it first, and calls back then."""
    over = threading.Event()
    call = Future.add_done_callback

    def late(future: Future[Any], callback: Callable[[Future[Any]], object]) -> None:
        call(future, lambda done: (over.wait(), callback(done)))

    config = engine_overrides()
    with LLM.from_models(target, config="plain", overrides=config, link=PacedLink(1e9)) as llm:
        monkeypatch.setattr(Future, "add_done_callback", late)
        try:
            llm.generate(PROMPT, SamplingParams(max_tokens=1))
        finally:
            over.set()
        assert llm._last is not None
        (round,) = llm._last.rounds
        assert 0.0 < round.pass_ms <= round.ms
