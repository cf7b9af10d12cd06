"""`offload-rt demo`: the embedded models against plain decoding, over an emulated PCIe link and in memory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offload_rt.commands import prompts
from offload_rt.commands.console import Console, duration
from offload_rt.commands.running import (
    decoded_plainly,
    machine_errors_in_a_line,
    ms_per_token,
    tokens_verdict,
    write_text,
)

if TYPE_CHECKING:
    from offload_rt.api.context import Context
    from offload_rt.api.llm import LLM
    from offload_rt.sampling.params import SamplingParams

CONFIG = "triforce"
NEW_TOKENS = 128
TEMPERATURE, TOP_P, SEED = 0.7, 0.9, 1
LINK_RATE = 2e9
"""Bytes per second of the emulated link. Streaming the KV then takes longer than computing, as for a 7B model
over PCIe at 25 GB/s; at 25 GB/s, the demo model's small KV would not be the bottleneck."""
PASSAGE = "Now, when I say that I am in the habit"
"""The beginning of a paragraph of the built-in book, which the model reads."""
CUE, RECITED = "passenger you", "a general thing;"
"""The model reads the paragraph again up to `CUE`, and repeats it up to `RECITED`. Each word in between is
far likelier than any other, so that no rounding changes it."""
CARDS = (
    ("rtx3060", "llama3.1-8b", "nf4", "32k"),
    ("rtx4060ti-16", "qwen2.5-7b-1m", "nf4", "128k"),
    ("rtx4090", "llama3.1-8b", "none", "128k"),
)
"""GPUs that many people own, each with a model, its quantisation and a context."""
CARDS_RAM = 32
"""GiB of host memory beside these GPUs."""
CARDS_NEW_TOKENS = 256


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    demo = commands.add_parser(
        "demo",
        help="compare with plain decoding on the embedded models",
        description="Continues a long prompt with the embedded models on the CPU, and compares with plain"
        " decoding: greedily with the KV behind an emulated PCIe link, then sampled with the KV in memory."
        " Afterwards the model repeats a passage of a book, and three plans for well-known GPUs follow.",
        allow_abbrev=False,
    )
    demo.set_defaults(run=run, model=None)
    prompts.add_arguments(demo)


def run(arguments: argparse.Namespace) -> int:
    console = Console(quiet=False)
    # Checked before the runtime is imported, which takes seconds.
    text = prompts.read(arguments, console)
    from cpu_kv import PacedLink
    from offload_rt.api.llm import LLM
    from offload_rt.machine.devices import choose_device, choose_dtype
    from offload_rt.model.checkpoint_config import model_config
    from offload_rt.model.embedded import demo_model
    from offload_rt.model.loading import load_model, load_tokenizer
    from offload_rt.sampling.params import SamplingParams

    console.tokens["decode"] = NEW_TOKENS
    cpu, report = choose_device("cpu"), console.progress
    dtype = choose_dtype("auto", cpu, model_config(demo_model("target")).dtype)
    target, draft = (load_model(demo_model(part), cpu, dtype) for part in ("target", "draft"))
    tokenizer = load_tokenizer(demo_model("target"))
    greedy = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    sampled = replace(greedy, temperature=TEMPERATURE, top_p=TOP_P, seed=SEED)

    prompt = prompts.tokens(text, arguments, console)
    with machine_errors_in_a_line():
        link = PacedLink(LINK_RATE)
        console.say(
            f"note       the KV is first behind an emulated PCIe link of {LINK_RATE / 1e9:g} GB/s, as that of"
            " a large model would be on a GPU, then in memory"
        )
        with LLM.from_models(target, draft, tokenizer, CONFIG, on_progress=report, link=link) as llm:
            _compare("over link", llm.read(prompt, NEW_TOKENS), greedy, console)
        with LLM.from_models(target, draft, tokenizer, CONFIG, on_progress=report) as llm:
            with llm.read(prompt, NEW_TOKENS) as context:
                _compare("in memory", context, sampled, console)
            status = _recite(llm, greedy, console)
    if not status:
        for line in _plans():
            console.say(line)
    return status


