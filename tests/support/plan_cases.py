"""Requests to plan for a desktop with a card, what is true of every plan, and how a refusal is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from cpu_kv import ElementType
from offload_rt.config.draft_shape import DraftShape
from offload_rt.config.files import parse_override
from offload_rt.drafting.levels.configs import load_config
from offload_rt.model.named_shapes import find_shape
from offload_rt.model.quantization import Quantization
from offload_rt.planning.cost_model import CostModel, RoundTime
from offload_rt.planning.planner import Plan, plan
from offload_rt.planning.request import PlanRequest
from offload_rt.system.hardware import Hardware
from support.machine_cases import DESKTOP, GPU, HOST

LLAMA = replace(find_shape("llama2-7b", None), max_positions=2**18)
JF68M = find_shape("jf68m", None)
CONTEXT = 131_072


def request(
    overrides: Mapping[str, object] = {}, config: str = "triforce", context: int = CONTEXT, **changes: Any
) -> PlanRequest:
    """Llama2-7B with a small draft at 128K on a desktop, unless arguments say otherwise.

    KV is in 16 bits, 4,096 entries of which are retrieved, and 0.92 of what is drafted over them is accepted.
    Weights are not in planes.
    """
    exact = {"store.code": "raw", "retrieval.bits": 16, "retrieval.budget": 4096, "weights.planes": "off"}
    settings = load_config(config, {**exact, **overrides})
    asked = PlanRequest(LLAMA, JF68M, settings, context, 256, DESKTOP, expected_acceptance=0.92)
    return replace(asked, **changes)


def gpu(number: int = 1, **changes: Any) -> Hardware:
    """The desktop with `number` cards and other figures of the card."""
    return Hardware(HOST, (replace(GPU, **changes),) * number, measured=True)


def host(gpus: int = 1, **changes: Any) -> Hardware:
    """The desktop with so many cards and other figures of the host."""
    return Hardware(replace(HOST, **changes), (GPU,) * gpus, measured=True)


def expected_round(predictor: CostModel, drafted: DraftShape, resident: int = 0, cpu: int = 0) -> RoundTime:
    """A round with so many tokens on the GPU and so many attended by the CPU."""
    placement = predictor.memory.placement(resident, cpu)
    return predictor.round(predictor.verification(placement, drafted), predictor.draft(drafted))


def check_sums(planned: Plan) -> None:
    """What is true of every plan."""
    asked, placement = planned.request, planned.placement
    whole = placement.resident_bytes + placement.streamed_bytes + placement.cpu_attended_bytes
    assert whole == asked.context * asked.target.token_bytes
    report: Any = planned.to_json()
    text = json.dumps(report)
    assert json.loads(text) == report and not re.search(r'": -\d', text), "nothing is negative"
    if not planned.fits:
        assert planned.predicted is None
        assert all(plan(one).fits for one in nearest(planned))
        return
    page = asked.config.store.page
    assert placement.resident_tokens % page == 0 or placement.resident_tokens == asked.context
    assert placement.cpu_tokens % page == 0 or placement.streamed_tokens == 0
    for parts, card in zip(planned.gpus, asked.hardware.gpus, strict=True):
        assert sum(parts.values()) <= card.memory_bytes
        assert parts["staging_ring"] == report["placement"]["ring_bytes"]
    host = asked.hardware.host
    assert sum(planned.host.values()) <= host.memory_bytes
    found = planned.check()
    assert found.round_ms >= found.pass_ms * (1 - 1e-9)
    assert found.ms_per_token == pytest.approx(found.round_ms / found.tokens_per_round)
    assert 1 <= found.tokens_per_round <= planned.gamma + 1
    if asked.in_place:
        assert placement.cpu_tokens == asked.context
    else:
        assert planned.host["kv"] <= host.lockable_bytes


def nearest(planned: Plan) -> Iterator[PlanRequest]:
    """The requests that a refusal says would fit."""
    asked, said = planned.request, planned.refusal
    assert said is not None
    for suggestion in said.split("; "):
        match suggestion.removeprefix("what fits: ").split():
            case ["the", "longest", "context", "that", "fits", "is", tokens, "tokens"]:
                yield replace(asked, context=int(tokens))
            case ["--set", override]:
                yield asked.having(*parse_override(override))
            case ["2", "such", "GPUs"]:
                gpus = 2 * asked.hardware.gpus
                yield replace(asked, hardware=replace(asked.hardware, gpus=gpus))
            case ["--config", "plain"]:
                yield asked.having("speculation.levels", ())
            case ["--quantize", name]:
                yield replace(asked, target=asked.target.with_weights(Quantization.named(name)))
            case ["--dtype", "bfloat16"]:
                draft = asked.draft and replace(asked.draft, dtype=ElementType.BFLOAT16)
                yield replace(asked, target=replace(asked.target, dtype=ElementType.BFLOAT16), draft=draft)
