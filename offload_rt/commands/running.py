"""What commands that run a model share: they open it, write its text as it comes, and tell of failures."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING

from offload_rt.commands.console import Console
from offload_rt.commands.exits import READER_GONE, drop_stdout, status_of, unwritable
from offload_rt.commands.options import (
    DISTRIBUTION,
    given_distribution,
)
from offload_rt.errors import UsageError, first_line

if TYPE_CHECKING:
    from offload_rt.api.context import Context, TokenStream
    from offload_rt.api.llm import LLM
    from offload_rt.engine.results import GenerationResult
    from offload_rt.sampling.params import SamplingParams
    from offload_rt.text.thoughts import Splitter


def tell_model_sampling(llm: LLM, arguments: argparse.Namespace, console: Console) -> None:
    """Says what sampling the model suggests, where the user gave no flag and so decodes greedily."""
    suggested = llm.model_sampling
    if suggested is None or given_distribution(arguments):
        return
    flags = " ".join(
        f"--{name.replace('_', '-')} {value:g}"
        for name in DISTRIBUTION
        if (value := getattr(suggested, name)) != getattr(type(suggested), name)
    )
    console.notice(f"decoding is greedy; the model's generation_config.json suggests {flags}")


def open_llm(arguments: argparse.Namespace, console: Console, sizes: tuple[int, int] | None) -> LLM:
    """Opens the models of `add_model` in a configuration; reports its progress to `console`.

    Args:
        sizes: prompt tokens and new ones for which there must be room.

    Raises:
        UsageError: so many tokens do not fit, among others; then no weights were read.
    """
    from offload_rt.api.llm import LLM

    return LLM(
        arguments.model,
        draft=arguments.draft,
        config=arguments.config,
        device=arguments.device,
        dtype=arguments.dtype,
        rope=arguments.rope,
        quantize=arguments.quantize,
        overrides=dict(arguments.overrides),
        on_progress=console.progress,
        on_notice=console.notice,
        on_plan=console.expect,
        size_hint=sizes,
    )


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
    events: TokenStream,
    params: SamplingParams,
    console: Console,
    as_tokens: bool = False,
    thoughts: Splitter | None = None,
) -> tuple[int, UsageError | None]:
    """Streams the text to stdout.

    Args:
        as_tokens: write token IDs instead, separated by spaces.
        thoughts: splits the text in two, of which the second part is written; None: all is written.

    Returns:
        The exit code, and the error that ended the text early, if any; the text written by then is valid.
    """
    with console.writing_text():
        return _write_events(events, params, console, as_tokens, thoughts)


def ended_early(failure: UsageError, result: GenerationResult) -> UsageError:
    """Returns the error that ended a text early, with a word on what was written by then."""
    return UsageError(f"{failure}; the text ends after {len(result.tokens)} tokens, which are valid")


def _write_events(
    events: TokenStream,
    params: SamplingParams,
    console: Console,
    as_tokens: bool,
    thoughts: Splitter | None,
) -> tuple[int, UsageError | None]:
    status = written = 0
    failure: UsageError | None = None
    stdout_works = True
    try:
        with machine_errors_in_a_line(), closing(events):
            for count, event in enumerate(events, 1):
                piece = f"{' ' * (count > 1)}{event.token}" if as_tokens else event.text
                written += len(piece)
                piece = piece if thoughts is None else thoughts.push(piece)[1]
                if piece:
                    console.before_text()
                    _write(piece, console)
                console.progress("decode", count, params.max_tokens)
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
        rest = whole[written:]
        if thoughts is not None:
            rest = thoughts.push(rest)[1] + thoughts.finish()[1]
        _write(rest + "\n", console)
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


def ms_per_token(result: GenerationResult) -> float:
    """Returns the mean time per decoded token, in ms."""
    return result.timings.decode_ms / max(result.timings.new_tokens, 1)


def tokens_verdict(result: GenerationResult, plain: GenerationResult, params: SamplingParams) -> str:
    """Returns how the tokens compare with those of plain decoding.

    At temperature 0 they are equal. Where not all bits are, a near tie may fall otherwise.
    """
    if params.temperature > 0:
        return "same output distribution, samples may differ"
    if result.tokens == plain.tokens:
        return "tokens equal"
    pairs = zip(result.tokens, plain.tokens, strict=False)
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if result.exactness == "bits":
        return f"TOKENS DIFFER after {equal}: a defect of offload-rt, please report it"
    return f"the first {equal} tokens equal; a near tie may be rounded otherwise by {result.exactness_reason}"
