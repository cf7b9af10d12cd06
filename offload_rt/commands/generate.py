"""`offload-rt generate`: streams text to stdout, progress and a summary to stderr, and the result to JSON."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from offload_rt.commands import prompts, sessions
from offload_rt.commands.console import Console
from offload_rt.commands.exits import INTERRUPTED, status_of
from offload_rt.commands.options import (
    add_configuration,
    add_json,
    add_model,
    add_sampling,
    check_early,
    distribution,
)
from offload_rt.commands.running import (
    decoded_plainly,
    ended_early,
    machine_errors_in_a_line,
    ms_per_token,
    open_llm,
    tell_model_sampling,
    tokens_verdict,
    write_text,
)
from offload_rt.system.files import write_json

if TYPE_CHECKING:
    from offload_rt.api.context import Context
    from offload_rt.engine.results import GenerationResult
    from offload_rt.sampling.params import SamplingParams


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt losslessly; text goes to stdout, everything else to stderr.",
        epilog="A first run: offload-rt generate --model FOLDER --prompt-file book.txt. Memory and speed are"
        " predicted by offload-rt plan.",
        allow_abbrev=False,
    )
    generate.set_defaults(run=run)

    add_model(generate)
    prompts.add_arguments(generate)
    add_sampling(generate, max_tokens=256)
    add_configuration(generate)
    sessions.add_arguments(generate)

    add = generate.add_argument_group("output").add_argument
    add("--compare-plain", action="store_true", help="also run plain decoding and compare speed and tokens")
    add_json(add, "the result and its statistics")
    add("--quiet", action="store_true", help="print nothing but errors on stderr")


def run(arguments: argparse.Namespace) -> int:
    console = Console(arguments.quiet)
    text = prompts.read(arguments, console)
    check_early(arguments)
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    options = {"ignore_eos": arguments.ignore_eos, "json_schema": arguments.json_schema}
    params = distribution(arguments, stop=tuple(arguments.stop), seed=seed, **options)
    console.tokens["decode"] = params.max_tokens
    kept_sessions = sessions.Sessions(arguments, console)
    if not (arguments.prompts or arguments.stdin):
        kept_sessions.check_exists("name a prompt, --prompt-file FILE")
    with machine_errors_in_a_line():
        prompt = prompts.tokens(text, arguments, console)
    sizes = len(prompt), params.max_tokens
    with machine_errors_in_a_line(), open_llm(arguments, console, sizes) as llm:
        tell_model_sampling(llm, arguments, console)
        # A Ctrl-C during the prefill leaves nothing to report, so it is not caught here.
        context = kept_sessions.open(llm, prompt, params.max_tokens)
        events = context.stream(params=params)
        status, failure = write_text(events, params, console, as_tokens=isinstance(text, list))
        assert events.result is not None
        result = events.result
        report = result.to_json()
        try:
            console.summary(result)
            console.compare_with_plan(result, llm.plan)
            if failure is None and status in (0, INTERRUPTED):
                kept_sessions.save(context)
            if arguments.compare_plain and not status and failure is None:
                report["plain"] = _compare(context, result, params, console)
        except KeyboardInterrupt as interrupt:
            console.say("ended      interrupted before all was done")
            status = status_of(interrupt)
        finally:  # before the runtime closes, as closing may fail on a broken link
            if arguments.json is not None:
                write_json("--json", arguments.json, report)
        if failure is not None:
            raise ended_early(failure, result)
    return status


def _compare(
    context: Context, result: GenerationResult, params: SamplingParams, console: Console
) -> dict[str, object]:
    """Decodes plainly too, and prints the comparison; returns it as the `plain` of the JSON result."""
    plain = decoded_plainly(context, result, params)
    ms, plain_ms = ms_per_token(result), ms_per_token(plain)
    ratio = plain_ms / ms if ms else 0.0
    verdict = tokens_verdict(result, plain, params)
    console.say(f"compared   {ratio:.2f} times as fast as plain decoding; {verdict}")
    equal = result.tokens == plain.tokens
    return {"decode_ms": plain.timings.decode_ms, "ratio": ratio, "tokens_equal": equal}