def _compare(label: str, context: Context, params: SamplingParams, console: Console) -> None:
    """Decodes with speculation and plainly, and prints the comparison; on a busy machine without a ratio."""
    console.other_work.restart()
    result = context.generate(params=params)
    plain = decoded_plainly(context, result, params)
    ms, plain_ms = ms_per_token(result), ms_per_token(plain)
    times = f"{ms:.1f} against {plain_ms:.1f} ms/token"
    verdict = tokens_verdict(result, plain, params)
    if (busy := console.other_work.note()) is None:
        console.say(f"{label:10} {plain_ms / ms:.2f} times as fast as plain decoding ({times}); {verdict}")
    else:
        console.say(f"{label:10} speed not comparable ({times}): {busy}; {verdict}")


def _recite(llm: LLM, greedy: SamplingParams, console: Console) -> int:
    """Lets the model repeat a passage that it has just read; returns an exit code.

    What it writes is compared with the book, word by word.
    """
    book = prompts.built_in()
    start = book.index(PASSAGE)
    cue = book.index(CUE, start) + len(CUE)
    end, passage_end = book.index(RECITED, cue) + len(RECITED), book.index("\n\n", cue)
    begun, expected = f"{book[start:passage_end]}\n\n{book[start:cue]}", book[cue:end]
    count = len(llm.encode(begun + expected)) - len(llm.encode(begun))
    params = replace(greedy, max_tokens=count)
    console.say(
        f"recites    the model has read one paragraph of Moby-Dick, and continues from {CUE!r} when it reads"
        " it again:"
    )
    with llm.read(begun, count) as context:
        events = context.stream(params=params)
        status, failure = write_text(events, params, console)
    if failure is not None:
        raise failure
    if not status:
        assert events.result is not None
        console.say(f"checked    {recital_verdict(events.result.text, expected)}")
    return status


def recital_verdict(text: str, expected: str) -> str:
    """Returns how many words of a text are those of the book, from the first one on."""
    words, of_book = text.split(), expected.split()
    equal = 0
    for word, of_the_book in zip(words, of_book, strict=False):
        if word != of_the_book:
            break
        equal += 1
    if equal == len(of_book):
        return f"all {equal} words are the book's, compared one by one"
    return f"the first {equal} of {len(of_book)} words are the book's, compared one by one"


def _plans() -> Iterator[str]:
    """Yields a line on each of `CARDS`, and the command that shows more."""
    from offload_rt.drafting.levels.configs import load_configs
    from offload_rt.model.named_shapes import find_shape
    from offload_rt.planning.planner import ranked, requests_for
    from offload_rt.system.hardware import named_hardware

    yield f"plans      predicted, not measured, for GPUs in a desktop with {CARDS_RAM} GiB of memory:"
    configs, command = load_configs("auto", {}), ""
    for gpu, model, quantize, context in CARDS:
        tokens = prompts.token_count(context)
        shape, machine = find_shape(model, None, quantize=quantize), named_hardware(gpu, ram=CARDS_RAM)
        sizes = tokens - CARDS_NEW_TOKENS, CARDS_NEW_TOKENS
        best = ranked(requests_for(configs, shape, None, sizes, machine))[0]
        predicted = best.check()
        weights = "" if quantize == "none" else f" in {quantize}"
        yield (
            f"           {gpu}: {model}{weights}, {tokens:,} tokens:"
            f" {predicted.ms_per_token:.0f} ms/token"
            f" ({predicted.plain_ms_per_token:.0f} with plain decoding),"
            f" first token after {duration(predicted.prefill_ms / 1e3)}"
        )
        command = f"--model {model} --quantize {quantize} --gpu {gpu} --ram {CARDS_RAM} --context {context}"
    yield f"           offload-rt plan {command} shows the last one in full"
