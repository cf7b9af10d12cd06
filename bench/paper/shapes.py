"""What a draft looks like: its shape, its layers, how many texts are drafted at once."""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from bench.inputs import say
from bench.paper.runs import Continued
from bench.paper.tables import acceptance_of, expected_of
from bench.studies import Row
from bench.texts import passed, recompose
from offload_rt.api import LLM
from offload_rt.config import load_config
from offload_rt.drafting.model_drafter import ModelDrafter
from offload_rt.drafting.shapes import DraftShape
from offload_rt.layers import LayerPlan
from offload_rt.results import SamplingParams

CHAINS = tuple(f"chain@{depth}" for depth in (8, 16, 24, 32, 48))
TREES = "sequences:4@24", "tree:2,2,2@16", "grown:64@16", "grown:128@32"
SEQUOIA = "sequoia:64@16", "sequoia:128@32", "sequoia:256@32"
SHAPES = (*CHAINS, *TREES, *SEQUOIA, "chain@32+suffix", "sequoia:256@32+suffix")
"""Shapes, their depths, and what joins them."""
GROUPS = tuple(f"groups:{count}" for count in range(1, 6))
LAYERS = ("all", *GROUPS, "skip:2", "skip:2,3", "skip:1a,2a,3a")
GROWN = ("grown:10", "grown:20", "grown:40")
"""Of depth 5, so 2, 4 and 8 nodes wide."""
PROBED = 64
BATCH = ("plain", "lookup")


def shapes(study: Continued) -> list[Row]:
    """Shapes of drafts.

    TriForce, figure 6c. Tokens that a pass yields; `expected` is what the acceptance of the first chain
    promises.
    """
    rows: list[Row] = []
    alpha: float | None = None
    with study.llm() as llm:
        for name in study.sizes.shapes:
            say(f"shape {name}")
            shape, _, rest = name.partition("@")
            depth, _, source = rest.partition("+")
            row = study.measured(llm, study.drafting(int(depth), draft=shape, merge=source))
            if not source and shape == "chain" and alpha is None:
                alpha = acceptance_of(row["tokens_per_pass"], int(depth))
            known = alpha is not None and not source and shape.startswith(("chain", "sequoia"))
            expected = expected_of(shape, int(depth), alpha or 0.0) if known else None
            rows.append({"draft": name, **row, "expected": expected})
    chains = [row for row in rows if row["draft"].startswith("chain@") and "+" not in row["draft"]]
    best = max((row["tokens_per_pass"] for row in chains), default=None)
    return [row | {"over_best_chain": best and row["tokens_per_pass"] / best} for row in rows]


def layers(study: Continued) -> list[Row]:
    """Layers in groups or left out.

    EasySpec, figure 4 and table 4, and Draft & Verify; in place. `likeness` is the cosine of the last hidden
    states to the exact ones. `own devices ms` is a prediction: what is left of a drafted token's time where
    the attention blocks of a group run side by side, from the measured time of one.
    """
    alike = _likeness(study)
    rows: list[Row] = []
    plans = [(name, flag, "chain", 8) for name in LAYERS for flag in (True, False)[: 1 + ("groups" in name)]]
    plans += [("groups:3", flag, tree, 5) for tree in GROWN for flag in (True, False)]
    with study.llm(linked=False) as llm:
        for name, calibrate, draft, depth in plans:
            say(f"layers {name}, {draft}{'' if calibrate else ', not calibrated'}")
            found = study.measured(llm, study.drafting(depth, layers=name, calibrate=calibrate, draft=draft))
            row: Row = {"layers": name, "draft": f"{draft}@{depth}", "calibrated": calibrate}
            row |= {key: found[key] for key in ("tokens_per_pass", "accepted")} | {"likeness": alike[name]}
            rows.append(row | {"draft_token_ms": found["draft_ms_per_pass"] / found["proposed_per_pass"]})
    by_name = {row["layers"]: row["draft_token_ms"] for row in rows if row["draft"] == "chain@8"}
    attention_ms = max(0.0, by_name["all"] - by_name["skip:1a,2a,3a"]) / 3
    for row, (name, _, draft, depth) in zip(rows, plans, strict=True):
        plan = LayerPlan.parse(name, study.models.target.config.num_hidden_layers)
        spared = 0 if plan is None else sum(len(group) - 1 for group in plan.groups)
        width = DraftShape.parse(draft).deep(depth).per_pass  # tokens that a pass drafts
        row["own_devices_ms"] = row["draft_token_ms"] - attention_ms * spared / width
    return rows


@torch.inference_mode()
def _likeness(study: Continued) -> dict[str, float]:
    """By order of layers, the mean cosine of the last hidden states to those of all layers in order."""
    context, found = study.sizes.context, dict[str, Tensor]()
    read, probed = study.tokens[:context], study.tokens[context : context + PROBED]
    with study.session("likeness of orders of layers", read, PROBED, "retrieval") as session:
        session.prefill()
        for name in LAYERS:
            recompose(session, load_config("retrieval", study.drafting(PROBED, layers=name)))
            drafter = session.verifier.drafter
            assert isinstance(drafter, ModelDrafter)
            hidden = passed(drafter.verifier, probed, PROBED, hidden=True).hidden
            assert hidden is not None
            found[name] = hidden.float()
    cosine = torch.cosine_similarity
    return {name: float(cosine(one, found["all"], dim=-1).mean()) for name, one in found.items()}


def batch(study: Continued) -> list[Row]:
    """Several texts at once.

    TriForce, table 4; in place, tokens a second together and in turn.
    """
    models, tokens, sizes = study.models, study.tokens, study.sizes
    count, length = sizes.batch, sizes.batch_context
    step = max(1, (len(tokens) - length) // count)
    prompts = [tokens[at * step : at * step + length] for at in range(count)]
    params = SamplingParams(max_tokens=sizes.new_tokens, seed=0, ignore_eos=True)
    rows = []
    for config in BATCH:
        say(f"batch of {count}, {config}")
        with LLM.from_models(models.target, None, models.tokenizer, config) as llm:
            turns = []
            for _ in range(3):
                alone = [llm.generate(prompt, params) for prompt in prompts]
                together = llm.generate(prompts, params)
                assert [one.tokens for one in alone] == [one.tokens for one in together]
                made = 1e3 * sum(len(one.tokens) for one in alone)
                turn_ms = sum(one.timings.predicted_ms for one in alone)
                # Members of a batch end together but for the last rounds.
                turns.append((made / turn_ms, made / max(one.timings.predicted_ms for one in together)))
        row = {"config": config, "prompts": count, "context": length}
        row |= {"in_turn_tokens_per_s": median(one for one, _ in turns)}
        row |= {"batch_tokens_per_s": median(one for _, one in turns)}
        rows.append(row | {"ratio": median(batch / alone for alone, batch in turns)})
    return rows
