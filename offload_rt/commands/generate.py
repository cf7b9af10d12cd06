"""`offload-rt generate`: streams text to stdout, progress and a summary to stderr, and results to JSON."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.commands import prompts
from offload_rt.commands.console import Console
from offload_rt.commands.exits import READER_GONE, drop_stdout, status_of, unwritable
from offload_rt.config import AUTO, RetrievalConfig, SpeculationConfig
from offload_rt.errors import UsageError, first_line
from offload_rt.files import check_writable, write_json
from offload_rt.toml import config_names, load_configs, parse_override

if TYPE_CHECKING:
    from offload_rt.api import LLM
    from offload_rt.context import Context, TokenStream
    from offload_rt.results import GenerationResult, SamplingParams

Add = Callable[..., object]
"""The `add_argument` of a parser or a group."""


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
    _add_sampling(generate)
    _add_configuration(generate)

    add = generate.add_argument_group("output").add_argument
    add("--compare-plain", action="store_true", help="also decode plainly and compare speed and tokens")
    add_json(add, "the result and its statistics")
    add("--quiet", action="store_true", help="print nothing but errors on stderr")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which models run, and where."""
    add = parser.add_argument_group("model").add_argument
    target = "target model: a folder or a hub id (default: the embedded demo pair)"
    add("--model", metavar="PATH|ID", help=target)
    draft = "small model with the target's tokenizer, which drafts (default: none, or the demo's own)"
    add("--draft", metavar="PATH|ID|none", help=draft)
    device = "where models run (default: auto, the GPU if there is one); cuda:0,cuda:1: KV lies on both"
    add("--device", type=_devices, default="auto", metavar="auto|cpu|cuda|cuda:N,…", help=device)
    add_dtype(add)


def _devices(text: str) -> str:
    """An argument type: what may be devices, whether they are there or not."""
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: use auto, cpu, cuda or cuda:0,cuda:1")
    return text


def add_dtype(add: Add) -> None:
    """Adds `--dtype`."""
    meaning = "of weights and KV (default: auto, the model's own on a GPU, float32 on a CPU)"
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help=meaning)


def add_json(add: Add, what: str) -> None:
    """Adds `--json FILE`; a file that cannot be written is refused before any work."""

    def writable(name: str) -> Path:
        check_writable("--json", Path(name))
        return Path(name)

    add("--json", type=writable, metavar="FILE", help=f"write {what} to FILE (default: nowhere)")


def _add_sampling(generate: argparse.ArgumentParser) -> None:
    sampling = generate.add_argument_group("sampling")
    add = sampling.add_argument
    most = "generate at most N (default: 256)"
    add("-n", "--max-new-tokens", type=int, default=256, metavar="N", help=most)
    add_distribution(sampling)
    add("--seed", type=int, metavar="S", help="repeats a text (default: random, shown in the summary)")
    stop = "end the text where STRING begins; may be repeated (default: none)"
    add("--stop", action="append", default=[], metavar="STRING", help=stop)
    add("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")


def add_distribution(sampling: argparse._ArgumentGroup) -> None:
    """Adds the flags that say from which distribution tokens are drawn."""
    add = sampling.add_argument
    add("--temperature", type=float, default=0.0, metavar="T", help="0: the likeliest token (default: 0)")
    top_p = "draw from the fewest likely tokens that have probability P together (default: 1, all)"
    add("--top-p", type=float, default=1.0, metavar="P", help=top_p)
    top_k = "draw from the K likeliest tokens (default: 0, all)"
    add("--top-k", type=int, default=0, metavar="K", help=top_k)


ANY_KEY = "sets any configuration key (default: the config's values); the last value given wins"


def add_overrides(
    parser: argparse._ActionsContainer,
    meaning: str = ANY_KEY,
    flag: str = "--set",
    metavar: str = "section.key=value",
    key: str = "",
) -> None:
    """Adds a flag for any key of a configuration, or for one `key`."""
    parser.add_argument(
        flag,
        type=lambda given: parse_override(f"{key}={given}" if key else given),
        action="append",
        default=[],
        dest="overrides",
        metavar=metavar,
        help=meaning,
    )


def _add_configuration(generate: argparse.ArgumentParser) -> None:
    group = generate.add_argument_group("configuration")
    meaning = f"{', '.join(config_names())}, a TOML file, or auto: the fastest by the plan (default: auto)"
    group.add_argument("--config", default=AUTO, metavar="NAME|FILE", help=meaning)

    def add(flag: str, key: str, meaning: str, metavar: str = "N") -> None:
        add_overrides(group, f"{meaning}; sets {key}", flag, metavar, key)

    add("--retrieval-budget", "retrieval.budget", f"tokens retrieved (default: {RetrievalConfig.budget})")
    add("--chunk-size", "retrieval.chunk", f"tokens chosen together (default: {RetrievalConfig.chunk})")
    add("--gamma1", "speculation.gamma1", f"depth of first drafts (default: {SpeculationConfig.gamma1})")
    add("--gamma2", "speculation.gamma2", "depth of drafts for the full cache (default: as it pays)")
    policies = "every, stride:N or acceptance:X (default: the config's)"
    add("--refresh", "retrieval.refresh", f"when to retrieve anew: {policies}", "POLICY")
    add_overrides(group)


def distribution(arguments: argparse.Namespace, **others: Any) -> SamplingParams:
    """What the flags of `add_distribution` say, and how many tokens."""
    from offload_rt.results import SamplingParams

    return SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_new_tokens,
        **others,
    )


