"""`offload-rt generate`: streams text to stdout, progress and a summary to stderr, and the result to JSON."""

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
from offload_rt.model.rope import Yarn
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
    """Adds the flags that choose the models and the devices."""
    add = parser.add_argument_group("model").add_argument
    target = "target model: a folder or a hub ID (default: the embedded demo pair)"
    add("--model", metavar="PATH|ID", help=target)
    draft = "small draft model with the target's tokenizer (default: none, or the demo's own)"
    add("--draft", metavar="PATH|ID|none", help=draft)
    device = "where models run (default: auto, the GPU if there is one); cuda:0,cuda:1: KV lies on both"
    add("--device", type=_devices, default="auto", metavar="auto|cpu|cuda|cuda:N,…", help=device)
    add_dtype(add)
    add_rope(add)


def _devices(text: str) -> str:
    """An argument type: names of devices, whether they exist or not."""
    if not re.fullmatch(r"auto|cpu|cuda|cuda:\d+(,cuda:\d+)*", text):
        raise argparse.ArgumentTypeError(
            f"{text[:60]!r} is not a device: use auto, cpu, cuda or cuda:0,cuda:1"
        )
    return text


def add_dtype(add: Add) -> None:
    """Adds `--dtype`."""
    meaning = "dtype of weights and KV (default: auto, the model's own on a GPU, float32 on a CPU)"
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help=meaning)


def add_rope(add: Add) -> None:
    """Adds `--rope`."""
    meaning = "stretch the target's positions by YaRN, e.g. yarn:4 (default: as its config.json says)"
    add("--rope", type=Yarn.parse, metavar="yarn:FACTOR", help=meaning)


def add_json(add: Add, what: str) -> None:
    """Adds `--json FILE`; refuses a file that cannot be written before any work."""

    def writable(name: str) -> Path:
        check_writable("--json", Path(name))
        return Path(name)

    add("--json", type=writable, metavar="FILE", help=f"write {what} to FILE (default: nowhere)")


def _add_sampling(generate: argparse.ArgumentParser) -> None:
    sampling = generate.add_argument_group("sampling")
    add = sampling.add_argument
    most = "generate at most N tokens (default: 256)"
    add("-n", "--max-new-tokens", type=prompts.token_count, default=256, metavar="N", help=most)
    add_distribution(sampling)
    add("--seed", type=int, metavar="S", help="seed of sampling (default: random, shown in the summary)")
    stop = "end the text where STRING begins; may be repeated (default: none)"
    add("--stop", action="append", default=[], metavar="STRING", help=stop)
    add("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")


