"""`offload-rt generate`: text to stdout as it is made, progress and a summary to stderr, results as JSON."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.config import parse_override
from offload_rt.errors import UsageError
from offload_rt.files import check_writable, write_json
from offload_rt.machine.hardware import GIB

if TYPE_CHECKING:
    from offload_rt.api import LLM
    from offload_rt.results import GenerationResult, SamplingParams

DEMO_PROMPT_TOKENS = 32768
"""How much of the demo prompt is read where --max-prompt-tokens does not say."""

INTERRUPTED = 130
READER_GONE = 141


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    generate = commands.add_parser(
        "generate", help="continue a prompt", description="Continues a prompt.", allow_abbrev=False
    )
    generate.set_defaults(run=run)

    model = generate.add_argument_group("model")
    model.add_argument("--model", metavar="PATH|ID", help="target model (default: the demo pair)")
    model.add_argument("--draft", metavar="PATH|ID|none", help="small model that drafts")
    model.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    model.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")

    prompt = generate.add_argument_group("prompt (default: a long text about Python)")
    prompt.add_argument("--prompt", metavar="TEXT")
    prompt.add_argument("--prompt-file", metavar="FILE")
    prompt.add_argument("stdin", nargs="?", metavar="-", help="read the prompt from stdin")
    prompt.add_argument(
        "--max-prompt-tokens",
        type=_positive,
        metavar="N",
        help=f"keep the last N tokens (default: all; of the demo prompt {DEMO_PROMPT_TOKENS})",
    )

    sampling = generate.add_argument_group("sampling")
    sampling.add_argument("-n", "--max-new-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all tokens")
    sampling.add_argument("--seed", type=int, metavar="S", help="default: drawn, and told in the summary")
    sampling.add_argument("--stop", action="append", default=[], metavar="STRING", help="may be repeated")
    sampling.add_argument("--ignore-eos", action="store_true")

    config = generate.add_argument_group("configuration")
    config.add_argument("--config", default="triforce", metavar="NAME|FILE", help="default: triforce")
    for flag, key, metavar in (
        ("--retrieval-budget", "retrieval.budget", "N"),
        ("--chunk-size", "retrieval.chunk", "N"),
        ("--gamma1", "speculation.gamma1", "N"),
        ("--gamma2", "speculation.gamma2", "N"),
        ("--refresh", "retrieval.refresh", "POLICY"),
    ):
        config.add_argument(
            flag,
            type=_override(key),
            action="append",
            dest="overrides",
            metavar=metavar,
            help=f"sets {key}",
        )
    config.add_argument(
        "--set",
        type=parse_override,
        action="append",
        dest="overrides",
        metavar="section.key=value",
        help="sets any configuration key; the last one given counts",
    )
    generate.set_defaults(overrides=[])

    output = generate.add_argument_group("output")
    output.add_argument("--compare-plain", action="store_true", help="then decode plainly too, and compare")
    output.add_argument("--json", type=Path, metavar="FILE", help="write the result and its statistics")
    output.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def _override(key: str) -> Callable[[str], tuple[str, object]]:
    return lambda value: parse_override(f"{key}={value}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    # What needs no model is checked before the runtime is imported: that alone takes seconds.
    if arguments.json is not None:
        check_writable("--json", arguments.json)
    text = _prompt(arguments)
    from offload_rt.api import LLM
    from offload_rt.results import SamplingParams

    params = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        max_tokens=arguments.max_new_tokens,
        stop=tuple(arguments.stop),
        seed=int.from_bytes(os.urandom(4)) if arguments.seed is None else arguments.seed,
        ignore_eos=arguments.ignore_eos,
    )
    # A character that the reader's encoding lacks is no reason to lose the rest.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = _Console(arguments.quiet)
    prompt: list[int] = []

    with (
        _told_in_a_line(),
        LLM(
            arguments.model,
            draft=arguments.draft,
            config=arguments.config,
            device=arguments.device,
            dtype=arguments.dtype,
            overrides=dict(arguments.overrides),
            on_progress=console.progress,
            on_notice=console.notice,
        ) as llm,
    ):
        prompt[:] = _encode(llm, text, arguments, console)
        status, failure = _write_text(llm, prompt, params, console)
        result = llm.last_result
        report = result.to_json()
        console.summary(result)
        if arguments.compare_plain and not status and failure is None:
            try:
                comparison = _comparison(result, llm.plain(params))
            except KeyboardInterrupt:
                console.say("compared   interrupted")
                status = INTERRUPTED
            else:
                report["plain"] = comparison
                console.say(_comparison_line(comparison, params))
        # Before the runtime is closed: on a broken link that may fail too.
        if arguments.json is not None:
            write_json("--json", arguments.json, report)
        if failure is not None:
            tokens = len(result.tokens)
            raise UsageError(f"{failure}; the text ends after {tokens} tokens, which stand") from failure
    return status


@contextmanager
def _told_in_a_line() -> Iterator[None]:
    """What the machine refuses while it works, as a line to the user."""
    try:
        yield
    except _refusals() as error:
        raise _told(error) from error


def _refusals() -> tuple[type[Exception], ...]:
    import torch

    from cpu_kv import CopyFailed, TransferStalled

    return MemoryError, torch.OutOfMemoryError, CopyFailed, TransferStalled


def _told(error: Exception) -> UsageError:
    """A refusal of the machine, with its remedy."""
    from cpu_kv import CopyFailed, TransferStalled

    if isinstance(error, CopyFailed | TransferStalled):
        return UsageError(f"{error}; check the GPU and its driver (nvidia-smi)")
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UsageError(f"out of memory: {reason}; give a shorter prompt or fewer new tokens")


def _prompt(arguments: argparse.Namespace) -> str:
    """The prompt that was asked for, or the demo prompt."""
    given = {
        "--prompt": arguments.prompt,
        "--prompt-file": arguments.prompt_file,
        "-": arguments.stdin,
    }
    named = [name for name, value in given.items() if value is not None]
    if arguments.stdin not in (None, "-"):
        raise UsageError(f"unexpected argument {arguments.stdin!r}; a prompt is given with --prompt TEXT")
    if len(named) > 1:
        raise UsageError(f"{' and '.join(named)}: give one prompt only")
    if not named:
        # Every Python carries these pages, and together they are as long as a book.
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    source = named[0]
    try:
        if source == "--prompt":
            # What is not UTF-8 on the command line reaches us as lone surrogates.
            text = os.fsencode(arguments.prompt).decode("utf-8")
        elif source == "--prompt-file":
            source = f"prompt file {arguments.prompt_file}"
            text = Path(arguments.prompt_file).read_bytes().decode("utf-8")
        else:
            source = "stdin"
            if sys.stdin is None:
                raise UsageError("stdin: is closed; pipe a text into it")
            text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{source}: not UTF-8 (byte {error.start}); convert it to UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{source}: cannot be read ({reason}); give a text file") from None
    if not text:
        raise UsageError(f"{source}: the prompt is empty; give at least one character")
    return text


def _encode(llm: LLM, text: str, arguments: argparse.Namespace, console: _Console) -> list[int]:
    """The prompt's tokens, the last of them where there are more than --max-prompt-tokens."""
    limit: int | None = arguments.max_prompt_tokens
    demo = arguments.prompt is None and arguments.prompt_file is None and arguments.stdin is None
    if limit is None and demo:
        limit = DEMO_PROMPT_TOKENS
    prompt = llm.encode(text)
    if limit is not None and len(prompt) > limit:
        of_what = "the demo prompt's " if demo else ""
        console.notice(f"prompt: kept the last {limit:,} of {of_what}{len(prompt):,} tokens")
        prompt = llm.encode(text, last=limit)
    console.tokens = {"prefill": len(prompt), "decode": arguments.max_new_tokens}
    return prompt


