"""`offload-rt demo`: the embedded models against plain decoding, in memory and over an emulated PCIe link."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from offload_rt.commands import prompts
from offload_rt.commands.console import Console
from offload_rt.commands.generate import (
    decoded_plainly,
    machine_errors_in_a_line,
    ms_per_token,
    tokens_verdict,
    write_text,
)

if TYPE_CHECKING:
    from offload_rt.context import Context
    from offload_rt.results import GenerationResult, SamplingParams

CONFIG = "triforce"
NEW_TOKENS = 128
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 1
ENDING_WORDS = 16
"""Last words of the prompt that are shown before the text that continues them."""
LINK_RATE = 2e9
"""Bytes per second of the emulated link. Streaming the KV then takes longer than computing, as for a 7B model
over PCIe at 25 GB/s; at 25 GB/s, the demo model's small KV would not be the bottleneck."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    demo = commands.add_parser(
        "demo",
        help="compare with plain decoding on the embedded models",
        description="Continues a long prompt with the embedded models, on the CPU: sampled text with"
        " the KV in memory, then greedy text with the KV behind an emulated PCIe link, each against plain"
        " decoding.",
        allow_abbrev=False,
    )
    demo.set_defaults(run=run, model=None)
    prompts.add_arguments(demo)


def run(arguments: argparse.Namespace) -> int:
    # Checked before the runtime is imported, which takes seconds.
    text = prompts.read(arguments)
    from cpu_kv import PacedLink
    from offload_rt.api import LLM
    from offload_rt.model.checkpoint_config import model_config
    from offload_rt.model.loading import choose_device, choose_dtype, demo_model, load_model, load_tokenizer
    from offload_rt.results import SamplingParams

    console = Console(quiet=False)
    console.tokens["decode"] = NEW_TOKENS
    cpu, report = choose_device("cpu"), console.progress
    dtype = choose_dtype("auto", cpu, model_config(demo_model("target")).dtype)
    target, draft = (load_model(demo_model(part), cpu, dtype) for part in ("target", "draft"))
    tokenizer = load_tokenizer(demo_model("target"))
    greedy = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    sampled = replace(greedy, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED)

    prompt = prompts.tokens(text, arguments, console)
    if isinstance(text, str):
        console.notice(f"it ends: … {' '.join(text[-200:].split()[-ENDING_WORDS:])}")
    with machine_errors_in_a_line():
        with LLM.from_models(target, draft, tokenizer, CONFIG, on_progress=report) as llm:
            context = llm.read(prompt, NEW_TOKENS)
            events = context.stream(params=sampled)
            status, failure = write_text(events, sampled, console, as_tokens=isinstance(text, list))
            if failure is not None:
                raise failure
            if status:
                return status
            console.say(
                f"sampled    {NEW_TOKENS} tokens after a prompt of {len(prompt):,};"
                f" temperature {TEMPERATURE}, top-p {TOP_P}, seed {SEED}"
            )
            assert events.result is not None
            _compare("in memory", context, events.result, sampled, console)
        console.say(
            f"note       next, an emulated PCIe link: KV streams at {LINK_RATE / 1e9:g} GB/s; only that is"
            " emulated, everything else runs at this machine's own speed"
        )
        link = PacedLink(LINK_RATE)
        with LLM.from_models(target, draft, tokenizer, CONFIG, on_progress=report, link=link) as llm:
            context = llm.read(prompt, NEW_TOKENS)
            _compare("over link", context, context.generate(params=greedy), greedy, console)
        if (busy := console.busy()) is not None:
            console.notice(f"{busy}; speculation, with its many short passes, loses more than plain decoding")
    return 0


def _compare(
    where: str, context: Context, result: GenerationResult, params: SamplingParams, console: Console
) -> None:
    """Decodes the prompt plainly too, and prints the comparison."""
    plain = decoded_plainly(context, result, params)
    ms, plain_ms = ms_per_token(result), ms_per_token(plain)
    console.say(
        f"{where:10} {plain_ms / ms:.2f} times as fast as plain decoding ({ms:.1f} against {plain_ms:.1f}"
        f" ms/token); {tokens_verdict(result, plain, params)}"
    )