def add_distribution(sampling: argparse._ArgumentGroup) -> None:
    """Adds the flags of the distribution that tokens are drawn from."""
    add = sampling.add_argument
    add("--temperature", type=float, metavar="T", help="0: always the likeliest token (default: 0)")
    top_p = "draw from the fewest likeliest tokens whose probabilities sum to P (default: 1, all)"
    add("--top-p", type=float, metavar="P", help=top_p)
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: 0, all)")


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
    """Returns sampling parameters from the flags of `add_distribution`, and `others`."""
    from offload_rt.results import SamplingParams

    return SamplingParams(**_given(arguments), max_tokens=arguments.max_new_tokens, **others)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the values that the user gave to flags of `add_distribution`."""
    named = {name: getattr(arguments, name) for name in ("temperature", "top_p", "top_k")}
    return {name: value for name, value in named.items() if value is not None}


def _tell_model_sampling(llm: LLM, arguments: argparse.Namespace, console: Console) -> None:
    """Says that the model suggests sampling, where the user gave no flag and so decodes greedily."""
    suggested = llm.model_sampling
    if suggested is None or _given(arguments):
        return
    flags = f"--temperature {suggested.temperature:g}"
    flags += f" --top-p {suggested.top_p:g}" if suggested.top_p < 1 else ""
    flags += f" --top-k {suggested.top_k}" if suggested.top_k else ""
    console.notice(f"decoding is greedy; the model's generation_config.json suggests sampling: {flags}")


def open_llm(arguments: argparse.Namespace, console: Console, prompt_tokens: int) -> LLM:
    """Opens the models of `add_model` in a configuration; reports its progress to `console`."""
    from offload_rt.api import LLM

    return LLM(
        arguments.model,
        draft=arguments.draft,
        config=arguments.config,
        device=arguments.device,
        dtype=arguments.dtype,
        rope=arguments.rope,
        overrides=dict(arguments.overrides),
        on_progress=console.progress,
        on_notice=console.notice,
        size_hint=(prompt_tokens, arguments.max_new_tokens),
    )


def run(arguments: argparse.Namespace) -> int:
    # Checked before the runtime is imported, which takes seconds. Checking levels imports torch.
    text = prompts.read(arguments)
    load_configs(arguments.config, dict(arguments.overrides))
    seed = int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed
    params = distribution(arguments, stop=tuple(arguments.stop), seed=seed, ignore_eos=arguments.ignore_eos)
    console = Console(arguments.quiet)
    console.tokens["decode"] = params.max_tokens
    with machine_errors_in_a_line():
        prompt = prompts.tokens(text, arguments, console)
    with machine_errors_in_a_line(), open_llm(arguments, console, len(prompt)) as llm:
        _tell_model_sampling(llm, arguments, console)
        # A Ctrl-C during the prefill leaves nothing to report, so it is not caught here.
        context = llm.read(prompt, params.max_tokens)
        events = context.stream(params=params)
        status, failure = write_text(events, params, console, as_tokens=isinstance(text, list))
        assert events.result is not None
        result = events.result
        report = result.to_json()
        try:
            console.summary(result)
            console.compare_with_plan(result, llm.predicted_ms)
            if arguments.compare_plain and not status and failure is None:
                report["plain"] = _compare(context, result, params, console)
        except KeyboardInterrupt as interrupt:
            console.say("compared   interrupted")
            status = status_of(interrupt)
        finally:  # before the runtime closes, as closing may fail on a broken link
            if arguments.json is not None:
                write_json("--json", arguments.json, report)
        if failure is not None:
            tokens = len(result.tokens)
            raise UsageError(f"{failure}; the text ends after {tokens} tokens, which are valid") from failure
    return status


class MachineError(UsageError):
    """A failure of the machine at run time, with its remedy."""


@contextmanager
def machine_errors_in_a_line() -> Iterator[None]:
    """Turns failures of the machine into `MachineError`."""
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
        as_tokens: write token IDs instead, separated by spaces.

    Returns:
        The exit code, and the error that ended the text early, if any; the text written by then is valid.
    """
    with console.writing_text():
        return _write_events(events, params, console, as_tokens)


def _write_events(
    events: TokenStream, params: SamplingParams, console: Console, as_tokens: bool
) -> tuple[int, UsageError | None]:
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
        # Text that was held back when an interrupt came is part of the result.
        whole = " ".join(map(str, result.tokens)) if as_tokens else result.text
        _write(whole[written:] + "\n", console)
    return status, failure


def _write(text: str, console: Console) -> None:
    """Writes to stdout and flushes it; replaces characters that its encoding lacks."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError as error:
        assert isinstance(sys.stdout, io.TextIOWrapper)
        console.notice(
            f"stdout is {error.encoding}, which lacks {error.object[error.start]!a}: missing characters are"
            " written as '?'; set PYTHONUTF8=1 for UTF-8"
        )
        sys.stdout.reconfigure(errors="replace")
        sys.stdout.write(text)
    sys.stdout.flush()


def decoded_plainly(context: Context, result: GenerationResult, params: SamplingParams) -> GenerationResult:
    """Continues the prompt of `result` again, by plain decoding over the same KV."""
    context.rewind(result.prompt_tokens)
    return context.generate(params=params, config="plain")


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
    return {"predicted_ms": plain.timings.predicted_ms, "ratio": ratio, "tokens_equal": equal}


def ms_per_token(result: GenerationResult) -> float:
    """Returns the mean time per decoded token, in ms."""
    return result.timings.predicted_ms / max(result.timings.predicted_n, 1)


def tokens_verdict(result: GenerationResult, plain: GenerationResult, params: SamplingParams) -> str:
    """Returns how the tokens compare with those of plain decoding; they are equal at temperature 0."""
    if params.temperature > 0:
        return "same output distribution, samples may differ"
    return "tokens equal" if result.tokens == plain.tokens else "TOKENS DIFFER"