def _write_text(
    llm: LLM, prompt: list[int], params: SamplingParams, console: _Console
) -> tuple[int, UsageError | None]:
    """Writes the text to stdout as it is made.

    Returns the exit code, and what ended the text before its time: what is written by then stands.
    """
    status = written = 0
    failure: UsageError | None = None
    # A Ctrl-C while the prompt is read leaves nothing to tell: it goes past here.
    events = llm.stream(prompt, params)
    try:
        with closing(events):
            for made, event in enumerate(events, 1):
                console.clear()
                sys.stdout.write(event.text)
                sys.stdout.flush()
                written += len(event.text)
                # On a terminal the text itself is the progress.
                if not sys.stdout.isatty():
                    console.progress("decode", made, params.max_tokens)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except _refusals() as error:
        failure = _told(error)
    except OSError as error:
        # Python flushes stdout once more when it exits: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"stdout: cannot be written ({error.strerror}); send it elsewhere") from None
        status = READER_GONE
    finally:
        console.clear()
    if status != READER_GONE:
        # What an interruption left held back is part of the result.
        sys.stdout.write(llm.last_result.text[written:] + "\n")
        sys.stdout.flush()
    return status, failure


def _comparison(result: GenerationResult, plain: GenerationResult) -> dict[str, object]:
    """The JSON's `plain`: how our time a token compares with plain decoding's."""
    ours, theirs = result.timings, plain.timings
    per_token = ours.predicted_ms / max(ours.predicted_n, 1)
    plain_per_token = theirs.predicted_ms / max(theirs.predicted_n, 1)
    return {
        "predicted_ms": theirs.predicted_ms,
        "ratio": plain_per_token / per_token if per_token else 0.0,
        "tokens_equal": result.tokens == plain.tokens,
    }


