"""Progress, notices and summaries that a command writes to stderr."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from offload_rt.errors import shortened
from offload_rt.machine.other_work import OtherWork
from offload_rt.system.hardware import GIB

if TYPE_CHECKING:
    from rich.progress import Progress

    from offload_rt.engine.results import GenerationResult
    from offload_rt.planning.planner import Plan


BAR_COLUMNS = 30
REDRAWS_PER_SECOND = 4
RATE_OVER_S = 120.0
"""Seconds whose reports say how fast a phase goes; some phases report seldom."""
FAR_FROM_PLAN = 2.0
"""Ratio of measured and predicted time, or its inverse, from which a run is far from its plan."""
COMPARABLE_TOKENS = 8
"""Fewest tokens whose time is compared with the plan."""


LABEL = 11
"""Columns of the word that a line begins with."""


def wrapped(line: str, indent: int = LABEL) -> str:
    """Returns a line for stderr: on a terminal, wrapped at words, with later lines indented."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return line
    if len(line) < columns or columns < 2:
        return line
    return textwrap.fill(
        line,
        columns - 1,
        subsequent_indent=" " * indent if columns > 2 * indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def duration(seconds: float) -> str:
    """Returns a duration in a unit that suits it."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class Console:
    """Writes lines to stderr and, on a terminal, a progress line that is redrawn in place.

    Attributes:
        tokens: number of tokens by phase, where known; adds tokens/s to the progress of the phase.
        other_work: that of other programs, before and since the console was created.
    """

    def __init__(self, quiet: bool) -> None:
        self.tokens: dict[str, int] = {}
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet
        self._drawing: Progress | None = None
        self._phase = ""
        self._noticed: set[str] = set()
        self._expected = ""  # the config of the plan that was shown
        self._held_lines: list[str] | None = None  # lines to print after the text
        self.other_work = OtherWork()

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if self._held_lines is not None:
            self._held_lines.append(line)
        elif not self._quiet:
            self.clear()
            try:
                print(wrapped(line), file=sys.stderr, flush=True)
            except OSError:  # nobody reads it: the work goes on
                self._quiet = True

    def error(self, text: str) -> None:
        """Prints an error that does not end the program, as one line, also where the rest is quiet."""
        self.clear()
        line = f"error      {shortened(' '.join(text.splitlines()))}"
        print(wrapped(line), file=sys.stderr, flush=True)

    @contextmanager
    def writing_text(self) -> Iterator[None]:
        """Keeps stderr out of the text that is written to stdout, where both show in one place."""
        if not _shown_together(sys.stdout, sys.stderr):
            yield
            return
        self._held_lines = []
        try:
            yield
        finally:
            lines, self._held_lines = self._held_lines, None
            for line in lines:
                self.say(line)

    def before_text(self) -> None:
        """Removes the progress line where text is about to be written in its place."""
        if self._held_lines is not None:
            self.clear()

    def notice(self, text: str) -> None:
        """Prints a note once, however often it is given."""
        if self._expected and text.startswith(f"config auto: {self._expected} "):
            return  # `expect` has said it
        if text not in self._noticed:
            self._noticed.add(text)
            self.say(f"note       {text}")

    def progress(self, phase: str, done: int, total: int) -> None:
        """Shows on a terminal how much of a phase is done, in its own units, until it is done."""
        if done < total:
            self._draw(phase, done, total)
        elif phase == self._phase:
            self.clear()

    def working(self, phase: str, subject: str) -> None:
        """Shows on a terminal what is under way, for work that reports no progress."""
        self._draw(phase, 0, None, subject)

    def _draw(self, phase: str, done: int, total: int | None, subject: str = "") -> None:
        if not self._live or self._held_lines is not None:
            return
        if self._drawing is None:
            self._drawing = _progress_line()
        drawing, task = self._drawing, next(iter(self._drawing.tasks), None)
        if task is None or phase != self._phase or total is None or done < task.completed:
            if task is not None:
                drawing.remove_task(task.id)
            drawing.add_task(phase, total=total, completed=done, tokens=self.tokens.get(phase), what=subject)
        else:
            drawing.update(task.id, completed=done, total=total)
        self._phase = phase
        if not drawing.live.is_started:
            drawing.start()
            _drawing_consoles.add(self)

    def clear(self) -> None:
        """Removes the progress line."""
        if self._drawing is not None:
            self._drawing.stop()
            _drawing_consoles.discard(self)

    def expect(self, plan: Plan) -> None:
        """Says what is about to run, and how fast it will be by its plan."""
        request, predicted = plan.request, plan.check()
        gpus = request.hardware.gpus
        place = f"{len(gpus)} × {gpus[0].name}" if len(gpus) > 1 else gpus[0].name if gpus else "cpu"
        drafts = request.draft is not None and any(level.needs_draft_model for level in request.levels)
        draft = f" with {request.draft.name}" if request.draft is not None and drafts else ""
        self._expected = request.config.name
        rates = "" if request.hardware.measured else ", at the rates of a usual desktop"
        prefill = duration(predicted.prefill_ms / 1e3)
        expected = f"up to {request.context:,} tokens at a time; expected {prefill} each"
        if request.new_tokens:
            expected = (
                f"{request.context:,} prompt tokens + {request.new_tokens:,} new; {request.config.name};"
                f" expected {predicted.ms_per_token:.1f} ms/token (plain"
                f" {predicted.plain_ms_per_token:.1f}), first token in {prefill}"
            )
        self.say(f"run        {request.target.name}{draft} on {place}: {expected}{rates}")

    def summary(self, result: GenerationResult) -> None:
        """Prints the statistics of a generation: times, rounds, memory, notices."""
        timings, memory = result.timings, result.memory
        prompt_s = timings.prefill_ms / 1e3
        rate = f" ({timings.prefill_tokens / prompt_s:,.0f} tokens/s)" if prompt_s else ""
        self.say(f"prompt     {result.prompt_tokens:,} tokens, prefill {prompt_s:.1f} s{rate}")
        speed = ""
        if timings.new_tokens:
            per_token = timings.decode_ms / timings.new_tokens
            speed = f", {per_token:.1f} ms/token, {timings.tokens_per_second:.1f} tokens/s"
        self.say(
            f"generated  {len(result.tokens)} tokens{speed}; finish: {result.finish_reason};"
            f" seed {result.seed}"
        )
        if result.rounds:
            parts = [f"{result.rounds}, {len(result.tokens) / result.rounds:.2f} tokens per round"]
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

    def compare_with_plan(self, result: GenerationResult, plan: Plan | None) -> None:
        """Prints where decoding took far more or less time than predicted, and names a busy machine.

        A plan with the rates of a usual desktop, before this machine is measured, is not compared.
        """
        tokens = result.timings.new_tokens
        if plan is None or not plan.request.hardware.measured or tokens < COMPARABLE_TOKENS:
            return
        measured = result.timings.decode_ms / tokens
        ratio = measured / plan.ms_per_token
        if 1 / FAR_FROM_PLAN <= ratio <= FAR_FROM_PLAN:
            return
        times = f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"
        text = f"decoding took {measured:.1f} ms/token, {times} times the {plan.ms_per_token:.1f} of the plan"
        remedy = "offload-rt doctor --refresh measures this machine again"
        cause = self.other_work.note() if ratio > 1 else None
        self.notice(f"{text}; {cause or remedy}")


_drawing_consoles: set[Console] = set()


def clear_progress() -> None:
    """Removes every progress line, for what a program writes at its end."""
    for console in tuple(_drawing_consoles):
        console.clear()


def _progress_line() -> Progress:
    """Returns a progress line on stderr: phase, bar, share, tokens/s and the time left."""
    from rich import progress  # here, as it takes a while
    from rich.console import Console as RichConsole
    from rich.table import Column
    from rich.text import Text

    class Rate(progress.ProgressColumn):
        def render(self, task: progress.Task) -> str:
            tokens = task.fields["tokens"]
            if not (tokens and task.speed and task.total):
                return ""
            return f"{task.speed / task.total * tokens:,.0f} tokens/s"

    class Left(progress.TimeRemainingColumn):
        def render(self, task: progress.Task) -> Text:
            return super().render(task) + " left" if task.time_remaining else Text()

    return progress.Progress(
        progress.TextColumn("{task.description:10}", markup=False),
        progress.TextColumn("{task.fields[what]}", markup=False),
        progress.BarColumn(BAR_COLUMNS),
        progress.TaskProgressColumn(),
        Rate(Column(no_wrap=True)),
        Left(compact=True, table_column=Column(no_wrap=True)),
        console=RichConsole(stderr=True),
        refresh_per_second=REDRAWS_PER_SECOND,
        speed_estimate_period=RATE_OVER_S,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _shown_together(text: TextIO | None, notes: TextIO | None) -> bool:
    """Returns whether two streams are one file, pipe or terminal, as with 2>&1."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (text, notes) if stream is not None)
    except (OSError, ValueError):
        return False
    return os.path.samestat(first, second)
