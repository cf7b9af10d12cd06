"""`python -m bench rollback`: ways to return recurrent states to the accepted tokens after a rejection."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bench.random_models import random_prompt
from bench.results import Row
from bench.studies.study import Part, Study, Subject, elapsed_ms
from cpu_kv import Link, PacedLink
from offload_rt.api.llm import LLM
from offload_rt.caches.local_history import copied, state_tensors
from offload_rt.caches.new_tokens import NewTokens
from offload_rt.engine.sequence import TokenSequence
from offload_rt.model.architecture import cache_argument
from offload_rt.model.passes import PassInput


@dataclass(frozen=True)
class Sizes:
    """Sizes of `rollback`.

    Attributes:
        contexts: tokens in the cache.
        hidden: width of the model, eight layers of which two have full attention.
        drafted: tokens of a draft; half of them are accepted.
        link: GB/s of the emulated link.
        turns: times that each way is measured.
    """

    contexts: tuple[int, ...] = (4096, 32768)
    hidden: int = 1024
    drafted: int = 16
    link: float = 2.0
    turns: int = 9


@dataclass(frozen=True)
class RandomQwen(Subject):
    """A model in the manner of Qwen3.5, with random weights."""

    model: PreTrainedModel

    @classmethod
    def opened(cls, arguments: argparse.Namespace, sizes: Sizes) -> RandomQwen:
        heads = sizes.hidden // 128
        config = AutoConfig.for_model(
            "qwen3_5_text",
            vocab_size=4096,
            hidden_size=sizes.hidden,
            intermediate_size=3 * sizes.hidden,
            num_hidden_layers=8,
            layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
            num_attention_heads=heads,
            num_key_value_heads=2,
            head_dim=128,
            linear_num_key_heads=heads,
            linear_num_value_heads=2 * heads,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            max_position_embeddings=max(sizes.contexts) + 1024,
            eos_token_id=None,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        return cls({"layers": config.num_hidden_layers}, sizes, model)


def ways(subject: RandomQwen) -> Iterator[Row]:
    """Milliseconds that a rejection adds to a round, by what is done about the recurrent states.

    `pass`: one verification. `run again`: in the next pass the accepted tokens go through the recurrent
    layers once more, whose inputs were kept (what the runtime does). `longer pass`: they go through the whole
    model again. `recorded`: the recurrent layers run token by token, and a state is kept for each;
    `recorded MB` is what these states take.
    """
    sizes = subject.sizes
    links: dict[str, Callable[[], Link | None]] = {
        "in place": lambda: None,
        f"link of {sizes.link:g} GB/s": lambda: PacedLink(1e9 * sizes.link),
    }
    for context, (name, link) in product(sizes.contexts, links.items()):
        with (
            LLM.from_models(subject.model, config="plain", link=link()) as llm,
            llm.read(random_prompt(4096, context)),
        ):
            (sequence,) = llm.engine.sequences
            yield {"context": context, "kv": name} | _measured(sequence, sizes)


@torch.inference_mode()
def _measured(sequence: TokenSequence, sizes: Sizes) -> Row:
    rows, accepted = 1 + sizes.drafted, 1 + sizes.drafted // 2
    full, model = sequence.full, sequence.target
    length = full.verified_length

    def run(count: int) -> float:
        full.rewind(length)
        pass_input = PassInput(full, NewTokens.chain(count), rows)
        return elapsed_ms(lambda: model.forward([pass_input]))

    times: dict[str, list[float]] = {"pass": [], "again": [], "longer": [], "at once": [], "recorded": []}
    for _ in range(sizes.turns):
        times["pass"].append(run(rows))
        full.commit(range(accepted))
        times["again"].append(
            elapsed_ms(lambda: model.forward([PassInput(full, NewTokens.chain(rows), rows)]))
        )
        times["longer"].append(run(rows + accepted))
        for step, name in ((rows, "at once"), (1, "recorded")):
            times[name].append(elapsed_ms(partial(_mixers, sequence, rows, step)))
    full.rewind(length)
    ms = {name: median(times_of_form) for name, times_of_form in times.items()}
    states = sum(
        t.nbytes for state in full.local.history.states.values() for t in state_tensors(state.state).values()
    )
    return {
        "pass": ms["pass"],
        "run again": ms["again"] - ms["pass"],
        "longer pass": ms["longer"] - ms["pass"],
        "recorded": ms["recorded"] - ms["at once"],
        "recorded MB": rows * states / 1e6,
    }


def _mixers(sequence: TokenSequence, rows: int, step: int) -> None:
    """Runs all recurrent layers over `rows` tokens, `step` at a time, and copies each state."""
    model = sequence.target
    hidden = torch.randn(1, rows, model.hidden_size)
    for layer, verified in sequence.full.local.history.states.items():
        cache = DynamicCache(config=model.local_layers.config)
        cache.layers[layer] = copied(verified.state)
        mixer = getattr(model.module.model.layers[layer], model.kinds.kinds[layer].mixer)
        for at in range(0, rows, step):
            mixer(hidden[:, at : at + step], **{cache_argument(type(mixer).forward): cache})
            copied(cache.layers[layer])


STUDY = Study(
    note="Medians in ms of a model with random weights, shaped like Qwen3.5, in float32.",
    sizes=Sizes(),
    quick={"contexts": (1024,), "hidden": 256, "turns": 1},
    minutes=(4, 1),
    opened=RandomQwen.opened,
    parts={"ways": Part(ways)},
)