def _comparison_line(comparison: dict[str, object], params: SamplingParams) -> str:
    if params.temperature > 0:
        tokens = "the laws are equal, the draws need not be"
    else:
        tokens = "tokens equal" if comparison["tokens_equal"] else "TOKENS DIFFER"
    return f"compared   {comparison['ratio']:.2f} times as fast as plain decoding; {tokens}"


class _Console:
    """stderr: lines that stay, and on a terminal a progress line that is drawn over.

    Attributes:
        tokens: how many tokens a phase takes, where that is known.
    """

    BAR = 30
    REDRAW_S = 0.1
    LOG_S = 10.0

    def __init__(self, quiet: bool) -> None:
        self.tokens: dict[str, int] = {}
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._drawn = False
        self._phase = ""
        self._began = self._last = time.monotonic()
        self._noticed: set[str] = set()

    def say(self, line: str) -> None:
        if not self._quiet:
            self.clear()
            print(line, file=sys.stderr, flush=True)

    def notice(self, text: str) -> None:
        """Says something once, though the result tells it again."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.say(f"note       {text}")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Draws how far a phase is, in units of its own; on no terminal, a line now and then."""
        now = time.monotonic()
        if phase != self._phase:
            # How fast it goes is known from the second report on; of other phases there may be one alone.
            self._phase, self._began = phase, now
            self._last = now if phase in self.tokens else float("-inf")
        if self._quiet or now - self._last < (self.REDRAW_S if self._live else self.LOG_S):
            return
        self._last = now
        share = done / total if total else 1.0
        line = f"{phase:10} {share:4.0%}"
        if phase in self.tokens:
            line += f"  {share * self.tokens[phase] / (now - self._began):,.0f} tokens/s"
        if not self._live:
            print(line, file=sys.stderr, flush=True)
            return
        full = round(share * self.BAR)
        print(f"\r\x1b[K{line}  {'█' * full}{'░' * (self.BAR - full)}", end="", file=sys.stderr, flush=True)
        self._drawn = True

    def clear(self) -> None:
        """Takes the progress line away."""
        if self._drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._drawn = False

    def summary(self, result: GenerationResult) -> None:
        timings, memory = result.timings, result.memory
        prompt_s = timings.prompt_ms / 1e3
        rate = f" ({timings.prompt_n / prompt_s:,.0f} tokens/s)" if prompt_s else ""
        self.say(f"prompt     {result.prompt_tokens:,} tokens, prefill {prompt_s:.1f} s{rate}")
        speed = ""
        if timings.predicted_n:
            per_token = timings.predicted_ms / timings.predicted_n
            speed = f", {per_token:.1f} ms/token, {timings.predicted_per_second:.1f} tokens/s"
        self.say(
            f"generated  {len(result.tokens)} tokens{speed}; finish: {result.finish_reason};"
            f" seed {result.seed}"
        )
        if result.rounds:
            parts = [f"{result.rounds}, {len(result.tokens) / result.rounds:.2f} tokens a round"]
            parts += [
                f"{level.name} accepted {level.accepted / level.proposed:.0%} of {level.proposed}"
                for level in result.levels
                if level.proposed
            ]
            self.say(f"rounds     {'; '.join(parts)}")
        device = f", on the device {memory.device_peak_bytes / GIB:.2f}" if memory.device_peak_bytes else ""
        self.say(
            f"memory     KV {memory.kv_bytes / GIB:.2f} GiB; peak on the host"
            f" {memory.host_peak_bytes / GIB:.2f} GiB{device}"
        )
        for text in result.notices:
            self.notice(text)