def open_llm(arguments: argparse.Namespace, console: Console, prompt_tokens: int) -> LLM:
    """The models of `add_model` in a configuration; it tells `console` how far it is."""
    from offload_rt.api import LLM

    return LLM(
        arguments.model,
        draft=arguments.draft,
        config=arguments.config,
        device=arguments.device,
        dtype=arguments.dtype,
        overrides=dict(arguments.overrides),
        on_progress=console.progress,
        on_notice=console.notice,
        size_hint=(prompt_tokens, arguments.max_new_tokens),
    )


def run(arguments: argparse.Namespace) -> int:
    # Before the runtime is imported: that alone takes seconds.
    load_configs(arguments.config, dict(arguments.overrides))
    text = prompts.read(arguments)
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    params = distribution(arguments, stop=tuple(arguments.stop), seed=seed, ignore_eos=arguments.ignore_eos)
    console = Console(arguments.quiet)
    console.tokens["decode"] = params.max_tokens
    with machine_errors_in_a_line():
        prompt = prompts.tokens(text, arguments, console)
    with machine_errors_in_a_line(), open_llm(arguments, console, len(prompt)) as llm:
        # A Ctrl-C during the prefill leaves nothing to report, so it is not caught here.
        context = llm.read(prompt, params.max_tokens)
        events = context.stream(params=params)
        status, failure = write_text(events, params, console, as_tokens=isinstance(text, list))
        assert events.result is not None
        result = events.result
        report = result.to_json()
        try:
            console.summary(result)
            if arguments.compare_plain and not status and failure is None:
                report["plain"] = _compare(context, result, params, console)
        except KeyboardInterrupt as interrupt:
            console.say("compared   interrupted")
            status = status_of(interrupt)
        finally:  # before the runtime closes: on a broken link, closing may fail too
            if arguments.json is not None:
                write_json("--json", arguments.json, report)
        if failure is not None:
            tokens = len(result.tokens)
            raise UsageError(f"{failure}; the text ends after {tokens} tokens, which stand") from failure
    return status


class MachineError(UsageError):
    """What the machine refused at run time, with its remedy."""


@contextmanager
def machine_errors_in_a_line() -> Iterator[None]:
    """Turns what the machine refuses into a `MachineError`."""
    import torch

    from cpu_kv import CopyFailed

    try:
        yield
    except CopyFailed as error:
        raise MachineError(f"{error}; check the GPU and its driver (nvidia-smi)") from error
    except (MemoryError, torch.OutOfMemoryError) as error:
        remedy = "give a shorter prompt, fewer new tokens or a smaller --retrieval-budget"
        raise MachineError(f"out of memory: {first_line(error)}; {remedy}") from error


def write_text(
    events: TokenStream, params: SamplingParams, console: Console, as_tokens: bool = False
) -> tuple[int, UsageError | None]:
    """Streams the text to stdout.

    Args:
        as_tokens: its token ids instead, with spaces between them.

    Returns:
        The exit code, and the error that cut the text short, if any; what was written by then stands.
    """
    status = written = 0
    failure: UsageError | None = None
    stdout_works = True
    try:
        with machine_errors_in_a_line(), closing(events):
            for made, event in enumerate(events, 1):
                piece = f"{' ' * (made > 1)}{event.token}" if as_tokens else event.text
                console.clear()
                _write(piece, console)
                written += len(piece)
                # On a terminal the text itself is the progress.
                if not sys.stdout.isatty():
                    console.progress("decode", made, params.max_tokens)
    except KeyboardInterrupt as interrupt:
        status = status_of(interrupt)
    except MachineError as error:
        failure = error
    except OSError as error:
        drop_stdout()
        stdout_works = False
        if isinstance(error, BrokenPipeError):
            status = READER_GONE
        else:
            failure = UsageError(unwritable(error))
    finally:
        console.clear()
    if stdout_works:
        result = events.result
        assert result is not None
        # Text held back when an interruption came is part of the result.
        whole = " ".join(map(str, result.tokens)) if as_tokens else result.text
        _write(whole[written:] + "\n", console)
    return status, failure


def _write(text: str, console: Console) -> None:
    """Writes to stdout at once; a character that its encoding lacks must not end the text."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError as error:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        console.notice(
            f"stdout is {error.encoding}, which lacks {error.object[error.start]!a}: what it lacks is written"
            " as '?'; set PYTHONUTF8=1 for UTF-8"
        )
        sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text)
    sys.stdout.flush()


def decoded_plainly(context: Context, result: GenerationResult, params: SamplingParams) -> GenerationResult:
    """Continues the prompt of `result` again, by plain decoding over the KV that is there."""
    context.rewind(result.prompt_tokens)
    return context.generate(params=params, config="plain")


def _compare(
    context: Context, result: GenerationResult, params: SamplingParams, console: Console
) -> dict[str, object]:
    """Decodes the text plainly too; the JSON's `plain`: our time per token against plain decoding's."""
    plain = decoded_plainly(context, result, params)
    ms, plain_ms = ms_per_token(result), ms_per_token(plain)
    ratio = plain_ms / ms if ms else 0.0
    verdict = tokens_verdict(result, plain, params)
    console.say(f"compared   {ratio:.2f} times as fast as plain decoding; {verdict}")
    equal = result.tokens == plain.tokens
    return {"predicted_ms": plain.timings.predicted_ms, "ratio": ratio, "tokens_equal": equal}


def ms_per_token(result: GenerationResult) -> float:
    """What a token took to decode."""
    return result.timings.predicted_ms / max(result.timings.predicted_n, 1)


def tokens_verdict(result: GenerationResult, plain: GenerationResult, params: SamplingParams) -> str:
    """How the tokens compare with those of plain decoding: equal at temperature 0."""
    if params.temperature > 0:
        return "same output distribution, samples may differ"
    return "tokens equal" if result.tokens == plain.tokens else "TOKENS DIFFER"
